"""What touches DeepSpeed: process group, engine settings, trained and frozen models, gathering under ZeRO-3; the
moves of its states are in `state_moves`.

With ds.zero_stage=null nothing imports it: `torch_engine` trains the model."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_suite.config.check.lacking import refuse_without_gpu
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.models import TO_A_GPU, TrainedModelConfig
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.distributed.mesh import Rank
from rlhf_suite.distributed.world import World, give_back_freed_memory, rng_state, set_rng_state
from rlhf_suite.errors import UserError
from rlhf_suite.launch.allocator import FreedMemory
from rlhf_suite.models.forward import LanguageModel, ScalarModel, check_layout
from rlhf_suite.models.host_weights import keep_on_host
from rlhf_suite.models.load import load_model
from rlhf_suite.models.prepare import fuse_layers, fuses_layers, make_trainable
from rlhf_suite.models.reward_model import check_head_is_trained
from rlhf_suite.models.sequence_parallel import SequenceGroup
from rlhf_suite.train import optim, tensor_parallel
from rlhf_suite.train.checkpoint_files import Entries
from rlhf_suite.train.parts import (
    WEIGHT,
    Held,
    SavedParts,
    base_state,
    convert_for_optimizer,
    list_held_parts,
    load_tensors,
    local_part,
    state_of,
    write_parts,
    write_tensors,
)
from rlhf_suite.train.schedules import learning_rate_factor
from rlhf_suite.train.settings import (
    build_frozen_config,
    compile_engine,
    device_to_load_to,
    engine_config,
    is_plain,
    reduces_in_last_backward,
)
from rlhf_suite.train.state_moves import move_states_to_device, move_states_to_host
from rlhf_suite.train.torch_engine import TorchEngine

# For a rank that waits for the others. Only the driver judges whether they still work (launch.timeout_s): DeepSpeed's
# limit of ten minutes would end a run whose first rank takes longer to write a large model.
COLLECTIVES = timedelta(days=1)


def join_world(rank: Rank, zero_stage: int | None = 0) -> World:
    """Join the process group of DeepSpeed, whose environment a Worker has set: gloo on CPUs, NCCL on GPUs. Without
    DeepSpeed (a `zero_stage` of None) the rank is the only one and joins nothing.

    DeepSpeed's extension for shared memory stays off: it takes a minute to compile, and its buffers outlive the run.
    """
    on_gpu = rank.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if not on_gpu:
        give_back_freed_memory()
    if zero_stage is None:
        assert rank.mesh.size == 1, "several ranks need DeepSpeed"
        return World.of(rank.number, rank.mesh, device)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    limit = {} if "DEEPSPEED_TIMEOUT" in os.environ else {"timeout": COLLECTIVES}
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", verbose=False, **limit)
    return World.of(rank.number, rank.mesh, device)


def make_load_context(ds: DeepSpeedConfig) -> AbstractContextManager[Any]:
    """Return a context to create a model in: under ZeRO-3 `from_pretrained` partitions parameters as it loads them."""
    if ds.zero_stage != 3:
        return nullcontext()
    from transformers.integrations import HfDeepSpeedConfig

    bf16 = {"enabled": ds.param_dtype == "bf16"}
    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1, "bf16": bf16}
    return nullcontext(HfDeepSpeedConfig(config))  # transformers looks for it while it is alive


class TrainedModel:
    """A model under DeepSpeed or, with ds.zero_stage=null, torch alone: call it, `backward` sums of losses, and `step`
    once per optimiser step."""

    def __init__(
        self,
        module: LanguageModel | ScalarModel,
        config: TrainedModelConfig,
        ds: DeepSpeedConfig,
        total_steps: int,
        world: World,
    ) -> None:
        self.module, self.config, self.ds, self.total_steps, self.world = module, config, ds, total_steps, world
        self._plain_norm, self.max_norm = 0.0, config.max_norm
        self.engine = self._make_engine()
        self.optimizer = self.engine.optimizer
        if is_plain(ds):
            norm_of = partial(tensor_parallel.gradient_norm, world=world) if world.mesh.tensor > 1 else None
            optim.clip_and_guard(
                self.optimizer, lambda: self.max_norm, self._record_norm, norm_of or optim.gradient_norm
            )
        self._peaks = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._freed = FreedMemory()

    def _make_engine(self) -> Any:
        """Return what computes gradients and updates: torch alone, or DeepSpeed."""
        if self.ds.zero_stage is None:
            return TorchEngine(self.module, self.config, self.ds)
        module, config = self.module, self.config
        optimizer: torch.optim.Optimizer | None = None
        settings = engine_config(self.ds, config.max_norm, self.world, needs_whole_gradients=config.optim == "muon")
        if config.optim == "muon":
            optimizer = optim.muon(module, config)
        elif self.ds.adam_offload and self.ds.cpu_adam == "deepspeed":
            optimizer = optim.cpu_adamw(module, config)
        else:
            optimizer = optim.adamw(module, config)
        trained = [p for p in module.parameters() if p.requires_grad]
        with redirect_stdout(None):  # with ZeRO-1 in bf16 DeepSpeed prints readings of the memory
            engine = start_engine(module, settings, self.world, model_parameters=trained, optimizer=optimizer)
        if self.ds.deepcompile:
            compile_engine(engine)
        return engine

    def _record_norm(self, norm: float) -> None:
        self._plain_norm = norm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        """Add the gradient of `loss`, the share of this rank in the loss of the step; `last`: no other follows in it.

        DeepSpeed averages over the ranks that hold the same parameters; scaled by their number, the result is the
        gradient of the sum over the data axis. Ranks that split the tokens of a batch have the same loss, and each has
        the gradient of its own tokens.
        """
        if reduces_in_last_backward(self.ds):
            self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.world.mesh.replicas)

    def step(self, step: int, rate: float | None = None) -> dict[str, float]:
        """Update with the gradients since the last step, at the learning rate `rate`, or that of optimiser step `step`
        (0-based).

        Return the gradient norm before clipping, and the rate. Nothing was updated where the norm is not finite.
        """
        factor = learning_rate_factor(step, self.total_steps, self.config) if rate is None else 1.0
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor if rate is None else rate
        self.engine.step()
        norm = self._plain_norm if is_plain(self.ds) else float(self.engine.get_global_grad_norm())
        if not math.isfinite(norm):
            self._forget_gradients()
        self._freed.give_back()
        return {"grad_norm": norm if math.isfinite(norm) else math.inf, "lr": self.optimizer.param_groups[0]["lr"]}

    def clip_to(self, max_norm: float) -> None:
        """Clip the norm of the gradient to `max_norm` (0: do not) from now on."""
        self.max_norm = max_norm
        if isinstance(self.engine, TorchEngine):
            self.engine.max_norm = max_norm
        elif not is_plain(self.ds):
            self.optimizer.clip_grad = max_norm

    def _forget_gradients(self) -> None:
        """Drop the gradients of a skipped step. With ds.adam_offload DeepSpeed 0.19 keeps them in ZeRO-1 and 2, and
        every later step would be skipped too."""
        if self.ds.adam_offload and self.ds.zero_stage in (1, 2):
            for group in self.optimizer.averaged_gradients:
                self.optimizer.averaged_gradients[group] = None

    @contextmanager
    def optimizer_on_device(self) -> Iterator[None]:
        """Have the optimiser state, the fp32 weights and the gradients on the device within the block alone; after it
        they are in host memory."""
        move_states_to_device(self.engine, self.ds.zero_stage, self.world.device)
        try:
            yield
        finally:
            self.optimizer_to_host()

    def optimizer_to_host(self) -> None:
        """Move all that only an update needs to host memory. The weights that a forward pass reads stay."""
        move_states_to_host(self.engine, self.ds.zero_stage, pinned=self.world.device.type == "cuda")

    @property
    def needs_equal_micro_batches(self) -> bool:
        """Return whether every rank must run as many micro-batches as the others: backward passes hold collectives."""
        return self.world.mesh.size > 1 and self.ds.zero_stage in (2, 3)

    @contextmanager
    def gather(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Have the given parameters whole on every rank within the block; ZeRO-3 partitions them, and tensor
        parallelism splits them."""
        parameters = list(parameters)
        with gather_parameters(self.ds, parameters), tensor_parallel.whole(parameters):
            yield

    @property
    def replica(self) -> int:
        """Return the number of this rank among those that hold the same parameters: ZeRO divides over them."""
        return self.world.mesh.replica_index(self.world.rank)

    def files(self, kind: str) -> str:
        """Return with what the names of the files of a checkpoint begin that hold the parameters of this rank."""
        mesh = self.world.mesh
        return f"{kind}_tensor{mesh.tensor_index(self.world.rank)}" if mesh.tensor > 1 else kind

    def load_parts(self, folder: Path, kind: str) -> SavedParts:
        """Return what the files of a checkpoint, named by `files(kind)`, hold for this rank."""
        split = {name for name, parameter in self.module.named_parameters() if tensor_parallel.is_shard(parameter)}
        return SavedParts(folder, kind, self.files(kind), split)

    def save_state(self, folder: Path, *, with_optimizer: bool = True) -> Entries:
        """Write the parts of weights and optimiser state that this rank holds, and its random numbers. Every rank
        calls it, and returns what the manifest says of its files."""
        base, written = self.engine.optimizer, Entries()
        if self.replica == 0 or not is_plain(self.ds):  # without ZeRO every rank has everything
            held = list(list_held_parts(self.module, base))
            states = [state_of(part, base) if with_optimizer else ({}, {}) for part in held]
            parts = {
                part.name: (part.start, {WEIGHT: part.weight} | tensors, values)
                for part, (tensors, values) in zip(held, states, strict=True)
            }
            written |= write_parts(folder / f"{self.files('state')}_{self.replica}.pt", parts)
        return written | write_tensors(folder / f"rng_{self.world.rank}.pt", rng_state())

    def load_state(self, folder: Path, *, with_optimizer: bool = True) -> None:
        """Do the inverse of `save_state`, whatever the number of ranks and the ZeRO stage were. A rank that the
        checkpoint has not keeps the random numbers with which it began."""
        saved = self.load_parts(folder, "state")
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        saved.check_names(trained)
        if with_optimizer:
            saved.check_moments({name: optim.moments_of(parameter) for name, parameter in trained.items()})
        for held in list_held_parts(self.module, self.engine.optimizer):
            saved.read(held.name, WEIGHT, held.start, held.weight)
            if with_optimizer:
                self._load_moments(saved, held)
        for name, parameter in trained.items():
            start, part = local_part(parameter)
            saved.read(name, WEIGHT, start, part)
        self.forget_gathered()
        if (own := folder / f"rng_{self.world.rank}.pt").exists():
            set_rng_state(load_tensors(own))

    def forget_gathered(self) -> None:
        """Drop the whole parameters that ZeRO-3 keeps beside the parts of ranks, those that are small or that a pass
        has just read: the parts have been written to, and the next pass gathers them again."""
        if self.ds.zero_stage == 3:
            self.engine.optimizer.empty_partition_cache()
        if self.ds.zpg > 1:
            self.engine.optimizer.invalidate_secondary_tensor()

    def _load_moments(self, saved: SavedParts, held: Held) -> None:
        """Put what is saved of the optimiser's state about a part into the optimiser."""
        optimizer = self.engine.optimizer
        state = base_state(optimizer)[held.owner]
        for key in saved.keys(held.name):
            if key not in state:
                state[key] = torch.zeros_like(held.owner)
            saved.read(held.name, key, held.start, held.of(state[key]))
        for key, value in saved.values(held.name, held.start).items():
            state[key] = convert_for_optimizer(value, optimizer, held.owner.device)


def load_trained(
    model: ModelPlan, section: TrainedModelConfig, ds: DeepSpeedConfig, world: World, *, total_steps: int, seed: int
) -> TrainedModel:
    """Load a model, make it trainable as `section` says, and put it under DeepSpeed."""
    with make_load_context(ds):
        writable = partial(gather_parameters, ds, modifier_rank=0)
        module = load_model(
            model.path,
            head=model.head,
            ds=ds,
            seed=seed,
            flag=model.flag,
            writable=writable,
            dropout=not section.disable_dropout,
            device=device_to_load_to(ds, world),
        )
    if fuses_layers(ds, module.model.config.model_type, world.device.type, reads_images=module.vision is not None):
        fuse_layers(module.model, world.device.type)
    mark_leaf_modules(module, ds, must_have=model.name == "actor")
    make_trainable(module, section, ds.lora, seed=seed, section=model.name)
    split_tokens(module, ds, world)
    return TrainedModel(module.to(world.device), section, ds, total_steps, world)


def split_tokens(module: LanguageModel | ScalarModel, ds: DeepSpeedConfig, world: World) -> None:
    """Have the ranks of the sequence axis split the tokens of each batch of a model."""
    if world.sequence_ranks is not None:
        index = world.mesh.sequence_index(world.rank)
        module.sequence_group = SequenceGroup(world.sequence_ranks, index, world.mesh.sequence, ds.ring_attn_mode)
        check_layout(module.model, module.packed, module.sequence_group)


def load_frozen(model: ModelPlan, ds: DeepSpeedConfig, world: World) -> nn.Module:
    """Load a model that only runs forward."""
    if model.offload:
        refuse_without_gpu(f"{model.name}.offload", True, TO_A_GPU, world.device.type)
    ds = replace(ds, load_in_4bit=model.load_in_4bit)
    with make_load_context(ds):
        device = None if model.offload else device_to_load_to(ds, world)
        module = load_model(model.path, head=model.head, ds=ds, flag=model.flag, device=device)
    if isinstance(module, ScalarModel):
        check_head_is_trained(module, model.path, model.flag)
    split_tokens(module, ds, world)
    return prepare_frozen(module, ds, world, model.offload)


def prepare_frozen(
    module: LanguageModel | ScalarModel, ds: DeepSpeedConfig, world: World, offload: bool = False
) -> nn.Module:
    """Prepare a model that only runs forward: whole on its device, under ZeRO-3 partitioned over the ranks, and with
    `offload` in host memory until `on_device`."""
    module.eval().requires_grad_(False)
    mark_leaf_modules(module, ds, must_have=False)
    if ds.zero_stage != 3 and world.mesh.tensor == 1:
        prepared: nn.Module = module if offload else module.to(world.device)
    else:
        prepared = start_engine(module, build_frozen_config(ds), world)
    if offload:
        keep_on_host(module, world.device)
    return prepared


def start_engine(module: nn.Module, settings: dict[str, Any], world: World, **more: Any) -> Any:
    """Return a model under DeepSpeed, its matrices split over the ranks of the tensor axis."""
    import deepspeed

    if world.mesh.tensor > 1:
        assert isinstance(module, LanguageModel | ScalarModel)
        settings["tensor_parallel"] = tensor_parallel.settings(module, module.model.config, world.mesh.tensor)
    engine, *_ = deepspeed.initialize(model=module, config=settings, **more)
    if world.mesh.tensor > 1:
        engine.first_dataloader_check.remove()  # it compares batches in a way that ours do not have
    return engine


def mark_leaf_modules(module: LanguageModel | ScalarModel, ds: DeepSpeedConfig, *, must_have: bool) -> None:
    """Have ZeRO-3 gather the modules of these classes as a whole. Models beside the actor may be of another kind.

    Layers that carry a state are among them: how often their parts run depends on a rank's sequences.

    Raises:
        UserError: no module of a model that `must_have` them is of such a class.
    """
    known = {type(submodule).__name__ for submodule in module.modules()}
    missing = sorted({*ds.zero3_leaf_modules} - known)
    if missing and must_have:
        raise UserError(
            f"ds.zero3_leaf_modules: the model has no module of class {missing[0]}. It has {', '.join(sorted(known))}"
        )
    if ds.zero_stage == 3 and (present := sorted({*ds.zero3_leaf_modules, *module.family.mixers} & known)):
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(module, present)


def gather_parameters(
    ds: DeepSpeedConfig, parameters: Iterable[torch.Tensor], modifier_rank: int | None = None
) -> AbstractContextManager[Any]:
    """Return a context in which the given parameters are whole on every rank; below ZeRO-3 they always are. What
    `modifier_rank` changes in them is kept."""
    if ds.zero_stage != 3:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=modifier_rank)
