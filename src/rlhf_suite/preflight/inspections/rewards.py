"""Inspect the sources of rewards: reward files define the function, rubrics can be read, servers answer, tokens can be
sent, and there is a jail for programs.
"""

from __future__ import annotations

import os
import string
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.agent import agents_of
from rlhf_suite.config.declarations.reward import TOKEN, is_http, urls
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import REWARDED, RL
from rlhf_suite.config.declarations.teacher import list_teachers
from rlhf_suite.config.rules.judges import list_rubrics
from rlhf_suite.config.rules.rewards import list_named
from rlhf_suite.launch.slurm import is_first_node
from rlhf_suite.preflight.inspections.network import first_hop, unreachable
from rlhf_suite.python_source import SourceError
from rlhf_suite.registry import reward_file, reward_rule, teacher
from rlhf_suite.rewards.rubric import ONLY, RubricError, read_file, read_rubric
from rlhf_suite.sandbox.jail import offer

FUNCTION = "reward_func"
CONNECT_S = 2.0
VISIBLE = frozenset(string.ascii_letters + string.digits + string.punctuation)


def remote_urls(run: Run) -> Mapping[str, str]:
    """Return the reward file or the servers of each source of rewards, by flag."""
    if run.task not in REWARDED:
        return {}
    return {f"{key}.remote_url": source.remote_url for key, source in list_named(run).items() if source.remote_url}


def teacher_urls(run: Run) -> Mapping[str, str]:
    """Return the servers of each teacher behind an endpoint, by flag."""
    if run.task not in RL or run.algo.distill.coef == 0:
        return {}
    return {
        f"{key}.remote_url": source.remote_url
        for key, source in list_teachers(run.teacher).items()
        if source.remote_url is not None and teacher.needs(source.kind, "server")
    }


def judge_urls(run: Run) -> Mapping[str, str]:
    """Return the servers of the judge, by flag."""
    if run.task not in REWARDED or not list_rubrics(run) or not run.reward.judge.url:
        return {}
    return {"reward.judge.url": run.reward.judge.url}


def rubrics_are_usable(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for each file of a rubric that cannot be read, or is not a rubric."""
    rubrics = list_rubrics(run) if run.task in REWARDED else {}
    for key, name in rubrics.items():
        try:
            rubric = read_rubric(read_file(Path(name)))
        except OSError as error:
            problem = f"{name} cannot be read (seen from {Path.cwd()}): {error.strerror}"
            yield Problem(key, problem, "give a text file with the rubric (docs/rewards_judge.md)")
        except UnicodeDecodeError:
            yield Problem(key, f"{name} is not UTF-8 text", "give a text file with the rubric (docs/rewards_judge.md)")
        except RubricError as error:
            yield Problem(key, f"{name}: {error}", "correct it (docs/rewards_judge.md)")
        else:
            if run.reward.judge.mode == "yes_no" and [*rubric.weights] != [ONLY]:
                problem = f"the rubric {name} has criteria, but Yes or No gives only one number"
                yield Problem("reward.judge.mode", problem, "write verdict, or remove the heading Criteria")
            if "{label}" in rubric.text and run.task in REWARDED and run.data.label_key is None:
                problem = f"the rubric {name} shows a label"
                yield Problem("data.label_key", problem, "add data.label_key=<column>, or remove {label} from it")


def reward_files_define(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for each reward file that does not define the function as it is called. Files are not run."""
    for key, name in remote_urls(run).items():
        if not is_http(name):
            try:
                reward_file.find_declaration(f"{name}:{FUNCTION}")
            except SourceError as error:
                yield Problem(key, error.what, error.fix)


def servers_answer(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for each reward and each teacher of which no server accepts connections. Only the node
    that will use them asks."""
    if folder is None or not is_first_node():
        return
    for key, value in {**remote_urls(run), **teacher_urls(run), **judge_urls(run)}.items():
        if not is_http(value):
            continue
        servers = {first_hop(url) for url in urls(value)}
        failed = unreachable(servers, CONNECT_S)
        if len(failed) == len(servers):
            said = "; ".join(f"{host}:{port}: {reason}" for (host, port), reason in failed.items())
            kind, fix = "reward server", "start the server first, or correct the address"
            if key in teacher_urls(run):
                kind = "teacher"
            elif key in judge_urls(run):
                kind = "judge"
            else:
                fix = f"{fix} (task=serve_rm prints that of a reward model)"
            yield Problem(key, f"no {kind} accepts a connection: {said}", fix)


def tokens_fit_a_header(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for a token that cannot be sent in an HTTP header: the error of the HTTP library would quote
    it."""
    judges = {run.reward.judge.key_env} if run.task in REWARDED and judge_urls(run) else set()
    for name in sorted(judges | ({TOKEN} if uses_token(run) else set())):
        token = os.environ.get(name, "")
        place = next((place for place, char in enumerate(token, 1) if char not in VISIBLE), None)
        if place is not None:
            kind = "a line end" if token[place - 1] in "\r\n" else "a character that is not visible ASCII"
            problem = f"its value has {kind} at position {place} of {len(token)}, so it cannot be sent"
            yield Problem(name, problem, f"export {name} with only the token, in visible ASCII characters")


def uses_token(run: Run) -> bool:
    """Return whether the run sends the token to reward servers, or requires it as a server."""
    if run.task in REWARDED:
        return any(is_http(source.remote_url) for source in list_named(run).values())
    return run.task == "serve_rm"


def programs_have_a_jail(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem if programs of the model would run, and this machine does not offer them a full jail."""
    if folder is None or run.task not in REWARDED:
        return
    using = [key for key, source in list_named(run).items() if source.rule and reward_rule.needs(source.rule, "tests")]
    if using:
        weaker = "reward.rules.code_allow_weaker", run.reward.rules.code_allow_weaker
        yield from jail_problems(f"{using[0]}.rule", *weaker, "use another rule")
    agents = agents_of(run.agent) if run.task in RL else []
    in_python = [agent for agent in agents if agent.config.needs("jail") and agent.config.python_url is None]
    if in_python:
        weaker = "agent.python_allow_weaker", in_python[0].config.python_allow_weaker
        yield from jail_problems(f"{in_python[0].key}.kind", *weaker, "use another agent")


def jail_problems(key: str, weaker: str, allows_weaker: bool, otherwise: str) -> Iterator[Problem]:
    """Yield a problem unless this machine offers a jail that is allowed. `key` is the flag that makes programs run, and
    `weaker` the one that allows a weaker jail."""
    if offer().options is not None and (allows_weaker or not offer().is_weaker):
        return
    lacks = "; ".join(offer().missing)
    if offer().is_weaker:
        problem = f"programs of the model would run in a jail that is too weak: {lacks}"
        fix = f"write {weaker}=true to accept that, or run where namespaces are allowed (docs/rewards_code.md)"
        yield Problem(weaker, problem, fix)
    else:
        problem = f"this machine offers no jail for programs of the model: {lacks}"
        yield Problem(key, problem, f"run on a machine that offers one (docs/rewards_code.md), or {otherwise}")


REWARDS = (tokens_fit_a_header, reward_files_define, rubrics_are_usable, servers_answer, programs_have_a_jail)
