"""Several agents in one run: each row is played by the agent of its datasource."""

from __future__ import annotations

import pytest
from scripted import Scripted, run

from rlhf_suite.agents.build import make_episodes
from rlhf_suite.config.declarations.agent import AgentSourceConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.data.generation import SamplingSettings
from rlhf_suite.data.row import Row
from rlhf_suite.data.text_encoders import PromptEncoder
from rlhf_suite.data.trajectory import ENVIRONMENT, Trajectory
from rlhf_suite.errors import UserError

CALL = '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>'
ASKS = """
from rlhf_suite.agents.base import Start, Step

class Environment:
    async def reset(self, task):
        return Start()

    async def step(self, turn):
        return Step.say("{says}", reward=0.25)

    async def close(self): ...
"""


@pytest.fixture
def config(tmp_path):
    """A run in which an environment asks again, except for rows of two datasets."""
    config = Run.of("ppo")
    config.data.apply_chat_template = True
    config.reward.rule, config.data.label_key = "exact_match", "label"
    (tmp_path / "asks.py").write_text(ASKS.format(says="and then?"))
    (tmp_path / "other.py").write_text(ASKS.format(says="why?"))
    config.agent.kind, config.train.agent_func_path = "environment", str(tmp_path / "asks.py")
    config.agent.max_turns, config.agent.python_style = 3, "tool"
    config.agent.sources = {
        "plain": AgentSourceConfig("single_turn", ["chat", "essays"]),
        "code": AgentSourceConfig("python", ["sums"]),
        "why": AgentSourceConfig("environment", ["doubts"], str(tmp_path / "other.py"), max_turns=2),
    }
    return config


def played(config, tokenizer, datasource, replies, allowed=None):
    """Play an episode of a row; the ledger, and the text after the prompt."""
    row = Row({"input": "go", "label": "5"} | ({} if datasource is None else {"datasource": datasource}), "f", 1)
    prompt = PromptEncoder(tokenizer, config.data, keeps_chat=True).encode(row)
    stop, ledger = tokenizer.eos_token_id, Trajectory.start(prompt, 0, 0)

    async def play_one():
        episodes = make_episodes(config, Scripted(tokenizer, replies), tokenizer, [stop], None)
        if allowed is not None:
            episodes = episodes.limit_turns(allowed)
        return await episodes.run(ledger, SamplingSettings(stop_token_ids=(stop,)), (1, 2))

    (done,) = run(play_one)
    return done, tokenizer.decode(done.ids[len(prompt.ids) :])


@pytest.mark.notices(
    "all rows have the agent of agent.kind",
    "agents/episodes.py",
    "self.named.get(task.datasource, self.others)",
    "self.others",
)
@pytest.mark.notices(
    "an agent of some datasets has the number of turns of the others",
    "config/declarations/agent.py",
    "max_turns=source.max_turns or config.max_turns",
    "max_turns=config.max_turns",
)
def test_each_row_has_the_agent_of_its_datasource(config, tokenizer):
    for datasource in ("chat", "essays"):
        done, said = played(config, tokenizer, datasource, ["5"])
        assert said == "5<|im_end|>" and ENVIRONMENT not in done.owner
        assert (done.reward, done.extra["agent/turns"]) == (None, 1.0), "the reward sources score it"
    done, said = played(config, tokenizer, "sums", [CALL, "42"])
    assert "<|im_start|>tool\n42<|im_end|>" in said and done.extra["agent/python_calls"] == 1
    done, said = played(config, tokenizer, "doubts", ["a", "b"])
    assert said.count("why?") == 1 and done.extra["agent/turns"] == 2
    for datasource in (None, "others"):
        done, said = played(config, tokenizer, datasource, ["a", "b", "c"])
        assert said.count("and then?") == 2 and done.extra["agent/turns"] == 3


@pytest.mark.notices(
    "allowed calls do not hold for the agents of some datasets",
    "agents/episodes.py",
    "datasource: agent.limit_turns(max_turns) for",
    "datasource: agent for",
)
def test_a_limit_of_turns_holds_for_each_agent(config, tokenizer):
    assert played(config, tokenizer, "doubts", ["a"], allowed=1)[0].extra["agent/turns"] == 1
    assert played(config, tokenizer, "others", ["a"], allowed=1)[0].extra["agent/turns"] == 1
    assert played(config, tokenizer, "chat", ["a"], allowed=1)[0].extra["agent/turns"] == 1


def test_an_error_in_the_file_of_an_agent_names_its_flag(config, tokenizer, tmp_path):
    (tmp_path / "other.py").write_text("class Environment: ...\n1 / 0")
    with pytest.raises(UserError, match=r"^agent.sources.why.agent_func_path=\S*other.py: importing it raised Zero"):
        make_episodes(config, None, tokenizer, [tokenizer.eos_token_id], None)
