"""`generate` and `score`: the output of a batch job, and the part of the rows that it processes."""

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
    """The output, and the rows of this job"""

    output_path: str | None = flag(None, when=ANSWERS)
    """Output file (.jsonl or .parquet); null: a .jsonl file in the run folder"""
    best_of_n: bool = flag(
        False,
        when=ANSWERS,
        needs=Need(is_above("rollout.n_samples_per_prompt", 1, "8"), "there is only one sample of each prompt"),
    )
    """Keep only the sample with the best score of each prompt. If several have the best score, keep the first of
    them"""
    shard: str | None = flag(None, when=ANSWERS)
    """Part of the rows that this job processes, as i/n: part i (from 0) of n equal parts. The name of the output file
    then contains the part; null: all rows"""


@dataclass
class GenerateConfig(OutputConfig):
    """The output, and the rows of this job"""

    benchmark: str | None = flag(None)
    """Measure the model on benchmarks instead of answering prompts. Benchmarks are separated by commas, each as
    <name>:<file or folder of its data set>, as in eval.benchmark. data.max_samples limits the questions of each
    benchmark to the first ones"""
    chunk_size: int | None = flag(None, ge=1, resume=FREE, when=ANSWERS)
    """Number of prompts whose answers are written together; null: enough prompts for vllm.max_num_seqs samples per
    engine"""


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
    """The output, and the rows of this job"""

    pairs: bool = flag(False, needs=Need(is_false(".best_of_n"), "a pair already contains the best response"))
    """Write pairs: the best and the worst response of each prompt as chosen and rejected, if their scores differ"""
    chunk_size: int = flag(1024, "Number of rows that are scored and written together", ge=1, resume=FREE)
    max_tokens_per_gpu: int = flag(16384, ge=1, when=BY_REWARD_MODEL | is_true("reward.process.enable"))
    """Token budget of a forward pass of the reward model"""

    @property
    def needs_groups(self) -> bool:
        """Whether the rows of one prompt are compared with each other."""
        return self.pairs or self.best_of_n
