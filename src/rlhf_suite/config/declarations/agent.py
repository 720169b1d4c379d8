"""`agent`: who answers the model's turns in reinforcement learning."""

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
    """The agent of the rows of some datasets"""

    kind: str = flag("single_turn", "Who answers a turn of the model, as agent.kind", algorithms=registry.agent)
    datasets: list[str] = flag([], "Values of column datasource whose rows it takes")
    agent_func_path: str | None = flag(None, "Its file; null: that of train.agent_func_path")
    max_turns: int | None = flag(None, "Most turns of the model in an episode; null: agent.max_turns", ge=1)


@dataclass
class AgentConfig:
    """Agents: what happens between the turns of the model"""

    kind: str = flag("single_turn", algorithms=registry.agent)
    """Who answers a turn of the model: nobody; tools that it calls; an environment of your own file; a Python
    interpreter; or a program of your own that asks for turns over HTTP, as chat completions"""
    sources: dict[str, AgentSourceConfig] = flag({})
    """Other agents by name, for the rows of some datasets; all other rows have that of agent.kind (docs/agents.md)"""
    tools: list[str] = flag([])
    """MCP servers whose tools the model may call: mcp:<command or URL> each, beside the functions of
    train.agent_func_path, and beside an environment"""
    mcp_sessions: str = flag("episode", choices=("episode", "process"))
    """How long a session with an MCP server lasts: for an episode, which begins it with its first call (a command is
    then a process for each episode); or for the process, for servers that keep nothing from one call to the next"""
    server_url: str | None = flag(None)
    """ws:// or wss:// address of an environment that speaks the protocol of OpenEnv, in place of
    train.agent_func_path"""
    action_key: str | None = flag("message", when=SERVED)
    """Field of an action with the text of a turn; null: a turn is the whole action, as JSON"""
    observation_key: str | None = flag(None, when=SERVED)
    """Field of an observation that the model sees; null: its only text, or all of it as JSON"""
    add_reward: bool = flag(False)
    """Add the reward of the reward sources (reward.rule and the like) to that of the environment or program; false:
    they score only the episodes to which it gave none"""
    max_turns: int = flag(8, "Most turns of the model in an episode", ge=1, when=MANY_TURNS)
    timeout_s: float = flag(600.0, gt=0, when=MANY_TURNS)
    """Longest episode in seconds; a longer one has no reward (agent.on_error)"""
    on_error: str | None = flag(None, choices=("stop", "drop", "zero"), when=MANY_TURNS)
    """What happens with an episode that an error of its environment or agent.timeout_s ended: the run ends; its group
    is dropped; or its reward is 0. More than reward.max_error_rate of them end the run. null: as reward.on_error"""
    history: str = flag(
        "append",
        choices=("append", "template"),
        needs=(
            Need(is_true("data.apply_chat_template"), "the chat template says how earlier turns are shown", RENDERED),
            Need(is_null("data.image_key"), "a conversation with images is not rendered again", RENDERED),
        ),
    )
    """What the model sees of earlier turns: append, what it wrote, token by token; or template, what the chat template
    shows of it, in a new sequence after each turn for which that differs"""
    tool_timeout_s: float = flag(30.0, gt=0)
    """Longest call of a tool, of Python code or of the environment, in seconds"""
    max_feedback_tokens: int | None = flag(512, ge=16)
    """Longest answer to a turn in tokens; more is cut off; null: no limit"""
    compact_at_tokens: int | None = flag(None, ge=16)
    """Tokens of a conversation from which on the model is asked to write a summary, with which the conversation goes on
    after its first prompt, in a new sequence (docs/agents_compaction.md); null: never"""
    compact_prompt: str = flag(SUMMARY, "How the user asks for a summary", when=COMPACTED)
    compact_max_tokens: int = flag(1024, ge=1, when=COMPACTED)
    """Longest summary in tokens; one that is cut off there ends the episode"""
    cut_to_fit: int | None = flag(None, ge=1)
    """Cut an answer to a turn that leaves no room in data.max_len or rollout.max_new_tokens, so that so many tokens are
    left; " [...]" stands where it was cut. null: such an answer ends the episode, or the request of a program fails"""
    max_concurrent: int = flag(256, "Episodes that are under way at a time", ge=1, resume=FREE, when=MANY_TURNS)
    num_workers: int = flag(0, ge=0, resume=FREE, when=MANY_TURNS)
    """Processes beside the driver that run the episodes, spread over the nodes; 0: the driver runs them"""
    max_restarts: int = flag(
        3, ge=0, resume=FREE, when=(MANY_TURNS, is_positive(".num_workers", "<number of processes>"))
    )
    """Times that each of these processes is started again when it dies; its unfinished episodes begin anew. 0: the run
    ends"""
    tool_parser: str = flag(
        "hermes",
        algorithms=registry.tool_parser,
        when=MANY_TURNS,
        needs=Need(
            is_set(".vllm_tool_parser", "<name>, such as hermes"),
            "it names one of vLLM's parsers",
            at=algorithm_reads("", registry.tool_parser, "vllm_tool_parser"),
        ),
    )
    """How calls of tools are read from the text of a turn"""
    vllm_tool_parser: str | None = flag(None, when=MANY_TURNS)
    """The parser of vLLM, such as hermes, qwen3_coder, mistral, glm45 or kimi_k2"""
    command: str | None = flag(None)
    """Shell command that plays an episode in place of train.agent_func_path: a process with a folder of its own, which
    finds the URL and the key of its episode in OPENAI_BASE_URL, ANTHROPIC_BASE_URL and the like
    (docs/agents_command.md)"""
    command_memory_mb: int = flag(4096, ge=64, resume=FREE, when=COMMANDED)
    """Memory of all that a command has started, in MiB; one that holds more is killed"""
    score_command: str | None = flag(None, when=COMMANDED)
    """Shell command that scores the files which agent.command left, in the same folder: its last line is the reward, or
    a JSON object with reward, score, metrics or error. null: what agent.command posts, or else the reward sources"""
    container: str | None = flag(None, when=COMMANDED)
    """Where both commands run: in containers of this image, by docker or podman; jail, in a jail of this machine, whose
    only network is the endpoint; null, with the rights of the run"""
    container_network: str = flag("host", resume=FREE, when=ISOLATED)
    """Network of the containers, as `--network` of docker takes it. With host they reach all that this machine does; an
    internal network leaves only this machine (docs/agents.md)"""
    container_paths: list[str] = flag([], when=ISOLATED)
    """Folders and files of this machine that the commands may read in a container or a jail, at the same paths"""
    host: str = flag("127.0.0.1", resume=FREE)
    """Address of this machine at which the program reaches its endpoint, on a free port"""
    sampling: str = flag("override", choices=("override", "refuse"), resume=FREE)
    """What becomes of a request of the program that asks for another sampling than that of rollout.* (temperature, a
    forced call, a JSON schema, ...): override, it is logged once and has no effect; or refuse, it is an error (400)"""
    python_style: str = flag("fence", algorithms=registry.python_style)
    """How the model writes code: fence, as blocks that begin with ```python in its text; or tool, as calls of a tool in
    its chat template"""
    python_memory_mb: int = flag(512, "Memory of an episode's interpreter in MiB", ge=64)
    python_url: str | None = flag(None)
    """http(s) address of a SandboxFusion server that runs the code, each block as a program of its own; null: a jail of
    this machine, where names last for the episode"""
    python_allow_weaker: bool = flag(False, when=is_null(".python_url"), resume=FREE)
    """Run code also where the machine offers only a weaker jail, without namespaces"""

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
