"""From flags to an agent and its episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_suite.agents.bridge import Bridge
from rlhf_suite.agents.compat import GymnasiumEnvironment, SkyRLEnvironment, TRLEnvironment
from rlhf_suite.agents.endpoint import EndpointAgent, Sessions
from rlhf_suite.agents.environment import EnvironmentAgent, called, constructed
from rlhf_suite.agents.episodes import Agent, AgentsByDatasource, Episodes, SingleTurnAgent
from rlhf_suite.agents.openenv import OpenEnvEnvironment
from rlhf_suite.agents.openrlhf import OpenRLHFEnvironment
from rlhf_suite.agents.own_files import imported, tool_environment, tools_of
from rlhf_suite.agents.parsing import TurnReader
from rlhf_suite.agents.python_tool import PROGRAMS, FenceAgent, PythonEnvironment, jailed
from rlhf_suite.agents.sandbox_fusion import remote
from rlhf_suite.agents.session import Limits, Policy, Shared
from rlhf_suite.agents.tools import EnvironmentWithTools
from rlhf_suite.config.agent import AgentConfig, ChosenAgent, agents_of
from rlhf_suite.config.agent_file import (
    GYMNASIUM,
    OPENRLHF,
    OPENRLHF_EXECUTOR,
    OPENRLHF_STEP,
    OURS,
    RAW,
    SKYRL,
    TRL,
    export_of,
    has_tools_beside,
)
from rlhf_suite.config.reward import has_source
from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.images import ImageReader
from rlhf_suite.errors import UserError
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.rewards.base import Choice
from rlhf_suite.sandbox.process import SandboxError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_agent(chosen: ChosenAgent, must_score: bool, choice: Choice | None = None) -> Agent:
    """Return an agent of a run. `must_score`: the run has no reward source, so that the environment has to score.

    Raises:
        UserError: the file cannot be imported, or this machine offers no jail for Python.
    """
    config = chosen.config
    if config.kind == "single_turn":
        return SingleTurnAgent()
    make, of_step = maker(chosen)
    cls = FenceAgent if config.kind == "python" and config.python_style == "fence" else EnvironmentAgent
    return cls(make, config.max_turns, config.timeout_s, of_step, must_score=must_score, choice=choice)


def maker(chosen: ChosenAgent) -> tuple[Callable[[], Any], float | None]:
    """Return what makes the environment of an episode, and the limit in seconds of each of its answers. Tools and
    Python have a limit for each call instead."""
    config = chosen.config
    if config.kind == "python":
        if config.python_url is not None:
            servers = remote(config.python_url, config.python_memory_mb)
            return lambda: PythonEnvironment(servers, config.tool_timeout_s, PROGRAMS), None
        try:
            sessions = jailed(config.python_memory_mb, config.python_allow_weaker)
        except SandboxError as error:
            raise UserError(f"{chosen.key}.kind=python: {error}") from error
        return lambda: PythonEnvironment(sessions, config.tool_timeout_s), None
    sources = tools_of(chosen)
    if config.kind == "tools":
        return lambda: tool_environment(sources, config), None
    make, of_step = environment_maker(chosen)
    if not sources:
        return make, of_step

    async def beside() -> EnvironmentWithTools:
        return EnvironmentWithTools(await called(make), tool_environment(sources, config), of_step)

    return beside, None


def environment_maker(chosen: ChosenAgent) -> tuple[Callable[[], Any], float | None]:
    """Return what makes the environment of an episode without other tools, and the limit of each of its answers."""
    config = chosen.config
    if (url := config.server_url) is not None:
        return lambda: OpenEnvEnvironment(url, config.action_key, config.observation_key), config.tool_timeout_s
    assert chosen.file is not None
    export = export_of(chosen.file)
    cls: Any = imported(chosen)
    if export.form == TRL:
        return lambda: TRLEnvironment(cls, config.tool_timeout_s), None
    adapters: dict[str, Callable[[Any], Any]] = {
        OURS: constructed,
        OPENRLHF: OpenRLHFEnvironment,
        OPENRLHF_EXECUTOR: OpenRLHFEnvironment,
        OPENRLHF_STEP: OpenRLHFEnvironment,
        SKYRL: SkyRLEnvironment,
        GYMNASIUM: GymnasiumEnvironment,
    }
    return partial(adapters[export.form], cls), config.tool_timeout_s


def make_episodes(
    run: PPORun,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int],
    serve: Callable[[str], Sessions],
    images: ImageReader | None = None,
) -> Episodes | None:
    """Return what runs the episodes of a run; None if nobody answers the model's turns. `serve` makes a server of
    sessions at an address; `images` reads those of a run that has any.

    Raises:
        UserError: the user's file cannot be imported, this machine offers no jail for Python, or what
        `make_conversations` raises.
    """
    config = run.agent
    if not config.has_turns:
        return None
    first, *others = agents_of(config, run.train.agent_func_path)
    bridge, reader = make_conversations(run, tokenizer, stop_ids)
    must_score, feedback = not has_source(run.reward), config.max_feedback_tokens
    choice = Choice(run.reward.reward_key, run.reward.combine)
    agent: Agent
    if config.kind == "endpoint":
        program, feedback = imported(first), None  # a message that was cut is not known again
        most = run.data.max_len * max(map(len, tokenizer.get_vocab()))
        given = (program, serve(config.host), config.max_turns, config.timeout_s, most)
        agent = EndpointAgent(*given, must_score=must_score, choice=choice)
    else:
        agent = make_agent(first, must_score, choice)
    if others:
        made = [(each.datasets, make_agent(each, must_score, choice)) for each in others]
        agent = AgentsByDatasource({name: other for names, other in made for name in names}, agent)
    limits = Limits(run.data.max_len, run.rollout.max_new_tokens, feedback)
    most = run.data.max_images_per_prompt
    shared = Shared(policy, bridge, reader, limits, config.history == "template", images, most)
    return Episodes(agent, shared, config.max_concurrent)


def make_conversations(
    run: PPORun, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]
) -> tuple[Bridge, TurnReader]:
    """Return what continues the conversations of a run's agents, and what reads the turns of the model.

    Raises:
        UserError: a conversation cannot go on with this chat template, or the parser of tool calls does not fit the
        tokenizer.
    """
    config = run.agent
    bridge = Bridge(tokenizer, run.data, stop_ids)
    if run.data.apply_chat_template:
        agents = agents_of(config, run.train.agent_func_path)
        bridge.check(sorted({role for chosen in agents for role in roles(chosen)}))
    return bridge, TurnReader(tokenizer, stop_ids, config.tool_parser, config.vllm_tool_parser)


def watch_calls(loop: LoopThread, config: AgentConfig) -> None:
    """Watch over the event loop of the episodes: an `async` function of the user's that blocks it stops all of them.
    The program of an endpoint never runs on it."""
    if config.kind != "endpoint":
        loop.watch(config.tool_timeout_s, "agent.tool_timeout_s")


def roles(chosen: ChosenAgent) -> list[str]:
    """Return the roles of the messages with which conversations go on."""
    config = chosen.config
    if config.kind == "endpoint":
        return ["user"]
    if config.calls_tools:
        return ["tool"]
    if config.kind != "environment":
        return []
    beside = ["tool"] if has_tools_beside(chosen) else []
    form = OURS if chosen.file is None else export_of(chosen.file).form
    return [*beside, *([] if form in RAW else {TRL: ["tool"]}.get(form, ["user"]))]
