"""Environments of other libraries: written as they are there, found in their file and played to the end."""

from __future__ import annotations

import re

import numpy as np
import pytest
from scripted import Scripted, chat_task, open_session, run

from foreign_agents import BASES, FILES
from rlhf_suite.agents.base import Task, Turn
from rlhf_suite.agents.build import make_agent, make_episodes
from rlhf_suite.agents.calls import EnvironmentFailure
from rlhf_suite.agents.compat import GymnasiumEnvironment, SkyRLEnvironment
from rlhf_suite.agents.openrlhf import class_of_step
from rlhf_suite.config.check.agent_file import Export, export_of
from rlhf_suite.config.declarations.agent import AgentConfig, agents_of
from rlhf_suite.config.declarations.runs import Run
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
    config = AgentConfig(kind="environment", max_turns=max_turns, timeout_s=600.0, tool_timeout_s=300.0)
    episode = run(make_agent(agents_of(config, file)[0], must_score=True).run, task, session)
    said = tokenizer.decode(episode.ledgers[0].ids)
    return episode, said.replace("<|im_start|>", "[").replace("<|im_end|>", "]")


@pytest.mark.notices(
    "the feedback of an environment of OpenRLHF is not shown to the model",
    "agents/openrlhf.py",
    "text=feedback or None,",
    'text="\\n" if feedback else None,',
)
def test_an_agent_file_of_openrlhf(tokenizer, written):
    episode, said = play(tokenizer, written(FILES["openrlhf"]), ["a", "b", "4"], "4", text=True)
    assert said.endswith("a]\n\nHuman: no\nAssistant: b]\n\nHuman: no\nAssistant: 4]")
    assert episode.outcome == Scored(1.0, 1.0, {"steps": 3.0})
    assert episode.ledgers[0].turn_rewards.sum() == pytest.approx(0.5)


HOLDER = """
from rlhf_suite.agents.base import Start
from rlhf_suite.agents.kinds import environment_maker
from rlhf_suite.config.declarations.agent import AgentConfig, agents_of

MAKE = environment_maker(agents_of(AgentConfig(kind="environment"), INNER)[0])[0]

class Environment:
    async def reset(self, task):
        self.inner = MAKE()
        return await self.inner.reset(task) if RESETS else Start()
    async def step(self, turn):
        return await self.inner.step(turn)
    async def close(self):
        await self.inner.close()
"""


@pytest.mark.notices(
    "an environment without a session reads no special tokens and says nothing",
    "agents/openrlhf.py",
    "        if self.session is None:\n",
    "        if False:\n",
)
@pytest.mark.parametrize(
    ("form", "resets", "problem"),
    [
        ("openrlhf", True, "class AgentInstance has no session to read turns by: define take_session"),
        ("openrlhf", False, "class AgentInstance got a turn before its reset was called"),
        ("skyrl", False, "got a turn before its reset was called"),
        ("gymnasium", False, "got a turn before its reset was called"),
    ],
)
def test_an_environment_inside_of_another_one_says_what_the_other_leaves_out(
    tokenizer, written, tmp_path, form, resets, problem
):
    inner = tmp_path / "inner.py"
    inner.write_text(FILES[form])
    text = HOLDER.replace("INNER", repr(str(inner))).replace("RESETS", str(resets))
    episode, _ = play(tokenizer, written(text), ["a"], "4", text=form == "openrlhf")
    assert isinstance(episode.outcome, RewardFailure)
    assert str(inner) in episode.outcome.reason and problem in episode.outcome.reason


@pytest.mark.notices(
    "an environment of OpenRLHF samples by settings of its own, and nobody says so",
    "agents/openrlhf.py",
    "if wanted != own and (wanted or own):",
    "if False:",
)
@pytest.mark.notices(
    "only a changed object that OpenRLHF's environment returns is noticed",
    "agents/openrlhf.py",
    "        check_sampling(shown, kept)\n",
    "",
)
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("params.temperature = 0.5", "sampling_params.temperature from 1.0 to 0.5; .* set rollout.temperature instead"),
        ("params.stop = ['</s>']", "sampling_params.stop .* set rollout.stop instead"),
        ("params.max_tokens //= 2", "sampling_params.max_tokens .* set rollout.max_new_tokens instead"),
    ],
)
@pytest.mark.parametrize("returned", ["params", "None"])
def test_sampling_by_the_environment_is_refused(tokenizer, written, change, problem, returned):
    """The object that it gets is what OpenRLHF shares with its engine: a change counts even if it is not returned."""
    text = FILES["openrlhf"].replace("self.step_idx += 1", f"params = states['sampling_params']; {change}")
    text = text.replace('states.get("sampling_params", None)', returned)
    outcome = play(tokenizer, written(text), ["a"], "4", text=True)[0].outcome
    assert isinstance(outcome, RewardFailure) and re.search(problem, outcome.reason)


SEEN = """
class AgentInstance:
    async def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states, **kwargs):
        return {"observation": "SYSTEM " + states["prompt"]}

    async def step(self, states, **kwargs):
        self.turns += 1
        assert states["observation_text"] == "SYSTEM a question" + "".join(self.seen), states
        assert states["action_text"].endswith("<|im_end|>"), states
        self.seen += [states["action_text"], " FEEDBACK "]
        assert states["sampling_params"].max_tokens > 0 and not states["sampling_params"].skip_special_tokens
        return {"rewards": 0.5, "environment_feedback": " FEEDBACK ", "done": self.turns == 3}

    seen = []
"""


@pytest.mark.notices(
    "the observation of OpenRLHF loses what the model wrote",
    "agents/openrlhf.py",
    "self.observed += action + feedback",
    "self.observed += feedback",
)
@pytest.mark.notices(
    "the action of OpenRLHF has no special tokens",
    "agents/openrlhf.py",
    "action = str(self.session.bridge.tokenizer.decode(turn.ids))",
    "action = turn.text",
)
def test_openrlhf_shows_all_that_was_said_with_special_tokens_and_awaits_the_constructor(tokenizer, written):
    episode, said = play(tokenizer, written(SEEN), ["a", "b", "c"], "4", text=True)
    assert said == "SYSTEM a questiona] FEEDBACK b] FEEDBACK c]" and episode.outcome == Scored(0.5, 1.5, {})


def test_a_prompt_of_a_chat_template_may_be_changed_by_an_environment_of_openrlhf(tokenizer, written):
    text = SEEN.replace("seen = []", "seen = ['']").replace('"SYSTEM a question"', 'states["observation_text"][:0]')
    text = text.replace('+ "".join(self.seen)', '+ states["observation_text"]')
    _, said = play(tokenizer, written(text), ["a", "b", "c"], "4")
    assert said.startswith("SYSTEM [user\nbegin]\n[assistant\na] FEEDBACK b]")


STEP = """
index = 0

async def step(state, action, label, **kwargs):
    global index
    index += 1
    if index == 2:
        return 1.0, None, True, {"count": 2}
    return 0.25, state + action + " no: ", False, {}
"""


def test_the_function_step_of_the_first_versions_of_openrlhf(tokenizer, written):
    episode, said = play(tokenizer, written(STEP), ["a", "b"], "4", text=True)
    assert said.endswith("a] no: b]") and episode.outcome == Scored(1.0, 1.25, {"count": 2.0})


def test_a_state_of_the_function_step_that_rewrites_what_was_said_is_refused(tokenizer, written):
    outcome = play(tokenizer, written(STEP.replace("state + action", "action")), ["a"], "4", text=True)[0].outcome
    assert "step returned a state that does not begin with the state" in outcome.reason


def test_an_executor_of_openrlhf_may_name_another_class(tokenizer, written, tmp_path):
    (tmp_path / "elsewhere.py").write_text(
        FILES["openrlhf"].replace("AgentInstance(", "Mine(").partition("class AgentEx")[0]
    )
    text = """
import logging
from openrlhf.utils.agent import MultiTurnAgentExecutor
from openrlhf.utils.logging_utils import init_logger
from elsewhere import Mine

logger = init_logger(__name__)

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Mine)
"""
    assert play(tokenizer, written(text), ["4"], "4", text=True)[0].outcome.reward == 1.0


def test_an_environment_of_trl(tokenizer, written):
    episode, said = play(tokenizer, written(FILES["trl"]), [CALL % 3, CALL % 2, "done"], "5")
    assert said.startswith("[user\nbegin The counter begins at 0.]") and said.count("[tool\n") == 2
    assert "[tool\n3]" in said and "[tool\n5]" in said and episode.outcome.reward == 1.0
    assert play(tokenizer, written(FILES["trl"]), [CALL % 3, "done"], "5")[0].outcome.reward == 0.0


ENDS = {
    "the model calls no tool": (["done"], {}, "finished"),
    "agent.max_turns": ([CALL % 1], {"max_turns": 2}, "turns"),
    "a turn is cut off": ([("<tool_call>", "length")], {}, "cut"),
    "the context is full": ([CALL % 1] * 99, {"max_turns": 99, "max_len": 700}, "full"),
}


@pytest.mark.notices(
    "an environment of TRL is asked for its reward only when the model ends the episode",
    "agents/environment.py",
    "                await self.last_words(environment, players)",
    "                if ending is Ending.FINISHED:\n                    await self.last_words(environment, players)",
)
@pytest.mark.parametrize("end", ENDS)
def test_an_environment_of_trl_is_asked_for_its_reward_once_however_the_episode_ends(tokenizer, written, end):
    more, limits, ending = ENDS[end]
    counted = FILES["trl"].replace(
        "        return float(",
        "        self.asked = 1 + getattr(self, 'asked', 0)\n        return self.asked + float(",
    )
    episode, _ = play(tokenizer, written(counted), [CALL % 5, *more], "5", **limits)
    assert (episode.ending, episode.outcome.reward) == (
        ending,
        2.0 if end != "agent.max_turns" and "full" not in end else 1.0,
    )


def test_an_environment_of_skyrl(tokenizer, written):
    episode, said = play(tokenizer, written(FILES["skyrl"]), ["x", "y"], "y")
    assert said.startswith("[user\nbegin]\n[user\nbegin now]") and "[user\nagain]" in said
    assert episode.ending == "finished" and episode.outcome == Scored(1.0, 1.0, {})


def test_an_environment_of_gymnasium(tokenizer, written):
    episode, said = play(tokenizer, written(FILES["gymnasium"]), ["right", "right"], "")
    assert said.startswith("[user\nbegin You are at 0.]") and "[user\nYou are at 1.]" in said
    assert episode.outcome == Scored(1.0, 1.0, {"agent/environment_truncated": 0.0})


@pytest.mark.parametrize("returned", [None, (), "x", ("x", 1.0, True)])
@pytest.mark.parametrize(("adapter", "first"), [(SkyRLEnvironment, "init"), (GymnasiumEnvironment, "reset")])
def test_what_cannot_be_the_answer_of_a_method_is_named_with_its_class(adapter, first, returned):
    class Odd:
        def answer(self, *given, **named):
            return returned

        init = reset = step = answer

    async def fail_in(function, *given) -> str:
        with pytest.raises(EnvironmentFailure) as failure:
            await function(*given)
        return str(failure.value)

    environment = adapter(Odd)
    said = run(fail_in, environment.reset, Task([1], "hi", ({"role": "user", "content": "hi"},)))
    assert said == f"{__file__}: class Odd: {first} returned {returned!r}, not a tuple of 2 values"
    said = run(fail_in, environment.step, Turn(np.array([1]), "x", "x"))
    assert said.startswith(f"{__file__}: class Odd: step returned {returned!r}, not a ")


def test_what_the_function_step_returns_is_named_where_it_is_something_else():
    async def step() -> None:
        states = {"observation_text": "a", "action_text": "b", "label": "c"}
        await class_of_step(lambda state, action, label: None)().step(states)

    with pytest.raises(EnvironmentFailure, match=r"^step returned None, not a tuple \(reward, next state, done, extra"):
        run(step)


@pytest.mark.parametrize("form", FILES)
def test_the_form_of_a_file_is_found_without_running_it(written, form):
    assert export_of(written("raise SystemExit\n" + FILES[form])).form == form


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class Environment: ...", Export("environment", "Environment")),
        ("from elsewhere import Environment", Export("environment", "Environment")),
        ("def f(): ...\ntools = [f]", Export("tools", "tools")),
        ("from elsewhere import AgentInstance", Export("openrlhf", "AgentInstance")),
        ("class AgentExecutor: ...", Export("openrlhf executor", "AgentExecutor")),
        (STEP, Export("openrlhf step", "step")),
    ],
)
def test_forms_of_the_suite(written, text, found):
    assert export_of(written(text)) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "contains nothing that an agent can use"),
        (
            "class AgentExecutor:\n    async def execute(self): ...",
            r"mine.py:2: AgentExecutor has its own execute.*endpoint",
        ),
        (FILES["openrlhf"] + "    async def execute(self): ...", "AgentExecutor has its own execute.*AgentInstance"),
        ("def load_environment(): ...", "an environment of the library verifiers"),
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
    config = Run.of("ppo")
    config.data.apply_chat_template = True
    config.data.label_key = "label"
    policy = Scripted(tokenizer, [CALL % 5, "done"])
    assert make_episodes(config, policy, tokenizer, [tokenizer.eos_token_id], None) is None
    config.agent.kind, config.train.agent_func_path = "environment", written(FILES["trl"])
    prompt = PromptEncoder(tokenizer, config.data, keeps_chat=True).encode(Row({"input": "go", "label": "5"}, "f", 1))
    stop = tokenizer.eos_token_id
    ledger = Trajectory.start(prompt, 0, 0)

    async def play_one() -> list[Trajectory]:
        episodes = make_episodes(config, policy, tokenizer, [stop], None)
        return await episodes.run(ledger, SamplingSettings(stop_token_ids=(stop,)), (1, 2))

    (done,) = run(play_one)
    assert (done.reward, done.score, done.failure, done.extra["agent/turns"]) == (1.0, 1.0, "", 2.0)


def test_a_template_that_cannot_show_tools_is_refused_at_the_start(written):
    config = Run.of("ppo")
    config.data.apply_chat_template = True
    config.agent.kind, config.train.agent_func_path = "environment", written(FILES["trl"])
    plain = byte_tokenizer()
    with pytest.raises(UserError, match="cannot continue with the answer of a tool: the chat template does not render"):
        make_episodes(config, None, plain, [plain.eos_token_id], None)
