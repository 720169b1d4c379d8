"""Everything DeepSpeed: process group, engine configuration, the trained and the frozen model, ZeRO-3 gathering."""

from __future__ import annotations

import logging
import math
import pickle
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from rlhf_suite.config.ds import DeepSpeedConfig
from rlhf_suite.config.models import TrainedModelConfig
from rlhf_suite.distributed.mesh import Rank
from rlhf_suite.distributed.world import World
from rlhf_suite.errors import UserError
from rlhf_suite.models.forward import ScalarModel
from rlhf_suite.models.load import load_model
from rlhf_suite.models.prepare import fuse_layers, make_trainable, stream_from_host
from rlhf_suite.models.reward_model import check_head_is_trained
from rlhf_suite.train import optim
from rlhf_suite.train.schedules import learning_rate_factor


def join_world(rank: Rank) -> World:
    """Join the process group of DeepSpeed, whose environment a Worker has set: gloo on CPUs, NCCL on GPUs.

    DeepSpeed's extension for shared memory is switched off: it takes a minute to compile, and its buffers outlive the
    run.
    """
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    on_gpu = rank.device == "cuda"
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", verbose=False)
    return World(rank.number, rank.mesh, torch.device("cuda", 0) if on_gpu else torch.device("cpu"))


def engine_config(ds: DeepSpeedConfig, max_norm: float, world: World) -> dict[str, Any]:
    """DeepSpeed's configuration. The caller owns accumulation: backward adds up, each step() updates."""
    zero: dict[str, Any] = {"stage": ds.zero_stage, "overlap_comm": ds.overlap_comm}
    if ds.zero_stage == 3:
        zero |= {"zero_hpz_partition_size": ds.zpg, "stage3_param_persistence_threshold": 0, "reduce_scatter": False}
    if ds.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": world.device.type == "cuda"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": ds.param_dtype == "bf16"},
        "steps_per_print": None,
    }
    config["gradient_clipping"] = 0.0 if is_plain(ds) else max_norm
    config["data_types"] = {"grad_accum_dtype": ds.grad_accum_dtype}
    return config


def is_plain(ds: DeepSpeedConfig) -> bool:
    """Whether torch's optimiser runs with no DeepSpeed optimiser around it, which would clip and guard."""
    return ds.zero_stage == 0 and ds.param_dtype == "fp32"


def loading_context(ds: DeepSpeedConfig) -> AbstractContextManager[Any]:
    """Where a model is created: under ZeRO-3 `from_pretrained` then partitions parameters as it loads them."""
    if ds.zero_stage != 3:
        return nullcontext()
    from transformers.integrations import HfDeepSpeedConfig

    bf16 = {"enabled": ds.param_dtype == "bf16"}
    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1, "bf16": bf16}
    return nullcontext(HfDeepSpeedConfig(config))  # transformers looks for it while it is alive


class TrainedModel:
    """A model under DeepSpeed. `forward` through it, `backward` sums of losses, `step` once per optimiser step."""

    def __init__(
        self, module: nn.Module, config: TrainedModelConfig, ds: DeepSpeedConfig, total_steps: int, world: World
    ) -> None:
        import deepspeed

        self.module, self.config, self.ds, self.total_steps, self.world = module, config, ds, total_steps, world
        self._plain_norm = 0.0
        settings = engine_config(ds, config.max_norm, world)
        optimizer = None
        if config.optim == "muon":
            optim.mark_muon_parameters(module.named_parameters())
            settings["optimizer"] = optim.muon_config(config)
            settings["zero_optimization"]["reduce_scatter"] = False
        else:
            optimizer = optim.adamw(module, config)
        trained = [p for p in module.parameters() if p.requires_grad]
        with redirect_stdout(None):  # with ZeRO-1 in bf16 DeepSpeed prints readings of the memory
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=module, model_parameters=trained, optimizer=optimizer, config=settings
            )
        self.engine.checkpoint_engine = tensor_files(self.engine._config)
        if is_plain(ds):
            optim.clip_and_guard(self.optimizer, config.max_norm, self._record_norm)
        self._peaks = [float(group["lr"]) for group in self.optimizer.param_groups]

    def _record_norm(self, norm: float) -> None:
        self._plain_norm = norm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss`, this rank's share of the step's loss. DeepSpeed averages over the ranks, so it
        is scaled by their number to make the result the gradient of the sum over ranks."""
        self.engine.backward(loss * self.world.mesh.data)

    def step(self, step: int) -> dict[str, float]:
        """Update with the gradients since the last step, at the learning rate of optimiser step `step` (0-based).

        Returns the gradient norm before clipping and the rate. A norm that is not finite means nothing was updated.
        """
        factor = learning_rate_factor(step, self.total_steps, self.config)
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        self.engine.step()
        norm = self._plain_norm if is_plain(self.ds) else float(self.engine.get_global_grad_norm())
        if not math.isfinite(norm):
            self._forget_gradients()
        return {"grad_norm": norm if math.isfinite(norm) else math.inf, "lr": self._peaks[0] * factor}

    def _forget_gradients(self) -> None:
        """Drop the sums of a step that was skipped. With ds.adam_offload DeepSpeed 0.19 keeps them in ZeRO-1 and 2, and
        every later step would be skipped too."""
        if self.ds.adam_offload and self.ds.zero_stage < 3:
            for group in self.optimizer.averaged_gradients:
                self.optimizer.averaged_gradients[group] = None

    @property
    def needs_equal_micro_batches(self) -> bool:
        """Whether every rank must run the same number of micro-batches (its collectives run in the backward pass)."""
        return self.world.mesh.size > 1 and self.ds.zero_stage >= 2

    def gathered(self, parameters: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
        """Within it the given parameters are whole on every rank (ZeRO-3 partitions them)."""
        return gathered(self.ds, parameters)

    def save_state(self, folder: Path) -> None:
        """Weights, optimiser state and this rank's RNG state. Every rank calls it."""
        frozen_4bit = self.ds.load_in_4bit  # such weights do not load again, and come from the model's folder
        self.engine.save_checkpoint(
            str(folder), tag="engine", client_state={}, save_latest=False, exclude_frozen_parameters=frozen_4bit
        )
        torch.save(rng_state(), folder / f"rng_{self.world.rank}.pt")

    def load_state(self, folder: Path) -> None:
        """The inverse of `save_state`, on the same number of ranks."""
        path, _ = self.engine.load_checkpoint(str(folder), tag="engine", load_module_strict=not self.ds.load_in_4bit)
        assert path is not None, f"no engine state in {folder}"
        set_rng_state(load_tensors(folder / f"rng_{self.world.rank}.pt"))


def load_trained(  # noqa: PLR0913 - one model is many choices, each made by its caller
    section: TrainedModelConfig,
    head: Literal["lm", "value"],
    ds: DeepSpeedConfig,
    world: World,
    *,
    total_steps: int,
    seed: int,
    flag: str,
) -> TrainedModel:
    """Load the model of `section`, make it trainable and put it under DeepSpeed."""
    assert section.model_name_or_path is not None, flag
    with loading_context(ds):
        writable = partial(gathered, ds, modifier_rank=0)
        module = load_model(
            section.model_name_or_path,
            head=head,
            ds=ds,
            seed=seed,
            flag=flag,
            writable=writable,
            dropout=not section.disable_dropout,
        )
    if ds.use_liger_kernel:
        fuse_layers(module.model, world.device.type)
    make_trainable(module, section, ds.lora, seed=seed, section=flag.partition(".")[0])
    return TrainedModel(module.to(world.device), section, ds, total_steps, world)


def load_frozen(
    path: str, head: Literal["lm", "value"], ds: DeepSpeedConfig, world: World, flag: str, offload: bool = False
) -> nn.Module:
    """Load a model that only runs forward. With ds.load_in_4bit a reference is held as its policy is; a judge whose
    word counts (reward model, teacher) keeps its precision."""
    ds = replace(ds, load_in_4bit=ds.load_in_4bit and flag.startswith("ref."))
    with loading_context(ds):
        module = load_model(path, head=head, ds=ds, flag=flag)
    if isinstance(module, ScalarModel):
        check_head_is_trained(module, path, flag)
    if offload and world.device.type == "cpu":
        key = f"{flag.partition('.')[0]}.offload"
        raise UserError(f"{key}=true: this machine has no GPU to bring weights to. Set {key}=false")
    return frozen_model(module, ds, world, offload)


def frozen_model(module: nn.Module, ds: DeepSpeedConfig, world: World, offload: bool = False) -> nn.Module:
    """A model that only runs forward: whole on its device, or under ZeRO-3 partitioned over the ranks; with `offload`
    from host memory."""
    module.eval().requires_grad_(False)
    if ds.zero_stage != 3:
        return stream_from_host(module, world.device) if offload else module.to(world.device)
    import deepspeed

    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": ds.param_dtype == "bf16"},
        "steps_per_print": None,
    }
    engine, *_ = deepspeed.initialize(model=module, config=settings)
    return engine


def gathered(
    ds: DeepSpeedConfig, parameters: Iterable[torch.Tensor], modifier_rank: int | None = None
) -> AbstractContextManager[Any]:
    """Within it the given parameters are whole on every rank; a no-op below ZeRO-3. What `modifier_rank` changes in
    them is kept."""
    if ds.zero_stage != 3:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=modifier_rank)


def tensor_files(config: Any) -> Any:
    """Return the part of a DeepSpeed engine that writes and reads its checkpoint files, made to run no code in them.

    DeepSpeed's own unpickles whatever a file holds. The files need three of its classes, which only hold values.
    """
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    class TensorFiles(TorchCheckpointEngine):
        def load(self, path: str, map_location: Any = None) -> Any:
            with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
                return load_tensors(Path(path), map_location)

    return TensorFiles(config)


def load_tensors(path: Path, map_location: Any = None) -> Any:
    """Load a file of `torch.save` that holds tensors and plain values. Anything else in it is refused, not run."""
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it asks for {asked[1]}" if asked else "torch cannot read it"
        raise UserError(
            f"{path} is not a file of tensors and plain values ({reason}). It could run code, so nothing of it was "
            "loaded. Delete the checkpoint that it is part of, and resume from another one"
        ) from None


def rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
