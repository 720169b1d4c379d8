"""What the user gave the agents of a run: the class or the functions of a file, and the tools of MCP servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_suite.agents.mcp_tools import McpServer
from rlhf_suite.agents.openrlhf import class_of_executor, class_of_step
from rlhf_suite.agents.tools import MCP, FunctionTools, ToolEnvironment, ToolSource
from rlhf_suite.config.check.agent_file import OPENRLHF_EXECUTOR, OPENRLHF_STEP, TOOLS, Export, export_of, has_tools
from rlhf_suite.config.declarations.agent import AgentConfig, ChosenAgent
from rlhf_suite.disk import resolve_home
from rlhf_suite.python_source import import_failure, import_file
from rlhf_suite.rewards.openrlhf_names import offer_openrlhf


def import_export(chosen: ChosenAgent, export: Export | None = None) -> Any:
    """Import the user's file of an agent, and return what it has for agents, or `export` of it."""
    assert chosen.file is not None
    export = export or export_of(chosen.file)
    offer_openrlhf()
    try:
        exported = getattr(import_file(resolve_home(chosen.file).resolve()), export.name)
        kinds = {OPENRLHF_EXECUTOR: class_of_executor, OPENRLHF_STEP: class_of_step}
        return kinds[export.form](exported) if export.form in kinds else exported
    except (Exception, SystemExit) as error:
        raise import_failure(f"{chosen.file_flag}={chosen.file}", error) from error


def tool_environment(sources: Sequence[ToolSource], config: AgentConfig) -> ToolEnvironment:
    """Return the tools of an episode as an environment."""
    return ToolEnvironment([source.of_episode() for source in sources], config.tool_timeout_s)


def tools_of(chosen: ChosenAgent) -> list[ToolSource]:
    """Return the tools of an agent: those of MCP servers, and those of its file."""
    config = chosen.config
    names, is_shared = (name.removeprefix(MCP).strip() for name in config.tools), config.mcp_sessions == "process"
    sources: list[ToolSource] = [McpServer(name, is_shared) for name in names]
    if chosen.file is not None and has_tools(chosen.file):
        sources.append(FunctionTools(import_export(chosen, Export(TOOLS, TOOLS))))
    return sources
