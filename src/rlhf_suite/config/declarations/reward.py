"""`reward`: where the score of a rollout comes from, and how it is shaped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_suite import registry
from rlhf_suite.config.declarations.conditions import BY_TEXT, Condition, Need, is_null, is_one_of, is_set, is_true
from rlhf_suite.config.declarations.flags import FREE, SHAPE, flag, group
from rlhf_suite.config.declarations.models import OFFLOADED
from rlhf_suite.config.declarations.sections import Section
from rlhf_suite.config.declarations.task_groups import BY_MODEL, RL, STANDARDISED

STEPS = is_true(".enable")
JUDGED = is_set(".rubric", "<rubric.md>")
MODEL = is_set(".model_name_or_path", "<reward model>")
IF_TEXT_IS_READ: Any = {"score": {"when": (BY_TEXT,)}}  # a reward model gives one number for tokens
OWN_ENGINES = is_null(".url")
NO_TAG = r"(?!</?(?:think|answer)>)"
SAID = rf"\s*{NO_TAG}\S(?:{NO_TAG}.)*"  # something, without a tag in it
THOUGHT_AND_ANSWER = rf"<think>{SAID}</think>\s*<answer>{SAID}</answer>"
TOKEN = "RLHF_SUITE_REWARD_TOKEN"  # the environment variable with the token of reward servers


def is_http(remote_url: str | None) -> bool:
    """Return whether reward.remote_url names servers rather than a file."""
    return remote_url is not None and remote_url.startswith(("http://", "https://"))


IS_FILE = Condition(".remote_url", lambda url: url is not None and not is_http(url), " names a file", "<file.py>")


@dataclass
class HttpConfig:
    """Requests to reward servers"""

    batch_size: int = flag(32, "Responses per request; a judge gets one", ge=1)
    concurrency: int = flag(8, "Requests at a time", ge=1)
    num_retries: int = flag(5, "How often a failed request is tried again, after 1, 2, 4, ... seconds", ge=0)
    timeout_s: float = flag(180.0, "Deadline of one request in seconds", gt=0)


@dataclass
class ProcessRewardConfig:
    """A process reward model (task=prm) that scores every step of a response; reward=prm turns it on"""

    enable: bool = flag(
        False,
        "Score responses step by step",
        needs=Need(
            is_set(".model_name_or_path", "<folder that task=prm wrote>"), "it names the model that scores the steps"
        ),
    )
    model_name_or_path: str | None = flag(None, "HF folder that task=prm wrote; it has its own tokenizer", when=STEPS)
    aggregate: str = flag("min", algorithms=registry.step_aggregate, when=STEPS)
    """A response's reward from P(good) of its steps"""
    step_separator: str | None = flag(None, when=STEPS)
    """The text that ends a step of a response; empty: every character is a step; null: as in training"""
    num_nodes: int = flag(1, "Nodes of the process reward model's worker group", ge=1, resume=SHAPE, when=STEPS)
    num_gpus_per_node: int = flag(1, "Ranks per node", ge=1, resume=SHAPE, when=STEPS)


@dataclass
class RuleConfig:
    """Settings of rules"""

    math_boxed: bool = flag(False, "Rule math: a response without \\boxed{} has no answer")
    format_pattern: str = flag(THOUGHT_AND_ANSWER, "Regular expression of the whole response")
    length_limit: int = flag(4000, "A response of at most so many characters gets 1", ge=1)
    repetition_ngram: int = flag(3, "Words of an n-gram that counts as repeated when it stands again", ge=1)
    repetition_tolerated: float = flag(0.2, "Share of repeated n-grams that costs nothing", ge=0, lt=1)
    code_timeout_s: float = flag(10.0, "Seconds for all tests of a response", gt=0)
    code_memory_mb: int = flag(1024, "Memory of the program in MiB, all of its processes together", ge=64)
    code_allow_weaker: bool = flag(False)
    """Run programs also where the machine offers them only a weaker jail, without namespaces (docs/rewards_code.md)"""


@dataclass
class JudgeConfig:
    """A judge: a chat model that scores responses by the rubric in reward.rubric"""

    url: str | None = flag(None)
    """An OpenAI-compatible server, as http://<host>:<port>/v1, or a comma list of them (reward.http has its time limit,
    retries and concurrency); null: engines of the run have the model (task=ppo)"""
    model: str | None = flag(None, "The name of the model at the server; without one, its folder or hub name")
    mode: str = flag("verdict", choices=("verdict", "rank", "yes_no"))
    """What the judge says: a number for each criterion of the rubric, an order of all answers to a prompt, or Yes or
    No, of which the probability of Yes is the score (a server has to list log-probabilities for that)"""
    both_orders: bool = flag(False, when=is_one_of(".mode", "rank"))
    """Ask a second time with the answers in the reversed order, and take the mean of both scores"""
    key_env: str = flag("RLHF_SUITE_JUDGE_KEY")
    """The name of the environment variable with the server's key; without a value no key is sent"""
    scale: list[float] = flag([0.0, 10.0], when=is_one_of(".mode", "verdict"))
    """The numbers that mean the worst and the best: they become 0 and 1"""
    max_new_tokens: int = flag(
        1024, "Tokens of a reply, with its reasons", ge=1, when=is_one_of(".mode", "verdict", "rank")
    )
    max_chars: int = flag(20_000, ge=100)
    """Characters of a prompt, a response or a label that the judge sees; the middle of a longer one is cut out with a
    mark"""
    body: dict[str, Any] = flag({})
    """Further fields of each request, such as {temperature: 0}; a field that is null is not sent. Engines of the run
    take temperature (0 if it is not there), top_p, top_k, min_p, repetition_penalty and chat_template_kwargs"""
    max_calls: int | None = flag(None, ge=1, resume=FREE)
    """The run ends before it sends more requests than these to the judge; null: no limit"""
    max_tokens: int | None = flag(None, ge=1, resume=FREE)
    """The run ends before a request when those before it used so many tokens; null: no limit"""
    num_engines: int = flag(1, "Engines of the run that have the judge, on devices of their own", ge=1, resume=FREE,
                            when=OWN_ENGINES)  # fmt: skip
    tensor_parallel_size: int = flag(1, ge=1, resume=SHAPE, when=OWN_ENGINES)
    """Devices that each hold a part of every layer of such an engine"""
    max_len: int | None = flag(None, ge=1, when=OWN_ENGINES)
    """The longest question with its reply in tokens; null: what the model was made for, at most 8192"""


@dataclass
class SourceConfig:
    """What scores: one of a rule, a .py file, HTTP servers, a judge, a reward model"""

    rule: str | None = flag(None, algorithms=registry.reward_rule)
    """A rule that computes the reward from the response and its label"""
    remote_url: str | None = flag(None)
    """A .py file with reward_func(queries, prompts, labels), or a comma list of http(s) URLs (docs/rewards.md)"""
    rubric: str | None = flag(None, "A file with the rubric by which a judge (reward.judge) scores")
    model_name_or_path: str | None = flag(None, "HF folder or hub name of a reward model that shares the tokenizer")


@dataclass
class NamedSourceConfig(SourceConfig):
    """One of several sources"""

    weight: float = flag(1.0, "Factor of its reward in the sum; 0: measured, not trained on", ge=0)
    datasets: list[str] | None = flag(None, "Values of column datasource whose rows it scores; null: all rows")
    process: bool = flag(False, "The process reward model of reward.process")
    best_of: str | None = flag(None)
    """A name that it shares with other sources: of these, only the one with the largest weight x reward counts"""


@dataclass
class NormalizationConfig(Section):
    """Normalised scores of a reward model"""

    normalize_enable: bool = flag(
        False,
        needs=Need(MODEL, "the constants are stored in a reward model"),
        tasks=STANDARDISED,
    )
    """Normalise scores, (score - mean) / std, with the constants stored in the reward model's config"""
    normalize_mean_only: bool = flag(False, when=is_true(".normalize_enable"), tasks=STANDARDISED)
    """Scores are only centred, score - mean, and not divided by std"""


@dataclass
class RewardConfig(NormalizationConfig, SourceConfig):
    """Where the reward comes from (a rule, a .py file, HTTP servers, a judge, a reward model or, in task=ppo and
    task=score, a process reward model), and in task=ppo its shape"""

    sources: dict[str, NamedSourceConfig] = flag({})
    """Several sources by name, instead of rule, remote_url, rubric and model_name_or_path (docs/rewards_sources.md)"""
    reward_key: str | None = flag(None, of_tasks=IF_TEXT_IS_READ)
    """The named number of a reward that is trained on (of several sources: <source> or <source>/<name>); null: all
    parts of the reward, by reward.combine"""
    combine: str = flag("sum", choices=("sum", "max"), of_tasks=IF_TEXT_IS_READ)
    """How the named parts of a reward become one number"""
    http: HttpConfig = group(
        HttpConfig, when=Condition(".remote_url", is_http, " names servers", "http://<host>:<port>/<path>") | JUDGED
    )
    judge: JudgeConfig = group(JudgeConfig, when=JUDGED)
    rules: RuleConfig = group(RuleConfig)
    timeout_s: float = flag(60.0, gt=0, when=is_set(".rule", "<name>") | IS_FILE)
    """Seconds for a batch of a file; a row that is scored by itself has a thirtieth of it or more
    (docs/rewards_failures.md)"""
    num_processes: int | None = flag(None, ge=1, when=is_set(".rule", "<name>"))
    """Processes in which a rule scores; null: one for each CPU core, 8 at most"""
    num_retries: int = flag(
        0, ge=0, when=is_set(".rule", "<name>") | is_set(".remote_url", "<.py file or URLs>") | JUDGED
    )
    """How often scoring is tried again where a rule, a file, servers or a judge fail, after 1, 2, 4, ... seconds"""
    offload: bool = flag(False, resume=SHAPE, when=MODEL, needs=OFFLOADED, tasks=RL)
    """Keep the reward model's weights in host memory, and bring them to the GPU once for all that it computes in a
    step"""
    num_nodes: int = flag(1, "Nodes of the reward model's worker group", ge=1, resume=SHAPE, when=MODEL, tasks=BY_MODEL)
    num_gpus_per_node: int = flag(1, "Ranks per node", ge=1, resume=SHAPE, when=MODEL, tasks=BY_MODEL)
    on_error: str = flag("stop", choices=("stop", "drop"), tasks=BY_MODEL)
    """What happens where the reward of a sample fails after all tries: the run ends, or the sample's whole group is
    dropped"""
    max_error_rate: float = flag(
        0.5,
        ge=0,
        le=1,
        when=is_one_of(".on_error", "drop") | is_one_of("agent.on_error", "drop", "zero"),
        tasks=BY_MODEL,
    )
    """End the run when a larger share of a batch's samples has no reward"""
    process: ProcessRewardConfig = group(ProcessRewardConfig, tasks=(*RL, "score"))
    clip_range: list[float] = flag([-10.0, 10.0], tasks=RL)
    """The raw score is clamped to this range, before any baseline"""
    clip_shaped: bool = flag(False, "Clamp after the penalties below instead of before them", tasks=RL)
    overlong_buffer_len: int | None = flag(None, ge=1, tasks=RL)
    """Penalise responses that reach into the last so many tokens of the longest length allowed, linearly; null: off"""
    overlong_penalty_factor: float = flag(1.0, ge=0, when=is_set(".overlong_buffer_len", "<tokens>"), tasks=RL)
    """The overlong penalty of a response of full length"""
    stop_properly_penalty_coef: float | None = flag(None, le=1, tasks=RL)
    """Truncated responses: >= 0 multiplies their reward, < 0 replaces it; null: off"""

    @property
    def scores_steps(self) -> bool:
        """Whether a process reward model gives scores."""
        return self.has("process") and self.process.enable


def urls(remote_url: str | None) -> list[str]:
    """Return the servers of reward.remote_url."""
    return [url.strip() for url in (remote_url or "").split(",") if url.strip()]


def has_source(config: RewardConfig) -> bool:
    """Return whether anything gives scores."""
    return (
        config.scores_steps
        or bool(config.sources)
        or any((config.rule, config.remote_url, config.rubric, config.model_name_or_path))
    )


def is_judged(config: RewardConfig) -> bool:
    """Return whether a judge scores."""
    return any(source.rubric is not None for source in (config, *config.sources.values()))


def judges_on_engines(config: RewardConfig) -> bool:
    """Return whether a judge scores, and no server is named that has it."""
    return is_judged(config) and not urls(config.judge.url)


def key_of(source: str) -> str:
    """Return the key of the section that declares a source of rewards; "" is the name of the only one."""
    return f"reward.sources.{source}" if source else "reward"


def reward_models(config: RewardConfig) -> dict[str, str]:
    """Return the paths of the reward models of a run, by the keys of the sections that name them."""
    sections: dict[str, SourceConfig] = {"": config, **config.sources}
    paths = {key_of(name): section.model_name_or_path for name, section in sections.items()}
    return {key: path for key, path in paths.items() if path is not None}
