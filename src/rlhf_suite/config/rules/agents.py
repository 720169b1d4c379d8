"""Rules about agents: what each kind needs."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from rlhf_suite import registry
from rlhf_suite.config.agent_file import ENVIRONMENTS, PROGRAM, TOOLS, Export, export_of
from rlhf_suite.config.problems import Problem, rule
from rlhf_suite.config.runs import PPORun
from rlhf_suite.python_source import SourceError

FILE = "train.agent_func_path"
MCP = "mcp:"


@rule
def agent_has_its_file(run: PPORun) -> Iterator[Problem]:
    file, kind = run.train.agent_func_path, run.agent.kind
    if kind == "environment" and file is None and run.agent.server_url is None:
        yield Problem(FILE, "agent.kind=environment has no environment", f"add {FILE}=<file.py> (docs/agents.md)")
    if kind == "environment" and file is not None and run.agent.server_url is not None:
        yield Problem("agent.server_url", f"there are two environments: {FILE}={file} too", "keep one of them")
    if kind == "tools" and file is None and not run.agent.tools:
        what = "agent.kind=tools has no tools"
        yield Problem(FILE, what, f"add {FILE}=<file.py with a list tools>, or agent.tools=[mcp:<command or URL>]")
    if kind == "endpoint" and file is None:
        what = "agent.kind=endpoint has no program"
        yield Problem(FILE, what, f"add {FILE}=<file.py with run_agent(task, base_url, api_key)> (docs/agents.md)")
    if kind not in ("environment", "tools", "endpoint") or file is None:
        return
    try:
        export = export_of(file)
    except SourceError as error:
        yield Problem(FILE, error.what, error.fix)
        return
    yield from export_fits(run, export)


def export_fits(run: PPORun, export: Export) -> Iterator[Problem]:
    """Yield a problem if the file is for another kind of agent, or its form needs a chat template."""
    what = (
        f"{run.train.agent_func_path} has {export.name} ({export.form}), which is not for agent.kind={run.agent.kind}"
    )
    if run.agent.kind == "tools" and export.form != TOOLS:
        yield Problem(FILE, what, "write agent.kind=environment, or define tools = [functions]")
    if run.agent.kind == "environment" and export.form not in ENVIRONMENTS:
        yield Problem(FILE, what, f"write agent.kind={'endpoint' if export.form == PROGRAM else 'tools'}")
    if run.agent.kind == "endpoint" and export.form != PROGRAM:
        yield Problem(FILE, what, "define run_agent(task, base_url, api_key), or write another agent.kind")
    if export.form in ("trl", "skyrl", "gymnasium") and not run.data.apply_chat_template:
        what = f"{export.name} ({export.form}) answers with messages, which need a chat template"
        yield Problem("data.apply_chat_template", what, "add data.apply_chat_template=true")


@rule
def messages_have_a_template(run: PPORun) -> Iterator[Problem]:
    if run.data.apply_chat_template:
        return
    key, fix = "data.apply_chat_template", "add data.apply_chat_template=true"
    if run.agent.calls_tools:
        fence = ", or write agent.python_style=fence" if run.agent.kind == "python" else ""
        yield Problem(key, "tools are called in the form of a chat template", f"{fix}{fence}")
    if run.agent.kind == "endpoint":
        yield Problem(key, "the endpoint speaks in messages, which need a chat template", fix)
    if run.agent.history == "template" and run.agent.kind != "single_turn":
        what = "without a chat template nothing says how earlier turns are shown"
        yield Problem("agent.history", what, "write agent.history=append, or data.apply_chat_template=true")


@rule
def allowed_calls_have_an_agent(run: PPORun) -> Iterator[Problem]:
    if run.eval.max_calls is not None and run.agent.kind == "single_turn":
        what = "a response of agent.kind=single_turn is one turn, and nobody answers it"
        yield Problem("eval.max_calls", what, "remove it, or set agent.kind")


@rule
def parser_of_vllm_is_named(run: PPORun) -> Iterator[Problem]:
    if run.agent.kind != "single_turn" and run.agent.tool_parser == "vllm" and run.agent.vllm_tool_parser is None:
        what = "agent.tool_parser=vllm needs the name of a parser"
        yield Problem("agent.vllm_tool_parser", what, "add agent.vllm_tool_parser=<name>, such as hermes")


@rule
def servers_of_agents_have_addresses(run: PPORun) -> Iterator[Problem]:
    for name, url, schemes in (
        ("server_url", run.agent.server_url, ("ws", "wss")),
        ("python_url", run.agent.python_url, ("http", "https")),
    ):
        if url is not None and (urlsplit(url).scheme not in schemes or not urlsplit(url).hostname):
            what = f"{url!r} is not an address that begins with {schemes[0]}:// or {schemes[1]}://"
            yield Problem(f"agent.{name}", what, f"write agent.{name}={schemes[0]}://<host>:<port>")


@rule
def endpoint_fits(run: PPORun) -> Iterator[Problem]:
    name = run.algo.advantage.estimator
    if run.agent.kind == "endpoint" and name in registry.estimator.that_read("gamma"):
        what = f"{name} needs the order of all tokens, which is not known when a program rewrites its history"
        yield Problem("algo.advantage.estimator", what, "write algo.advantage.estimator=group_norm, rloo or the like")


@rule
def servers_of_tools_are_named(run: PPORun) -> Iterator[Problem]:
    for name in run.agent.tools:
        if not name.startswith(MCP) or not name.removeprefix(MCP).strip():
            what = f"{name!r} is not a server of tools"
            yield Problem("agent.tools", what, "write mcp:<command>, or mcp:http://<host>:<port>/mcp")
