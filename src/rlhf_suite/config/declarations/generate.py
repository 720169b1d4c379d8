"""`generate` and `score`: what a batch job writes, where, and which part of the rows is its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rlhf_suite.config.declarations.conditions import (
    BY_REWARD_MODEL,
    Need,
    is_above,
    is_false,
    is_null,
    is_true,
)
from rlhf_suite.config.declarations.flags import FREE, flag

OUTPUT_SUFFIXES = (".jsonl", ".parquet")
SHARD = re.compile(r"(\d+)/(\d+)")
ANSWERS = is_null("generate.benchmark")  # in task=generate; in task=score always


@dataclass
class OutputConfig:
    """What is written, and which rows this job takes"""

    output_path: str | None = flag(None, "A .jsonl or .parquet file; null: a .jsonl in the run folder", when=ANSWERS)
    best_of_n: bool = flag(
        False,
        "Keep only the sample of each prompt with the best score; the first of equal ones",
        when=ANSWERS,
        needs=Need(is_above("rollout.n_samples_per_prompt", 1, "8"), "there is only one sample of each prompt"),
    )
    shard: str | None = flag(None, when=ANSWERS)
    """i/n: take part i (from 0) of n equal parts of the rows; the file's name says which part it is"""


@dataclass
class GenerateConfig(OutputConfig):
    """What is written, and which rows this job takes"""

    benchmark: str | None = flag(None)
    """Measure the model on benchmarks, and write no answers to prompts: a comma list of <name>:<file or folder of its
    data set>, as in eval.benchmark; data.max_samples takes the first questions of each"""
    chunk_size: int | None = flag(None, ge=1, resume=FREE, when=ANSWERS)
    """Prompts written at a time; null: as many as make vllm.max_num_seqs samples for every engine"""


def shard_of(shard: str | None) -> tuple[int, int] | None:
    """Return (i, n) for "i/n", (0, 1) for null, and None for what is not a shard."""
    if shard is None:
        return 0, 1
    match = SHARD.fullmatch(shard)
    part, parts = map(int, match.groups()) if match else (0, 0)
    return (part, parts) if part < parts else None


def output_file(output_path: str | None, shard: str | None, default: Path) -> Path:
    """Return where a job writes: `answers.jsonl`, or for a shard `answers-00000-of-00004.jsonl`."""
    path = default if output_path is None else Path(output_path)
    place = shard_of(shard)
    if shard is None or place is None:
        return path
    return path.with_stem(f"{path.stem}-{place[0]:05d}-of-{place[1]:05d}")


@dataclass
class ScoreConfig(OutputConfig):
    """What is written of scored rows"""

    pairs: bool = flag(False, needs=Need(is_false(".best_of_n"), "a pair already contains the best response"))
    """Write the best and the worst response of each prompt as chosen and rejected, where their scores differ"""
    chunk_size: int = flag(1024, "Rows scored and written at a time", ge=1, resume=FREE)
    max_tokens_per_gpu: int = flag(16384, ge=1, when=BY_REWARD_MODEL | is_true("reward.process.enable"))
    """Token budget of a forward pass of the reward model"""

    @property
    def needs_groups(self) -> bool:
        """Whether the rows of one prompt are compared with each other."""
        return self.pairs or self.best_of_n
