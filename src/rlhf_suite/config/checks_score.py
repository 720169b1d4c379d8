"""Rules between the flags of the task that scores rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rlhf_suite.config import checks_reward as reward
from rlhf_suite.config.checks_generate import output_problems
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.runs import ScoreRun
from rlhf_suite.config.sources import source_problems


def has_rows(run: ScoreRun) -> Iterator[Problem]:
    keys = {"data.input_key": run.data.input_key, "data.output_key": run.data.output_key}
    if run.data.label_key is not None:
        keys["data.label_key"] = run.data.label_key
    yield from source_problems("data.dataset", run.data.dataset, keys)


def output_is_writable(run: ScoreRun) -> Iterator[Problem]:
    yield from output_problems("score", run.score, run.ckpt.load_enable)


def best_or_pairs(run: ScoreRun) -> Iterator[Problem]:
    if run.score.pairs and run.score.best_of_n:
        what = "a pair has the best response already"
        yield Problem("score.best_of_n", what, "write score.best_of_n=false, or score.pairs=false")


def budget_holds_a_sequence(run: ScoreRun) -> Iterator[Problem]:
    if run.reward.model_name_or_path is not None and run.score.max_tokens_per_gpu < run.data.max_len:
        what = f"{run.score.max_tokens_per_gpu} tokens do not hold one sequence of data.max_len={run.data.max_len}"
        fix = f"write score.max_tokens_per_gpu={run.data.max_len} or more"
        yield Problem("score.max_tokens_per_gpu", what, fix)


def sources_read_text(run: ScoreRun) -> Iterator[Problem]:
    for name, source in run.reward.sources.items():
        if source.model_name_or_path is not None or source.process:
            what = "several sources score text here, and a reward model is none of them"
            fix = "serve it with task=serve_rm and name it by remote_url, or give reward.model_name_or_path alone"
            yield Problem(f"reward.sources.{name}", what, fix)


RULES: tuple[Callable[[ScoreRun], Iterable[Problem]], ...] = (
    has_rows,
    output_is_writable,
    best_or_pairs,
    budget_holds_a_sequence,
    sources_read_text,
    *reward.RULES,
    reward.model_stays,
)
