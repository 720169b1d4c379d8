"""`generate`: what a batch job writes, where, and which part of the rows is its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rlhf_suite.config.flags import FREE, flag

OUTPUT_SUFFIXES = (".jsonl", ".parquet")
SHARD = re.compile(r"(\d+)/(\d+)")


@dataclass
class GeneratorConfig:
    """The model that answers"""

    model_name_or_path: str | None = flag(None, "HF folder or hub name, or builtin:<name>")


@dataclass
class OutputConfig:
    """What is written, and which rows this job takes"""

    output_path: str | None = flag(None, "A .jsonl or .parquet file; null: a .jsonl in the run folder")
    best_of_n: bool = flag(False, "Keep the best sample of each prompt only, by score; of equals the first")
    shard: str | None = flag(
        None, "i/n: take the i-th (from 0) of n equal parts of the rows; the part is in the file's name"
    )


@dataclass
class GenerateConfig(OutputConfig):
    """What is written, and which rows this job takes"""

    chunk_size: int | None = flag(
        None,
        "Prompts written at a time; null: as many as make vllm.max_num_seqs samples for every engine",
        ge=1,
        resume=FREE,
    )


def shard_of(shard: str | None) -> tuple[int, int] | None:
    """(i, n) of "i/n", (0, 1) without one; None: this is no shard."""
    if shard is None:
        return 0, 1
    match = SHARD.fullmatch(shard)
    part, parts = map(int, match.groups()) if match else (0, 0)
    return (part, parts) if part < parts else None


def output_file(output_path: str | None, shard: str | None, default: Path) -> Path:
    """Where a job writes: `answers.jsonl`, or of a shard `answers-00000-of-00004.jsonl`."""
    path = default if output_path is None else Path(output_path)
    place = shard_of(shard)
    if shard is None or place is None:
        return path
    return path.with_stem(f"{path.stem}-{place[0]:05d}-of-{place[1]:05d}")
