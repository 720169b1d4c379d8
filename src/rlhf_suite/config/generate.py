"""`generate` and `score`: what a batch job writes, where, and which part of the rows is its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_suite.config.flags import FREE, flag, is_set, is_true
from rlhf_suite.config.problems import Problem, rule
from rlhf_suite.config.reward import has_source

if TYPE_CHECKING:
    from rlhf_suite.config.runs import GenerateRun, ScoreRun


OUTPUT_SUFFIXES = (".jsonl", ".parquet")
SHARD = re.compile(r"(\d+)/(\d+)")


@dataclass
class OutputConfig:
    """What is written, and which rows this job takes"""

    output_path: str | None = flag(None, "A .jsonl or .parquet file; null: a .jsonl in the run folder")
    best_of_n: bool = flag(False, "Keep only the sample of each prompt with the best score; the first of equal ones")
    shard: str | None = flag(
        None, "i/n: take part i (from 0) of n equal parts of the rows; the file's name says which part it is"
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

    pairs: bool = flag(
        False, "Write the best and the worst response of each prompt as chosen and rejected, where their scores differ"
    )
    chunk_size: int = flag(1024, "Rows scored and written at a time", ge=1, resume=FREE)
    max_tokens_per_gpu: int = flag(
        16384,
        "Token budget of a forward pass of the reward model",
        ge=1,
        when=is_set("reward.model_name_or_path", "<reward model>") | is_true("reward.process.enable"),
    )

    @property
    def needs_groups(self) -> bool:
        """Whether the rows of one prompt are compared with each other."""
        return self.pairs or self.best_of_n


@rule
def output_is_writable(run: GenerateRun) -> Iterator[Problem]:
    yield from output_problems("generate", run.generate, run.ckpt.load_enable)


@rule
def scores_are_writable(run: ScoreRun) -> Iterator[Problem]:
    yield from output_problems("score", run.score, run.ckpt.load_enable)


def output_problems(section: str, output: OutputConfig, resumes: bool) -> Iterator[Problem]:
    """Yield what is wrong with the flags of an output."""
    key = f"{section}.output_path"
    if shard_of(output.shard) is None:
        fix = f"write {section}.shard=0/4 for the first of four parts, or remove it"
        yield Problem(f"{section}.shard", f"{output.shard!r} is not i/n with i < n", fix)
    elif output.output_path is not None:
        path = output_file(output.output_path, output.shard, Path())
        if path.is_dir():
            yield Problem(key, f"{output.output_path} is a folder", f"write {key}={path / 'rows.jsonl'}")
        elif path.suffix not in OUTPUT_SUFFIXES:
            fix = f"write {key}={path.with_suffix('.jsonl')} (or .parquet)"
            yield Problem(key, f"{output.output_path} is neither a .jsonl nor a .parquet file", fix)
        elif path.exists() and not resumes:
            yield Problem(key, f"{path} exists already", "choose another file, or remove that one")


@rule
def best_has_a_score(run: GenerateRun) -> Iterator[Problem]:
    if not run.generate.best_of_n:
        return
    key = "generate.best_of_n"
    if not has_source(run.reward):
        fix = "add reward.rule=<rule> or reward.remote_url=<file.py or URL>"
        yield Problem(key, "nothing scores the samples", fix)
    if run.rollout.n_samples_per_prompt < 2:
        fix = "write rollout.n_samples_per_prompt=8, or generate.best_of_n=false"
        yield Problem(key, "there is only one sample of each prompt", fix)


@rule
def best_or_pairs(run: ScoreRun) -> Iterator[Problem]:
    if run.score.pairs and run.score.best_of_n:
        what = "a pair already contains the best response"
        yield Problem("score.best_of_n", what, "write score.best_of_n=false, or score.pairs=false")


@rule
def budget_holds_a_sequence(run: ScoreRun) -> Iterator[Problem]:
    if run.reward.model_name_or_path is not None and run.score.max_tokens_per_gpu < run.data.max_len:
        what = f"{run.score.max_tokens_per_gpu} tokens are too few for one sequence of data.max_len={run.data.max_len}"
        fix = f"write score.max_tokens_per_gpu={run.data.max_len} or more"
        yield Problem("score.max_tokens_per_gpu", what, fix)
