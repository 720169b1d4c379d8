"""Rules about where rewards come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from rlhf_suite.config.formatting import spelled
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.reward import (
    JudgeConfig,
    NamedSourceConfig,
    SourceConfig,
    has_source,
    is_http,
    reward_model,
    urls,
)
from rlhf_suite.config.runs import CheckRewardRun, GenerateRun, LoopRun, PPORun, RewardedRun, ScoredTextRun, ScoreRun
from rlhf_suite.config.sources import GYM_PACKAGE, gym_problems
from rlhf_suite.foreign_text import printable
from rlhf_suite.registry import reward_rule

NAME = re.compile(r"[\w-]+")
FIX = "add reward.rule=exact_match, reward.remote_url=<file.py> or reward.model_name_or_path=<reward model>"


def named(run: ScoredTextRun | LoopRun) -> Mapping[str, SourceConfig]:
    """Every source by the key of its section: `reward` itself, or the entries of reward.sources."""
    if run.reward.sources:
        return {f"reward.sources.{name}": source for name, source in run.reward.sources.items()}
    return {"reward": run.reward}


def given(key: str, source: SourceConfig) -> list[str]:
    """What a source says that it is, as on the command line."""
    flags = {"rule": source.rule, "remote_url": source.remote_url, "model_name_or_path": source.model_name_or_path}
    chosen = [f"{key}.{name}={value}" for name, value in flags.items() if value is not None]
    if isinstance(source, NamedSourceConfig) and source.process:
        chosen.append(f"{key}.process=true")
    if isinstance(source, JudgeConfig) and source.process.enable and not source.sources:
        chosen.append("reward.process.enable=true")
    return chosen


def one_reward(run: ScoredTextRun | LoopRun) -> Iterator[Problem]:
    if not has_source(run.reward) and isinstance(run, PPORun) and not run.algo.advantage.needs("rewards"):
        if run.eval.dataset is not None:
            what = "nothing scores the samples of eval.dataset"
            yield Problem("reward", what, "add reward.rule=exact_match (it is not trained on), or eval.dataset=null")
        return
    beside = given("reward", run.reward)
    if run.reward.sources and beside:
        fix = "set it to null, or leave reward.sources away"
        yield Problem("reward.sources", f"would be the only sources, but there is {' and '.join(beside)} too", fix)
    for key, source in named(run).items():
        chosen = given(key, source)
        if not chosen:
            fix = FIX if key == "reward" else "give it one of rule, remote_url, model_name_or_path and process"
            yield Problem(key, "nothing scores the samples", fix)
        elif len(chosen) > 1:
            yield Problem(key, f"several sources: {' and '.join(chosen)}", "keep one, set the others to null")


def sources_fit_together(run: ScoredTextRun) -> Iterator[Problem]:
    sources = run.reward.sources
    models = [name for name, source in sources.items() if source.model_name_or_path is not None]
    if len(models) > 1:
        what = f"{' and '.join(models)} are reward models, and one can run beside the policy"
        yield Problem("reward.sources", what, "serve the others with task=serve_rm, and name them by remote_url")
    of_steps = [name for name, source in sources.items() if source.process]
    enabled = isinstance(run.reward, JudgeConfig) and run.reward.process.enable
    if sources and bool(of_steps) != enabled:
        what = (
            f"{'no source' if enabled else of_steps[0]} has process: true, reward.process.enable is {spelled(enabled)}"
        )
        yield Problem("reward.sources", what, "write both, or neither")
    if sources and not any(source.weight > 0 for source in sources.values()):
        yield Problem("reward.sources", "every weight is 0, so nothing is trained on", "give one a weight above 0")
    for name in sources:
        if not NAME.fullmatch(name):
            what = f"{name!r} is part of names of metrics"
            yield Problem("reward.sources", what, "use letters, digits, - and _ in names of sources")


def remote_url_is_usable(run: ScoredTextRun) -> Iterator[Problem]:
    for key, source in named(run).items():
        yield from url_problems(f"{key}.remote_url", source.remote_url)


def url_problems(key: str, remote_url: str | None) -> Iterator[Problem]:
    """What is wrong with a file or a list of servers."""
    if remote_url is None:
        return
    if not is_http(remote_url):
        if not (remote_url.endswith(".py") and Path(remote_url).is_file()):
            what = f"{remote_url} is no Python file (seen from {Path.cwd()})"
            fix = "give a .py file with reward_func(queries, prompts, labels), or http://<host>:<port>/<path>"
            yield Problem(key, what, fix)
        return
    for url in urls(remote_url):
        wrong = what_is_wrong(url)
        if wrong is not None:
            fix = f"write '{key}=\"http://<host>:<port>/<path>,http://...\"'"
            yield Problem(key, f"{printable(url)} {wrong}", fix)
        elif urlsplit(url).username is not None or urlsplit(url).password is not None:
            what = "holds a user name or password, which would be written into the run folder"
            yield Problem(key, what, "leave it away, and export RLHF_SUITE_REWARD_TOKEN")


def what_is_wrong(url: str) -> str | None:
    """Return why `url` is not the address of a server, or None."""
    try:
        parts = urlsplit(url)
        hostname = parts.hostname
    except ValueError as error:  # brackets that do not close, an address that is not IPv6
        return f"is not a URL ({error})"
    if not is_http(url) or not hostname or any(char.isspace() or not char.isprintable() for char in url):
        return "is not a URL"
    try:
        port = parts.port
    except ValueError:  # not a number, or above 65535
        port = 0
    return "has a port that is not a number from 1 to 65535" if port == 0 else None


def rule_has_labels(run: ScoredTextRun) -> Iterator[Problem]:
    for key, source in named(run).items():
        if source.rule and reward_rule.needs(source.rule, "label") and run.data.label_key is None:
            what = f"{key}.rule={source.rule} compares with a label"
            yield Problem("data.label_key", what, "add data.label_key=<column of the right answer>")


def rule_is_installed(run: ScoredTextRun) -> Iterator[Problem]:
    for key, source in named(run).items():
        if source.rule == GYM_PACKAGE:
            yield from gym_problems(f"{key}.rule")


def process_has_a_model(run: RewardedRun) -> Iterator[Problem]:
    key = "reward.process.model_name_or_path"
    if not isinstance(run, GenerateRun) and run.reward.process.enable and run.reward.process.model_name_or_path is None:
        yield Problem(key, "no process reward model is named", f"add {key}=<folder that task=prm wrote>")


def constants_have_a_model(run: RewardedRun) -> Iterator[Problem]:
    if run.reward.normalize_enable and reward_model(run.reward) is None:
        what = "the constants are stored in a reward model, and there is none"
        yield Problem("reward.normalize_enable", what, "leave it away, or name reward.model_name_or_path")


def model_stays(run: GenerateRun | ScoreRun) -> Iterator[Problem]:
    """Nothing is there to make room for."""
    if run.reward.offload:
        yield Problem("reward.offload", "there is no other model to make room for", "write reward.offload=false")


def pattern_is_one(run: ScoredTextRun) -> Iterator[Problem]:
    try:
        re.compile(run.reward.rules.format_pattern)
    except re.error as error:
        yield Problem("reward.rules.format_pattern", f"is no regular expression: {error}", "mend it")


def sources_read_text(run: ScoreRun | CheckRewardRun) -> Iterator[Problem]:
    for name, source in run.reward.sources.items():
        if source.model_name_or_path is not None or source.process:
            what = "several sources score text here, and a reward model is none of them"
            fix = "serve it with task=serve_rm and name it by remote_url, or give reward.model_name_or_path alone"
            if isinstance(run, CheckRewardRun):
                fix = "serve it with task=serve_rm and name it by remote_url, or leave it away for this check"
            yield Problem(f"reward.sources.{name}", what, fix)


OF_TEXT: tuple[Callable[[ScoredTextRun], Iterable[Problem]], ...] = (
    one_reward,
    sources_fit_together,
    remote_url_is_usable,
    rule_has_labels,
    rule_is_installed,
    pattern_is_one,
)
RULES: tuple[Callable[[RewardedRun], Iterable[Problem]], ...] = (
    *OF_TEXT,
    process_has_a_model,
    constants_have_a_model,
)
