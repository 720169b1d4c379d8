"""Rules between the flags of the tasks that score rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rlhf_suite.config.checks import reward
from rlhf_suite.config.checks.generate import output_problems
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.runs import CheckRewardRun, ScoreRun
from rlhf_suite.config.sources import source_problems


def has_rows(run: ScoreRun | CheckRewardRun) -> Iterator[Problem]:
    data = run.data
    given = {"data.input_key": data.input_key, "data.output_key": data.output_key, "data.label_key": data.label_key}
    given["data.reward_columns"] = ",".join(data.reward_columns) or None
    keys = {flag: column for flag, column in given.items() if column is not None}
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


def no_model_scores(run: CheckRewardRun) -> Iterator[Problem]:
    key = "reward.model_name_or_path"
    if run.reward.model_name_or_path is not None:
        yield Problem(
            key, "this task loads no model", "use task=score, or a served one: task=serve_rm, reward.remote_url"
        )


def something_is_scored(run: CheckRewardRun) -> Iterator[Problem]:
    """Without responses the label is its own answer."""
    if run.data.output_key is not None:
        return
    key, fix = "data.output_key", "add data.output_key=<column of the responses>"
    if run.data.label_key is None:
        yield Problem(key, "there is nothing to score: no response, and no label to take for one", fix)
    for name, source in reward.named(run).items():
        if source.rule == "code":
            yield Problem(key, f"a label of {name}.rule=code holds tests, which are no answer", fix)


RULES: tuple[Callable[[ScoreRun], Iterable[Problem]], ...] = (
    has_rows,
    output_is_writable,
    best_or_pairs,
    budget_holds_a_sequence,
    reward.sources_read_text,
    *reward.RULES,
    reward.model_stays,
)

CHECK_REWARD: tuple[Callable[[CheckRewardRun], Iterable[Problem]], ...] = (
    has_rows,
    no_model_scores,
    something_is_scored,
    reward.sources_read_text,
    *reward.OF_TEXT,
)
