"""`agent`: what answers the turns of the model in reinforcement learning."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhf_suite import registry
from rlhf_suite.config.declarations.conditions import (
    Need,
    algorithm_needs,
    algorithm_reads,
    is_null,
    is_one_of,
    is_positive,
    is_set,
    is_true,
)
from rlhf_suite.config.declarations.flags import FREE, flag

FILE = "train.agent_func_path"
FILES = ("environment", "tools", "program")  # what an agent may need the file of train.agent_func_path to have
MANY_TURNS = algorithm_needs(".kind", registry.agent, "turns")
WORKERS = is_positive(".num_workers", "<number of processes>")
RENDERED = is_one_of("", "template")
COMMANDED = is_set(".command", "<command>")
COMPACTED = is_set(".compact_at_tokens", "<tokens>")
SUMMARY = (
    "This conversation goes on without its earlier turns. Write a summary of them with which you can finish the task: "
    "what was done and found out, with the exact names, numbers and values; what failed; and what remains to be done. "
    "Answer with the summary alone."
)
JAIL = "jail"  # agent.container: no container, but the jail of this machine
ISOLATED = (COMMANDED, is_set(".container", "<image>"))
SERVED = is_set(".server_url", "ws://<host>:<port>/ws")


@dataclass
class AgentSourceConfig:
    """The agent for the rows of some datasets"""

    kind: str = flag("single_turn", algorithms=registry.agent)
    """What answers a turn of the model, with the values of agent.kind"""
    datasets: list[str] = flag([], "Values of the column datasource. The agent gets the rows with these values")
    agent_func_path: str | None = flag(None, "Python file of this agent; null: train.agent_func_path")
    max_turns: int | None = flag(None, ge=1)
    """Largest number of turns of the model in an episode; null: agent.max_turns"""


@dataclass
class AgentConfig:
    """Agents: what happens between the turns of the model"""

    kind: str = flag("single_turn", algorithms=registry.agent)
    """What answers a turn of the model: nothing; tools that the model calls; an environment in your own file; a Python
    interpreter; or your own program, which requests turns over HTTP as chat completions"""
    sources: dict[str, AgentSourceConfig] = flag({})
    """Other agents by name, for the rows of some datasets. All other rows use the agent of agent.kind
    (docs/agents.md)"""
    tools: list[str] = flag([])
    """MCP servers whose tools the model may call, each as mcp:<command or URL>. These tools are added to the functions
    of train.agent_func_path, or to an environment"""
    mcp_sessions: str = flag("episode", choices=("episode", "process"))
    """Lifetime of a session with an MCP server. episode: each episode starts a session at its first call (a command
    then runs as one process per episode). process: the process keeps one session; use it for servers without state
    between calls"""
    server_url: str | None = flag(None)
    """Address (ws:// or wss://) of an environment with the OpenEnv protocol, instead of train.agent_func_path"""
    action_key: str | None = flag("message", when=SERVED)
    """Field of an action that gets the text of a turn; null: the turn itself is the whole action, as JSON"""
    observation_key: str | None = flag(None, when=SERVED)
    """Field of an observation that the model sees; null: the only text of the observation, or the whole observation as
    JSON"""
    add_reward: bool = flag(False)
    """Add the reward from the reward sources (reward.rule and so on) to the reward from the environment or program.
    false: the reward sources score only episodes that got no reward from them"""
    max_turns: int = flag(8, "Largest number of turns of the model in an episode", ge=1, when=MANY_TURNS)
    timeout_s: float = flag(600.0, gt=0, when=MANY_TURNS)
    """Time limit of an episode in seconds. An episode that exceeds it has no reward (agent.on_error)"""
    on_error: str | None = flag(None, choices=("stop", "drop", "zero"), when=MANY_TURNS)
    """What to do with an episode that ended by an error of its environment or by agent.timeout_s. stop: end the run;
    drop: drop the group of the episode; zero: give it the reward 0. If their share exceeds reward.max_error_rate, the
    run ends. null: as reward.on_error"""
    history: str = flag(
        "append",
        choices=("append", "template"),
        needs=(
            Need(is_true("data.apply_chat_template"), "the chat template shows the earlier turns", RENDERED),
            Need(
                is_null("data.image_key"),
                "the chat template is not applied again to a conversation with images",
                RENDERED,
            ),
        ),
    )
    """How the model sees earlier turns. append: exactly the tokens that it wrote; template: the output of the chat
    template, in a new sequence after each turn for which the two differ"""
    tool_timeout_s: float = flag(30.0, gt=0)
    """Time limit of a call of a tool, of Python code or of the environment, in seconds"""
    max_feedback_tokens: int | None = flag(512, ge=16)
    """Longest answer to a turn in tokens. A longer one is cut off; null: no limit"""
    compact_at_tokens: int | None = flag(None, ge=16)
    """If a conversation reaches this number of tokens, the model is asked for a summary. The conversation then
    continues in a new sequence, with its first prompt and the summary (docs/agents_compaction.md); null: never"""
    compact_prompt: str = flag(SUMMARY, "Message of the user that asks for a summary", when=COMPACTED)
    compact_max_tokens: int = flag(1024, ge=1, when=COMPACTED)
    """Longest summary in tokens. A summary that is cut off at this length ends the episode"""
    cut_to_fit: int | None = flag(None, ge=1)
    """Shorten an answer to a turn if it does not fit into data.max_len or rollout.max_new_tokens, so that this number
    of tokens is left for the model. " [...]" marks the cut. null: such an answer ends the episode, or the request of a
    program fails"""
    max_concurrent: int = flag(256, ge=1, resume=FREE, when=MANY_TURNS)
    """Largest number of episodes that run at the same time"""
    num_workers: int = flag(0, ge=0, resume=FREE, when=MANY_TURNS)
    """Number of processes beside the driver that run the episodes. They are spread over the nodes. 0: the driver runs
    the episodes"""
    max_restarts: int = flag(
        3, ge=0, resume=FREE, when=(MANY_TURNS, is_positive(".num_workers", "<number of processes>"))
    )
    """Number of times that each of these processes is restarted after it has died. Its unfinished episodes start again.
    0: the run ends instead"""
    tool_parser: str = flag(
        "hermes",
        algorithms=registry.tool_parser,
        when=MANY_TURNS,
        needs=Need(
            is_set(".vllm_tool_parser", "<name>, such as hermes"),
            "it is the name of the vLLM parser to use",
            at=algorithm_reads("", registry.tool_parser, "vllm_tool_parser"),
        ),
    )
    """How tool calls are parsed from the text of a turn"""
    vllm_tool_parser: str | None = flag(None, when=MANY_TURNS)
    """Name of a tool parser of vLLM, such as hermes, qwen3_coder, mistral, glm45 or kimi_k2"""
    command: str | None = flag(None)
    """Shell command that plays an episode, instead of train.agent_func_path. It runs as a process in a folder of its
    own. The environment variables OPENAI_BASE_URL, ANTHROPIC_BASE_URL and similar ones contain the URL and the key of
    its episode (docs/agents_command.md)"""
    command_memory_mb: int = flag(4096, ge=64, resume=FREE, when=COMMANDED)
    """Memory limit in MiB for all processes that a command has started. Beyond it, the command is killed"""
    score_command: str | None = flag(None, when=COMMANDED)
    """Shell command that scores the files that agent.command wrote, in the same folder. Its last output line is the
    reward, or a JSON object with reward, score, metrics or error. null: the reward that agent.command posts, or else
    that of the reward sources"""
    container: str | None = flag(None, when=COMMANDED)
    """Where both commands run. An image name: in containers of this image, with docker or podman; jail: in a jail of
    this machine, whose only network access is the endpoint; null: with the rights of the run"""
    container_network: str = flag("host", resume=FREE, when=ISOLATED)
    """Network of the containers, as in --network of docker. With host, they can reach everything that this machine can
    reach. With an internal network, they reach only this machine (docs/agents.md)"""
    container_paths: list[str] = flag([], when=ISOLATED)
    """Folders and files of this machine that the commands can read in a container or a jail, at the same paths"""
    host: str = flag("127.0.0.1", resume=FREE)
    """Address of this machine at which the program reaches its endpoint. The port is a free one"""
    sampling: str = flag("override", choices=("override", "refuse"), resume=FREE)
    """What to do if a request of the program asks for other sampling settings than rollout.* (temperature, a forced
    call, a JSON schema, ...). override: ignore them and log it once; refuse: answer with an error (400)"""
    python_style: str = flag("fence", algorithms=registry.python_style)
    """How the model writes code. fence: in its text, as blocks that begin with ```python; tool: as tool calls of its
    chat template"""
    python_memory_mb: int = flag(512, "Memory limit of the Python interpreter of an episode, in MiB", ge=64)
    python_url: str | None = flag(None)
    """Address (http or https) of a SandboxFusion server that runs the code. Each code block is then a separate program.
    null: a jail of this machine runs it, and variables last for the whole episode"""
    python_allow_weaker: bool = flag(False, when=is_null(".python_url"), resume=FREE)
    """Also run code on machines that offer only a weaker jail without namespaces"""

    @property
    def kinds(self) -> set[str]:
        """The kinds of all agents of the run."""
        return {self.kind, *(source.kind for source in self.sources.values())}

    @property
    def has_turns(self) -> bool:
        """Whether somebody answers turns of the model, in some row at least."""
        return any(registry.agent.needs(kind, "turns") for kind in self.kinds)

    @property
    def has_workers(self) -> bool:
        """Whether processes beside the driver run the episodes."""
        return self.has_turns and self.num_workers > 0

    def needs(self, need: str) -> bool:
        """Return whether the agent of `kind`, or the style in which it writes code, needs something."""
        in_style = self.reads("python_style") and registry.python_style.needs(self.python_style, need)
        return registry.agent.needs(self.kind, need) or in_style

    def reads(self, flag: str) -> bool:
        """Return whether the agent of `kind` reads a flag of this section."""
        return registry.agent.reads(self.kind, flag)

    @property
    def file_part(self) -> str | None:
        """What the file of the agent must have, one of `FILES`; None: it has no file."""
        return next((part for part in FILES if self.needs(part)), None)

    @property
    def needs_stop_strings(self) -> bool:
        """Whether turns end with strings, which the engines must look for in the text."""
        return any(replace(self, kind=kind).needs("stop_strings") for kind in self.kinds)


@dataclass(frozen=True)
class ChosenAgent:
    """One of the agents of a run."""

    key: str  # of its flags: agent, or agent.sources.<name>
    config: AgentConfig  # with its own kind and number of turns, and no other agents
    file: str | None
    file_flag: str  # that names the file
    datasets: tuple[str, ...] = ()  # values of column datasource; none: the rows that no other agent takes


def agents_of(config: AgentConfig, file: str | None = None) -> list[ChosenAgent]:
    """Return the agents of a run: that of agent.kind, then those of agent.sources. `file` is train.agent_func_path."""
    agents = [ChosenAgent("agent", replace(config, sources={}), file, FILE)]
    for name, source in config.sources.items():
        key, own = f"agent.sources.{name}", source.agent_func_path
        values = replace(config, kind=source.kind, max_turns=source.max_turns or config.max_turns, sources={})
        file_flag = FILE if own is None else f"{key}.agent_func_path"
        agents.append(ChosenAgent(key, values, own or file, file_flag, tuple(source.datasets)))
    return agents
