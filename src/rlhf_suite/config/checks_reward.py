"""Rules about where rewards come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rlhf_suite.config.algo import ON_POLICY_DISTILL
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.reward import JudgeConfig, is_http, urls
from rlhf_suite.config.runs import GenerateRun, LoopRun, PPORun, RewardedRun, ScoreRun


def one_reward(run: RewardedRun | LoopRun) -> Iterator[Problem]:
    sources = {
        "reward.rule": run.reward.rule,
        "reward.remote_url": run.reward.remote_url,
        "reward.model_name_or_path": run.reward.model_name_or_path,
    }
    if isinstance(run.reward, JudgeConfig) and run.reward.process.enable:
        sources["reward.process.enable"] = "true"
    chosen = [f"{key}={value}" for key, value in sources.items() if value is not None]
    if not chosen and isinstance(run, PPORun) and run.algo.advantage.estimator == ON_POLICY_DISTILL:
        if run.eval.dataset is not None:
            what = "nothing scores the samples of eval.dataset"
            yield Problem("reward", what, "add reward.rule=exact_match (it is not trained on), or eval.dataset=null")
    elif not chosen:
        fix = "add reward.rule=exact_match, reward.remote_url=<file.py> or reward.model_name_or_path=<reward model>"
        yield Problem("reward", "nothing scores the samples", fix)
    elif len(chosen) > 1:
        yield Problem("reward", f"several sources: {' and '.join(chosen)}", "keep one, set the others to null")


def remote_url_is_usable(run: RewardedRun) -> Iterator[Problem]:
    yield from url_problems("reward.remote_url", run.reward.remote_url)


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
        if not is_http(url) or not urlsplit(url).hostname:
            yield Problem(key, f"{url} is no URL", f"write '{key}=\"http://<host>:<port>/<path>,http://...\"'")
        elif urlsplit(url).username is not None or urlsplit(url).password is not None:
            what = "holds a user name or password, which would be written into the run folder"
            yield Problem(key, what, "leave it away, and export RLHF_SUITE_REWARD_TOKEN")


def rule_has_labels(run: RewardedRun) -> Iterator[Problem]:
    if run.reward.rule is not None and run.data.label_key is None:
        what = f"reward.rule={run.reward.rule} compares with a label"
        yield Problem("data.label_key", what, "add data.label_key=<column of the right answer>")


def process_has_a_model(run: RewardedRun) -> Iterator[Problem]:
    key = "reward.process.model_name_or_path"
    if not isinstance(run, GenerateRun) and run.reward.process.enable and run.reward.process.model_name_or_path is None:
        yield Problem(key, "no process reward model is named", f"add {key}=<folder that task=prm wrote>")


def constants_have_a_model(run: RewardedRun) -> Iterator[Problem]:
    if run.reward.normalize_enable and run.reward.model_name_or_path is None:
        what = "the constants are stored in a reward model, and there is none"
        yield Problem("reward.normalize_enable", what, "leave it away, or name reward.model_name_or_path")


def model_stays(run: GenerateRun | ScoreRun) -> Iterator[Problem]:
    """Nothing is there to make room for."""
    if run.reward.offload:
        yield Problem("reward.offload", "there is no other model to make room for", "write reward.offload=false")


RULES: tuple[Callable[[RewardedRun], Iterable[Problem]], ...] = (
    one_reward,
    remote_url_is_usable,
    rule_has_labels,
    process_has_a_model,
    constants_have_a_model,
)
