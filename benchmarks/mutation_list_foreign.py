"""Mistakes in agents of other frameworks, episode workers and sessions."""

from __future__ import annotations

from mutation import Mutation

COMPAT = ("tests/agents/test_compat.py",)
FOUND = ("tests/config/test_agent_inspections.py",)
ENDPOINT = ("tests/agents/test_endpoint.py",)
ENVIRONMENT = ("tests/agents/test_environment_agent.py",)
MCP = ("tests/agents/test_mcp.py",)
BESIDE = ("tests/agents/test_beside_tools.py",)
SCORING = ("tests/rl/test_scoring.py",)
IMAGES = ("tests/agents/test_agent_images.py",)

FOREIGN: list[Mutation] = [
    Mutation(
        "an environment of OpenRLHF samples by settings of its own, and nobody says so",
        "agents/openrlhf.py",
        "if wanted != own and (wanted or own):",
        "if False:",
        COMPAT,
    ),
    Mutation(
        "the feedback of an environment of OpenRLHF is not shown to the model",
        "agents/openrlhf.py",
        "text=feedback or None,",
        'text="\\n" if feedback else None,',
        COMPAT,
    ),
    Mutation(
        "the observation of OpenRLHF loses what the model wrote",
        "agents/openrlhf.py",
        "self.observed += action + feedback",
        "self.observed += feedback",
        COMPAT,
    ),
    Mutation(
        "the action of OpenRLHF has no special tokens",
        "agents/openrlhf.py",
        "action = str(self.session.bridge.tokenizer.decode(turn.ids))",
        "action = turn.text",
        COMPAT,
    ),
    Mutation(
        "only a changed object that OpenRLHF's environment returns is noticed",
        "agents/openrlhf.py",
        "        check_sampling(shown, kept)\n",
        "",
        COMPAT,
    ),
    Mutation(
        "images of OpenRLHF's feedback are dropped",
        "agents/openrlhf.py",
        'images=tuple(given.get("environment_images") or ()),',
        "images=(),",
        IMAGES,
    ),
    Mutation(
        "an episode that a limit ended without a reward ends the run",
        "agents/environment.py",
        'if status != "done":',
        'if status == "nothing":',
        ENVIRONMENT,
    ),
    Mutation(
        "a program that a limit ended ends the run",
        "agents/endpoint.py",
        "outcome = Scored(0.0, 0.0) if self.must_score else None",
        "outcome = outcome if self.must_score else None",
        ENDPOINT,
    ),
    Mutation(
        "a class without its methods is found by the first episode",
        "preflight/inspections/agents.py",
        "if missing and not node.bases:",
        "if False:",
        FOUND,
    ),
    Mutation(
        "a column that reset needs is not looked for",
        "preflight/inspections/agents.py",
        "        if absent:\n",
        "        if False:\n",
        FOUND,
    ),
    Mutation(
        "images for a policy that reads text are found by the first episode",
        "preflight/inspections/agents.py",
        "shows and run.data.image_key is None",
        "shows and run.data.image_key == 0",
        FOUND,
    ),
    Mutation(
        "the server of an environment is not asked before the run",
        "preflight/inspections/agents.py",
        "unreachable([first_hop(url)], CONNECT_S).items()",
        "{}.items()",
        FOUND,
    ),
    Mutation(
        "a program names as many metrics as it likes",
        "agents/endpoint.py",
        '    check_names("the program", name, given)\n',
        "",
        ENDPOINT,
    ),
    Mutation(
        "a fork of a greedy episode is trained on",
        "agents/session.py",
        "len(self.branches) if self.num_turns else 0, first.greedy",
        "len(self.branches) if self.num_turns else 0, False",
        ("tests/agents/test_agent_session.py",),
    ),
    Mutation(
        "an episode that failed keeps the turn rewards of its other ledgers",
        "rl/scoring.py",
        "        for ledger in ledgers:\n            ledger.turn_rewards[:] = 0",
        "        for ledger in ledgers[-1:]:\n            ledger.turn_rewards[:] = 0",
        ("tests/rl/test_failed_forks.py",),
    ),
    Mutation(
        "all answers of a turn carry the id of one call",
        "agents/tools.py",
        "answers = [answer_to(call, await self.answer(call)) for call in turn.calls]",
        "answers = [answer_to(turn.calls[0], await self.answer(call)) for call in turn.calls]",
        ("tests/agents/test_tools.py",),
    ),
    Mutation(
        "all episodes of a process share a session with an MCP server",
        "agents/mcp_tools.py",
        "        return self.shared or McpSession(self.server, self.schemas)\n",
        "        self.shared = self.shared or McpSession(self.server, self.schemas)\n        return self.shared\n",
        MCP,
    ),
    Mutation(
        "what an MCP server wrote before it died is not told",
        "agents/mcp_tools.py",
        "self.said = (self.said + text)[-TAIL:]",
        "self.said = self.said[-TAIL:]",
        MCP,
    ),
    Mutation(
        "sessions with an MCP server over HTTP are none",
        "agents/mcp_tools.py",
        'self.mode = "auto" if is_shared else "legacy"',
        'self.mode = "auto"',
        MCP,
    ),
    Mutation(
        "an MCP server that died is never started again",
        "agents/mcp_tools.py",
        "                await self.ended(connection)\n",
        "",
        MCP,
    ),
    Mutation(
        "an environment gets the calls of the tools beside it",
        "agents/tools.py",
        "if call.name not in self.own)",
        "if call.name is None)",
        BESIDE,
    ),
    Mutation(
        "an environment beside tools does not get the calls of its own",
        "agents/tools.py",
        "        if not rest:\n            return answered",
        "        if rest:\n            return answered",
        BESIDE,
    ),
    Mutation(
        "the rewards of reward sources stand in for those of the environment",
        "rl/scoring.py",
        "replace(outcome, reward=given.reward + outcome.reward)",
        "replace(outcome, reward=outcome.reward)",
        SCORING,
    ),
]
