"""`reward`: the sources of rewards, and the shaping of rewards."""

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

    batch_size: int = flag(32, "Responses per request; a request to a judge has only one", ge=1)
    concurrency: int = flag(8, "Number of requests at the same time", ge=1)
    num_retries: int = flag(5, "Number of retries of a failed request, after 1, 2, 4, ... seconds", ge=0)
    timeout_s: float = flag(180.0, "Time limit of a request in seconds", gt=0)


@dataclass
class ProcessRewardConfig:
    """A process reward model (task=prm) that scores every step of a response. The preset reward=prm enables it"""

    enable: bool = flag(
        False,
        "Score the steps of responses with a process reward model",
        needs=Need(
            is_set(".model_name_or_path", "<folder that task=prm wrote>"), "it names the model that scores the steps"
        ),
    )
    model_name_or_path: str | None = flag(None, when=STEPS)
    """Folder in Hugging Face format that task=prm wrote. The model has its own tokenizer"""
    aggregate: str = flag("min", algorithms=registry.step_aggregate, when=STEPS)
    """How the reward of a response is computed from P(good) of its steps"""
    step_separator: str | None = flag(None, when=STEPS)
    """Text that ends a step of a response; empty: every character is a step; null: the separator of the training of the
    model"""
    num_nodes: int = flag(1, "Number of nodes on which the process reward model runs", ge=1, resume=SHAPE, when=STEPS)
    num_gpus_per_node: int = flag(1, ge=1, resume=SHAPE, when=STEPS)
    """Number of ranks (processes) of the process reward model on each node"""


@dataclass
class RuleConfig:
    """Settings of reward rules"""

    math_boxed: bool = flag(False, "Rule math: accept only answers in \\boxed{}")
    format_pattern: str = flag(THOUGHT_AND_ANSWER, "Rule format: regular expression that the whole response must match")
    length_limit: int = flag(4000, "Rule length: a response of at most this number of characters gets 1", ge=1)
    repetition_ngram: int = flag(3, ge=1)
    """Number of words in the n-grams that are counted as repeated if they occur again"""
    repetition_tolerated: float = flag(0.2, "Share of repeated n-grams without a penalty", ge=0, lt=1)
    code_timeout_s: float = flag(10.0, "Time limit for all tests of a response, in seconds", gt=0)
    code_memory_mb: int = flag(1024, "Memory limit of the program with all of its processes, in MiB", ge=64)
    code_allow_weaker: bool = flag(False)
    """Also run programs on machines that offer only a weaker jail without namespaces (docs/rewards_code.md)"""


@dataclass
class JudgeConfig:
    """A judge: a chat model that scores responses by the rubric in reward.rubric"""

    url: str | None = flag(None)
    """Address of an OpenAI-compatible server, such as http://<host>:<port>/v1, or several addresses separated by
    commas. reward.http has the time limit, retries and concurrency of requests. null: the judge runs in engines of the
    run (task=ppo)"""
    model: str | None = flag(None)
    """Name of the model at the server. Without a server: its folder or its name on the hub"""
    mode: str = flag("verdict", choices=("verdict", "rank", "yes_no"))
    """Form of the judgement. verdict: a number for each criterion of the rubric; rank: an order of all answers to a
    prompt; yes_no: Yes or No, and the score is the probability of Yes (the server must return log-probabilities)"""
    both_orders: bool = flag(False, when=is_one_of(".mode", "rank"))
    """Ask again with the answers in reversed order, and use the mean of both scores"""
    key_env: str = flag("RLHF_SUITE_JUDGE_KEY")
    """Name of the environment variable that holds the key of the server. If the variable is not set, no key is sent"""
    scale: list[float] = flag([0.0, 10.0], when=is_one_of(".mode", "verdict"))
    """The numbers [worst, best] of the judge's scale. They are mapped to 0 and 1"""
    max_new_tokens: int = flag(
        1024,
        "Longest reply of the judge in tokens, including its reasons",
        ge=1,
        when=is_one_of(".mode", "verdict", "rank"),
    )
    max_chars: int = flag(20_000, ge=100)
    """Largest number of characters of a prompt, a response or a label that the judge sees. The middle of a longer text
    is cut out and marked"""
    body: dict[str, Any] = flag({})
    """Further fields of each request, such as {temperature: 0}. A field with the value null is not sent. Engines of the
    run accept temperature (default 0), top_p, top_k, min_p, repetition_penalty and chat_template_kwargs"""
    max_calls: int | None = flag(None, ge=1, resume=FREE)
    """Largest number of requests to the judge in a run. The run ends before it exceeds this number; null: no limit"""
    max_tokens: int | None = flag(None, ge=1, resume=FREE)
    """Token limit of all requests to the judge in a run. Once it is reached, the run ends before the next request;
    null: no limit"""
    num_engines: int = flag(1, ge=1, resume=FREE, when=OWN_ENGINES)
    """Number of engines of the run that hold the judge, on devices of their own"""
    tensor_parallel_size: int = flag(1, ge=1, resume=SHAPE, when=OWN_ENGINES)
    """Number of devices that split every layer of an engine of the judge"""
    max_len: int | None = flag(None, ge=1, when=OWN_ENGINES)
    """Longest question with its reply, in tokens; null: the context length of the model, at most 8192"""


@dataclass
class SourceConfig:
    """A source of rewards: exactly one of a rule, a .py file, HTTP servers, a judge or a reward model"""

    rule: str | None = flag(None, algorithms=registry.reward_rule)
    """Rule that computes the reward from the response and its label"""
    remote_url: str | None = flag(None)
    """A .py file with reward_func(queries, prompts, labels), or http(s) URLs of reward servers separated by commas
    (docs/rewards.md)"""
    rubric: str | None = flag(None, "File with the rubric by which a judge (reward.judge) scores responses")
    model_name_or_path: str | None = flag(None)
    """Reward model: a folder in Hugging Face format or a name on the hub. It must have the same tokenizer as the
    policy"""


@dataclass
class NamedSourceConfig(SourceConfig):
    """One of several sources"""

    weight: float = flag(1.0, ge=0)
    """Factor of this source's reward in the sum; 0: the reward is logged, but not trained on"""
    datasets: list[str] | None = flag(None)
    """Values of the column datasource. The source scores only rows with one of these values; null: all rows"""
    process: bool = flag(False, "The source is the process reward model of reward.process")
    best_of: str | None = flag(None)
    """Name of a set of sources. Only the source with the largest weight x reward in the set counts; null: the source
    always counts"""


@dataclass
class NormalizationConfig(Section):
    """Normalised scores of a reward model"""

    normalize_enable: bool = flag(
        False,
        needs=Need(MODEL, "the constants are stored in a reward model"),
        tasks=STANDARDISED,
    )
    """Normalise scores as (score - mean) / std. The constants are stored in the configuration of the reward model"""
    normalize_mean_only: bool = flag(False, when=is_true(".normalize_enable"), tasks=STANDARDISED)
    """Only subtract the mean from scores, and do not divide by std"""


@dataclass
class RewardConfig(NormalizationConfig, SourceConfig):
    """The source of rewards (a rule, a .py file, HTTP servers, a judge, a reward model or, in task=ppo and task=score,
    a process reward model), and in task=ppo the shaping of rewards"""

    sources: dict[str, NamedSourceConfig] = flag({})
    """Several sources by name, instead of rule, remote_url, rubric and model_name_or_path (docs/rewards_sources.md)"""
    reward_key: str | None = flag(None, of_tasks=IF_TEXT_IS_READ)
    """Name of the one part of the reward that is trained on (with several sources: <source> or <source>/<name>); null:
    all parts, combined by reward.combine"""
    combine: str = flag("sum", choices=("sum", "max"), of_tasks=IF_TEXT_IS_READ)
    """How the named parts of a reward are combined into one number"""
    http: HttpConfig = group(
        HttpConfig, when=Condition(".remote_url", is_http, " names servers", "http://<host>:<port>/<path>") | JUDGED
    )
    judge: JudgeConfig = group(JudgeConfig, when=JUDGED)
    rules: RuleConfig = group(RuleConfig)
    timeout_s: float = flag(60.0, gt=0, when=is_set(".rule", "<name>") | IS_FILE)
    """Time limit in seconds for a batch that a file scores. A row that is scored by itself has at least a thirtieth of
    it (docs/rewards_failures.md)"""
    num_processes: int | None = flag(None, ge=1, when=is_set(".rule", "<name>"))
    """Number of processes in which a rule scores; null: one per CPU core, at most 8"""
    num_retries: int = flag(
        0, ge=0, when=is_set(".rule", "<name>") | is_set(".remote_url", "<.py file or URLs>") | JUDGED
    )
    """Number of retries after a rule, a file, a server or a judge has failed, after 1, 2, 4, ... seconds"""
    offload: bool = flag(False, resume=SHAPE, when=MODEL, needs=OFFLOADED, tasks=RL)
    """Keep the weights of the reward model in host memory. In each step they are copied to the GPU once, for all of the
    model's computations"""
    num_nodes: int = flag(1, ge=1, resume=SHAPE, when=MODEL, tasks=BY_MODEL)
    """Number of nodes on which the reward model runs"""
    num_gpus_per_node: int = flag(1, ge=1, resume=SHAPE, when=MODEL, tasks=BY_MODEL)
    """Number of ranks (processes) of the reward model on each node"""
    on_error: str = flag("stop", choices=("stop", "drop"), tasks=BY_MODEL)
    """What to do if the reward of a sample fails after all retries. stop: end the run; drop: drop the whole group of
    the sample"""
    max_error_rate: float = flag(
        0.5,
        ge=0,
        le=1,
        when=is_one_of(".on_error", "drop") | is_one_of("agent.on_error", "drop", "zero"),
        tasks=BY_MODEL,
    )
    """End the run if a larger share of the samples of a batch has no reward"""
    process: ProcessRewardConfig = group(ProcessRewardConfig, tasks=(*RL, "score"))
    clip_range: list[float] = flag([-10.0, 10.0], tasks=RL)
    """Clip the raw score to this range, before any baseline"""
    clip_shaped: bool = flag(False, "Clip after the penalties below instead of before them", tasks=RL)
    overlong_buffer_len: int | None = flag(None, ge=1, tasks=RL)
    """Penalise long responses: within the last N tokens before the length limit, the penalty rises linearly from 0 to
    reward.overlong_penalty_factor; null: no penalty"""
    overlong_penalty_factor: float = flag(1.0, ge=0, when=is_set(".overlong_buffer_len", "<tokens>"), tasks=RL)
    """Penalty of a response that reaches the length limit"""
    stop_properly_penalty_coef: float | None = flag(None, le=1, tasks=RL)
    """Reward of truncated responses. A number >= 0 multiplies the reward, a number < 0 replaces it; null: no change"""

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
