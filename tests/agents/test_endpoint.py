"""The endpoint, over HTTP with the client of OpenAI: turns, tools, streams, retries, rewritten histories, limits."""

from __future__ import annotations

import asyncio
import json
from threading import Event

import pytest
from endpoint_episodes import (
    CALL,
    TOOL,
    Model,
    ask,
    client,
    echo,
    user,
)
from scripted import chat_task, open_session

from rlhf_suite.agents.endpoint import EndpointAgent
from rlhf_suite.data.trajectory import ENVIRONMENT, MODEL

pytestmark = pytest.mark.stack


@pytest.mark.notices(
    "an answer has the log-probs of other tokens",
    "agents/endpoint.py",
    "branch.ledger.engine_log_probs[-len(turn.ids) :].tolist()",
    "branch.ledger.engine_log_probs[: len(turn.ids)].tolist()",
)
def test_a_conversation_is_one_ledger_and_its_tokens_are_those_of_the_engine(play, tokenizer):
    answers = []

    def run_agent(task, base_url, api_key):
        messages = list(task.messages)
        for _ in range(3):
            answer = client(base_url, api_key).chat.completions.create(
                model="any", messages=messages, logprobs=True, max_tokens=40
            )
            answers.append(answer)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), user("go on")]
        return 0.5

    model = Model(tokenizer, echo)
    episode, ledgers = play(run_agent, model)
    assert [a.choices[0].message.content for a in answers] == ["answer 1", "answer 2", "answer 3"]
    (ledger,) = ledgers
    assert (ledger.reward, ledger.score, len(ledger.turns)) == (0.5, 0.5, 3)
    for answer, prompt, turn in zip(answers, model.asked, ledger.turns, strict=True):
        assert answer.prompt_token_ids == prompt and answer.choices[0].token_ids == turn.tolist()
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens == len(prompt)
    said = [token.logprob for answer in answers for token in answer.choices[0].logprobs.content]
    assert said == model.written == ledger.engine_log_probs[ledger.owner == MODEL].tolist()
    assert list(model.asked[2]) == ledger.ids[: len(model.asked[2])].tolist()
    metrics = {name.removeprefix("agent/"): value for name, value in ledger.extra.items()}
    assert metrics == {
        "turns": 3,
        "calls": 0,
        "malformed_calls": 0,
        "ledgers": 1,
        "orphans": 0,
        "retries": 0,
    }
    assert episode.ending == "finished"


def test_tools_are_called_and_their_answers_follow_in_the_same_ledger(play, tokenizer):
    from openai import AsyncOpenAI

    seen = []

    async def run_agent(task, base_url, api_key):
        messages = list(task.messages)
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as model:
            first = await model.chat.completions.create(model="m", messages=messages, tools=[TOOL], tool_choice="auto")
            message = first.choices[0].message
            (call,) = message.tool_calls
            seen.append((first.choices[0].finish_reason, call.function.name, json.loads(call.function.arguments)))
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
            second = await model.chat.completions.create(model="m", messages=messages, tools=[TOOL])
            seen.append(second.choices[0].message.content)
        return {"reward": 1, "score": 0.25, "metrics": {"sum": 3}}

    model = Model(tokenizer, lambda prompt: "done" if "tool\n" in prompt else f"so <think>\n{CALL}")
    _, (ledger,) = play(run_agent, model)
    assert seen == [("tool_calls", "add", {"a": 1, "b": 2}), "done"]
    assert (ledger.reward, ledger.score, ledger.extra["sum"], ledger.extra["agent/calls"]) == (1.0, 0.25, 3.0, 1.0)
    assert "<|im_start|>tool\n3<|im_end|>" in tokenizer.decode(ledger.ids) and len(ledger.turns) == 2


def test_calls_that_cannot_be_read_or_may_not_be_made_are_text(play, tokenizer):
    seen = []

    def run_agent(task, base_url, api_key):
        for more in ({"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL]}):
            choice = ask(base_url, api_key, [*task.messages, user(str(len(seen)))], **more).json()["choices"][0]
            seen.append((choice["message"].get("tool_calls"), choice["message"]["content"]))
            again = [*task.messages, user(str(len(seen) - 1)), {"role": "assistant", "content": seen[-1][1]}, user("?")]
            ask(base_url, api_key, again, **more)
        return 1.0

    model = Model(tokenizer, lambda prompt: CALL if prompt.count("user") == 2 and "\n0<" in prompt else "<tool_call>{x")
    _, ledgers = play(run_agent, model)
    assert seen == [(None, CALL), (None, "<tool_call>{x")]
    assert [len(ledger.turns) for ledger in ledgers] == [2, 2], "what was sent is known again"
    assert ledgers[-1].extra["agent/malformed_calls"] == 3


@pytest.mark.parametrize("reply", ["hello", CALL])
def test_a_stream_says_what_an_answer_says(play, tokenizer, reply):
    found = []

    def run_agent(task, base_url, api_key):
        stream = client(base_url, api_key).chat.completions.create(
            model="m", messages=task.messages, tools=[TOOL], stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        found.append(chunks)
        return 0.0

    _, (ledger,) = play(run_agent, Model(tokenizer, lambda prompt: reply))
    first, last, usage = found[0]
    assert usage.usage.completion_tokens == len(ledger.turns[0])
    assert first.choices[0].token_ids == ledger.turns[0].tolist()
    assert last.choices[0].finish_reason == ("stop" if reply == "hello" else "tool_calls")
    if reply == "hello":
        assert first.choices[0].delta.content == "hello"
    else:
        assert json.loads(first.choices[0].delta.tool_calls[0].function.arguments) == {"a": 1, "b": 2}


def test_other_tools_are_another_prompt_and_so_another_ledger(play, tokenizer):
    def run_agent(task, base_url, api_key):
        first = ask(base_url, api_key, task.messages, tools=[TOOL]).json()["choices"][0]["message"]
        then = [*task.messages, first, user("one")]
        second = ask(base_url, api_key, then, tools=[TOOL]).json()["choices"][0]["message"]
        ask(base_url, api_key, [*then, second, user("two")])
        return 1.0

    _, ledgers = play(run_agent, Model(tokenizer, echo))
    assert [len(ledger.turns) for ledger in ledgers] == [2, 1]
    assert not (ledgers[1].owner == ENVIRONMENT).any() and MODEL not in ledgers[1].owner[: -len(ledgers[1].turns[0])]


def test_coroutine_functions_share_one_event_loop_from_episode_to_episode(play, tokenizer):
    """What they keep between episodes, such as a client of a judge, belongs to the loop on which it was made."""
    loops = []

    async def run_agent(task, base_url, api_key):
        loops.append(asyncio.get_running_loop())
        await asyncio.to_thread(ask, base_url, api_key, task.messages)
        return 1.0

    for _ in range(3):
        play(run_agent, Model(tokenizer, echo))
    assert len(loops) == 3 and len(set(loops)) == 1


def test_a_coroutine_function_that_blocks_stops_nobody(tokenizer, server):
    """The first program waits, without awaiting, until the second one has had its turn."""
    done = Event()

    async def run_agent(task, base_url, api_key):
        if task.label == "blocks":
            waited = done.wait(300)
        ask(base_url, api_key, task.messages)
        if task.label == "blocks":
            return float(waited)
        done.set()
        return 1.0

    async def both():
        agent = EndpointAgent(run_agent, server, 9, 600.0, 10**5)
        tasks = [chat_task(tokenizer, label=label) for label in ("blocks", "asks")]
        return await asyncio.gather(*(agent.run(t, open_session(tokenizer, Model(tokenizer, echo), t)) for t in tasks))

    assert [episode.outcome.reward for episode in asyncio.run(both())] == [1.0, 1.0]
