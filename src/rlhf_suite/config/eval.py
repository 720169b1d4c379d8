"""`eval`: what is measured on held-out data, and when."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import flag


@dataclass
class EvalConfig:
    """Evaluation loss"""

    dataset: str | None = flag(None, "Comma list of held-out sources, each reported by name")
    split: str = flag("train", "Split of sources that have several")
    steps: int = flag(-1, "Every so many optimiser steps; -1: once per epoch", ge=-1)
    max_samples: int | None = flag(None, "Rows taken of each source; null: all", ge=1)


@dataclass
class RLEvalConfig(EvalConfig):
    """Evaluation by sampling: pass@1 and pass@k"""

    steps: int = flag(-1, "Before the first, after the last and every so many RL steps; -1: never", ge=-1)
    n_samples_per_prompt: int = flag(4, "Samples per prompt", ge=1)
    temperature: float = flag(0.6, "Sampling temperature; 0: greedy", ge=0)


@dataclass
class LoopEvalConfig:
    """Held-out prompts, answered greedily and scored before the first iteration and after each"""

    dataset: str | None = flag(None, "Comma list of sources with the columns of data.prompt_dataset; null: none")
    split: str = flag("train", "Split of sources that have several")
    max_samples: int | None = flag(None, "Rows taken from the start; null: all", ge=1)
