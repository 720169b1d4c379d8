"""Rules about judges: chat models that score by a rubric."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.declarations.reward import urls
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import REWARDED
from rlhf_suite.config.rules.rewards import list_named, url_problems
from rlhf_suite.foreign_text import SECRET_NAMES

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
OWN_FIELDS = {
    "model": "write reward.judge.model",
    "messages": "write the rubric in reward.rubric",
    "n": "remove it: a judge is asked once",
    "stream": "remove it: a reply is read as a whole",
}


def list_rubrics(run: Run) -> Mapping[str, str]:
    """Return the files of the rubrics of a run by flag."""
    named = {f"{key}.rubric": source.rubric for key, source in list_named(run).items()}
    return {key: rubric for key, rubric in named.items() if rubric is not None}


@rule(tasks=REWARDED)
def judge_is_named(run: Run) -> Iterator[Problem]:
    judge = run.reward.judge
    if not list_rubrics(run):
        return
    if not urls(judge.url):
        problem = "no judge is named that scores by the rubric"
        yield Problem("reward.judge.url", problem, "add reward.judge.url=http://<host>:<port>/v1")
    yield from url_problems("reward.judge.url", urls(judge.url), judge.key_env)
    if not judge.model:
        problem = "the server has to know which model is asked"
        yield Problem("reward.judge.model", problem, "add reward.judge.model=<name of the model at the server>")


@rule(tasks=REWARDED)
def judge_key_is_a_secret(run: Run) -> Iterator[Problem]:
    """Refuse a key in place of the name of its variable, and a name by which no message would hide the value."""
    key = "reward.judge.key_env"
    if not NAME.fullmatch(run.reward.judge.key_env):
        yield Problem(
            key, "is not the name of an environment variable", "export the key, and write the variable's name"
        )
    elif not SECRET_NAMES.search(run.reward.judge.key_env):
        problem = f"{run.reward.judge.key_env} is not a name by which messages know that its value is a secret"
        yield Problem(key, problem, "name a variable with KEY or TOKEN in its name")


@rule(tasks=REWARDED)
def judge_has_a_scale(run: Run) -> Iterator[Problem]:
    scale = run.reward.judge.scale
    if len(scale) != 2 or not -math.inf < scale[0] < scale[1] < math.inf:
        yield Problem("reward.judge.scale", f"{scale} is not [worst, best] with worst < best", "write '[0,10]'")
    for name, fix in OWN_FIELDS.items():
        if name in run.reward.judge.body:
            yield Problem(f"reward.judge.body.{name}", "is a field that the suite writes", fix)
