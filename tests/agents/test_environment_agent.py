"""Episodes of environments: rewards, why they end, and failures that are outcomes."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from dataclasses import replace

import numpy as np
import pytest
from scripted import Scripted, chat_task, open_session, run

from rlhf_suite.agents.base import Start, Step
from rlhf_suite.agents.environment import EnvironmentAgent
from rlhf_suite.agents.model_json import HALF_PAIR
from rlhf_suite.data.trajectory import ENVIRONMENT, MODEL, PROMPT
from rlhf_suite.rewards.base import Choice, Scored

HI = {"role": "user", "content": "hi"}
NO_CONTENT = "the content of a message is a text, or in a run with images a list of items with a type"
NO_TOOLS = 'it is not a list of {"type": "function", "function": {"name": ..., ...}}'


class Guess:
    """Guess a number: a tenth for each turn that is too low, one for the right one."""

    closed = 0

    async def reset(self, task):
        self.secret = int(task.label)
        return Start((*task.messages, {"role": "user", "content": "between 1 and 9"}))

    async def step(self, turn):
        given = int(turn.content)
        if given == self.secret:
            return Step(reward=1.0, done=True, extra={"found": 1.0})
        return Step.say("too low", reward=0.1) if given < self.secret else Step.say("too high")

    async def close(self):
        Guess.closed += 1


def play(tokenizer, replies, environment=Guess, max_turns: int = 5, timeout_s: float = 3600.0, **others):
    step_timeout_s, choice = others.pop("step_timeout_s", None), others.pop("choice", None)
    policy = Scripted(tokenizer, replies)
    must_score = others.pop("must_score", False)
    session = open_session(tokenizer, policy, chat_task(tokenizer, label="5"), **others)
    agent = EnvironmentAgent(environment, max_turns, timeout_s, step_timeout_s, must_score=must_score, choice=choice)
    return run(agent.run, chat_task(tokenizer, label="5"), session)


def test_turns_and_steps_alternate_until_the_environment_is_done(tokenizer):
    before = Guess.closed
    episode = play(tokenizer, ["3", "9", "4", "5"])
    (ledger,) = episode.ledgers
    text = tokenizer.decode(ledger.ids).replace("<|im_start|>", "[").replace("<|im_end|>\n", "]")
    assert text == (
        "[user\nbegin][user\nbetween 1 and 9][assistant\n3][user\ntoo low][assistant\n9][user\ntoo high]"
        "[assistant\n4][user\ntoo low][assistant\n5<|im_end|>"
    )
    assert [tokenizer.decode(turn[:-1]) for turn in ledger.turns] == ["3", "9", "4", "5"]
    assert not ledger.engine_log_probs[ledger.owner == ENVIRONMENT].any()
    assert episode.ending == "finished" and Guess.closed == before + 1
    counts = {"agent/turns": 4.0, "agent/calls": 0.0, "agent/malformed_calls": 0.0}
    assert episode.extra == {"found": 1.0, **counts}


@pytest.mark.notices(
    "the reward of the last step counts twice",
    "agents/environment.py",
    "            ending = self.ending_at(turn, step, players)",
    "            if step.reward:\n                player.session.open.ledger.reward_turn(step.reward)\n"
    "            ending = self.ending_at(turn, step, players)",
)
def test_rewards_of_turns_stand_at_them_and_the_last_is_the_outcome(tokenizer):
    episode = play(tokenizer, ["3", "9", "4", "5"])
    ledger = episode.ledgers[0]
    assert episode.outcome == Scored(1.0, pytest.approx(1.2), {"found": 1.0})
    places = ledger.turn_rewards.nonzero()[0]
    assert ledger.turn_rewards[places].tolist() == pytest.approx([0.1, 0.1])
    assert (ledger.owner[places] == MODEL).all() and (ledger.owner[places + 1] == ENVIRONMENT).all()
    ended = play(tokenizer, ["3", "4"], max_turns=2)
    assert ended.outcome == Scored(0.1, 0.2, {}) and (ended.ledgers[0].turn_rewards > 0).sum() == 1


class Parts(Guess):
    """As Guess, with rewards of named parts: every turn costs a tenth, and the last one may be right."""

    async def step(self, turn):
        step = await super().step(turn)
        found = {"answer": float(step.done)} if step.done else {}
        return replace(step, reward=found | {"turns": -0.1})


@pytest.mark.parametrize(
    ("choice", "of_turns", "last", "total"),
    [
        (None, [-0.1, -0.1], 0.9, 0.7),
        (Choice(combine="max"), [-0.1, -0.1], 1.0, 0.8),
        (Choice("answer"), [], 1.0, 1.0),
        (Choice("turns"), [-0.1, -0.1], -0.1, -0.3),
    ],
)
def test_named_parts_of_rewards_are_added_up_over_the_turns_and_logged(tokenizer, choice, of_turns, last, total):
    episode = play(tokenizer, ["3", "9", "5"], Parts, choice=choice)
    ledger = episode.ledgers[0]
    assert ledger.turn_rewards[ledger.turn_rewards.nonzero()].tolist() == pytest.approx(of_turns)
    assert (episode.outcome.reward, episode.outcome.score) == (pytest.approx(last), pytest.approx(total))
    assert episode.extra["answer"] == 1 and episode.extra["turns"] == pytest.approx(-0.3)


def test_a_reward_without_names_is_an_error_where_one_is_asked_for(tokenizer):
    episode = play(tokenizer, ["5"], choice=Choice("answer"))
    assert "reward.reward_key=answer, but the reward of the environment is a number without" in episode.outcome.reason
    assert play(tokenizer, ["9", "9"], Parts, max_turns=2, choice=Choice("answer")).outcome is None


def test_history_as_the_template_shows_it_begins_a_new_ledger_where_it_differs(tokenizer):
    """The template shows no reasoning, and the second turn has none."""
    policy = Scripted(tokenizer, ["<think>low</think>3", "9", "5"])
    session = open_session(tokenizer, policy, chat_task(tokenizer, label="5"))
    session.renders_history = True
    episode = run(EnvironmentAgent(Guess, 5, 600.0).run, chat_task(tokenizer, label="5"), session)
    first, second = episode.ledgers
    assert [[tokenizer.decode(turn[:-1]) for turn in each.turns] for each in (first, second)] == [
        ["<think>low</think>3"],
        ["9", "5"],
    ]
    assert policy.asked[1].prompt_ids == second.ids[: (second.owner == PROMPT).sum()].tolist()
    shown = tokenizer.decode(policy.asked[1].prompt_ids)
    assert shown.endswith("assistant\n3<|im_end|>\n<|im_start|>user\ntoo low<|im_end|>\n<|im_start|>assistant\n")
    assert policy.asked[2].prompt_ids == second.ids[: len(policy.asked[2].prompt_ids)].tolist()
    assert first.turn_rewards.sum() == pytest.approx(0.1) and not second.turn_rewards.any()
    assert episode.outcome == Scored(1.0, pytest.approx(1.1), {"found": 1.0})


def test_the_last_turn_is_scored_and_not_answered(tokenizer):
    episode = play(tokenizer, ["3", "4", "5"], max_turns=2)
    assert episode.ending == "turns" and tokenizer.decode(episode.ledgers[0].ids).endswith("\n4<|im_end|>")


@pytest.mark.notices(
    "the conversation goes on after a turn that was cut off", "agents/environment.py", "if turn.is_cut:", "if False:"
)
@pytest.mark.parametrize("as_text", [True, False])
def test_a_turn_that_was_cut_off_ends_the_episode(tokenizer, as_text):
    class InText(Guess):
        async def step(self, turn):
            return Step(text="\ntoo low\n") if as_text else Step.say("too low")

    episode = play(tokenizer, ["3", ("4", "length"), "5"], InText)
    assert episode.ending == "cut" and len(episode.ledgers[0].turns) == 2
    assert episode.ledgers[0].truncated


def test_an_answer_without_room_ends_the_episode(tokenizer):
    episode = play(tokenizer, ["3"] * 9, max_turns=99, max_len=120)
    ledger = episode.ledgers[0]
    assert episode.ending == "full" and len(ledger.ids) < 120
    assert not ledger.truncated, "the model did not ramble"
    assert ledger.owner[-1] == MODEL, "an answer that nothing follows is not in the ledger"


def test_an_environment_without_rewards_is_scored_by_the_run(tokenizer):
    class Silent(Guess):
        async def step(self, turn):
            return Step()

    episode = play(tokenizer, ["3"], Silent)
    assert episode.outcome is None and episode.ending == "finished"


class PaysAtTheEnd(Guess):
    async def step(self, turn):
        return Step.say("go on") if turn.content != "5" else Step(done=True)

    async def last_step(self):
        return Step(reward=0.25, score=0.5, extra={"asked": 1.0})


@pytest.mark.parametrize(
    ("replies", "ending"), [(["3", "5"], "finished"), (["3", "4"], "turns"), ([("3", "length")], "cut")]
)
def test_an_environment_that_knows_its_reward_at_the_end_gives_it_however_the_episode_ends(tokenizer, replies, ending):
    episode = play(tokenizer, replies, PaysAtTheEnd, max_turns=2, must_score=True)
    assert (episode.ending, episode.outcome) == (ending, Scored(0.25, 0.5, {"asked": 1.0}))


@pytest.mark.notices(
    "an episode that a limit ended without a reward ends the run",
    "agents/environment.py",
    "if ending is not Ending.FINISHED:",
    "if ending is None:",
)
def test_an_environment_that_has_paid_nothing_until_a_limit_ended_the_episode_has_paid_nothing(tokenizer):
    class PaysWhenDone(PaysAtTheEnd):
        last_step = None

    assert play(tokenizer, ["3", "4"], PaysWhenDone, max_turns=2, must_score=True).outcome == Scored(0.0, 0.0)
    assert play(tokenizer, ["3", "4"], PaysWhenDone, max_turns=2).outcome is None, "the sources of the run score it"
    episode = play(tokenizer, ["3", "5"], PaysWhenDone, max_turns=2, must_score=True)
    assert episode.outcome.reason == "no step of the environment had a reward, and the run has no reward source"


@pytest.mark.parametrize("broken", ["make", "reset", "step"])
def test_an_error_of_the_environment_is_the_outcome(tokenizer, broken):
    def fail_at(place: str) -> None:
        if place == broken:
            raise KeyError(place)

    class Broken(Guess):
        def __init__(self):
            fail_at("make")

        async def reset(self, task):
            fail_at("reset")
            return Start()

        async def step(self, turn):
            fail_at("step")

    before = Guess.closed
    episode = play(tokenizer, ["3"], Broken)
    where = "turn 1: " if broken == "step" else ""
    assert re.fullmatch(rf"{where}test_environment_agent\.py:\d+: KeyError: '{broken}'", episode.outcome.reason)
    assert episode.ending == "failed" and Guess.closed == before + (broken != "make")


@pytest.mark.notices(
    "an environment may return anything", "agents/calls.py", "if not isinstance(answer, wanted):", "if False:"
)
@pytest.mark.notices(
    "the fields of what an environment returns may be anything",
    "agents/calls.py",
    "problem in wrong_fields(answer):",
    "problem in ():",
)
@pytest.mark.parametrize(
    ("method", "answer", "reason"),
    [
        ("reset", None, "returned None, not a Start"),
        ("step", (1.0, True), "returned (1.0, True), not a Step"),
        ("reset", Start(text=5), "a Start with text=5: it is not a text"),
        ("reset", Start(text="a", messages=(HI,)), "it has messages too, and a prompt is either of them"),
        ("reset", Start(messages=({"content": "hi"},)), "a message needs a role, such as user or tool"),
        ("reset", Start(messages=({"role": "user", "content": "\ud800"},)), HALF_PAIR),
        ("reset", Start(tools="add"), NO_TOOLS),
        ("reset", Start(tools=({"name": "add"},)), NO_TOOLS),
        ("reset", Start(text="\udfff"), HALF_PAIR),
        ("step", Step(messages=({"role": "user"},)), NO_CONTENT),
        ("step", Step(messages=({"role": "tool", "content": None},)), NO_CONTENT),
        ("step", Step(messages=({"role": "user", "content": ["hi"]},)), NO_CONTENT),
        ("step", Step(messages=({"role": "user", "content": [{"type": "text", "text": "\ud800"}]},)), HALF_PAIR),
        ("step", Step(messages=(HI,), text="more"), "it has messages too, and the model would not see the text"),
        ("step", Step(messages=(HI,), images=None), "images=None: it is not a list of images"),
        ("step", Step(reward="1"), "a Step with reward='1': it is not a finite number"),
        ("step", Step(reward=10**400), "(401 characters): it is not a finite number"),
        ("step", Step(reward=np.array([1.0, 2.0])), "reward=array([1., 2.]): it is not a finite number"),
        ("step", Step(reward={"right": 1.0, "form": None}), "a Step with form=None: it is not a finite number"),
        ("step", Step(score="high", done=True), "a Step with score='high': it is not a finite number"),
        ("step", Step(reward=1.0, done=True, score=math.nan), "a Step with score=nan: it is not a finite number"),
        ("step", Step(done=True, extra={"board": None}), "a Step with board=None: it is not a finite number"),
        ("step", Step(done=True, extra={3: 1.0}), "a Step with [3]=1.0: its name is not a text"),
        ("step", Step(done=True, extra=None), "extra=None: it is not a dict of numbers by their names"),
        ("step", Step(done=True, rewards=[1.0]), "rewards=[1.0]: it is not a dict of a number for each role"),
        ("step", Step(messages={"role": "user"}), "messages={'role': 'user'}: it is not a list of messages"),
    ],
)
def test_an_answer_of_another_type_is_an_error_of_the_environment(tokenizer, method, answer, reason):
    async def wrong(self, given):
        return answer

    class Wrong(Guess): ...

    setattr(Wrong, method, wrong)
    episode = play(tokenizer, ["3"], Wrong)
    where = "turn 1: " if method == "step" else ""
    assert episode.outcome.reason.startswith(f"{where}{method} of the environment returned ")
    assert episode.outcome.reason.endswith(reason) and episode.ending == "failed"


def test_a_list_of_texts_is_one_text_for_a_model_without_images(tokenizer):
    class Listed(Guess):
        async def reset(self, task):
            return Start(messages=({"role": "user", "content": [{"type": "text", "text": "be"}, *gin]},))

        async def step(self, turn):
            return Step(messages=({"role": "user", "content": [{"type": "text", "text": "go"}]},))

    gin = ({"type": "text", "text": "gin"},)
    said = tokenizer.decode(play(tokenizer, ["3", ("4", "length")], Listed).ledgers[0].ids)
    assert said.startswith("<|im_start|>user\nbegin<|im_end|>") and "<|im_start|>user\ngo<|im_end|>" in said
    gin = ({"type": "image", "image": b""},)
    assert "an item of type 'image', and the policy reads text" in play(tokenizer, ["3"], Listed).outcome.reason


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_an_error(tokenizer, reward):
    class Wrong(Guess):
        async def step(self, turn):
            return Step(reward=reward, done=True)

    assert "reward" in play(tokenizer, ["3"], Wrong).outcome.reason


def test_parts_whose_sum_is_too_large_are_an_error(tokenizer):
    class Large(Guess):
        async def step(self, turn):
            return Step(reward={"a": 1e308, "b": 1e308}, done=True)

    assert "the sum of the parts of this reward is too large" in play(tokenizer, ["3"], Large).outcome.reason


@pytest.mark.notices(
    "a dead engine is an error of the environment",
    "agents/environment.py",
    "            turn = await player.session.reply()",
    "            turn = await self.ask(player.session.reply)",
)
def test_an_error_of_the_policy_is_raised(tokenizer):
    class Broken(Scripted):
        async def generate(self, request):
            raise TimeoutError("an engine died")

    session = open_session(tokenizer, Broken(tokenizer, []), chat_task(tokenizer, label="5"))
    with pytest.raises(TimeoutError, match="an engine died"):
        run(EnvironmentAgent(Guess, 5, 600.0).run, chat_task(tokenizer, label="5"), session)


@pytest.mark.notices(
    "a wait for an environment has no deadline of its own",
    "agents/calls.py",
    "asyncio.timeout(limit_s) as deadline",
    "asyncio.timeout(None) as deadline",
    limit_s=60,
)
def test_a_wait_has_a_deadline(tokenizer, clock):
    stuck = threading.Event()

    class Slow(Guess):
        async def step(self, turn):
            clock.forward(601.0)
            await asyncio.Event().wait()

    class Hung(Guess):
        def step(self, turn):
            clock.forward(601.0)
            stuck.wait()

    try:
        for environment in (Slow, Hung):
            outcome = play(tokenizer, ["3"], environment, step_timeout_s=600.0).outcome
            assert outcome.kind == "timeout" and "agent.tool_timeout_s=600" in outcome.reason
            episode = play(tokenizer, ["3"], environment, timeout_s=600.0)
            assert episode.ending == "timed_out" and "agent.timeout_s=600 (1 turns)" in episode.outcome.reason
    finally:
        stuck.set()


def test_functions_that_are_not_async_run_in_a_thread(tokenizer):
    threads = set()

    class Plain(Guess):
        def reset(self, task):
            threads.add(threading.current_thread().name)
            return Start()

        def step(self, turn):
            raise StopIteration

    outcome = play(tokenizer, ["3"], Plain).outcome
    assert threads == {"environment"} and outcome.reason == "turn 1: RuntimeError: StopIteration: "
