"""The rows of one step of each supervised task, the task's gradient however the step is split, and its formula.

The formulas are written in float64 over plain transformers models; they share no code with what they judge.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gradients
import torch
from gradients import LORA, Gradients, Split
from torch import nn
from transformers import AutoModelForCausalLM

from rlhf_suite.config.actor import DPOActorConfig, KTOActorConfig, PRMActorConfig, RMActorConfig, StudentConfig
from rlhf_suite.config.algo_supervised import DistillAlgoConfig, DPOAlgoConfig, KTOAlgoConfig, PRMAlgoConfig
from rlhf_suite.config.data import (
    LabelledDataConfig,
    PairDataConfig,
    RewardPairDataConfig,
    SFTDataConfig,
    StepDataConfig,
)
from rlhf_suite.config.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.ref import PreferenceReferenceConfig
from rlhf_suite.config.runs import DistillRun, DPORun, KTORun, PRMRun, RMRun, SupervisedRun
from rlhf_suite.config.teacher import TeacherConfig
from rlhf_suite.config.train import TrainConfig
from rlhf_suite.data.batch import Example, Item, sequences
from rlhf_suite.data.row import Row
from rlhf_suite.models.builtin import byte_tokenizer
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.tasks import distill, dpo, kto, prm, rm
from rlhf_suite.train.frozen import load_frozen_roles, prepared
from rlhf_suite.train.loader import rank_micro_batches
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.task import Task
from rlhf_suite.train.world import World

PLACEHOLDER, PLUS, MINUS = (byte_tokenizer()(sign)["input_ids"][0] for sign in ";+-")
BETA, SMOOTHING, NLL, DESIRABLE, KD, HEAT = 0.3, 0.1, 0.2, 1.7, 0.6, 1.5
ROWS = 7

SPLITS = [
    Split("one micro-batch", micro=ROWS),
    Split("micro-batches of 2", micro=2),
    Split("micro-batches of 1", micro=1),
    Split("padded", micro=3, packed=False),
    Split("token budget", budget=160),
    Split("gradient checkpointing", checkpointing=True),
    *(Split(f"2 ranks, ZeRO-{stage}", ranks=2, zero=stage, micro=1) for stage in range(4)),
    *(Split(f"1 row on 2 ranks, ZeRO-{stage}", ranks=2, zero=stage, sequences=(4,)) for stage in (2, 3)),
    Split("2 ranks, ZeRO-3, token budget, padded", ranks=2, zero=3, budget=160, packed=False),
    Split("LoRA", lora=True),
    Split("LoRA, 2 ranks, ZeRO-2", ranks=2, zero=2, micro=1, lora=True),
    Split("LoRA, 2 ranks, ZeRO-3", ranks=2, zero=3, micro=2, lora=True),
]


# The tasks as they are configured, and their rows.


def text(rng: random.Random, least: int, most: int) -> str:
    return "".join(rng.choice("abcdefgh 0123456789") for _ in range(rng.randint(least, most))).strip() or "x"


def pair_rows(rng: random.Random) -> list[dict[str, object]]:
    return [
        {
            "prompt": text(rng, 1, 20),
            "chosen": text(rng, 1, 25),
            "rejected": text(rng, 1, 25),
            "margin": rng.uniform(0, 1),
        }
        for _ in range(ROWS)
    ]


def rm_config(folder: Path, common: dict[str, Any]) -> RMRun:
    data = RewardPairDataConfig(prompt_key="prompt", margin_key="margin", max_len=64)
    return RMRun(actor=RMActorConfig(model_name_or_path=str(folder / "value")), data=data, **common)


def dpo_config(folder: Path, common: dict[str, Any], loss: str) -> DPORun:
    smoothing = SMOOTHING if loss == "sigmoid" else 0.0
    lora = common["ds"].lora.rank > 0
    return DPORun(
        actor=DPOActorConfig(model_name_or_path=str(folder / "lm")),
        ref=PreferenceReferenceConfig(None if lora or loss == "simpo" else str(folder / "reference")),
        data=PairDataConfig(prompt_key="prompt", max_len=64),
        algo=DPOAlgoConfig(loss=loss, beta=BETA, label_smoothing=smoothing, nll_loss_coef=NLL),
        **common,
    )


def labelled_rows(rng: random.Random) -> list[dict[str, object]]:
    return [{"input": text(rng, 1, 20), "output": text(rng, 1, 25), "label": row % 3 > 0} for row in range(ROWS)]


def kto_config(folder: Path, common: dict[str, Any], loss: str) -> KTORun:
    return KTORun(
        actor=KTOActorConfig(model_name_or_path=str(folder / "lm")),
        ref=PreferenceReferenceConfig(None if common["ds"].lora.rank > 0 else str(folder / "reference")),
        data=LabelledDataConfig(max_len=64),
        algo=KTOAlgoConfig(loss=loss, beta=BETA, desirable_loss_weight=DESIRABLE),
        **common,
    )


def step_rows(rng: random.Random, soft: bool) -> list[dict[str, object]]:
    counts = [rng.randint(1, 5) for _ in range(ROWS)]
    return [
        {
            "input": "".join(f"{text(rng, 1, 9)};" for _ in range(count)),
            "label": [round(rng.random(), 2) if soft else rng.choice("+-") for _ in range(count)],
        }
        for count in counts
    ]


def prm_config(folder: Path, common: dict[str, Any], names: list[str] | None) -> PRMRun:
    return PRMRun(
        actor=PRMActorConfig(model_name_or_path=str(folder / "lm")),
        data=StepDataConfig(max_len=64),
        algo=PRMAlgoConfig(placeholder_token=";", reward_tokens=names),
        **common,
    )


def distill_config(folder: Path, common: dict[str, Any], **algo: Any) -> DistillRun:
    return DistillRun(
        actor=StudentConfig(model_name_or_path=str(folder / "lm")),
        teacher=TeacherConfig(str(folder / ("lm" if common["ds"].lora.rank > 0 else "reference"))),
        data=SFTDataConfig(output_key="output", max_len=64),
        algo=DistillAlgoConfig(kd_coef=KD, temperature=HEAT, **algo),
        **common,
    )


# name: (configuration, what makes the task of it, rows)
TASKS: dict[str, tuple[Callable[..., SupervisedRun], Callable[..., Task], Callable[..., Any]]] = {
    "rm": (rm_config, rm.make_task, pair_rows),
    "dpo": (partial(dpo_config, loss="sigmoid"), dpo.make_task, pair_rows),
    "simpo": (partial(dpo_config, loss="simpo"), dpo.make_task, pair_rows),
    "kto": (partial(kto_config, loss="kto"), kto.make_task, labelled_rows),
    "kto vanilla": (partial(kto_config, loss="vanilla"), kto.make_task, labelled_rows),
    "prm": (partial(prm_config, names=None), prm.make_task, partial(step_rows, soft=False)),
    "distill": (distill_config, distill.make_task, labelled_rows),
    "distill, top 5": (partial(distill_config, top_k=5, divergence="jsd"), distill.make_task, labelled_rows),
    "prm soft": (partial(prm_config, names=["+", "-"]), prm.make_task, partial(step_rows, soft=True)),
}


def setup(folder: Path, name: str, split: Split) -> tuple[SupervisedRun, Task, list[Item]]:
    """The configuration, the task and the items of `split`'s step."""
    make_config, make_task, make_rows = TASKS[name]
    train = TrainConfig(
        micro_batch_size=split.micro,
        dynamic_batch_enable=split.budget is not None,
        max_tokens_per_gpu=split.budget or 1,
    )
    ds = DeepSpeedConfig(
        zero_stage=split.zero,
        param_dtype="fp32",
        packing_samples=split.packed,
        lora=LORA if split.lora else LoRAConfig(),
    )
    config = make_config(folder, {"train": train, "ds": ds})
    task = make_task(config, load_tokenizer(str(folder / "plain"), SFTDataConfig()))
    rows = [Row(values, "rows", line) for line, values in enumerate(make_rows(random.Random(4)))]
    items = list(task.assemble([task.encode(row) for row in rows]))
    return config, task, [items[row] for row in split.sequences if row < ROWS]


def make_models(folder: Path) -> Path:
    """Those of `gradients`, and another language model."""
    gradients.make_models(folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "lm")
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder / "reference")
    for name in ("lm", "reference"):
        byte_tokenizer().save_pretrained(folder / name)
    return folder


def gradient(world: World, folder: Path, name: str, split: Split) -> Gradients | None:
    """The gradient that the optimiser is given, by the names of a plain transformers model; rank 0's."""
    torch.manual_seed(0)
    config, task, items = setup(folder, name, split)
    with gradients.gradient_writer():
        model = gradients.trained_model(world, folder, task.head, split)
    task.frozen = load_frozen_roles(task, config, model)
    batches = prepared(task, model, rank_micro_batches(items, range(len(items)), config.train, world))
    optimizer_step(model, task, batches, 0, "stop")
    trained = [(name, p) for name, p in model.module.model.named_parameters() if p.requires_grad]
    with model.gathered([p for _, p in trained]):
        return {name: p.detach().clone() for name, p in trained} if world.is_main else None


# The formulas.


class Plain:
    """A plain model in float64, read one sequence at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def logits(self, example: Example) -> torch.Tensor:
        """[L, V]: of what follows each token."""
        return self.model(input_ids=torch.tensor(example.ids)[None], use_cache=False).logits[0]

    def log_p(self, example: Example) -> torch.Tensor:
        """[L-1, V]: of each token but the first."""
        return self.logits(example)[:-1].log_softmax(-1)

    def answer(self, example: Example) -> tuple[torch.Tensor, int]:
        """log p of the masked tokens, and how many they are."""
        ids, mask = torch.tensor(example.ids)[1:], torch.tensor(example.mask)[1:]
        chosen = self.log_p(example)[torch.arange(len(ids)), ids]
        return (chosen * mask).sum(), int(mask.sum())

    def score(self, example: Example) -> torch.Tensor:
        ids = torch.tensor(example.ids)
        hidden = self.model.model(input_ids=ids[None], use_cache=False).last_hidden_state
        return self.model.score(hidden)[0, -1, 0]


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return -torch.log(1 + torch.exp(-x))


def rm_formula(model: Plain, _: Plain, items: list[Item]) -> torch.Tensor:
    losses = []
    for item in items:
        chosen, rejected = sequences(item)
        losses.append(-log_sigmoid(model.score(chosen) - model.score(rejected) - chosen.numbers["margin"]))
    return sum(losses) / len(losses)


def dpo_formula(model: Plain, reference: Plain, items: list[Item]) -> torch.Tensor:
    losses = []
    for item in items:
        (chosen, tokens), (rejected, _) = (model.answer(example) for example in sequences(item))
        ref_chosen, ref_rejected = (reference.answer(example)[0] for example in sequences(item))
        h = BETA * ((chosen - rejected) - (ref_chosen - ref_rejected))
        loss = -(1 - SMOOTHING) * log_sigmoid(h) - SMOOTHING * log_sigmoid(-h)
        losses.append(loss - NLL * chosen / tokens)
    return sum(losses) / len(losses)


def simpo_formula(model: Plain, _: Plain, items: list[Item]) -> torch.Tensor:
    losses = []
    for item in items:
        chosen, rejected = (log_p / tokens for log_p, tokens in map(model.answer, sequences(item)))
        losses.append(-log_sigmoid(BETA * (chosen - rejected) - 0.5) - NLL * chosen)
    return sum(losses) / len(losses)


def kto_formula(model: Plain, reference: Plain, items: list[Item]) -> torch.Tensor:
    ratios = [[model.answer(x)[0] - reference.answer(x)[0] for x in sequences(item)] for item in items]
    labels = [sequences(item)[0].numbers["label"] for item in items]
    mismatched = float(sum(pair[1] for pair in ratios)) / len(items) if len(ratios[0]) == 2 else None
    losses = []
    for (ratio, *_), label in zip(ratios, labels, strict=True):
        others = [float(pair[0]) for pair, other in zip(ratios, labels, strict=True) if other != label]
        point = max(0.0, mismatched if mismatched is not None else sum(others) / max(len(others), 1))
        sigmoid = 1 / (1 + torch.exp(-BETA * ((ratio - point) if label else (point - ratio))))
        losses.append((DESIRABLE if label else 1) * (1 - sigmoid))
    return sum(losses) / len(losses)


def prm_formula(model: Plain, _: Plain, items: list[Item], soft: bool) -> torch.Tensor:
    losses = []
    for example in items:
        logits = model.logits(example)
        for place in [index for index, token in enumerate(example.ids) if token == PLACEHOLDER]:
            target, weight = (example.token_numbers[name][place] for name in ("target", "weight"))
            if soft:
                log_p = logits[place][[PLUS, MINUS]].log_softmax(-1)
                losses.append(-weight * log_p[0] - (1 - weight) * log_p[1])
            else:
                losses.append(-logits[place].log_softmax(-1)[int(target)])
    return sum(losses) / len(losses)


def distill_formula(model: Plain, teacher: Plain, items: list[Item], top_k: int | None) -> torch.Tensor:
    losses = []
    for example in items:
        p = (teacher.logits(example) / HEAT).softmax(-1)
        q = (model.logits(example) / HEAT).softmax(-1)
        language = model.log_p(example)
        for place in range(1, len(example)):
            if example.mask[place]:
                divergence = distance(p[place - 1], q[place - 1], top_k)
                losses.append(-(1 - KD) * language[place - 1, example.ids[place]] + KD * HEAT**2 * divergence)
    return sum(losses) / len(losses)


def distance(p: torch.Tensor, q: torch.Tensor, top_k: int | None) -> torch.Tensor:
    """KL(p, q), or the Jensen-Shannon divergence of p's likeliest tokens and the rest."""
    if top_k is None:
        return (p * (p / q).log()).sum()
    chosen = p.argsort(descending=True)[:top_k]
    p, q = (torch.cat([x[chosen], 1 - x[chosen].sum().reshape(1)]) for x in (p, q))
    m = (p + q) / 2
    return ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2


FORMULAS = {
    "distill": partial(distill_formula, top_k=None),
    "distill, top 5": partial(distill_formula, top_k=5),
    "prm": partial(prm_formula, soft=False),
    "prm soft": partial(prm_formula, soft=True),
    "rm": rm_formula,
    "dpo": dpo_formula,
    "simpo": simpo_formula,
    "kto": kto_formula,
    "kto vanilla": kto_formula,
}


def language_model(folder: Path, name: str) -> nn.Module:
    """Frozen."""
    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64, attn_implementation="eager")
    return model.requires_grad_(False)


def wanted(folder: Path, name: str, split: Split) -> Gradients:
    """The gradient of the formula; with LoRA of the adapters, and the reference is the model without them."""
    _, task, items = setup(folder, name, split)
    model = gradients.reference_model(folder, task.head)
    other = language_model(folder, "lm" if split.lora else "reference")
    adapters = {}
    for key, parameter in model.named_parameters() if split.lora else ():
        if parameter.ndim == 2 and "layers" in key:
            adapters[key] = [part.double() for part in gradients.adapter(key, parameter.shape)]
            parameter.data += LORA.alpha / LORA.rank * adapters[key][0] @ adapters[key][1]
    FORMULAS[name](Plain(model), Plain(other), items).backward()
    return gradients.adapter_gradients(model, adapters) if split.lora else gradients.plain_gradients(model)
