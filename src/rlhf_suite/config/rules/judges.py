"""Rules about judges: chat models that score by a rubric."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.declarations.reward import urls
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import LOOPS, REWARDED
from rlhf_suite.config.plan.run_plan import has_judge
from rlhf_suite.config.rules.rewards import list_named, url_problems
from rlhf_suite.foreign_text import SECRET_FIELD, SECRET_NAMES, printable

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# What engines of the run take of reward.judge.body, with the least and the largest value.
SAMPLED_BY = {
    "temperature": (0, 2),
    "top_p": (1e-6, 1),
    "top_k": (-1, math.inf),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, math.inf),
}
TEMPLATE = "chat_template_kwargs"
MIN_RANKED = 2
SAMPLES_GROUPS = ("ppo", "generate", *LOOPS)
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
    server = "add reward.judge.url=http://<host>:<port>/v1"
    if not urls(judge.url) and not has_judge(run):
        problem, model = "there is no judge to score by the rubric", judge.model or "<folder of a chat model>"
        fix = f"serve it, as by 'vllm serve {model} --port 8000', and {server}; only task=ppo has engines for a judge"
        yield Problem("reward.judge.url", problem, fix)
    yield from url_problems("reward.judge.url", urls(judge.url), judge.key_env)
    if not judge.model and has_judge(run):
        fix = f"{server} and reward.judge.model=<its name there>, or reward.judge.model=<model folder> alone"
        yield Problem("reward.judge.model", "there is no judge to score by the rubric", fix)
    elif not judge.model:
        problem = "the request to the server must name a model"
        yield Problem("reward.judge.model", problem, "add reward.judge.model=<name of the model at the server>")


@rule(tasks=REWARDED)
def engines_take_the_fields(run: Run) -> Iterator[Problem]:
    """Refuse fields of requests that only servers take, and one that takes from a server what Yes or No needs."""
    judge = run.reward.judge
    if has_judge(run):
        for name in sorted(judge.body.keys() - {*SAMPLED_BY, TEMPLATE}):
            problem = "is not a field that engines of the run take"
            fix = f"remove it; they take {', '.join((*SAMPLED_BY, TEMPLATE))}"
            yield Problem(f"reward.judge.body.{name}", problem, fix)
        for name, (low, high) in SAMPLED_BY.items():
            value = judge.body.get(name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and low <= value <= high):
                problem = f"{value!r} is not a number from {low:g} to {high:g}"
                yield Problem(f"reward.judge.body.{name}", problem, "correct it, or remove it")
        if not isinstance(judge.body.get(TEMPLATE) or {}, dict):
            problem = "is not a table of variables of the chat template"
            yield Problem(f"reward.judge.body.{TEMPLATE}", problem, "write it as {enable_thinking: false}")
    elif judge.mode == "yes_no" and list_rubrics(run) and "logprobs" in judge.body:
        problem = "is a field that the suite sets with reward.judge.mode=yes_no"
        yield Problem("reward.judge.body.logprobs", problem, "remove it: the score is read from log-probabilities")


@rule(tasks=REWARDED)
def fields_can_be_sent_and_kept(run: Run) -> Iterator[Problem]:
    """Refuse fields of requests that would put a key into the run folder, or that JSON does not have."""
    key = "reward.judge.body"
    for name, value in walk(run.reward.judge.body):
        if SECRET_FIELD.fullmatch(name.rpartition(".")[2]):
            problem = "is the name of a secret, and the run folder would contain its value"
            yield Problem(f"{key}.{name}", problem, f"remove it, and export {run.reward.judge.key_env}")
        elif not has_judge(run) and isinstance(value, float) and not math.isfinite(value):
            yield Problem(f"{key}.{name}", f"{value} is not a number of JSON", "write a finite number, or remove it")


def walk(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a table and of those in it, by their names with dots."""
    for name, value in table.items():
        yield f"{above}{printable(str(name), 40)}", value
        if isinstance(value, Mapping):
            yield from walk(value, f"{above}{name}.")


@rule(tasks=REWARDED)
def answers_can_be_ranked(run: Run) -> Iterator[Problem]:
    """Refuse a ranking of single answers."""
    if run.reward.judge.mode != "rank" or not list_rubrics(run):
        return
    if run.task in SAMPLES_GROUPS and run.rollout.n_samples_per_prompt < MIN_RANKED:
        problem = "rank orders the answers to a prompt, but there is only one"
        yield Problem("rollout.n_samples_per_prompt", problem, "write 2 or more, or reward.judge.mode=verdict")
    if run.task == "score" and not run.score.needs_groups:
        problem = "rank orders all answers to a prompt, but rows are scored one by one"
        yield Problem("reward.judge.mode", problem, "write verdict, or add score.best_of_n=true")


@rule(tasks=REWARDED)
def judge_key_is_a_secret(run: Run) -> Iterator[Problem]:
    """Refuse a key in place of the name of its variable, and a name by which no message would hide the value."""
    key = "reward.judge.key_env"
    if not NAME.fullmatch(run.reward.judge.key_env):
        yield Problem(
            key, "is not the name of an environment variable", "export the key, and write the variable's name"
        )
    elif not SECRET_NAMES.search(run.reward.judge.key_env):
        problem = (
            f"{run.reward.judge.key_env} is not a name that marks its value as a secret, so messages could show it"
        )
        yield Problem(key, problem, "name a variable with KEY or TOKEN in its name")


@rule(tasks=REWARDED)
def judge_has_a_scale(run: Run) -> Iterator[Problem]:
    scale = run.reward.judge.scale
    if len(scale) != 2 or not -math.inf < scale[0] < scale[1] < math.inf:
        yield Problem("reward.judge.scale", f"{scale} is not [worst, best] with worst < best", "write '[0,10]'")
    for name, fix in OWN_FIELDS.items():
        if name in run.reward.judge.body:
            yield Problem(f"reward.judge.body.{name}", "is a field that the suite sets", fix)
