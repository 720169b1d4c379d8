"""One batch, many ways to compute the gradient of its step, and one reference in float64.

The reference is written from plain transformers models and the formulas; it shares no code with the losses, the forward
pass or the step it judges. `python benchmarks/gradient_equality.py` writes the table of all errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_suite.config.actor import PolicyConfig
from rlhf_suite.config.algo import KLConfig
from rlhf_suite.config.critic import CriticConfig
from rlhf_suite.config.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.optim import TrainedModelConfig
from rlhf_suite.config.train import TrainConfig
from rlhf_suite.data.batch import TokenBatch, take
from rlhf_suite.losses.language import next_token_loss
from rlhf_suite.models.builtin import create_tiny
from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.models.load import load_model, make_trainable
from rlhf_suite.rl.objectives import PolicyObjective, ValueObjective
from rlhf_suite.rl.sharding import balanced_parts, shards
from rlhf_suite.train import strategy
from rlhf_suite.train.loader import micro_groups
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.task import Forward, Objective, StepLoss
from rlhf_suite.train.world import World

Gradients = dict[str, torch.Tensor]

LENGTHS = [9, 31, 4, 17, 70, 2, 25, 12, 6, 40, 3, 21]
UNMASKED = 3  # the sequence without a masked token
TEMPERATURE, KL_COEF, ENTROPY_COEF, DUAL_CLIP, CLIP, VALUE_CLIP = 0.8, 0.07, 0.05, 1.3, (0.2, 0.28), 0.4
LORA = LoRAConfig(rank=4, alpha=8)


@dataclass(frozen=True)
class Split:
    """One way to compute the step."""

    name: str
    ranks: int = 1
    zero: int = 0
    micro: int = 5
    budget: int | None = None
    packed: bool = True
    lora: bool = False
    checkpointing: str = ""  # "plain" or "re-entrant"
    max_norm: float = 0.0
    sequences: tuple[int, ...] = tuple(range(len(LENGTHS)))


SPLITS = [
    Split("one micro-batch", micro=12),
    *(Split(f"micro-batches of {size}", micro=size) for size in (5, 2, 1)),
    Split("padded, one micro-batch", micro=12, packed=False),
    Split("padded, micro-batches of 5", packed=False),
    Split("token budget 75", budget=75),
    Split("gradient checkpointing", checkpointing="plain"),
    Split("gradient checkpointing, re-entrant", checkpointing="re-entrant"),
    *(Split(f"ZeRO-{stage}", zero=stage) for stage in (1, 2, 3)),
    *(Split(f"2 ranks, ZeRO-{stage}, micro-batches of 2", ranks=2, zero=stage, micro=2) for stage in range(4)),
    *(Split(f"2 ranks, ZeRO-{stage}, token budget 75", ranks=2, zero=stage, budget=75) for stage in (2, 3)),
    Split("2 ranks, ZeRO-2, padded", ranks=2, zero=2, packed=False),
    *(Split(f"1 sequence on 2 ranks, ZeRO-{stage}", ranks=2, zero=stage, sequences=(4,)) for stage in (2, 3)),
    Split("LoRA", lora=True),
    Split("LoRA, padded, ZeRO-2", lora=True, packed=False, zero=2),
    Split("LoRA, gradient checkpointing, re-entrant", lora=True, checkpointing="re-entrant"),
    Split("LoRA, ZeRO-3, gradient checkpointing", lora=True, zero=3, checkpointing="plain"),
    Split("LoRA, 2 ranks, ZeRO-2, micro-batches of 2", ranks=2, zero=2, micro=2, lora=True),
    Split("LoRA, 2 ranks, ZeRO-3, token budget 75", ranks=2, zero=3, budget=75, lora=True),
]


# The losses: what the suite minimises, and its formula on the full log-softmax.


@dataclass
class NextToken:
    """SFT's objective without a tokenizer around it."""

    def units(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        return {"tokens": batch.tokens["mask"].sum()}

    def loss(self, model: Forward, batch: TokenBatch) -> StepLoss:
        mask = batch.tokens["mask"]
        loss = next_token_loss(token_log_probs(model, batch, needed=mask.bool()).log_probs, mask)
        return StepLoss({"tokens": loss.total}, loss.metrics)


def policy(mode: str) -> PolicyObjective:
    actor = PolicyConfig(
        loss_agg_mode=mode, dual_clip=DUAL_CLIP, entropy_coef=ENTROPY_COEF, eps_clip_low_high=list(CLIP)
    )
    return PolicyObjective(actor, KLConfig(use_loss=True, estimator="k3"), TEMPERATURE, KL_COEF)


OBJECTIVES: dict[str, Objective] = {
    "next token": NextToken(),
    "ppo, token-mean": policy("token-mean"),
    "ppo, seq-mean-token-mean": policy("seq-mean-token-mean"),
    "value": ValueObjective(CriticConfig(value_clip=VALUE_CLIP)),
}


def head_of(loss: str) -> str:
    return "value" if loss == "value" else "lm"


@dataclass
class Sequence:
    """What a formula reads of one sequence: tokens 1.. of it, [L-1], and the full log-softmax [L-1, V] or values."""

    batch: TokenBatch
    row: int
    outputs: torch.Tensor

    def __getattr__(self, name: str) -> torch.Tensor:
        return self.batch.tokens[name][self.batch.segments == self.row][1:].double()

    @property
    def log_probs(self) -> torch.Tensor:
        ids = self.batch.ids[self.batch.segments == self.row][1:]
        return self.outputs[torch.arange(len(ids)), ids]


def formula(loss: str, sequences: list[Sequence]) -> torch.Tensor:
    """The step's loss over all sequences."""
    num_tokens = sum(float(s.mask.sum()) for s in sequences)
    if loss == "next token":
        return -sum((s.log_probs * s.mask).sum() for s in sequences) / num_tokens
    if loss == "value":
        return sum((value_terms(s) * s.mask).sum() for s in sequences) / num_tokens
    chosen = [s for s in sequences if s.mask.sum() > 0]
    if loss == "ppo, token-mean":
        surrogate = sum((surrogate_terms(s) * s.mask).sum() for s in chosen) / num_tokens
    else:
        surrogate = sum((surrogate_terms(s) * s.mask).sum() / s.mask.sum() for s in chosen) / len(chosen)
    return surrogate + sum((regulariser_terms(s) * s.mask).sum() for s in chosen) / num_tokens


def surrogate_terms(s: Sequence) -> torch.Tensor:
    ratio = torch.exp(s.log_probs - s.old_log_probs)
    clipped = torch.minimum(torch.maximum(ratio, torch.tensor(1 - CLIP[0])), torch.tensor(1 + CLIP[1]))
    gain = torch.minimum(ratio * s.advantages, clipped * s.advantages)
    floor = torch.maximum(gain, DUAL_CLIP * s.advantages)
    return -torch.where(s.advantages < 0, floor, gain)


def regulariser_terms(s: Sequence) -> torch.Tensor:
    difference = s.ref_log_probs - s.log_probs
    k3 = torch.exp(difference) - difference - 1
    entropy = -(s.outputs.exp() * s.outputs).sum(-1)
    return KL_COEF * k3 - ENTROPY_COEF * entropy


def value_terms(s: Sequence) -> torch.Tensor:
    low, high = s.values - VALUE_CLIP, s.values + VALUE_CLIP
    clipped = torch.minimum(torch.maximum(s.outputs, low), high)
    return 0.5 * torch.maximum((s.outputs - s.returns) ** 2, (clipped - s.returns) ** 2)


# The reference.


def make_models(folder: Path) -> Path:
    """A tiny model with weights large enough to matter, as a language model and as a critic."""
    create_tiny(folder / "plain")
    generator = torch.Generator().manual_seed(7)
    for head, auto in (("lm", AutoModelForCausalLM), ("value", AutoModelForSequenceClassification)):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(11)
            model = auto.from_pretrained(folder / "plain", **({"num_labels": 1} if head == "value" else {}))
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder / head)
    return folder


def reference_model(folder: Path, head: str) -> torch.nn.Module:
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    return auto.from_pretrained(folder / head, dtype=torch.float64, attn_implementation="eager")


def outputs(model: torch.nn.Module, head: str, ids: torch.Tensor) -> torch.Tensor:
    """Of a sequence alone: log-softmax of the tempered logits [L-1, V], or values of the states [L-1]."""
    if head == "lm":
        return model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return model.score(model.model(input_ids=ids[None], use_cache=False).last_hidden_state)[0, :-1, 0]


def reference(folder: Path, loss: str, batch: TokenBatch, lora: bool = False) -> Gradients:
    """The gradient in float64, by the names of a plain transformers model; with `lora` of the adapters alone."""
    head = head_of(loss)
    model = reference_model(folder, head)
    adapters = {}
    for name, parameter in model.named_parameters() if lora else ():
        if parameter.ndim == 2 and "layers" in name:
            adapters[name] = [part.double() for part in adapter(name, parameter.shape)]
            up, down = adapters[name]
            parameter.data += LORA.alpha / LORA.rank * up @ down
    temperature = 1.0 if loss == "next token" else TEMPERATURE
    sequences = []
    for row in range(len(batch)):
        out = outputs(model, head, batch.ids[batch.segments == row])
        sequences.append(Sequence(batch, row, (out / temperature).log_softmax(-1) if head == "lm" else out))
    formula(loss, sequences).backward()
    return adapter_gradients(model, adapters) if lora else plain_gradients(model)


def plain_gradients(model: torch.nn.Module) -> Gradients:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def adapter_gradients(model: torch.nn.Module, adapters: dict[str, list[torch.Tensor]]) -> Gradients:
    """Of the adapters (B, A) that were added to weights, and of the scalar head."""
    whole = plain_gradients(model)
    result = {name: gradient for name, gradient in whole.items() if name == "score.weight"}
    for name, (up, down) in adapters.items():  # W = W0 + s up down, so d up = s dW down^T and d down = s up^T dW
        stem, scale = name.removesuffix(".weight"), LORA.alpha / LORA.rank
        result[f"{stem}.lora_A.default.weight"] = scale * up.T @ whole[name]
        result[f"{stem}.lora_B.default.weight"] = scale * whole[name] @ down.T
    return result


def adapter(name: str, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """(B [out, r], A [r, in]) of the weight of this name, both far from zero."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    up, down = ((shape[0], LORA.rank), (LORA.rank, shape[1]))
    return 0.1 * torch.randn(up, generator=generator), 0.1 * torch.randn(down, generator=generator)


def make_batch(folder: Path) -> TokenBatch:
    """Ragged sequences whose masks have gaps; old and reference log-probs near the model's own, so that some ratios
    are clipped and some are not."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor(LENGTHS)
    total = int(lengths.sum())

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=generator)

    ids = torch.randint(0, 256, (total,), generator=generator)
    plain = TokenBatch(ids, lengths)
    mask = (torch.rand(total, generator=generator) < 0.6).float()
    mask[plain.starts] = 0
    mask[plain.segments == UNMASKED] = 0
    mask[plain.starts + 1] = (torch.arange(len(LENGTHS)) != UNMASKED).float()  # all others have one
    with torch.no_grad():
        language, critic = reference_model(folder, "lm"), reference_model(folder, "value")
        own, values = torch.zeros(total), torch.zeros(total)
        for row, start in enumerate(plain.starts.tolist()):
            part = slice(start + 1, start + LENGTHS[row])
            sequence = ids[start : start + LENGTHS[row]]
            log_p = (outputs(language, "lm", sequence) / TEMPERATURE).log_softmax(-1)
            own[part] = log_p[torch.arange(len(sequence) - 1), sequence[1:]].float()
            values[part] = outputs(critic, "value", sequence).float()
    tokens = {
        "mask": mask,
        "old_log_probs": own + noise(0.3),
        "ref_log_probs": own + noise(0.5),
        "advantages": noise(1.0),
        "values": values + noise(0.4),
        "returns": values + noise(1.0),
    }
    return replace(plain, tokens=tokens, rows={"index": torch.arange(len(LENGTHS))})


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


def trained_model(world: World, folder: Path, head: str, split: Split) -> strategy.TrainedModel:
    """The model of `split` under DeepSpeed, its adapters set to `adapter`."""
    ds = DeepSpeedConfig(
        zero_stage=split.zero,
        param_dtype="fp32",
        packing_samples=split.packed,
        lora=LORA if split.lora else LoRAConfig(),
    )
    config = TrainedModelConfig(
        max_norm=split.max_norm,
        lr_scheduler="constant",
        gradient_checkpointing_enable=bool(split.checkpointing),
        gradient_checkpointing_reentrant=split.checkpointing == "re-entrant",
    )
    with strategy.loading_context(ds):
        module = load_model(str(folder / head), head=head, ds=ds)
    make_trainable(module, config, ds.lora)
    weights = {name: p for name, p in module.model.named_parameters() if "lora" in name}
    for name, parameter in weights.items():
        stem, _, part = name.partition(".lora_")
        other = f"{stem}.lora_{'A' if part[0] == 'B' else 'B'}.default.weight"
        own, others = (getattr(p, "ds_shape", p.shape) for p in (parameter, weights[other]))
        shape = (own[0], others[1]) if part[0] == "B" else (others[0], own[1])
        with strategy.gathered(ds, [parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(adapter(f"{stem}.weight", torch.Size(shape))["BA".index(part[0])])
    return strategy.TrainedModel(module, config, ds, 1, world)


def gradient(world: World, folder: Path, loss: str, split: Split, batch: TokenBatch) -> Gradients | None:
    """The gradient that the optimiser of `split` is given, by the names of a plain transformers model; rank 0's."""
    torch.manual_seed(0)
    with gradient_writer():
        model = trained_model(world, folder, head_of(loss), split)
    config = TrainConfig(
        micro_batch_size=split.micro,
        dynamic_batch_enable=split.budget is not None,
        max_tokens_per_gpu=split.budget or 1,
    )
    mine = shards(batch, balanced_parts(batch, world.size))[world.rank]
    micro_batches = [take(mine, group) for group in micro_groups(mine.lengths.tolist(), config)]
    optimizer_step(model, OBJECTIVES[loss], micro_batches, 0, "stop")
    trained = [(name, p) for name, p in model.module.model.named_parameters() if p.requires_grad]
    with model.gathered([p for _, p in trained]):
        return {name: p.detach().clone() for name, p in trained} if world.is_main else None


def relative_error(found: Gradients, wanted: Gradients) -> float:
    """Largest over the tensors of |found - wanted| / |wanted|, in the 2-norm."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return max(float((found[name].double() - wanted[name]).norm() / wanted[name].norm()) for name in wanted)
