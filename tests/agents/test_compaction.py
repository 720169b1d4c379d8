"""Compaction: a conversation near its limit goes on from a summary that the model writes, whose tokens are trained."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scripted import CHATML, Scripted, chat_task, make_tokenizer, open_session, run

from rlhf_suite.agents.base import Start, Step
from rlhf_suite.agents.bridge import Bridge
from rlhf_suite.agents.compaction import HEAD, Compaction
from rlhf_suite.agents.environment import EnvironmentAgent
from rlhf_suite.agents.episodes import with_outcome
from rlhf_suite.agents.tools import FunctionTools, ToolEnvironment
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.messages import add_text
from rlhf_suite.data.trajectory import ENVIRONMENT, MODEL, PROMPT
from rlhf_suite.errors import UserError

SAID = "wrong " * 10
ASK = "summary of the turns, please"


class Writer(Scripted):
    """Keeps what it wrote."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.wrote: list[list[int]] = []

    async def generate(self, request):
        generation = await super().generate(request)
        self.wrote.append(generation.ids.tolist())
        return generation


class Counts:
    """Answers every turn with its number, which is worth a tenth, until the model says that it is done."""

    async def reset(self, task):
        self.turns = 0
        return Start(({"role": "system", "content": "count"}, *task.messages))

    async def step(self, turn):
        self.turns += 1
        if "done" in turn.content:
            return Step(reward=1.0, done=True)
        return Step.say(f"turn {self.turns} " + SAID, reward=0.1)

    async def close(self): ...


def play(tokenizer, replies, at=150, most=40, environment=Counts, **others):
    policy, task, max_turns = Writer(tokenizer, replies), chat_task(tokenizer), others.pop("max_turns", 100)
    history, tools = others.pop("history", "append"), others.pop("tools", False)
    session = open_session(tokenizer, policy, task, parser="hermes" if tools else None, **others)
    session.renders_history = history == "template"
    agent = EnvironmentAgent(environment, max_turns, 600.0, compaction=Compaction(at, ASK, most))
    return policy, run(agent.run, task, session)


def shown(tokenizer, ids) -> str:
    return tokenizer.decode(ids).replace("<|im_start|>", "[").replace("<|im_end|>\n", "]").replace("<|im_end|>", "]")


def sampled(ledgers) -> list[list[int]]:
    """The tokens of all turns, in the order of the ledgers."""
    return [turn.tolist() for ledger in ledgers for turn in ledger.turns]


@pytest.mark.notices(
    "what stands after a summary is sampled into the old ledger",
    "agents/compaction.py",
    "    return session.fork(ids, messages, first.tools, images)",
    "    return session.append(session.bridge.after(int(session.open.ledger.ids[-1]), messages), messages)",
)
def test_a_long_conversation_goes_on_from_its_summary_in_a_new_ledger(tokenizer):
    policy, episode = play(tokenizer, ["one", "two", "three", "SO FAR 12", "four", "done"])
    first, second = with_outcome(episode)
    assert shown(tokenizer, first.ids) == (
        f"[system\ncount][user\nbegin][assistant\none][user\nturn 1 {SAID}][assistant\ntwo][user\nturn 2 {SAID}]"
        f"[assistant\nthree][user\nturn 3 {SAID}\n\n{ASK}][assistant\nSO FAR 12]"
    )
    assert shown(tokenizer, second.ids) == (
        f"[system\ncount][user\nbegin\n\n{HEAD}\n\nSO FAR 12][assistant\nfour][user\nturn 4 {SAID}][assistant\ndone]"
    )
    assert sampled([first, second]) == policy.wrote, "every sampled token is the model's once, as it was sampled"
    assert [first.fork, second.fork] == [0, 1] and [first.ending, second.ending] == ["compacted", "finished"]
    assert (first.prompt, first.group, first.sample) == (second.prompt, second.group, second.sample)
    summary = policy.wrote[3]
    counts = {"turns": 5, "calls": 0, "malformed_calls": 0, "compactions": 1, "summary_tokens": len(summary)}
    assert episode.extra == {f"agent/{name}": float(value) for name, value in counts.items()}


def test_rewards_stand_at_their_turns_and_not_at_the_summary(tokenizer):
    _, episode = play(tokenizer, ["one", "two", "three", "SO FAR", "four", "done"])
    for ledger, rewarded in zip(episode.ledgers, ([0, 1, 2], [0]), strict=True):
        ends = np.flatnonzero(np.diff(np.append(ledger.model_mask, False).astype(int)) == -1)
        assert ledger.turn_rewards.nonzero()[0].tolist() == ends[rewarded].tolist()
    assert episode.outcome.reward == 1.0 and episode.outcome.score == pytest.approx(1.4)


@pytest.mark.notices(
    "a summary that was cut off begins a ledger",
    "agents/compaction.py",
    "        if summary.is_cut:\n            return Ending.CUT, len(summary.ids)\n",
    "",
)
def test_a_summary_that_was_cut_off_ends_the_episode(tokenizer):
    policy, episode = play(tokenizer, ["one", "two", "three", ("SO FAR " * 30, "length"), "four"], most=12)
    (ledger,) = episode.ledgers
    assert policy.asked[-1].max_new_tokens == 12 == len(ledger.turns[-1])
    assert ledger.truncated and episode.ending is Ending.CUT and episode.extra["agent/compactions"] == 1
    assert episode.outcome.score == pytest.approx(0.3), "of the turns before it"


def test_a_conversation_can_be_summarised_many_times(tokenizer):
    """Each ledger begins with the prompt and the newest summary alone."""
    replies = ["one", "two", "three", "SUM 1", "four", "SUM 2", "five", "SUM 3", "done"]
    policy, episode = play(tokenizer, replies, at=130)
    assert len(episode.ledgers) == 4 and sampled(episode.ledgers) == policy.wrote
    for number, ledger in enumerate(episode.ledgers[1:], start=1):
        prompt = shown(tokenizer, ledger.ids[ledger.owner == PROMPT])
        assert prompt == f"[system\ncount][user\nbegin\n\n{HEAD}\n\nSUM {number}][assistant\n"
    assert episode.extra["agent/compactions"] == 3 and len({request.seed for request in policy.asked}) == 9
    assert len({request.affinity for request in policy.asked}) == 1


@pytest.mark.notices(
    "summaries count as turns",
    "agents/compaction.py",
    "max_new_tokens=self.max_tokens, counts=False",
    "max_new_tokens=self.max_tokens",
)
def test_summaries_are_no_turns_and_the_last_turn_has_none(tokenizer):
    policy, episode = play(tokenizer, ["one", "two", "three", "SUM", "four", "five"], max_turns=4)
    assert episode.ending is Ending.TURNS and episode.extra["agent/turns"] == 4
    assert [shown(tokenizer, ids) for ids in policy.wrote] == ["one]", "two]", "three]", "SUM]", "four]"]


def test_a_prompt_and_summary_without_room_end_the_episode(tokenizer):
    class Brief(Counts):
        async def step(self, turn):
            return Step.say("no", reward=0.1)

    _, episode = play(tokenizer, ["one", "SO FAR " * 9], 40, 70, Brief, max_len=150)
    (ledger,) = episode.ledgers
    assert episode.ending is Ending.FULL and ledger.turns[-1][-1] == tokenizer.eos_token_id


def test_the_template_may_rewrite_the_history(tokenizer):
    """What is shown has no reasoning, so that each turn begins a ledger; so does the summary."""
    replies = ["<think>a</think>one", "<think>b</think>two", "<think>c</think>SUM", "<think>d</think>done"]
    policy, episode = play(tokenizer, replies, at=110, history="template")
    assert sampled(episode.ledgers) == policy.wrote and len(episode.ledgers) == 4
    assert [ledger.ending for ledger in episode.ledgers] == ["finished", "finished", "compacted", "finished"]
    last = shown(tokenizer, policy.asked[-1].prompt_ids)
    assert last == f"[system\ncount][user\nbegin\n\n{HEAD}\n\nSUM][assistant\n", "without its reasoning"


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: other
    """
    return a + b


def test_the_user_asks_behind_the_answers_of_tools(tokenizer):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    policy, episode = play(
        tokenizer,
        [call, call * 2, f"3 and 3 {call}", "3"],
        at=130,
        environment=lambda: ToolEnvironment([FunctionTools([add])], 5.0),
        tools=True,
    )
    first, second = episode.ledgers
    assert shown(tokenizer, first.ids[first.owner == ENVIRONMENT]).endswith(
        f"[tool\n3][tool\n3][user\n{ASK}][assistant\n"
    )
    begin = shown(tokenizer, second.ids[second.owner == PROMPT])
    assert begin == f"[user\nbegin\n\n{HEAD}\n\n3 and 3][assistant\n", "calls in a summary are not executed"
    assert sampled([first, second]) == policy.wrote and episode.extra["agent/calls"] == 3


WORDS = ["2 + 3", " =", "\n", "<", "answers ", '"value"', "é", "too low?", "\n\n", "🙂"]


@pytest.mark.parametrize("seed", range(6))
def test_in_any_conversation_every_sampled_token_is_the_models_once_and_no_ledger_is_too_long(tokenizer, seed):
    """The engine is asked for what a ledger holds at that moment, and nothing is lost between two ledgers."""
    draw, limit, feedback = random.Random(seed), 300, 24

    def text(words: int) -> str:
        return "".join(draw.choice(WORDS) for _ in range(draw.randint(1, words)))

    class Talks(Counts):
        async def step(self, turn):
            self.turns += 1
            return Step(done=True, reward=1.0) if self.turns == 60 else Step.say(text(40), reward=0.01)

    replies = (text(6) for _ in range(1000))
    policy, episode = play(tokenizer, replies, 150, 40, Talks, max_len=limit, max_feedback_tokens=feedback)
    assert sampled(episode.ledgers) == policy.wrote and episode.ending is Ending.FINISHED
    assert len(episode.ledgers) == 1 + episode.extra["agent/compactions"] > 3
    assert len(policy.wrote) == 60 + episode.extra["agent/compactions"]
    assert max(len(ledger.ids) for ledger in episode.ledgers) <= limit
    asked = iter(policy.asked)
    for ledger in episode.ledgers:
        starts = np.flatnonzero(np.diff(np.insert(ledger.model_mask, 0, False).astype(int)) == 1)
        assert [ledger.ids[:start].tolist() for start in starts] == [
            list(next(asked).prompt_ids) for _ in range(len(starts))
        ]
        assert ((ledger.engine_log_probs < 0) == (ledger.owner == MODEL)).all()
    assert next(asked, None) is None


def test_a_text_joins_the_last_message_of_the_user():
    said, picture = {"role": "user", "content": "a"}, {"type": "image"}
    assert add_text([said], "b") == [{"role": "user", "content": "a\n\nb"}] and said["content"] == "a"
    tool = {"role": "tool", "content": "4"}
    assert add_text([said, tool], "b") == [said, tool, {"role": "user", "content": "b"}]
    (message,) = add_text([{"role": "user", "content": [picture]}], "b")
    assert message["content"] == [picture, {"type": "text", "text": "b"}]


def test_limits_that_are_too_small_are_refused_with_the_numbers(tokenizer):
    bridge = Bridge(tokenizer, DataConfig.of("sft", apply_chat_template=True), (tokenizer.eos_token_id,))
    request = len(bridge.prompt([{"role": "user", "content": ASK}]))
    Compaction(60, ASK, 20).check(bridge, 60 + 20 + 10 + request, 10, ["user", "tool"])
    with pytest.raises(UserError, match=r"agent.compact_at_tokens=61 leaves .* write at most 60, lower agent.compact"):
        Compaction(61, ASK, 20).check(bridge, 60 + 20 + 10 + request, 10, ["user", "tool"])


def test_a_template_without_a_message_of_the_user_behind_tools_is_refused_where_it_is_needed():
    refuses = (
        "{% for m in messages %}{% if m.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'tool' "
        "%}{{ raise_exception('a turn must follow the answer of a tool') }}{% endif %}{% endfor %}"
    )
    tokenizer = make_tokenizer(template=refuses + CHATML)
    bridge = Bridge(tokenizer, DataConfig.of("sft", apply_chat_template=True), (tokenizer.eos_token_id,))
    bridge.check(["tool", "user"])
    Compaction(50, ASK, 20).check(bridge, 1000, None, ["user"])
    said = r"cannot continue with a user's message after the answer of a tool: .*must follow"
    with pytest.raises(UserError, match=said):
        Compaction(50, ASK, 20).check(bridge, 1000, None, ["tool"])
