"""Mistakes in episodes of agents: the tokens between turns, what is executed, and what is rewarded."""

from __future__ import annotations

from mutation import Mutation

BRIDGE = ("tests/agents/test_bridge.py",)
ENVIRONMENT = ("tests/agents/test_environment_agent.py",)
PARSING = ("tests/agents/test_parsing.py",)
FORKS = ("tests/rl/test_forked_episodes.py",)
RUNS = ("tests/rl/test_agents_in_runs.py",)
SESSION = ("tests/agents/test_agent_session.py",)

AGENTS = [
    Mutation(
        "the bridge begins one token too early, with the end of the turn again",
        "agents/bridge.py",
        "return rest[len(closing) :]",
        "return rest[len(closing) - len(self.stops[stop]) :]",
        BRIDGE,
    ),
    Mutation(
        "the bridge loses the line break behind the end of a turn",
        "agents/bridge.py",
        "return rest[len(closing) :]",
        "return rest[len(closing) :].lstrip()",
        BRIDGE,
    ),
    Mutation(
        "a stop token in the text of an answer counts as the end of the turn",
        "agents/bridge.py",
        "header, answered, _ = self.rest([tried], tools).partition(ANSWER)",
        "header, answered = self.rest(answers, tools), ANSWER",
        BRIDGE,
    ),
    Mutation(
        "tokens that merge across the end of a turn are not noticed",
        "agents/bridge.py",
        "if tokens(self.tokenizer, head) + ids != tokens(self.tokenizer, whole):",
        "if False:",
        BRIDGE,
    ),
    Mutation(
        "what the model wrote is decoded and encoded again",
        "agents/session.py",
        "prompt_ids=ledger.ids.tolist(),",
        "prompt_ids=tokens(self.bridge.tokenizer, self.bridge.tokenizer.decode(ledger.ids)),",
        SESSION,
    ),
    Mutation(
        "what an environment says is trained on",
        "data/trajectory.py",
        "self._append(np.asarray(ids), ENVIRONMENT, zeros(ids), -1)",
        "self._append(np.asarray(ids), MODEL, zeros(ids), -1)",
        SESSION,
    ),
    Mutation(
        "every turn of an episode draws the same random numbers",
        "agents/session.py",
        "if self.num_turns else ()",
        "if False else ()",
        SESSION,
    ),
    Mutation(
        "a fork keeps turns that its history does not have",
        "agents/session.py",
        "return self.fork([*branch.ledger.ids[:length].tolist(), *ids]",
        "return self.fork([*branch.ledger.ids.tolist(), *ids]",
        SESSION,
    ),
    Mutation(
        "an answer that fills the ledger is appended",
        "agents/session.py",
        "len(ids) >= self.room()",
        "len(ids) > self.room()",
        SESSION,
    ),
    Mutation(
        "a call in a turn that was cut off is whole",
        "agents/parsing.py",
        "CUT_OFF if is_cut else call.problem",
        "call.problem",
        PARSING,
    ),
    Mutation(
        "a call that cannot be read is text",
        "agents/parsing.py",
        r're.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)',
        r're.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)',
        PARSING,
    ),
    Mutation(
        "the conversation goes on behind a turn that was cut off",
        "agents/environment.py",
        "if turn.is_cut:",
        "if False:",
        ENVIRONMENT,
    ),
    Mutation(
        "the reward of the last step counts twice",
        "agents/environment.py",
        "            if status := self.ended(turn, step, session):",
        "            if step.reward:\n                session.open.ledger.reward_turn(step.reward)\n"
        "            if status := self.ended(turn, step, session):",
        ENVIRONMENT,
    ),
    Mutation(
        "what a tool printed is a part of the answer that rewards see",
        "rl/scoring.py",
        "return t.turns[-1] if ENVIRONMENT in t.owner else t.response_ids",
        "return t.response_ids",
        RUNS,
    ),
    Mutation(
        "rewards of turns are lost",
        "rl/scoring.py",
        "Scored(t.reward + turns,",
        "Scored(t.reward,",
        RUNS,
    ),
    Mutation(
        "the ledgers of an episode are samples of their own in baselines",
        "rl/credit.py",
        "episodes=batch.episode,",
        "episodes=None,",
        FORKS,
    ),
    Mutation(
        "each ledger of an episode weighs as much as an episode",
        "losses/reduce.py",
        "whole = (counts if episode_tokens is None else episode_tokens)",
        "whole = counts",
        FORKS,
    ),
    Mutation(
        "the ledgers of an episode are in several optimiser steps",
        "data/trajectory.py",
        "return [row for episode in episodes for row in torch.nonzero(self.episode == episode)[:, 0].tolist()]",
        "return list(episodes)",
        FORKS,
    ),
    Mutation(
        "dynamic filtering counts ledgers",
        "rl/rollout.py",
        "episodes = group.episodes()",
        "episodes = group",
        FORKS,
    ),
    Mutation(
        "the first ledger of an episode is scored",
        "rl/scoring.py",
        "in zip(rows.lasts, episodes, strict=True)",
        "in zip(rows.starts, episodes, strict=True)",
        FORKS,
    ),
    Mutation(
        "the last ledger of an episode is not that of the last turn",
        "agents/session.py",
        "return Episode([*others, self.latest.ledger]",
        "return Episode(self.ledgers",
        SESSION,
    ),
    Mutation(
        "a call with a problem is executed",
        "agents/tools.py",
        "            if call.problem is not None:\n                raise ToolError(call.problem)\n",
        "",
        ("tests/agents/test_tools.py",),
    ),
    Mutation(
        "a block of code that is not closed runs",
        "agents/python_tool.py",
        "if rest.is_cut or not closed:",
        "if rest.is_cut:",
        ("tests/agents/test_python_tool.py",),
    ),
    Mutation(
        "a dead engine is an error of the environment",
        "agents/environment.py",
        "            turn = await session.reply()",
        "            turn = await self.ask(session.reply)",
        ENVIRONMENT,
    ),
]
