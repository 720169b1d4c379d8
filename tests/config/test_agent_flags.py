"""Flags of agents: what each kind needs, said before anything starts."""

from __future__ import annotations

import pytest

from rlhf_suite.config.declarations.agent import AgentConfig, AgentSourceConfig

RUN = "task=ppo actor.model_name_or_path=builtin:tiny data.prompt_dataset=builtin:reverse algo.advantage.estimator=rloo"
RUN += " rollout.n_samples_per_prompt=2 rollout.batch_size=4 train.batch_size=8 data.max_len=64"
LIMITS = "data.max_len=300 agent.max_feedback_tokens=100 agent.compact_at_tokens=120 agent.compact_max_tokens=40"
RULE, CHAT = "reward.rule=exact_match data.label_key=label", "data.apply_chat_template=true"


def test_agents_of_some_rows_may_run_in_workers():
    assert not AgentConfig(num_workers=2).has_workers
    assert AgentConfig(num_workers=2, sources={"code": AgentSourceConfig("python", ["sums"])}).has_workers
    assert not AgentConfig(num_workers=2, sources={"chat": AgentSourceConfig("single_turn", ["chat"])}).has_workers


@pytest.fixture
def files(tmp_path):
    """Paths by the names in command lines."""
    texts = {"ENV": "class Environment: ...", "TOOLS": "tools = []", "NONE": "x = 1"}
    texts["BOTH"] = "class Environment: ...\ntools = []"
    texts["RAW"] = "class AgentInstance:\n    async def step(self, states): ...\ntools = []"
    texts["PAYS"] = "class A:\n    def reset(self, **row): ...\n    def act(self): ...\n    def get_reward(self): ..."
    texts["ROLES"] = "class Environment:\n    roles = ('a', 'b')"
    texts["TOOLED"] = texts["ROLES"] + "\ntools = []"
    texts["PROGRAM"] = "async def run_agent(task, base_url, api_key): ..."
    texts["SHORT"] = "def run_agent(task): ..."
    texts["TRL"] = "class A:\n    def reset(self, **row): ...\n    def act(self): ..."
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    return {name: str(tmp_path / f"{name}.py") for name in texts}


def problems(checked, files, line: str) -> list[tuple[str, str]]:
    for name, path in files.items():
        line = line.replace(f"={name}", f"={path}").replace(f'"{name}"', f'"{path}"')
    return [(problem.key, problem.what) for problem in checked(f"{RUN} {line}").problems]


@pytest.mark.notices(
    "environments get no columns without a reward file",
    "config/declarations/data.py",
    ' | algorithm_needs(\n    "agent.kind", registry.agent, "columns"\n)',
    "",
)
@pytest.mark.notices(
    "agent.on_error may not say how many failures a run takes",
    "config/declarations/reward.py",
    '| is_one_of("agent.on_error", "drop", "zero")',
    "",
)
@pytest.mark.parametrize(
    "line",
    [
        "agent.kind=environment train.agent_func_path=ENV",
        f"agent.kind=environment train.agent_func_path=ENV {RULE} agent.max_turns=3",
        f"agent.kind=environment train.agent_func_path=TRL {CHAT}",
        f"agent.kind=tools train.agent_func_path=TOOLS {CHAT} {RULE} agent.tool_parser=json",
        f"agent.kind=tools train.agent_func_path=BOTH {CHAT} {RULE}",
        f"agent.kind=environment train.agent_func_path=BOTH {CHAT} agent.mcp_sessions=process",
        f"agent.kind=environment train.agent_func_path=TRL {CHAT} {RULE}",
        f"agent.kind=environment train.agent_func_path=PAYS {CHAT}",
        f"agent.kind=environment train.agent_func_path=PAYS {CHAT} {RULE} agent.add_reward=true",
        f"agent.kind=tools 'agent.tools=[\"mcp:python server.py\"]' {CHAT} {RULE}",
        f"agent.kind=python {RULE} agent.python_style=fence",
        *(f"agent.kind=python {RULE} agent.on_error={word} reward.max_error_rate=0.9" for word in ("zero", "drop")),
        f"agent.kind=python {RULE} agent.python_url=http://localhost:8080",
        "agent.kind=environment agent.server_url=ws://localhost:8000/ws agent.action_key=null",
        f"agent.kind=endpoint train.agent_func_path=PROGRAM {CHAT} agent.host=127.0.0.2 agent.max_concurrent=4",
        f"agent.kind=endpoint train.agent_func_path=PROGRAM {CHAT} {RULE} agent.tool_parser=json",
        f"agent.kind=endpoint agent.command=echo agent.score_command=echo agent.command_memory_mb=64 {CHAT} {RULE}",
        f"agent.kind=endpoint agent.command=echo agent.container=jail agent.container_paths=[/opt] {CHAT} {RULE}",
        f"agent.kind=endpoint agent.command=echo agent.container=image:1 {CHAT} {RULE} "
        "agent.container_network=agents agent.host=172.18.0.1",
        "agent.kind=environment train.agent_func_path=ENV agent.num_workers=2 agent.max_restarts=0",
        "agent.kind=environment train.agent_func_path=ENV data.reward_columns=[level]",
        f"agent.kind=endpoint train.agent_func_path=PROGRAM {CHAT} data.reward_columns=[level]",
        f"{RULE} agent.max_turns=3 agent.python_memory_mb=64 'agent.sources={{a: {{kind: python, datasets: [sums]}}}}'",
        f"{RULE} agent.kind=python 'agent.sources={{a: {{datasets: [x, y]}}, b: {{kind: environment, datasets: [z], "
        'max_turns: 2, agent_func_path: "ENV"}}\' train.agent_func_path=ENV',
        f"agent.kind=environment train.agent_func_path=ENV {CHAT} {LIMITS} agent.compact_prompt=please",
        f"agent.kind=tools train.agent_func_path=TOOLS {CHAT} {RULE} {LIMITS}",
        f"agent.kind=environment train.agent_func_path=ROLES {CHAT} {LIMITS}",
        f"agent.kind=environment train.agent_func_path=ROLES {RULE} agent.add_reward=true",
        f"{RULE} {CHAT} agent.kind=environment train.agent_func_path=ENV agent.tool_parser=json "
        "'agent.sources={a: {kind: tools, datasets: [x], "
        'agent_func_path: "TOOLS"}}\'',
    ],
)
def test_whole_agents_have_no_problem(checked, files, line):
    assert problems(checked, files, line) == []


@pytest.mark.parametrize(
    ("line", "key", "what"),
    [
        ("agent.kind=environment", "train.agent_func_path", "has no environment"),
        (f"agent.kind=python {RULE} data.reward_columns=[level]", "data.reward_columns", "has no effect"),
        (f"agent.kind=tools {RULE} {CHAT}", "train.agent_func_path", "has no tools"),
        ("agent.kind=environment train.agent_func_path=gone.py", "train.agent_func_path", "not a Python file"),
        ("agent.kind=environment train.agent_func_path=NONE", "train.agent_func_path", "nothing that an agent"),
        ("agent.kind=environment train.agent_func_path=TOOLS", "train.agent_func_path", "is not for agent.kind"),
        (f"agent.kind=tools train.agent_func_path=ENV {RULE} {CHAT}", "train.agent_func_path", "is not for agent.kind"),
        ("agent.kind=environment train.agent_func_path=TRL", "data.apply_chat_template", "need a chat template"),
        (
            "agent.kind=environment train.agent_func_path=BOTH",
            "data.apply_chat_template",
            "defines the form of tool calls",
        ),
        ("agent.kind=environment train.agent_func_path=RAW", "train.agent_func_path", "raw text, and tools beside it"),
        (
            f"agent.kind=environment train.agent_func_path=PAYS {CHAT} {RULE}",
            "agent.add_reward",
            "would score nothing",
        ),
        (f"agent.kind=environment train.agent_func_path=ROLES {RULE}", "agent.add_reward", "would score nothing"),
        (
            f"agent.kind=environment train.agent_func_path=TOOLED {CHAT}",
            "train.agent_func_path",
            "has an environment with roles, and no role can call",
        ),
        (
            "agent.kind=environment train.agent_func_path=ENV agent.add_reward=true",
            "agent.add_reward",
            "the run has no reward source",
        ),
        (
            f"agent.kind=tools train.agent_func_path=TOOLS {RULE}",
            "data.apply_chat_template",
            "defines the form of tool calls",
        ),
        (
            f"agent.kind=python agent.python_style=tool {RULE}",
            "data.apply_chat_template",
            "defines the form of tool calls",
        ),
        (
            "agent.kind=environment train.agent_func_path=ENV agent.history=template",
            "agent.history",
            "shows the earlier turns",
        ),
        (f"agent.kind=tools agent.tools=[server.py] {RULE} {CHAT}", "agent.tools", "not an MCP server"),
        (
            f"agent.kind=tools train.agent_func_path=TOOLS agent.tool_parser=vllm {RULE} {CHAT}",
            "agent.tool_parser",
            "needs agent.vllm_tool_parser to be set",
        ),
        (
            f"agent.kind=tools train.agent_func_path=TOOLS agent.vllm_tool_parser=hermes {RULE} {CHAT}",
            "agent.vllm_tool_parser",
            "tool_parser",
        ),
        (
            "agent.kind=environment train.agent_func_path=ENV agent.server_url=ws://h/ws",
            "agent.server_url",
            "two environments",
        ),
        ("agent.kind=environment agent.server_url=http://h/ws", "agent.server_url", "begins with ws:// or wss://"),
        (f"agent.kind=python {RULE} agent.python_url=http://a:b@h:80", "agent.python_url", "a user name or password"),
        (f"agent.kind=python {RULE} agent.python_url=h:80", "agent.python_url", "begins with http:// or https://"),
        ("agent.kind=environment train.agent_func_path=ENV agent.action_key=a", "agent.action_key", "server_url"),
        ("agent.kind=python", "reward", "nothing scores the samples"),
        (
            f"{RULE} eval.dataset=builtin:reverse eval.steps=1 eval.max_calls=[0]",
            "eval.max_calls",
            "an answer of a single turn has no calls",
        ),
        (f"agent.kind=endpoint {CHAT}", "train.agent_func_path", "has no program"),
        (
            f"agent.kind=endpoint {CHAT} agent.command=echo train.agent_func_path=PROGRAM",
            "agent.command",
            "two programs",
        ),
        (f"agent.kind=python {RULE} agent.command=echo", "agent.command", "agent.kind"),
        (
            f"agent.kind=endpoint {CHAT} train.agent_func_path=PROGRAM agent.container=jail",
            "agent.container",
            "agent.command",
        ),
        (
            f"agent.kind=endpoint {CHAT} agent.command=echo agent.container=image agent.container_network=agents",
            "agent.host",
            "do not reach agent.host=127.0.0.1",
        ),
        *(
            (
                f"agent.kind=endpoint {CHAT} agent.command=echo agent.container=image agent.container_network=agents "
                f"agent.host={host}",
                "agent.host",
                f"do not reach agent.host={host.strip(chr(39))}",
            )
            for host in ("localhost", "'::1'", "0.0.0.0", "'::'")
        ),
        (
            f"agent.kind=endpoint {CHAT} agent.command=echo agent.container=jail agent.container_network=agents",
            "agent.container_network",
            "the only network access of a jail",
        ),
        (
            f"agent.kind=endpoint {CHAT} agent.command=echo agent.container=--privileged",
            "agent.container",
            "is not an image",
        ),
        (
            f"agent.kind=endpoint {CHAT} train.agent_func_path=PROGRAM agent.score_command=echo",
            "agent.score_command",
            "agent.command",
        ),
        (
            f"agent.kind=endpoint train.agent_func_path=SHORT {CHAT}",
            "train.agent_func_path",
            "takes 1 arguments, not 3",
        ),
        (f"agent.kind=endpoint train.agent_func_path=ENV {CHAT}", "train.agent_func_path", "is not for agent.kind"),
        ("agent.kind=environment train.agent_func_path=PROGRAM", "train.agent_func_path", "is not for agent.kind"),
        ("agent.kind=endpoint train.agent_func_path=PROGRAM", "data.apply_chat_template", "need a chat template"),
        (
            f"agent.kind=endpoint train.agent_func_path=PROGRAM {CHAT} algo.advantage.estimator=reinforce",
            "algo.advantage.estimator",
            "needs the order of all tokens",
        ),
        (
            f"agent.kind=endpoint train.agent_func_path=PROGRAM {CHAT} agent.tool_timeout_s=3",
            "agent.tool_timeout_s",
            "agent.kind",
        ),
        (
            f"agent.kind=environment train.agent_func_path=ENV {LIMITS}",
            "agent.compact_at_tokens",
            "needs a chat template",
        ),
        (
            f"agent.kind=environment train.agent_func_path=ENV {CHAT} {LIMITS} agent.compact_at_tokens=160",
            "agent.compact_at_tokens",
            "takes up to 140 tokens, and data.max_len=300 leaves 140",
        ),
        (
            f"agent.kind=environment train.agent_func_path=ENV {CHAT} {LIMITS} agent.compact_at_tokens=40",
            "agent.compact_max_tokens",
            "as long as the conversation that it replaces (agent.compact_at_tokens=40)",
        ),
        (
            f"agent.kind=environment train.agent_func_path=ENV {CHAT} {LIMITS} rollout.max_new_tokens=140",
            "rollout.max_new_tokens",
            "takes up to 140 tokens",
        ),
        (
            f"agent.kind=environment train.agent_func_path=ENV {CHAT} {LIMITS} algo.advantage.estimator=reinforce",
            "algo.advantage.estimator",
            "an episode with a summary has several ledgers",
        ),
        (f"agent.kind=python {RULE} agent.compact_at_tokens=30", "agent.compact_at_tokens", "agent.kind"),
        (
            f"agent.kind=environment train.agent_func_path=ENV {CHAT} agent.compact_prompt=please",
            "agent.compact_prompt",
            "agent.compact_at_tokens",
        ),
        (f"{RULE} agent.max_turns=3", "agent.max_turns", "agent.kind"),
        (f"{RULE} agent.num_workers=2", "agent.num_workers", "agent.kind"),
        ("agent.kind=environment train.agent_func_path=ENV agent.num_workers=-1", "agent.num_workers", "is not >= 0"),
        ("agent.kind=environment train.agent_func_path=ENV agent.max_restarts=1", "agent.max_restarts", "num_workers"),
        (f"{RULE} train.agent_func_path=ENV", "train.agent_func_path", "agent.kind"),
        (f"{RULE} agent.kind=python 'agent.sources={{a: {{}}}}'", "agent.sources.a.datasets", "no row has this agent"),
        (
            f"{RULE} 'agent.sources={{a: {{kind: python, datasets: [x]}}, b: {{datasets: [y, x]}}}}'",
            "agent.sources.b.datasets",
            "the rows of x have the agent a already",
        ),
        (
            f"{RULE} 'agent.sources={{a: {{kind: environment, datasets: [x]}}}}'",
            "train.agent_func_path",
            "agent.sources.a.kind=environment has no environment",
        ),
        (
            f"{RULE} 'agent.sources={{a: {{kind: environment, datasets: [x], agent_func_path: \"TOOLS\"}}}}'",
            "agent.sources.a.agent_func_path",
            "is not for agent.sources.a.kind=environment",
        ),
        (
            f"{RULE} 'agent.sources={{a: {{kind: python, datasets: [x], agent_func_path: \"ENV\"}}}}'",
            "agent.sources.a.agent_func_path",
            "reads no file",
        ),
        (
            f"{RULE} agent.kind=python 'agent.sources={{a: {{datasets: [x], max_turns: 2}}}}'",
            "agent.sources.a.max_turns",
            "has episodes of one turn",
        ),
        (
            f"agent.kind=endpoint train.agent_func_path=PROGRAM {CHAT} {RULE} 'agent.sources={{a: {{datasets: [x]}}}}'",
            "agent.sources",
            "would take all rows",
        ),
        (
            f"{RULE} 'agent.sources={{a: {{kind: tools, datasets: [x], agent_func_path: \"TOOLS\"}}}}'",
            "data.apply_chat_template",
            "defines the form of tool calls",
        ),
        (
            "agent.kind=environment train.agent_func_path=ENV 'agent.sources={a: {datasets: [x]}}'",
            "reward",
            "nothing scores the samples",
        ),
        (
            f"{RULE} 'agent.sources={{a: {{kind: endpoint, datasets: [x]}}}}'",
            "agent.sources.a.kind",
            "single_turn, tools, environment, python",
        ),
    ],
)
def test_a_mistake_is_one_message(checked, files, line, key, what):
    ((found, said),) = problems(checked, files, line)
    assert found == key and what in said
