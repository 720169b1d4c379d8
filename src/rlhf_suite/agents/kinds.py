"""The kinds of agents: each is declared here, and makes the agent of a run from its flags.

What a kind needs and reads is all that others know of it (`AGENT` in registry.py); nobody asks for its name. One of the
user's own is a function of the same form: `agent.kind=<file.py>:<function>`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_suite import registry
from rlhf_suite.agents.calls import call, construct
from rlhf_suite.agents.command import Command
from rlhf_suite.agents.compaction import Compaction
from rlhf_suite.agents.compat import GymnasiumEnvironment, SkyRLEnvironment, TRLEnvironment
from rlhf_suite.agents.endpoint import EndpointAgent
from rlhf_suite.agents.environment import EnvironmentAgent
from rlhf_suite.agents.episodes import Agent, AgentSetup, SingleTurnAgent
from rlhf_suite.agents.isolation import Isolation, container_tool
from rlhf_suite.agents.openenv import OpenEnvEnvironment
from rlhf_suite.agents.openrlhf import OpenRLHFEnvironment
from rlhf_suite.agents.own_files import import_export, tool_environment, tools_of
from rlhf_suite.agents.python_tool import PROGRAMS, FenceAgent, PythonEnvironment, make_jailed
from rlhf_suite.agents.sandbox_fusion import remote
from rlhf_suite.agents.tools import EnvironmentWithTools
from rlhf_suite.config.check.agent_file import (
    GYMNASIUM,
    OPENRLHF,
    OPENRLHF_EXECUTOR,
    OPENRLHF_STEP,
    OURS,
    SKYRL,
    TRL,
    export_of,
)
from rlhf_suite.config.declarations.agent import JAIL, AgentConfig, ChosenAgent
from rlhf_suite.disk import resolve_home
from rlhf_suite.errors import UserError
from rlhf_suite.registry import agent, python_style
from rlhf_suite.sandbox.process import SandboxError

Make = Callable[[], Any]  # makes the environment of an episode


@agent(needs=())
def single_turn(setup: AgentSetup) -> Agent:
    """No answers: a response is a single turn."""
    return SingleTurnAgent()


@agent(
    needs=("turns", "tools", "tool_messages"),
    reads=(
        "tools",
        "mcp_sessions",
        "history",
        "tool_timeout_s",
        "max_feedback_tokens",
        "compact_at_tokens",
        "compact_prompt",
        "compact_max_tokens",
        "cut_to_fit",
    ),
)
def tools(setup: AgentSetup) -> Agent:
    """Functions of your file, and tools of MCP servers."""
    sources, config = tools_of(setup.chosen), setup.chosen.config
    return environment_agent(setup, lambda: tool_environment(sources, config))


@agent(
    needs=("turns", "environment", "columns"),
    reads=(
        "tools",
        "mcp_sessions",
        "server_url",
        "add_reward",
        "history",
        "tool_timeout_s",
        "max_feedback_tokens",
        "compact_at_tokens",
        "compact_prompt",
        "compact_max_tokens",
        "cut_to_fit",
    ),
)
def environment(setup: AgentSetup) -> Agent:
    """An environment from your file or on a server, with optional tools."""
    make, limit_s = environment_maker(setup.chosen)
    sources, config = tools_of(setup.chosen), setup.chosen.config
    if not sources:
        return environment_agent(setup, make, limit_s)

    async def beside() -> EnvironmentWithTools:
        return EnvironmentWithTools(await call(make), tool_environment(sources, config), limit_s)

    return environment_agent(setup, beside)


@agent(
    needs=("turns", "jail"),
    reads=(
        "python_style",
        "python_memory_mb",
        "python_url",
        "python_allow_weaker",
        "history",
        "tool_timeout_s",
        "max_feedback_tokens",
        "cut_to_fit",
    ),
)
def python(setup: AgentSetup) -> Agent:
    """A Python interpreter in a jail, or at a server."""
    config = setup.chosen.config
    if config.python_url is not None:
        servers = remote(config.python_url, config.python_memory_mb)
        make = partial(PythonEnvironment, servers, config.tool_timeout_s, PROGRAMS)
    else:
        try:
            sessions = make_jailed(config.python_memory_mb, config.python_allow_weaker)
        except SandboxError as error:
            raise UserError(f"{setup.chosen.key}.kind={config.kind}: {error}") from error
        make = partial(PythonEnvironment, sessions, config.tool_timeout_s)
    made: Agent = registry.python_style.load(config.python_style)(setup, make)
    return made


@python_style(needs=("stop_strings",))
def fence(setup: AgentSetup, make: Make) -> Agent:
    """As blocks that begin with ```python in the text of a turn."""
    return environment_agent(setup, make, cls=FenceAgent)


@python_style(needs=("tool_messages",))
def tool(setup: AgentSetup, make: Make) -> Agent:
    """As calls of a tool in the chat template."""
    return environment_agent(setup, make)


@agent(
    needs=(
        "turns",
        "program",
        "columns",
        "user_messages",
        "stop_strings",
        "text",
        "all_rows",
        "whole_episodes",
    ),
    reads=("add_reward", "host", "sampling", "command", "cut_to_fit"),
)
def endpoint(setup: AgentSetup) -> Agent:
    """Your own program, which requests turns over HTTP as chat completions, Messages or Responses."""
    config = setup.chosen.config
    assert setup.serve is not None, "a run has a server of sessions"
    sessions = setup.serve(config.host)
    program: Any = import_export(setup.chosen) if config.command is None else command_of(config, sessions.logs)
    return EndpointAgent(
        program,
        sessions,
        config.max_turns,
        config.timeout_s,
        setup.max_characters,
        must_score=setup.must_score,
        choice=setup.choice,
        overrides=config.sampling == "override",
    )


def command_of(config: AgentConfig, logs: Path | None) -> Command:
    """Return the command that plays the episodes of a run."""
    assert config.command is not None
    given = [resolve_home(path).absolute() for path in config.container_paths]
    paths = sorted({str(path) for named in given for path in (named, named.resolve())})
    tool = None if config.container in (None, JAIL) else container_tool()
    isolation = Isolation(config.container, config.container_network, paths, config.command_memory_mb, tool)
    return Command(config.command, config.command_memory_mb, config.score_command, logs, isolation)


def environment_agent(
    setup: AgentSetup, make: Make, limit_s: float | None = None, cls: type[EnvironmentAgent] = EnvironmentAgent
) -> EnvironmentAgent:
    """Return the agent of the environments that `make` returns; `limit_s`: of each of their answers. Tools and Python
    have a limit for each call instead."""
    config = setup.chosen.config
    return cls(
        make,
        config.max_turns,
        config.timeout_s,
        limit_s,
        must_score=setup.must_score,
        choice=setup.choice,
        compaction=Compaction.of(config),
    )


def environment_maker(chosen: ChosenAgent) -> tuple[Make, float | None]:
    """Return what makes the environment of an episode without other tools, and the limit of each of its answers."""
    config = chosen.config
    if (url := config.server_url) is not None:
        return lambda: OpenEnvEnvironment(url, config.action_key, config.observation_key), config.tool_timeout_s
    assert chosen.file is not None
    export = export_of(chosen.file)
    cls: Any = import_export(chosen)
    if export.form == TRL:
        return lambda: TRLEnvironment(cls, config.tool_timeout_s), None
    adapters: dict[str, Callable[[Any], Any]] = {
        OURS: construct,
        OPENRLHF: OpenRLHFEnvironment,
        OPENRLHF_EXECUTOR: OpenRLHFEnvironment,
        OPENRLHF_STEP: OpenRLHFEnvironment,
        SKYRL: SkyRLEnvironment,
        GYMNASIUM: GymnasiumEnvironment,
    }
    return partial(adapters[export.form], cls), config.tool_timeout_s
