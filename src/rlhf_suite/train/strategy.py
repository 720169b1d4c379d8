"""All that touches DeepSpeed: process group, engine settings, trained and frozen models, gathering under ZeRO-3."""

from __future__ import annotations

import logging
import math
import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_suite.config.ds import DeepSpeedConfig
from rlhf_suite.config.models import TrainedModelConfig
from rlhf_suite.config.plan import ModelPlan
from rlhf_suite.distributed.mesh import Rank
from rlhf_suite.distributed.world import World
from rlhf_suite.errors import UserError
from rlhf_suite.models.forward import LanguageModel, ScalarModel, check_layout
from rlhf_suite.models.load import load_model
from rlhf_suite.models.prepare import fuse_layers, make_trainable, stream_from_host
from rlhf_suite.models.reward_model import check_head_is_trained
from rlhf_suite.models.sequence_parallel import SequenceGroup
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
    return World.of(rank.number, rank.mesh, torch.device("cuda", 0) if on_gpu else torch.device("cpu"))


def engine_config(ds: DeepSpeedConfig, max_norm: float, world: World) -> dict[str, Any]:
    """Return the settings of a DeepSpeed engine. The caller accumulates: backward adds up, each step() updates."""
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
    """Return whether the optimiser of torch runs without one of DeepSpeed around it, which would clip and guard."""
    return ds.zero_stage == 0 and ds.param_dtype == "fp32"


def loading_context(ds: DeepSpeedConfig) -> AbstractContextManager[Any]:
    """Return a context to create a model in: under ZeRO-3 `from_pretrained` partitions parameters as it loads them."""
    if ds.zero_stage != 3:
        return nullcontext()
    from transformers.integrations import HfDeepSpeedConfig

    bf16 = {"enabled": ds.param_dtype == "bf16"}
    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1, "bf16": bf16}
    return nullcontext(HfDeepSpeedConfig(config))  # transformers looks for it while it is alive


class TrainedModel:
    """A model under DeepSpeed: call it, `backward` sums of losses, and `step` once per optimiser step."""

    def __init__(
        self,
        module: LanguageModel | ScalarModel,
        config: TrainedModelConfig,
        ds: DeepSpeedConfig,
        total_steps: int,
        world: World,
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
        """Add the gradient of `loss`, the share of this rank in the loss of the step.

        DeepSpeed averages over all ranks; scaled by their number, the result is the gradient of the sum over the data
        axis. Ranks that split the tokens of a batch have the same loss, and each has the gradient of its own tokens.
        """
        self.engine.backward(loss * self.world.mesh.size)

    def step(self, step: int) -> dict[str, float]:
        """Update with the gradients since the last step, at the learning rate of optimiser step `step` (0-based).

        Return the gradient norm before clipping, and the rate. Nothing was updated where the norm is not finite.
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
        """Drop the gradients of a skipped step. With ds.adam_offload DeepSpeed 0.19 keeps them in ZeRO-1 and 2, and
        every later step would be skipped too."""
        if self.ds.adam_offload and self.ds.zero_stage < 3:
            for group in self.optimizer.averaged_gradients:
                self.optimizer.averaged_gradients[group] = None

    @contextmanager
    def optimizer_on_device(self) -> Iterator[None]:
        """Have the optimiser state, the fp32 weights and the gradients on the device within the block alone; after it
        they are in host memory."""
        self.engine.reload_states()
        try:
            yield
        finally:
            self.optimizer_to_host()

    def optimizer_to_host(self) -> None:
        """Move all that only an update needs to host memory. The weights that a forward pass reads stay."""
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as States

        moved = [States.optim_states, States.hp_params, States.lp_grads, States.contiguous_grad_buffer]
        self.engine.offload_states(include=moved, pin_memory=self.world.device.type == "cuda")

    @property
    def needs_equal_micro_batches(self) -> bool:
        """Return whether every rank must run as many micro-batches as the others: backward passes hold collectives."""
        return self.world.mesh.size > 1 and self.ds.zero_stage >= 2

    def gathered(self, parameters: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
        """Return a context in which the given parameters are whole on every rank; ZeRO-3 partitions them."""
        return gathered(self.ds, parameters)

    def save_state(self, folder: Path) -> None:
        """Write weights, optimiser state and the state of the random numbers of this rank. Every rank calls it."""
        frozen_4bit = self.ds.load_in_4bit  # such weights do not load again, and come from the model's folder
        self.engine.save_checkpoint(
            str(folder), tag="engine", client_state={}, save_latest=False, exclude_frozen_parameters=frozen_4bit
        )
        torch.save(rng_state(), folder / f"rng_{self.world.rank}.pt")

    def load_state(self, folder: Path) -> None:
        """Do the inverse of `save_state`, on the same number of ranks."""
        path, _ = self.engine.load_checkpoint(str(folder), tag="engine", load_module_strict=not self.ds.load_in_4bit)
        assert path is not None, f"no engine state in {folder}"
        set_rng_state(load_tensors(folder / f"rng_{self.world.rank}.pt"))


def load_trained(
    model: ModelPlan, section: TrainedModelConfig, ds: DeepSpeedConfig, world: World, *, total_steps: int, seed: int
) -> TrainedModel:
    """Load a model, make it trainable as `section` says, and put it under DeepSpeed."""
    with loading_context(ds):
        writable = partial(gathered, ds, modifier_rank=0)
        module = load_model(
            model.path,
            head=model.head,
            ds=ds,
            seed=seed,
            flag=model.flag,
            writable=writable,
            dropout=not section.disable_dropout,
        )
    if ds.use_liger_kernel:
        fuse_layers(module.model, world.device.type)
    make_trainable(module, section, ds.lora, seed=seed, section=model.name)
    split_tokens(module, ds, world)
    return TrainedModel(module.to(world.device), section, ds, total_steps, world)


def split_tokens(module: LanguageModel | ScalarModel, ds: DeepSpeedConfig, world: World) -> None:
    """Have the ranks of the sequence axis split the tokens of each batch of a model."""
    if world.sequence_ranks is not None:
        index = world.rank % world.mesh.sequence
        module.sequence_group = SequenceGroup(world.sequence_ranks, index, world.mesh.sequence, ds.ring_attn_mode)
        check_layout(module.model, module.packed, module.sequence_group)


def load_frozen(model: ModelPlan, ds: DeepSpeedConfig, world: World) -> nn.Module:
    """Load a model that only runs forward."""
    ds = replace(ds, load_in_4bit=model.load_in_4bit)
    with loading_context(ds):
        module = load_model(model.path, head=model.head, ds=ds, flag=model.flag)
    if isinstance(module, ScalarModel):
        check_head_is_trained(module, model.path, model.flag)
    split_tokens(module, ds, world)
    if model.offload and world.device.type == "cpu":
        key = f"{model.name}.offload"
        raise UserError(f"{key}=true: this machine has no GPU to bring weights to. Set {key}=false")
    return frozen_model(module, ds, world, model.offload)


def frozen_model(module: nn.Module, ds: DeepSpeedConfig, world: World, offload: bool = False) -> nn.Module:
    """Prepare a model that only runs forward: whole on its device, under ZeRO-3 partitioned over the ranks, and with
    `offload` streamed from host memory."""
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
    """Return a context in which the given parameters are whole on every rank; below ZeRO-3 they always are. What
    `modifier_rank` changes in them is kept."""
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
