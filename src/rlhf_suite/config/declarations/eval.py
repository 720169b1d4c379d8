"""`eval`: the measurements on held-out data, and when they are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from rlhf_suite import registry
from rlhf_suite.config.declarations.conditions import Need, algorithm_needs, is_positive, is_set
from rlhf_suite.config.declarations.flags import flag
from rlhf_suite.config.declarations.sections import Section
from rlhf_suite.config.declarations.task_groups import RL, WITH_ANSWERS, WITH_PAIRS

LANGUAGE = ("gpt_loss", "aux_loss")
PREFERENCE = ("acc", "loss", "aux_loss", "chosen_reward", "reject_reward", "reward_margin")
QUANTILES = ("reward_p05", "reward_p25", "reward_p50", "reward_p75", "reward_p95")
HELD_OUT = is_set(".dataset", "<source>")
EVALUATED = is_set("eval.dataset", "<source>") | is_set("eval.benchmark", "<benchmark>:<file>")
MEASURED = HELD_OUT | is_set(".benchmark", "<benchmark>:<file>")


def column(name: str, *tasks: str) -> list[str] | None:
    """Declare the flag of a column of evaluation sets."""
    declared: list[str] | None = flag(
        None,
        f"Name of this column in the evaluation sets: one for all sets, or one for each set; null: data.{name}",
        when=HELD_OUT,
        tasks=tasks,
    )
    return declared


@dataclass
class EvalConfig(Section):
    """Evaluation on held-out rows: losses and accuracies, in task=ppo pass@1 and pass@k of sampled answers"""

    dataset: str | None = flag(None, "Held-out sources, separated by commas. Each is reported by its name; null: none")
    benchmark: str | None = flag(None, tasks=RL)
    """Benchmarks, separated by commas, each as <name>:<file or folder of its data set>. The names are gsm8k, math500,
    aime and ifeval (docs/benchmarks_of_models.md)"""
    split: str = flag(
        "train",
        "Name of the split to read from sources with several splits",
        when=HELD_OUT,
        defaults=dict.fromkeys(("dpo", "kto", "prm", "distill"), "test"),
    )
    steps: int = flag(-1, ge=-1, needs=Need(EVALUATED, "there is nothing to evaluate on", at=is_positive("")))
    """Evaluate every N optimiser steps; -1: once per epoch. In task=ppo: every N RL steps, and also before the first
    and after the last one; -1: only before the first and after the last step"""
    max_samples: int | None = flag(None, "Number of rows to use from each source; null: all", ge=1, when=MEASURED)
    on_start: bool = flag(True, "Also evaluate before the first step", when=HELD_OUT)
    n_samples_per_prompt: int = flag(4, "Number of samples per prompt", ge=1, when=HELD_OUT, tasks=RL)
    temperature: float = flag(0.6, "Sampling temperature; 0: greedy", ge=0, le=2, when=HELD_OUT, tasks=RL)
    max_calls: list[int] | None = flag(
        None,
        ge=0,
        when=HELD_OUT,
        needs=Need(algorithm_needs("agent.kind", registry.agent, "turns"), "an answer of a single turn has no calls"),
        tasks=RL,
    )
    """Also measure pass@k with these numbers of allowed calls. Each number is a separate evaluation. It limits how
    often an episode may call tools, run code or get an answer from its environment"""
    input_key: list[str] | None = column("input_key", *WITH_ANSWERS, "prm", *RL)
    output_key: list[str] | None = column("output_key", *WITH_ANSWERS)
    prompt_key: list[str] | None = column("prompt_key", *WITH_PAIRS)
    chosen_key: list[str] | None = column("chosen_key", *WITH_PAIRS)
    rejected_key: list[str] | None = column("rejected_key", *WITH_PAIRS)
    margin_key: list[str] | None = column("margin_key", "rm")
    steps_key: list[str] | None = column("steps_key", "prm")
    label_key: list[str] | None = column("label_key", "kto", "prm", *RL)

    def column_flags(self) -> dict[str, list[str]]:
        """Return the columns that evaluation sets call otherwise than the training data, by the name of the flag."""
        names = [field.name for field in fields(self) if field.name.endswith("_key")]
        return {name: columns for name in names if (columns := getattr(self, name)) is not None}

    def columns_of_sets(self, count: int) -> Iterator[dict[str, Any]]:
        """Yield for each of `count` evaluation sets the columns that it calls otherwise than the training data, as
        keyword arguments of `dataclasses.replace`."""
        given = self.column_flags()
        for place in range(count):
            yield {name: columns[place] if len(columns) > 1 else columns[0] for name, columns in given.items()}
