"""Every loss of every supervised task: how it is configured, the rows of one step, and its formula."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import task_formulas as formulas
import torch
from task_formulas import BETA, DESIRABLE, GAMMA, HEAT, KD, NLL, SMOOTHING, Plain

from rlhf_suite.config.declarations.algo import (
    AlgoConfig,
)
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.models import (
    ReferenceConfig,
)
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.teacher import TeacherConfig
from rlhf_suite.data.batch import Item

ROWS = 7
MAX_LEN = 64

Values = list[dict[str, object]]
Common = dict[str, Any]  # sections `train` and `ds`


@dataclass(frozen=True)
class Case:
    """A loss. `chosen`: the flag's values that select it, `<task>.<flag of algo>=<value>`."""

    config: Callable[[Path, Common], Run]
    rows: Callable[[random.Random], Values]
    formula: Callable[[Plain, Plain, list[Item]], torch.Tensor]
    chosen: tuple[str, ...] = field(default=())


# Rows.


def text(rng: random.Random, least: int, most: int) -> str:
    return "".join(rng.choice("abcdefgh 0123456789") for _ in range(rng.randint(least, most))).strip() or "x"


def pair_rows(rng: random.Random) -> Values:
    return [
        {
            "prompt": text(rng, 1, 20),
            "chosen": text(rng, 1, 25),
            "rejected": text(rng, 1, 25),
            "margin": rng.uniform(0, 1),
        }
        for _ in range(ROWS)
    ]


def labelled_rows(rng: random.Random) -> Values:
    return [{"input": text(rng, 1, 20), "output": text(rng, 1, 25), "label": row % 3 > 0} for row in range(ROWS)]


def step_rows(rng: random.Random, soft: bool = False) -> Values:
    counts = [rng.randint(1, 5) for _ in range(ROWS)]
    return [
        {
            "input": "".join(f"{text(rng, 1, 9)};" for _ in range(count)),
            "label": [round(rng.random(), 2) if soft else rng.choice("+-") for _ in range(count)],
        }
        for count in counts
    ]


# Configurations. With LoRA the reference is the actor without its adapters.


def sft_config(folder: Path, common: Common) -> Run:
    data = DataConfig.of("sft", output_key="output", max_len=MAX_LEN)
    return Run.of("sft", actor=replace(Run.of("sft").actor, model_name_or_path=str(folder / "lm")), data=data, **common)


def rm_config(folder: Path, common: Common, loss: str, margin: bool) -> Run:
    data = DataConfig.of(
        "rm",
        input_template="User: {}\nAssistant: ",
        prompt_key="prompt",
        margin_key="margin" if margin else None,
        max_len=MAX_LEN,
    )
    actor = replace(Run.of("rm").actor, model_name_or_path=str(folder / "value"))
    return Run.of("rm", actor=actor, data=data, algo=AlgoConfig.of("rm", loss=loss), **common)


def dpo_config(folder: Path, common: Common, loss: str) -> Run:
    without = not AlgoConfig.of("dpo", loss=loss).needs("reference") or common["ds"].lora.rank > 0
    return Run.of(
        "dpo",
        actor=replace(Run.of("dpo").actor, model_name_or_path=str(folder / "lm")),
        ref=ReferenceConfig.of("dpo", model_name_or_path=None if without else str(folder / "reference")),
        data=DataConfig.of("dpo", input_template="User: {}\nAssistant: ", prompt_key="prompt", max_len=MAX_LEN),
        algo=AlgoConfig.of(
            "dpo",
            loss=loss,
            beta=BETA,
            label_smoothing=SMOOTHING if loss == "sigmoid" else 0.0,
            nll_loss_coef=NLL,
            simpo_gamma=GAMMA,
        ),
        **common,
    )


def kto_config(folder: Path, common: Common, loss: str) -> Run:
    other = None if common["ds"].lora.rank > 0 else str(folder / "reference")
    return Run.of(
        "kto",
        actor=replace(Run.of("kto").actor, model_name_or_path=str(folder / "lm")),
        ref=ReferenceConfig.of("kto", model_name_or_path=other),
        data=DataConfig.of("kto", max_len=MAX_LEN),
        algo=AlgoConfig.of("kto", loss=loss, beta=BETA, desirable_loss_weight=DESIRABLE),
        **common,
    )


def prm_config(folder: Path, common: Common, names: list[str] | None) -> Run:
    return Run.of(
        "prm",
        actor=replace(Run.of("prm").actor, model_name_or_path=str(folder / "lm")),
        data=DataConfig.of("prm", max_len=MAX_LEN),
        algo=AlgoConfig.of("prm", placeholder_token=";", reward_tokens=names),
        **common,
    )


def distill_config(folder: Path, common: Common, divergence: str, top_k: int | None) -> Run:
    other = "lm" if common["ds"].lora.rank > 0 else "reference"
    return Run.of(
        "distill",
        actor=replace(Run.of("distill").actor, model_name_or_path=str(folder / "lm")),
        teacher=TeacherConfig.of("distill", model_name_or_path=str(folder / other)),
        data=DataConfig.of("distill", output_key="output", max_len=MAX_LEN),
        algo=AlgoConfig.of("distill", kd_coef=KD, temperature=HEAT, divergence=divergence, top_k=top_k),
        **common,
    )


# The table.


def rm(loss: str, margin: bool) -> Case:
    formula = partial(formulas.rm_formula, margin=margin)
    return Case(partial(rm_config, loss=loss, margin=margin), pair_rows, formula, (f"rm.loss={loss}",))


def dpo(loss: str) -> Case:
    formula = partial(formulas.dpo_formula, loss=formulas.PAIR_LOSSES[loss])
    return Case(partial(dpo_config, loss=loss), pair_rows, formula, (f"dpo.loss={loss}",))


def kto(loss: str) -> Case:
    return Case(partial(kto_config, loss=loss), labelled_rows, formulas.kto_formula, (f"kto.loss={loss}",))


def prm(names: list[str] | None, soft: bool) -> Case:
    formula = partial(formulas.prm_formula, names=names, soft=soft)
    return Case(partial(prm_config, names=names), partial(step_rows, soft=soft), formula)


def distill(divergence: str, top_k: int | None = None) -> Case:
    formula = partial(formulas.distill_formula, distance=formulas.DISTANCES[divergence], top_k=top_k)
    config = partial(distill_config, divergence=divergence, top_k=top_k)
    return Case(config, labelled_rows, formula, (f"distill.divergence={divergence}",))


CASES: dict[str, Case] = {
    "sft": Case(sft_config, labelled_rows, formulas.sft_formula),
    "rm sigmoid": rm("sigmoid", margin=False),
    "rm sigmoid, margins": rm("sigmoid", margin=True),
    "rm logexp": rm("logexp", margin=False),
    **{f"dpo {loss}": dpo(loss) for loss in formulas.PAIR_LOSSES},
    "kto": kto("kto"),
    "kto vanilla": kto("vanilla"),
    "prm, whole vocabulary": prm(None, soft=False),
    "prm, two reward tokens": prm(["+", "-"], soft=False),
    "prm, soft labels": prm(["+", "-"], soft=True),
    **{f"distill {name}": distill(name) for name in formulas.DISTANCES},
    **{f"distill {name}, top 5": distill(name, top_k=5) for name in formulas.DISTANCES},
}
