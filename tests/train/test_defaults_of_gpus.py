"""Flags whose default depends on the device and the model; a value that is given wins."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.rollout import VLLMConfig, most_sequences
from rlhf_suite.config.plan.zero import overlaps_reduction
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.distributed.world import World
from rlhf_suite.models.prepare import fuses_layers, liger_kinds
from rlhf_suite.train.settings import engine_config

pytestmark = pytest.mark.quick
CPU, GPU = World(0, Mesh(2), torch.device("cpu")), World(0, Mesh(2), torch.device("cuda"))


@pytest.mark.notices(
    "a flag that switches the overlap off is not read on GPUs",
    "config/plan/zero.py",
    "    if ds.overlap_comm is not None:\n        return ds.overlap_comm\n",
    "",
)
@pytest.mark.parametrize(
    ("stage", "flag", "on_gpu", "on_cpu"),
    [
        *((stage, None, stage in (2, 3), False) for stage in (None, 0, 1, 2, 3)),
        *((3, False, False, False), (2, True, True, True)),
    ],
)
def test_reductions_overlap_on_gpus_unless_the_flag_says_otherwise(stage, flag, on_gpu, on_cpu):
    ds = DeepSpeedConfig.of("sft", zero_stage=stage, overlap_comm=flag)
    assert (overlaps_reduction(ds, "cuda"), overlaps_reduction(ds, "cpu")) == (on_gpu, on_cpu)


def zero_settings(world: World, stage: int, **options) -> tuple[bool, bool | None]:
    """Whether reductions overlap, and whether ZeRO scatters gradients; None: as DeepSpeed does by itself."""
    zero = engine_config(DeepSpeedConfig.of("sft", zero_stage=stage), 1.0, world, **options)["zero_optimization"]
    return zero["overlap_comm"], zero.get("reduce_scatter")


@pytest.mark.notices(
    "Muon gets a part of each gradient on GPUs",
    "train/settings.py",
    '    if needs_whole_gradients:\n        zero["reduce_scatter"] = False\n',
    "",
)
def test_zero_3_scatters_gradients_on_gpus_but_those_of_muon():
    assert zero_settings(GPU, 3) == (True, True)
    assert zero_settings(GPU, 2) == (True, None)
    assert zero_settings(CPU, 3) == (False, False)
    assert zero_settings(GPU, 3, needs_whole_gradients=True) == (False, False)
    assert zero_settings(GPU, 2, needs_whole_gradients=True) == (False, False)


def test_liger_is_on_where_it_can_be_and_a_flag_wins():
    def fuses(device="cuda", reads_images=False, **flags):
        return fuses_layers(DeepSpeedConfig.of("sft", **flags), "qwen3", device, reads_images=reads_images)

    is_known = "qwen3" in liger_kinds()  # where it is installed
    assert fuses() == is_known
    assert not fuses(device="cpu")
    assert not fuses(reads_images=True)
    assert not fuses(tensor_parallel_size=2)
    assert not fuses(deepcompile=True)
    assert not fuses(use_liger_kernel=False)
    assert fuses(use_liger_kernel=True, device="cpu"), "then the run is refused with the reason"


def test_an_engine_on_a_gpu_runs_as_many_sequences_as_vllm_says():
    assert most_sequences(VLLMConfig.of("ppo"), "cpu") == 256
    assert most_sequences(VLLMConfig.of("ppo"), "cuda") == 1024
    assert (
        most_sequences(VLLMConfig.of("ppo", max_num_seqs=7), "cuda")
        == most_sequences(VLLMConfig.of("ppo", max_num_seqs=7), "cpu")
        == 7
    )


@pytest.mark.notices(
    "small parameters are gathered for each pass whatever the flag says",
    "config/plan/zero.py",
    "    if ds.persistence_threshold is not None:\n        return ds.persistence_threshold\n",
    "",
)
def test_small_parameters_stay_whole_on_gpus_unless_the_flag_says_otherwise():
    def threshold(world: World, **flags) -> int:
        ds = DeepSpeedConfig.of("sft", zero_stage=3, **flags)
        return engine_config(ds, 1.0, world)["zero_optimization"]["stage3_param_persistence_threshold"]

    assert (threshold(GPU), threshold(CPU), threshold(GPU, deepcompile=True)) == (100_000, 0, 0)
    assert (threshold(GPU, persistence_threshold=0), threshold(CPU, persistence_threshold=5)) == (0, 5)
