"""An agent of the user's own: a function in one file makes it, and its declaration says what the run must provide."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
from plain_run import run, small

from rlhf_suite.agents.build import make_agent
from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.declarations.agent import AgentConfig, AgentSourceConfig, agents_of
from rlhf_suite.data.trajectory import ENVIRONMENT, MODEL
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.registry import WrongResult
from rlhf_suite.tracking.metrics import read_rows

OWN = '''
from rlhf_suite.agents.base import Episode, Task
from rlhf_suite.agents.episodes import Agent, AgentSetup
from rlhf_suite.agents.session import Session
from rlhf_suite.registry import agent


class ThinkTwice:
    def __init__(self, max_turns: int) -> None:
        self.max_turns = max_turns

    def limit_turns(self, max_turns: int) -> "ThinkTwice":
        return ThinkTwice(max_turns)

    async def run(self, task: Task, session: Session) -> Episode:
        if session.set_prompt(None, None):
            await session.reply(max_new_tokens=4)
        while session.num_turns < self.max_turns and not session.is_full and session.observe_text(" again: "):
            await session.reply(max_new_tokens=4)
        return session.episode(extra={"agent/turns": float(session.num_turns)})


@agent(needs=("turns",), reads=("max_feedback_tokens",))
def think_twice(setup: AgentSetup) -> Agent:
    """The model answers, is told to look again, and answers once more."""
    return ThinkTwice(setup.chosen.config.max_turns)


@agent(needs=("turns", "user_messages", "all_rows"))
def alone(setup):
    """An agent that leads the conversation."""
    return ThinkTwice(2)


def undeclared(setup):
    return ThinkTwice(1)


def wrong(setup):
    return len
'''


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def test_an_own_agent_trains_on_every_token_that_the_model_wrote(ranks, own, tmp_path):
    more = {"rollout__max_new_tokens": 24, "reward__rules__length_limit": 24}
    flags = small(agent__kind=f"{own}:think_twice", agent__max_turns=2, train__max_steps=1, **more)
    ranks(1).call(run, tmp_path, flags)
    (row,) = [row for row in read_rows(tmp_path / "metrics.jsonl") if "train/reward" in row]
    table = pq.read_table(tmp_path / "rollouts/step_000001.parquet").to_pylist()
    owners = [sample["owner"] for sample in table]
    assert len(owners) == 4 and all(MODEL in each for each in owners)
    asked = [each for each in owners if ENVIRONMENT in each]
    assert asked, "no response left room for a second turn"
    assert row["agent/turns"] == pytest.approx(1 + len(asked) / len(owners))


def problems(line: str) -> list[tuple[str, str]]:
    return [(each.key, each.what) for each in preflight(parse(f"task=ppo demo=ppo {line}".split())).problems]


def test_its_declaration_decides_which_flags_are_read_and_what_is_needed(own):
    kind = f"agent.kind={own}:"
    assert problems(f"{kind}think_twice agent.max_turns=3 agent.max_feedback_tokens=64") == []
    ((key, _),) = problems(f"{kind}think_twice agent.server_url=ws://localhost:1/ws")
    assert key == "agent.server_url"
    ((key, what),) = problems(f"{kind}alone")
    assert key == "data.apply_chat_template" and "sends messages" in what
    assert problems(f"{kind}undeclared agent.tool_timeout_s=3 data.reward_columns=[x]") == []
    ((key, what),) = problems(f"{kind}gone")
    assert key == "agent.kind" and "defines no gone" in what


def test_an_own_agent_stands_beside_others_unless_it_needs_all_rows(own):
    def with_source(function: str) -> AgentConfig:
        return AgentConfig(sources={"mine": AgentSourceConfig(f"{own}:{function}", ["sums"])})

    assert with_source("think_twice").has_turns
    assert agents_of(with_source("think_twice"))[1].config.needs("turns")
    assert not agents_of(with_source("think_twice"))[1].config.needs("columns")
    assert agents_of(with_source("undeclared"))[1].config.needs("columns")
    ((key, what),) = problems(f"agent.kind=python agent.sources={{a:{{kind:'{own}:alone',datasets:[x]}}}}")
    assert key == "agent.sources.a.kind" and "takes all rows" in what


def test_something_that_is_not_an_agent_is_refused(own):
    (chosen,) = agents_of(AgentConfig(kind=f"{own}:wrong"))
    with pytest.raises(WrongResult, match=r"wrong returned builtin_function_or_method, as agent .*async run\(task"):
        make_agent(chosen, must_score=False)
