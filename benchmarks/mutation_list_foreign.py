"""Mistakes in agents of other frameworks, episode workers and sessions."""

from __future__ import annotations

from mutation import Mutation

COMPAT = ("tests/agents/test_compat.py",)
FOUND = ("tests/config/test_agent_inspections.py",)
ENDPOINT = ("tests/agents/test_endpoint.py",)
ENVIRONMENT = ("tests/agents/test_environment_agent.py",)
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
]
