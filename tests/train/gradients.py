"""One batch, the gradient of its step however the step is computed, and the gradient of its formula in float64.

The reference is written from plain transformers models and the formulas; it shares no code with the losses, the forward
pass or the step it judges. `python benchmarks/gradient_equality.py` writes the table of all errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from plain_models import LORA, Gradients, adapter, balancing, formula_gradient, outputs, reference_model
from policy_formulas import OBJECTIVES, TEMPERATURE, Sequence, formula, head_of
from splits import Split

from alike import begin_alike
from rlhf_suite.config.declarations.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.config.plan.micro_batches import trained_micro_batches
from rlhf_suite.data.batch import take
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.distributed.world import World
from rlhf_suite.models.load import load_model
from rlhf_suite.models.prefixes import find_neighbours
from rlhf_suite.models.prepare import make_trainable
from rlhf_suite.rl.sharding import balanced_parts, shards
from rlhf_suite.train import strategy
from rlhf_suite.train.loader import micro_groups
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.task import Objective

LENGTHS = [9, 31, 4, 17, 70, 2, 25, 12, 6, 40, 3, 21]
ALIKE = [(1, 4, 24), (7, 4, 11), (9, 4, 30), (10, 9, 3), (11, 9, 18)]  # rows that begin as others do: so many tokens
UNMASKED = 3  # the sequence without a masked token
BUDGET = 75  # tokens of a micro-batch


# The reference.


def reference(folder: Path, loss: str, batch: Experience, lora: bool = False, aux: float = 0.0) -> Gradients:
    """The gradient of the formula in float64; `aux`: weight of the load-balancing loss."""
    head = head_of(loss)
    temperature = 1.0 if loss == "next token" else TEMPERATURE

    def total(model: torch.nn.Module) -> torch.Tensor:
        found = [outputs(model, head, batch.ids[batch.segments == row]) for row in range(len(batch))]
        if head == "lm":
            found = [(out / temperature).log_softmax(-1) for out in found]
        sequences = [Sequence(batch, row, out) for row, out in enumerate(found)]
        if aux == 0:
            return formula(loss, sequences)
        masked = [batch.ids[batch.segments == s.row] for s in sequences if s.mask.any()]
        return formula(loss, sequences) + aux * balancing(model, masked)

    return formula_gradient(reference_model(folder, head), lora, total)


def read_alone(folder: Path, batch: Experience, temperature: float = 1.0) -> list[Sequence]:
    """Every sequence under the plain language model, without gradient."""
    model = reference_model(folder, "lm").requires_grad_(False)
    each = [outputs(model, "lm", batch.ids[batch.segments == row]) / temperature for row in range(len(batch))]
    return [Sequence(batch, row, out.log_softmax(-1)) for row, out in enumerate(each)]


def make_batch(folder: Path) -> Experience:
    """Ragged sequences whose masks have gaps; old and reference log-probs near the model's own, so that some ratios
    are clipped and some are not."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor(LENGTHS)
    total = int(lengths.sum())

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=generator)

    ids = begin_alike(torch.randint(0, 256, (total,), generator=generator), LENGTHS, ALIKE)
    plain = Experience(ids, lengths, torch.ones(total), torch.arange(len(LENGTHS)))
    mask = (torch.rand(total, generator=generator) < 0.6).float()
    mask[plain.starts] = 0
    mask[plain.segments == UNMASKED] = 0
    mask[plain.starts + 1] = (torch.arange(len(LENGTHS)) != UNMASKED).float()  # all others have one
    own, values = own_numbers(folder, plain)
    return replace(
        plain,
        mask=mask,
        old_log_probs=own + noise(0.3),
        ref_log_probs=own + noise(0.5),
        advantages=noise(1.0),
        values=values + noise(0.4),
        returns=values + noise(1.0),
    )


@torch.no_grad()
def own_numbers(folder: Path, batch: Experience) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain models' own log-probs and values of all tokens but the first ones, [T] each."""
    language, critic = reference_model(folder, "lm"), reference_model(folder, "value")
    own, values = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    for row, start in enumerate(batch.starts.tolist()):
        sequence = batch.ids[batch.segments == row]
        part = slice(start + 1, start + len(sequence))
        log_p = (outputs(language, "lm", sequence) / TEMPERATURE).log_softmax(-1)
        own[part] = log_p[torch.arange(len(sequence) - 1), sequence[1:]].float()
        values[part] = outputs(critic, "value", sequence).float()
    return own, values


# The suite's own gradient.


class WriteGradient(torch.optim.Optimizer):
    """Puts the gradient where the parameter was: what the optimiser is given, exactly, whatever ZeRO does around it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad)


@contextmanager
def gradient_writer() -> Iterator[None]:
    before = strategy.optim.adamw
    strategy.optim.adamw = lambda module, _: WriteGradient(
        [p for p in module.parameters() if p.requires_grad], {"lr": 1.0}
    )
    try:
        yield
    finally:
        strategy.optim.adamw = before


WORLDS: dict[Mesh, World] = {}


def meshed(world: World, split: Split) -> World:
    """The world of this rank in the mesh of `split`."""
    return with_mesh(world, Mesh(split.ranks // (split.sequence * split.tensor), split.sequence, split.tensor))


def with_mesh(world: World, mesh: Mesh) -> World:
    """The world of this rank in a mesh; its groups of ranks are made once."""
    if mesh not in WORLDS:
        WORLDS[mesh] = World.of(world.rank, mesh, world.device)
    return WORLDS[mesh]


def trained_model(world: World, folder: Path, head: str, split: Split) -> strategy.TrainedModel:
    """The model of `split` under DeepSpeed, its adapters set to `adapter`."""
    world = meshed(world, split)
    ds = ds_config(split)
    config = TrainedModelConfig.of(
        "ppo",
        aux_loss_coef=split.aux,
        freeze=list(split.freeze),
        max_norm=split.max_norm,
        lr_scheduler="constant",
        gradient_checkpointing_enable=bool(split.checkpointing),
        gradient_checkpointing_reentrant=split.checkpointing == "re-entrant",
    )
    with strategy.make_load_context(ds):
        module = load_model(str(folder / head), head=head, ds=ds)
    make_trainable(module, config, ds.lora)
    strategy.split_tokens(module, ds, world)
    weights = {name: p for name, p in module.model.named_parameters() if "lora" in name}
    for name, parameter in weights.items():
        stem, _, part = name.partition(".lora_")
        other = f"{stem}.lora_{'A' if part[0] == 'B' else 'B'}.default.weight"
        own, others = (getattr(p, "ds_shape", p.shape) for p in (parameter, weights[other]))
        shape = (own[0], others[1]) if part[0] == "B" else (others[0], own[1])
        with strategy.gather_parameters(ds, [parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(adapter(f"{stem}.weight", torch.Size(shape))["BA".index(part[0])])
    return strategy.TrainedModel(module.to(world.device), config, ds, 1, world)


def gradient(world: World, folder: Path, loss: str, split: Split, batch: Experience) -> Gradients | None:
    """The gradient that the optimiser of `split` is given, by the names of a plain transformers model; rank 0's."""
    with gradient_writer():
        model = trained_model(world, folder, head_of(loss), split)
    return optimizer_gradient(model, OBJECTIVES[loss], split, batch)


def optimizer_gradient(
    model: strategy.TrainedModel, objective: Objective[Experience], split: Split, batch: Experience
) -> Gradients | None:
    """The gradient of one step over `batch`."""
    torch.manual_seed(0)
    config, world = train_config(split, BUDGET), model.world
    mine = shards(batch, balanced_parts(batch, world.mesh.data))[world.data_index]
    limit, packed, order = trained_micro_batches(config), model.module.packed, find_neighbours(model.module, mine)
    groups = micro_groups(mine.lengths.tolist(), limit, world.mesh, packed, order)
    micro_batches = [take(mine, group) for group in groups]
    optimizer_step(model, objective, micro_batches, 0, "stop")
    return written(model)


KEPT: dict[tuple[Path, str, Split], tuple[strategy.TrainedModel, list[tuple[torch.Tensor, torch.Tensor]]]] = {}


def kept_model(world: World, folder: Path, head: str, split: Split) -> strategy.TrainedModel:
    """As `trained_model`, made once; a gradient that was written into its weights is taken out again."""
    key = (folder, head, split)
    if key not in KEPT:
        KEPT.clear()
        with gradient_writer():
            model = trained_model(world, folder, head, split)
        KEPT[key] = (model, [(tensor, tensor.clone()) for tensor in local_weights(model)])
    model, before = KEPT[key]
    with torch.no_grad():
        for tensor, value in before:
            tensor.copy_(value)
    return model


def local_weights(model: strategy.TrainedModel) -> list[torch.Tensor]:
    """What this rank holds of the weights: the parameters or, under ZeRO-3, its parts of them, and the optimiser's."""
    parameters = [getattr(p, "ds_tensor", p).detach() for p in model.module.parameters()]
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        parameters += [part.detach() for part in getattr(model.optimizer, name, [])]
    return parameters


def train_config(split: Split, budget: int) -> TrainConfig:
    return TrainConfig.of(
        "sft",
        micro_batch_size=split.micro,
        dynamic_batch_enable=split.budget,
        max_tokens_per_gpu=budget if split.budget else 1,
    )


def ds_config(split: Split) -> DeepSpeedConfig:
    return DeepSpeedConfig.of(
        "sft",
        zero_stage=split.zero,
        param_dtype="fp32",
        packing_samples=split.packed,
        attn_implementation=split.attention,
        ring_attn_size=split.sequence,
        ring_attn_mode=split.mode,
        tensor_parallel_size=split.tensor,
        lora=LORA if split.lora else LoRAConfig(),
    )


def written(model: strategy.TrainedModel) -> Gradients | None:
    """What `WriteGradient` left in the parameters, by the names of a plain transformers model; rank 0's."""
    trained = [(name, p) for name, p in model.module.model.named_parameters() if p.requires_grad]
    with model.gather([p for _, p in trained]):
        return {name: p.detach().clone() for name, p in trained} if model.world.is_main else None
