"""Rules about where rewards come from, and how they are shaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import parse_qsl, urlsplit

from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.declarations.agent import AgentConfig, agents_of
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.loop import held_out_rule
from rlhf_suite.config.declarations.reward import (
    TOKEN,
    NamedSourceConfig,
    RewardConfig,
    SourceConfig,
    has_source,
    is_http,
    key_of,
    reward_models,
    urls,
)
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import LOOPS, RL, SCORED, SCORED_TEXTS
from rlhf_suite.foreign_text import SECRET_FIELD, printable
from rlhf_suite.registry import reward_rule

NAME = re.compile(r"[\w-]+")
FIX = (
    "add reward.rule=exact_match, reward.remote_url=<file.py>, reward.rubric=<file.md> or "
    "reward.model_name_or_path=<reward model>"
)


def list_named(run: Run) -> Mapping[str, SourceConfig]:
    """Return every source by the key of its section: `reward` itself, or the entries of reward.sources; and in a loop
    `eval`, whose rule judges held-out answers."""
    if run.task in RL and run.replays:
        return {}
    rule_of_held_out = held_out_rule(run.eval) if run.has("eval") else None
    held_out = {"eval": SourceConfig(rule=rule_of_held_out)} if rule_of_held_out is not None else {}
    if run.reward.sources:
        return {key_of(name): source for name, source in run.reward.sources.items()} | held_out
    return {key_of(""): run.reward} | held_out


def list_given(key: str, source: SourceConfig) -> list[str]:
    """Return the flags by which a source says what it is, as on the command line."""
    names = ("rule", "remote_url", "rubric", "model_name_or_path")
    flags: dict[str, str | None] = {name: getattr(source, name) for name in names}
    chosen = [f"{key}.{name}={value}" for name, value in flags.items() if value is not None]
    if isinstance(source, NamedSourceConfig) and source.process:
        chosen.append(f"{key}.process=true")
    if isinstance(source, RewardConfig) and source.scores_steps and not source.sources:
        chosen.append("reward.process.enable=true")
    return chosen


def scores_episodes(agent: AgentConfig) -> bool:
    """Return whether the environment or program of an agent may give the reward of an episode."""
    return agent.reads("add_reward")


@rule(tasks=RL)
def policy_has_a_reward(run: Run) -> Iterator[Problem]:
    if run.replays:
        return  # the rollouts have their rewards
    if not has_source(run.reward) and all(scores_episodes(agent.config) for agent in agents_of(run.agent)):
        return  # one that does not is found in the first rollout
    if has_source(run.reward) or run.algo.advantage.needs("rewards"):
        yield from one_reward(run)
    elif run.eval.dataset is not None:
        problem = "nothing scores the samples of eval.dataset"
        yield Problem("reward", problem, "add reward.rule=exact_match (it is not trained on), or eval.dataset=null")


@rule(tasks=(*LOOPS, "score", "check_reward"))
def rows_have_a_reward(run: Run) -> Iterator[Problem]:
    yield from one_reward(run)


def one_reward(run: Run) -> Iterator[Problem]:
    """Yield what keeps a run from having one source of rewards, or several that are named."""
    beside = list_given("reward", run.reward)
    if run.reward.sources and beside:
        fix = "set it to null, or remove reward.sources"
        yield Problem("reward.sources", f"would be the only sources, but there is {' and '.join(beside)} too", fix)
    for key, source in list_named(run).items():
        chosen = list_given(key, source)
        if not chosen:
            fix = FIX if key == "reward" else "give it one of rule, remote_url, rubric, model_name_or_path and process"
            yield Problem(key, "nothing scores the samples", fix)
        elif len(chosen) > 1:
            problem = f"there are several sources: {' and '.join(chosen)}"
            yield Problem(key, problem, "keep one, and set the others to null")


@rule(tasks=(*RL, *SCORED))
def sources_fit_together(run: Run) -> Iterator[Problem]:
    sources = run.reward.sources
    of_steps = [name for name, source in sources.items() if source.process]
    enabled = run.reward.scores_steps
    if sources and bool(of_steps) != enabled:
        problem = (
            f"{'no source' if enabled else of_steps[0]} has process: true, reward.process.enable is {spell(enabled)}"
        )
        yield Problem("reward.sources", problem, "write both, or neither")
    if sources and not any(source.weight > 0 for source in sources.values()):
        yield Problem("reward.sources", "every weight is 0, so nothing is trained on", "give one a weight above 0")
    for name in sources:
        if not NAME.fullmatch(name):
            problem = f"{name!r} is part of the names of metrics"
            yield Problem("reward.sources", problem, "use only letters, digits, - and _ in the names of sources")


@rule(tasks=SCORED_TEXTS)
def best_sources_are_several(run: Run) -> Iterator[Problem]:
    shared = [source.best_of for source in run.reward.sources.values() if source.best_of is not None]
    for name, source in run.reward.sources.items():
        if source.best_of is not None and shared.count(source.best_of) == 1:
            problem = f"no other source has best_of={source.best_of}, so there is nothing to choose from"
            yield Problem(f"reward.sources.{name}.best_of", problem, "give another source the same name, or remove it")


@rule(tasks=SCORED_TEXTS)
def reward_key_is_there(run: Run) -> Iterator[Problem]:
    key, sources = run.reward.reward_key, run.reward.sources
    if key is None:
        return
    if not sources and reward_models(run.reward):
        problem = f"{key!r} is the name of a number, but a reward model gives only one number without a name"
        yield Problem("reward.reward_key", problem, "remove it")
    name = key.partition("/")[0]
    if sources and (name not in sources or sources[name].weight == 0):
        problem = f"{key!r} does not begin with a source whose weight is above 0; sources: {', '.join(sources)}"
        yield Problem("reward.reward_key", problem, "write <source>, or <source>/<name of one of its numbers>")


@rule(tasks=SCORED_TEXTS)
def servers_have_addresses(run: Run) -> Iterator[Problem]:
    for name, source in list_named(run).items():
        if is_http(source.remote_url):
            yield from url_problems(f"{name}.remote_url", urls(source.remote_url))


def url_problems(key: str, servers: list[str], variable: str = TOKEN) -> Iterator[Problem]:
    """Yield what is wrong with a list of servers, whose key is in the environment variable `variable`."""
    for url in servers:
        wrong = what_is_wrong(url)
        if wrong is not None:
            fix = f"write '{key}=\"http://<host>:<port>/<path>,http://...\"'"
            yield Problem(key, f"{printable(url)} {wrong}", fix)
        else:
            yield from password_problems(key, url, f"remove it, and export {variable}")


def password_problems(key: str, url: str, fix: str) -> Iterator[Problem]:
    """Yield a problem of an address with a name or a password of a user, or with a key in its query."""
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        problem = "holds a user name or password, which would be written into the run folder"
        yield Problem(key, problem, fix)
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if SECRET_FIELD.fullmatch(name):
            problem = f"holds {printable(name, 40)} in its query, which would be written into the run folder"
            yield Problem(key, problem, fix)


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


@rule(tasks=SCORED_TEXTS)
def rule_has_what_it_needs(run: Run) -> Iterator[Problem]:
    for key, source in list_named(run).items():
        if source.rule and reward_rule.needs(source.rule, "label") and run.data.label_key is None:
            problem = f"{key}.rule={source.rule} compares with a label"
            yield Problem("data.label_key", problem, "add data.label_key=<column of the right answer>")


@rule(tasks=LOOPS)
def rule_of_held_out_answers_has_what_it_needs(run: Run) -> Iterator[Problem]:
    name, label = held_out_rule(run.eval), run.eval.label_key or run.data.label_key
    if name is not None and label is None and reward_rule.needs(name, "label"):
        problem = f"eval.rule={name} compares with a label"
        yield Problem("eval.label_key", problem, "add eval.label_key=<column of the right answer>")


@rule(tasks=SCORED_TEXTS)
def pattern_is_one(run: Run) -> Iterator[Problem]:
    try:
        re.compile(run.reward.rules.format_pattern)
    except re.error as error:
        yield Problem("reward.rules.format_pattern", f"is not a regular expression: {error}", "correct it")


@rule(tasks=SCORED)
def sources_read_text(run: Run) -> Iterator[Problem]:
    for name, source in run.reward.sources.items():
        if source.model_name_or_path is not None or source.process:
            problem = "this task allows only sources that score text, but a reward model scores tokens"
            fix = (
                "serve it (task=serve_rm) and write its address as remote_url, or write only reward.model_name_or_path"
            )
            if not run.reward.has("process"):
                fix = "serve it with task=serve_rm and write its address as remote_url, or remove it for this check"
            yield Problem(f"reward.sources.{name}", problem, fix)


@rule(tasks=("check_reward",))
def no_model_scores(run: Run) -> Iterator[Problem]:
    key = "reward.model_name_or_path"
    if run.reward.model_name_or_path is not None:
        fix = "use task=score, or serve the model with task=serve_rm and write its address as reward.remote_url"
        yield Problem(key, "this task loads no model", fix)


@rule(tasks=("check_reward",))
def something_is_scored(run: Run) -> Iterator[Problem]:
    """Check that there is a response, or a label that can be scored as its own answer."""
    if run.data.output_key is not None:
        return
    key, fix = "data.output_key", "add data.output_key=<column of the responses>"
    if run.data.label_key is None:
        yield Problem(key, "there is nothing to score: neither a response nor a label to use as the response", fix)
    for name, source in list_named(run).items():
        if source.rule is not None and reward_rule.needs(source.rule, "tests"):
            yield Problem(
                key, f"a label of {name}.rule={source.rule} contains tests, which cannot be scored as an answer", fix
            )


@rule(tasks=("generate",))
def reward_is_a_rule(run: Run) -> Iterator[Problem]:
    if reward_models(run.reward):
        problem = "samples are scored by rules, files, servers and judges only"
        fix = "add reward.rule=<rule> or reward.remote_url=<file.py or URL>"
        yield Problem("reward.model_name_or_path", problem, fix)
    elif has_source(run.reward):
        yield from one_reward(run)


@rule(tasks=RL)
def penalties_fit(run: Run) -> Iterator[Problem]:
    buffer, longest = run.reward.overlong_buffer_len, run.rollout.max_new_tokens or run.data.max_len
    if buffer is not None and buffer >= longest:
        problem = f"{buffer} tokens would penalise every response: the longest has {longest}"
        yield Problem("reward.overlong_buffer_len", problem, f"write reward.overlong_buffer_len={max(1, longest // 5)}")


@rule(tasks=RL)
def ranges_are_ordered(run: Run) -> Iterator[Problem]:
    for key, given, example, is_read in (
        ("reward.clip_range", run.reward.clip_range, "[-10,10]", True),
        ("algo.dynamic_filtering_range", run.algo.dynamic_filtering_range, "[0,1]", run.algo.dynamic_filtering_enable),
    ):
        if is_read and (len(given) != 2 or given[0] >= given[1]):
            yield Problem(key, f"{given} is not [low, high] with low < high", f"write '{key}={example}'")
    low_high = run.actor.eps_clip_low_high
    if low_high is not None and len(low_high) != 2:
        key = "actor.eps_clip_low_high"
        yield Problem(key, f"{len(low_high)} values, not [low, high]", f"write '{key}=[0.2,0.28]'")
