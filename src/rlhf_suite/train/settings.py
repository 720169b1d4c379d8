"""What the flags say to DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.plan.zero import overlaps_reduction, persistent_size, scatters_gradients
from rlhf_suite.distributed.world import World


def engine_config(
    ds: DeepSpeedConfig, max_norm: float, world: World, *, needs_whole_gradients: bool = False
) -> dict[str, Any]:
    """Return the settings of a DeepSpeed engine. The caller accumulates: backward adds up, each step() updates; where
    the reduction is part of the last backward pass, the caller says which one that is."""
    device = world.device.type
    is_wanted = ds.overlap_comm is True  # by the user, whatever the optimiser needs
    overlaps = overlaps_reduction(ds, device) and (is_wanted or not needs_whole_gradients)
    zero: dict[str, Any] = {"stage": ds.zero_stage, "overlap_comm": overlaps}
    if ds.zero_stage == 3:
        zero["zero_hpz_partition_size"] = ds.zpg
        zero["stage3_param_persistence_threshold"] = persistent_size(ds, device)
        zero["reduce_scatter"] = scatters_gradients(ds, device)
    if needs_whole_gradients:
        zero["reduce_scatter"] = False
    if ds.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": world.device.type == "cuda"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": reduces_in_last_backward(ds),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": ds.param_dtype == "bf16"},
        "steps_per_print": None,
    }
    if ds.deepcompile:
        config["compile"] = {"deepcompile": True}
    config["gradient_clipping"] = 0.0 if is_plain(ds) else max_norm
    config["data_types"] = {"grad_accum_dtype": ds.grad_accum_dtype}
    return config


def device_to_load_to(ds: DeepSpeedConfig, world: World) -> torch.device | None:
    """Return the GPU that the tensors of a model are read to; None: they are read to host memory, as on a CPU, and
    where ZeRO-3 or tensor parallelism divides them first."""
    is_direct = world.device.type == "cuda" and ds.zero_stage != 3 and world.mesh.tensor == 1
    return world.device if is_direct else None


def reduces_in_last_backward(ds: DeepSpeedConfig) -> bool:
    """Return whether gradients are reduced during the last backward pass of a step: ZeRO-2 and 3 reduce them in every
    one, and the others after the last one unless they are told to overlap both. DeepCompile always asks."""
    return ds.deepcompile or (ds.zero_stage == 1 and ds.overlap_comm is True)


def is_plain(ds: DeepSpeedConfig) -> bool:
    """Return whether the optimiser of torch runs without one of DeepSpeed around it, which would clip and guard."""
    return ds.zero_stage == 0 and ds.param_dtype == "fp32"


def build_frozen_config(ds: DeepSpeedConfig) -> dict[str, Any]:
    """Return the settings of an engine whose model only runs forward."""
    zero: dict[str, Any] = {"stage": 0}
    if ds.zero_stage == 3:
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": ds.param_dtype == "bf16"},
        "steps_per_print": None,
    }


def compile_engine(engine: Any) -> None:
    """Have DeepCompile put the reductions (and under ZeRO-3 the gathering) into the compiled graphs of a model.

    They are nowhere else then. Where torch gives up compiling ever new shapes and runs a function as it is written, its
    gradients would be lost without a word; here that ends the run.
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    engine.compile()
