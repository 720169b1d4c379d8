"""Rules about agents: what each kind needs."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from rlhf_suite import registry
from rlhf_suite.config.check.agent_file import OURS, PROGRAM, TOOLS
from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.declarations.agent import JAIL, ChosenAgent, agents_of
from rlhf_suite.config.declarations.reward import has_source
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RL
from rlhf_suite.config.declarations.tools import THIS_MACHINE
from rlhf_suite.config.rules.rewards import password_problems
from rlhf_suite.foreign_text import hide_secrets

MCP, TEMPLATE = "mcp:", "data.apply_chat_template"
ENVIRONMENT = OURS
MISSING = {
    ENVIRONMENT: "add {key}=<file.py> (docs/agents_environments.md)",
    TOOLS: "add {key}=<file.py with a list tools>, or agent.tools=[mcp:<command or URL>]",
    PROGRAM: "add agent.command=<command>, or {key}=<file.py with run_agent(task, base_url, api_key)> "
    "(docs/agents_program.md)",
}

EVERY_ADDRESS = ("0.0.0.0", "::")  # at which a server listens everywhere, and nobody connects


def agents_in(run: Run) -> list[ChosenAgent]:
    """Return the agents of a run, without those of agent.sources that a rule refuses."""
    agents = agents_of(run.agent, run.train.agent_func_path)
    return [agent for number, agent in enumerate(agents) if number == 0 or not agent.config.needs("all_rows")]


@rule(tasks=RL)
def agents_have_their_files(run: Run) -> Iterator[Problem]:
    for agent in agents_in(run):
        part, file, key = agent.config.file_part, agent.file, agent.file_flag
        url = run.agent.server_url if part == ENVIRONMENT else None
        command = run.agent.command if part == PROGRAM else None
        if part is None:
            continue
        if file is None and url is None and command is None and not (part == TOOLS and run.agent.tools):
            problem = f"{agent.key}.kind={agent.config.kind} has no {part}"
            yield Problem(key, problem, MISSING[part].format(key=key))
        if file is not None and url is not None:
            yield Problem("agent.server_url", f"there are two environments: {key}={file} too", "keep one of them")
        if file is not None and command is not None:
            yield Problem("agent.command", f"there are two programs: {key}={file} too", "keep one of them")


@rule(tasks=RL)
def agents_share_the_datasets(run: Run) -> Iterator[Problem]:
    taken: dict[str, str] = {}
    for name, source in run.agent.sources.items():
        key = f"agent.sources.{name}"
        if not source.datasets:
            problem = "no row has this agent"
            yield Problem(
                f"{key}.datasets", problem, "write the values of the column datasource for whose rows this agent is"
            )
        for dataset in source.datasets:
            if taken.setdefault(dataset, name) != name:
                problem = f"the rows of {dataset} have the agent {taken[dataset]} already"
                yield Problem(f"{key}.datasets", problem, f"remove {dataset} from one of them")
    if run.agent.sources and run.agent.needs("all_rows"):
        problem = f"there are other agents beside agent.kind={run.agent.kind}, whose program would take all rows"
        yield Problem("agent.sources", problem, "remove them, or write another agent.kind")


@rule(tasks=RL)
def agents_beside_others_fit(run: Run) -> Iterator[Problem]:
    for agent, source in zip(agents_of(run.agent)[1:], run.agent.sources.values(), strict=True):
        key, kind = agent.key, agent.config.kind
        if source.agent_func_path is not None and agent.config.file_part is None:
            yield Problem(
                f"{key}.agent_func_path", f"{key}.kind={kind} reads no file", "remove it, or write another kind"
            )
        if source.max_turns is not None and not agent.config.needs("turns"):
            yield Problem(
                f"{key}.max_turns", f"{key}.kind={kind} has episodes of one turn", "remove it, or write another kind"
            )
        if agent.config.needs("all_rows"):
            problem = f"{kind} takes all rows, and is not one of {', '.join(registry.agent.without('all_rows'))}"
            yield Problem(f"{key}.kind", problem, "write another kind")


@rule(tasks=RL)
def messages_have_a_template(run: Run) -> Iterator[Problem]:
    if run.data.apply_chat_template:
        return
    key, fix, agents = TEMPLATE, f"add {TEMPLATE}=true", agents_in(run)
    callers = [agent for agent in agents if agent.config.needs("tool_messages")]
    if callers:
        fence = ", or write agent.python_style=fence" if callers[0].config.reads("python_style") else ""
        yield Problem(key, "the chat template defines the form of tool calls", f"{fix}{fence}")
    if any(agent.config.needs("user_messages") for agent in agents):
        speaker = next(agent.config.kind for agent in agents if agent.config.needs("user_messages"))
        yield Problem(key, f"agent.kind={speaker} sends messages, which need a chat template", fix)


@rule(tasks=RL)
def rewards_of_environments_are_used(run: Run) -> Iterator[Problem]:
    if run.agent.add_reward and not has_source(run.reward):
        problem = "the run has no reward source whose reward could be added"
        yield Problem(
            "agent.add_reward",
            problem,
            "add a reward source, such as reward.rule=<rule>, or write agent.add_reward=false",
        )


@rule(tasks=RL)
def servers_of_agents_have_addresses(run: Run) -> Iterator[Problem]:
    for name, url, schemes in (
        ("server_url", run.agent.server_url, ("ws", "wss")),
        ("python_url", run.agent.python_url, ("http", "https")),
    ):
        if url is not None and (urlsplit(url).scheme not in schemes or not urlsplit(url).hostname):
            problem = f"{hide_secrets(url)!r} is not an address that begins with {schemes[0]}:// or {schemes[1]}://"
            yield Problem(f"agent.{name}", problem, f"write agent.{name}={schemes[0]}://<host>:<port>")
        elif url is not None:
            yield from password_problems(
                f"agent.{name}", url, "remove it: the suite does not send a password to these servers"
            )


@rule(tasks=RL)
def endpoint_fits(run: Run) -> Iterator[Problem]:
    name = run.algo.advantage.estimator
    if run.agent.needs("whole_episodes") and name in registry.estimator.that_read("gamma"):
        problem = f"{name} needs the order of all tokens, which is not known when a program rewrites its history"
        yield Problem(
            "algo.advantage.estimator", problem, "write algo.advantage.estimator=group_norm, rloo or the like"
        )


@rule(tasks=RL)
def summaries_fit(run: Run) -> Iterator[Problem]:
    at, most, key = run.agent.compact_at_tokens, run.agent.compact_max_tokens, "agent.compact_at_tokens"
    if at is None or not any(registry.agent.reads(kind, "compact_at_tokens") for kind in run.agent.kinds):
        return
    if not run.data.apply_chat_template:
        problem = "the request for a summary is a message of the user, which needs a chat template"
        yield Problem(key, problem, "add data.apply_chat_template=true, or write agent.compact_at_tokens=null")
    name = run.algo.advantage.estimator
    if name in registry.estimator.that_read("gamma"):
        problem = f"{name} needs the order of all tokens, and an episode with a summary has several ledgers"
        yield Problem(
            "algo.advantage.estimator", problem, "write algo.advantage.estimator=group_norm, rloo or the like"
        )
    needed, most_left = most + (run.agent.max_feedback_tokens or 0), run.data.max_len - at
    parts = f"a summary (agent.compact_max_tokens={most}) after an answer (agent.max_feedback_tokens)"
    if needed >= most_left:
        problem = f"{parts} takes up to {needed} tokens, and data.max_len={run.data.max_len} leaves {most_left}"
        yield Problem(key, problem, "lower it or these limits, or raise data.max_len")
    if run.rollout.max_new_tokens is not None and needed >= run.rollout.max_new_tokens:
        problem = f"{parts} takes up to {needed} tokens, and no more may follow the prompt"
        yield Problem("rollout.max_new_tokens", problem, f"raise it above {needed}, or lower these limits")
    if most >= at:
        problem = f"a summary of this length would be as long as the conversation that it replaces ({key}={at})"
        yield Problem("agent.compact_max_tokens", problem, f"write less than {at}")


@rule(tasks=RL)
def containers_reach_the_endpoint(run: Run) -> Iterator[Problem]:
    agent = run.agent
    if agent.command is None or agent.container is None:
        return
    if not agent.container.strip() or agent.container.startswith("-"):
        yield Problem("agent.container", f"{agent.container!r} is not an image", "write an image, jail or null")
    has_own_network = agent.container_network != "host"
    if agent.container == JAIL and has_own_network:
        problem = "the only network access of a jail is the endpoint"
        yield Problem("agent.container_network", problem, "remove it, or write an image in agent.container")
    elif has_own_network and (agent.host in (*THIS_MACHINE, *EVERY_ADDRESS) or agent.host.startswith("127.")):
        problem = f"containers of the network {agent.container_network} do not reach agent.host={agent.host}"
        fix = "write the address that this machine has in that network, such as agent.host=172.18.0.1"
        yield Problem("agent.host", problem, fix)


@rule(tasks=RL)
def servers_of_tools_are_named(run: Run) -> Iterator[Problem]:
    for name in run.agent.tools:
        if not name.startswith(MCP) or not name.removeprefix(MCP).strip():
            problem = f"{name!r} is not an MCP server"
            yield Problem("agent.tools", problem, "write mcp:<command>, or mcp:http://<host>:<port>/mcp")


@rule(tasks=RL)
def programs_read_text(run: Run) -> Iterator[Problem]:
    if run.data.image_key is not None and run.agent.needs("text"):
        problem = "programs that use the endpoint can only send and receive text"
        yield Problem("agent.kind", problem, "write agent.kind=environment")
