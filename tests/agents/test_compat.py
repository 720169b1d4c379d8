"""Environments of other libraries: written as they are there, found in their file and played to the end."""

from __future__ import annotations

import pytest
from scripted import Scripted, chat_task, open_session, run

from foreign_agents import BASES, FILES
from rlhf_suite.agents.base import Task
from rlhf_suite.agents.build import make_agent, make_episodes
from rlhf_suite.config.agent import AgentConfig, agents_of
from rlhf_suite.config.agent_file import Export, export_of
from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.generation import SamplingSettings
from rlhf_suite.data.row import Row
from rlhf_suite.data.text_encoders import PromptEncoder
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.errors import UserError
from rlhf_suite.models.builtin import byte_tokenizer
from rlhf_suite.python_source import SourceError
from rlhf_suite.rewards.base import RewardFailure, Scored

CALL = '<tool_call>{"name": "increment", "arguments": {"step": %d}}</tool_call>'


@pytest.fixture
def written(tmp_path):
    """The path of a file with some text, beside stand-ins for the base classes of libraries."""
    (tmp_path / "bases.py").write_text(BASES)

    def write(text: str) -> str:
        (tmp_path / "mine.py").write_text(text)
        return str(tmp_path / "mine.py")

    return write


def play(tokenizer, file, replies, label, text=False, max_turns=5, **limits):
    task = Task([5, 6], "a question", label=label) if text else chat_task(tokenizer, label=label)
    session = open_session(tokenizer, Scripted(tokenizer, replies), task, parser="hermes", **limits)
    config = AgentConfig(kind="environment", max_turns=max_turns, timeout_s=50.0, tool_timeout_s=20.0)
    episode = run(make_agent(agents_of(config, file)[0], must_score=True).run, task, session)
    said = tokenizer.decode(episode.ledgers[0].ids)
    return episode, said.replace("<|im_start|>", "[").replace("<|im_end|>", "]")


def test_an_agent_file_of_openrlhf(tokenizer, written):
    episode, said = play(tokenizer, written(FILES["openrlhf"]), ["a", "b", "4"], "4", text=True)
    assert said.endswith("a]\n\nHuman: no\nAssistant: b]\n\nHuman: no\nAssistant: 4]")
    assert episode.outcome == Scored(1.0, 1.0, {"steps": 3.0})
    assert episode.ledgers[0].turn_rewards.sum() == pytest.approx(0.5)


def test_sampling_by_the_environment_is_refused(tokenizer, written):
    file = written(FILES["openrlhf"].replace('states.get("sampling_params", None)', "object()"))
    outcome = play(tokenizer, file, ["a"], "4", text=True)[0].outcome
    assert isinstance(outcome, RewardFailure) and "rollout.stop" in outcome.reason


def test_an_environment_of_trl(tokenizer, written):
    episode, said = play(tokenizer, written(FILES["trl"]), [CALL % 3, CALL % 2, "done"], "5")
    assert said.startswith("[user\nbegin The counter begins at 0.]") and said.count("[tool\n") == 2
    assert "[tool\n3]" in said and "[tool\n5]" in said and episode.outcome.reward == 1.0
    assert play(tokenizer, written(FILES["trl"]), [CALL % 3, "done"], "5")[0].outcome.reward == 0.0


ENDS = {
    "the model calls no tool": (["done"], {}, "done"),
    "agent.max_turns": ([CALL % 1], {"max_turns": 2}, "turns"),
    "a turn is cut off": ([("<tool_call>", "length")], {}, "truncated"),
    "the context is full": ([CALL % 1] * 99, {"max_turns": 99, "max_len": 700}, "truncated"),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_environment_of_trl_is_asked_for_its_reward_once_however_the_episode_ends(tokenizer, written, end):
    more, limits, status = ENDS[end]
    counted = FILES["trl"].replace(
        "        return float(",
        "        self.asked = 1 + getattr(self, 'asked', 0)\n        return self.asked + float(",
    )
    episode, _ = play(tokenizer, written(counted), [CALL % 5, *more], "5", **limits)
    assert (episode.status, episode.outcome.reward) == (
        status,
        2.0 if end != "agent.max_turns" and "full" not in end else 1.0,
    )


def test_an_environment_of_skyrl(tokenizer, written):
    episode, said = play(tokenizer, written(FILES["skyrl"]), ["x", "y"], "y")
    assert said.startswith("[user\nbegin]\n[user\nbegin now]") and "[user\nagain]" in said
    assert episode.status == "done" and episode.outcome == Scored(1.0, 1.0, {})


def test_an_environment_of_gymnasium(tokenizer, written):
    episode, said = play(tokenizer, written(FILES["gymnasium"]), ["right", "right"], "")
    assert said.startswith("[user\nbegin You are at 0.]") and "[user\nYou are at 1.]" in said
    assert episode.outcome == Scored(1.0, 1.0, {"agent/environment_truncated": 0.0})


@pytest.mark.parametrize("form", FILES)
def test_the_form_of_a_file_is_found_without_running_it(written, form):
    assert export_of(written("raise SystemExit\n" + FILES[form])).form == form


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class Environment: ...", Export("environment", "Environment")),
        ("from elsewhere import Environment", Export("environment", "Environment")),
        ("def f(): ...\ntools = [f]", Export("tools", "tools")),
    ],
)
def test_forms_of_the_suite(written, text, found):
    assert export_of(written(text)) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "has nothing that an agent could use"),
        ("class AgentExecutor: ...", "AgentExecutor and no AgentInstance"),
        ("def load_environment(): ...", "an environment of verifiers"),
        ("def f(:", "invalid syntax"),
    ],
)
def test_a_file_without_a_known_form_is_refused(written, text, problem):
    with pytest.raises(SourceError, match=problem):
        export_of(written(text))
    with pytest.raises(SourceError, match="not a Python file"):
        export_of("gone.py")


def test_an_error_in_the_file_names_it(written):
    file = written("class Environment: ...\n1 / 0")
    with pytest.raises(UserError, match=rf"train.agent_func_path={file}: importing it raised ZeroDivisionError"):
        make_agent(agents_of(AgentConfig(kind="environment"), file)[0], must_score=True)


def test_a_run_has_episodes_of_its_agent(tokenizer, written):
    config = PPORun()
    config.data.apply_chat_template = True
    config.data.label_key = "label"
    policy = Scripted(tokenizer, [CALL % 5, "done"])
    assert make_episodes(config, policy, tokenizer, [tokenizer.eos_token_id], None) is None
    config.agent.kind, config.train.agent_func_path = "environment", written(FILES["trl"])
    prompt = PromptEncoder(tokenizer, config.data, keeps_chat=True).encode(Row({"input": "go", "label": "5"}, "f", 1))
    stop = tokenizer.eos_token_id
    ledger = Trajectory.start(0, 0, 0, prompt.ids)

    async def play_one() -> list[Trajectory]:
        episodes = make_episodes(config, policy, tokenizer, [stop], None)
        return await episodes.run(prompt, ledger, SamplingSettings(stop_token_ids=(stop,)), (1, 2))

    (done,) = run(play_one)
    assert (done.reward, done.score, done.failure, done.extra["agent/turns"]) == (1.0, 1.0, "", 2.0)


def test_a_template_that_cannot_show_tools_is_refused_at_the_start(written):
    config = PPORun()
    config.data.apply_chat_template = True
    config.agent.kind, config.train.agent_func_path = "environment", written(FILES["trl"])
    plain = byte_tokenizer()
    with pytest.raises(UserError, match="cannot go on with the answer of a tool: the chat template does not render"):
        make_episodes(config, None, plain, [plain.eos_token_id], None)
