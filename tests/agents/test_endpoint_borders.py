"""What the unchanged clients of Anthropic and OpenAI may send at the border of what the endpoint understands: a request
is answered with a turn, or with the error of its API; none leaves an episode hanging."""

from __future__ import annotations

import pytest
from endpoint_episodes import TOOL, Model, client, echo, trained, user

pytestmark = pytest.mark.stack
HUGE = 10**9  # more tokens than any ledger has
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
OF_ANTHROPIC = {"name": "add", "input_schema": TOOL["function"]["parameters"]}
CACHED = {"type": "ephemeral"}


def by_messages(base_url: str, api_key: str, **request) -> str:
    from anthropic import Anthropic  # seconds, which other files of tests need not wait

    model = Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)
    answer = model.messages.create(**{"model": "claude", "max_tokens": 40, "messages": [user("x")]} | request)
    return answer.content[0].text


def by_chat(base_url: str, api_key: str, **request) -> str:
    model = client(base_url, api_key, max_retries=0).chat.completions
    return model.create(**{"model": "gpt", "messages": [user("x")]} | request).choices[0].message.content


def by_responses(base_url: str, api_key: str, **request) -> str:
    model = client(base_url, api_key, max_retries=0).responses
    return model.create(**{"model": "gpt", "input": "x"} | request).output_text


SOURCE = {"type": "base64", "media_type": "image/png", "data": PIXEL}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_9", "content": "3"}
OTHER_CALL = {"type": "tool_use", "id": "toolu_8", "name": "add", "input": {}}
ITEM_CALL = {"type": "function_call", "call_id": "call_8", "name": "add", "arguments": "{}"}
REFUSED = {
    "an image in Messages": (by_messages, {"messages": [user([{"type": "image", "source": SOURCE}])]}, "'image'"),
    "a document": (
        by_messages,
        {
            "messages": [
                user([{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}])
            ]
        },
        "'document'",
    ),
    "a result of no call in Messages": (by_messages, {"messages": [user([RESULT])]}, "'toolu_9'"),
    "a result of another call in Messages": (
        by_messages,
        {"messages": [user("x"), {"role": "assistant", "content": [OTHER_CALL]}, user([RESULT])]},
        "'toolu_9'",
    ),
    "an image in chat completions": (
        by_chat,
        {"messages": [user([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}])]},
        "images are not understood",
    ),
    "an audio": (
        by_chat,
        {"messages": [user([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}])]},
        "a list of parts with texts",
    ),
    "an answer of no tool": (by_chat, {"messages": [{"role": "tool", "tool_call_id": "c9", "content": "3"}]}, "'c9'"),
    "an image in Responses": (
        by_responses,
        {"input": [user([{"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}])]},
        "images are not understood",
    ),
    "a file": (by_responses, {"input": [user([{"type": "input_file", "file_id": "file_1"}])]}, "with texts"),
    "an item of a service": (by_responses, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "'item_reference'"),
    "an output of another call": (
        by_responses,
        {"input": [user("x"), ITEM_CALL, {"type": "function_call_output", "call_id": "call_9", "output": "3"}]},
        "'call_9'",
    ),
    "an unknown response": (by_responses, {"previous_response_id": "resp_000099"}, "names no answer"),
    "a conversation that a service keeps": (by_responses, {"conversation": "conv_1"}, "conversation='conv_1'"),
}


@pytest.mark.notices(
    "an answer to a call that nobody made is shown to the model",
    "agents/request.py",
    "if identity not in names:",
    "if False:",
    cases="another_call",
)
@pytest.mark.parametrize("case", [pytest.param(case, id=name.replace(" ", "_")) for name, case in REFUSED.items()])
def test_what_is_not_understood_is_an_error_of_the_api_and_the_episode_goes_on(play, tokenizer, case):
    import anthropic
    import openai

    ask, request, said = case
    answers = []

    def run_agent(task, base_url, api_key):
        with pytest.raises((anthropic.BadRequestError, openai.BadRequestError), match=said):
            ask(base_url, api_key, **request)
        answers.append(ask(base_url, api_key))
        return 1.0

    model = Model(tokenizer, echo)
    _, (ledger,) = play(run_agent, model, overrides=True)
    assert answers == ["answer 1"] and trained([ledger]) == sorted(model.written)


ANSWERED = {
    "hints for a service in Messages": (
        by_messages,
        {
            "system": [{"type": "text", "text": "be brief", "cache_control": CACHED}],
            "messages": [user([{"type": "text", "text": "x", "cache_control": CACHED}])],
            "tools": [OF_ANTHROPIC | {"cache_control": CACHED}],
            "metadata": {"user_id": "me"},
            "service_tier": "auto",
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    ),
    "more tokens than fit in Messages": (by_messages, {"max_tokens": HUGE, "timeout": 60}),
    "redacted thinking": (
        by_messages,
        {
            "messages": [
                user("x"),
                {
                    "role": "assistant",
                    "content": [{"type": "redacted_thinking", "data": "?"}, {"type": "text", "text": "y"}],
                },
                user("z"),
            ]
        },
    ),
    "one call at a time": (by_chat, {"parallel_tool_calls": False, "tools": [TOOL]}),
    "hints for a service in chat completions": (
        by_chat,
        {"service_tier": "auto", "store": True, "metadata": {"a": "b"}, "user": "me", "reasoning_effort": "low"},
    ),
    "more tokens than fit in chat completions": (by_chat, {"max_completion_tokens": HUGE}),
    "hints for a service in Responses": (
        by_responses,
        {
            "store": True,
            "metadata": {"a": "b"},
            "service_tier": "auto",
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "low", "summary": "auto"},
            "parallel_tool_calls": False,
            "truncation": "auto",
        },
    ),
    "reasoning that a service encrypted": (
        by_responses,
        {
            "input": [
                user("x"),
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "?"},
                {"role": "assistant", "content": "y"},
                user("z"),
            ]
        },
    ),
    "more tokens than fit in Responses": (by_responses, {"max_output_tokens": HUGE}),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name.replace(" ", "_")) for name, case in ANSWERED.items()])
def test_what_means_nothing_here_is_answered_with_a_turn(play, tokenizer, case):
    ask, request = case
    answers = []

    def run_agent(task, base_url, api_key):
        answers.append(ask(base_url, api_key, **request))
        return 1.0

    model = Model(tokenizer, echo)
    _, (ledger,) = play(run_agent, model, overrides=True)
    assert answers[0].startswith("answer ") and trained([ledger]) == sorted(model.written)
    assert all(word not in tokenizer.decode(ledger.ids) for word in ("ephemeral", "encrypted", "user_id"))


@pytest.mark.parametrize("api", ["messages", "chat", "responses"])
def test_a_client_that_leaves_its_stream_and_asks_anew_trains_on_each_token_at_most_once(play, tokenizer, api):
    """Without the header of a repetition the second request is a sample of its own, and the first one an orphan."""
    from anthropic import Anthropic

    def streams_of(base_url, api_key):
        if api == "messages":
            model = Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key).messages
            return model.create(model="claude", max_tokens=40, messages=[user("x")], stream=True)
        model = client(base_url, api_key)
        if api == "chat":
            options = {"include_usage": True}
            return model.chat.completions.create(model="m", messages=[user("x")], stream=True, stream_options=options)
        return model.responses.create(model="m", input="x", stream=True)

    seen = []

    def run_agent(task, base_url, api_key):
        with streams_of(base_url, api_key) as stream:
            next(iter(stream))
        with streams_of(base_url, api_key) as stream:
            seen.extend(stream)
        return 1.0

    model = Model(tokenizer, echo)
    _, (ledger,) = play(run_agent, model)
    assert len(model.asked) == 2 and ledger.extra["agent/orphans"] == 1
    assert trained([ledger]) == sorted(model.written)[: len(model.written) // 2]
    if api == "chat":
        assert seen[-1].choices == [] and seen[-1].usage.completion_tokens == len(ledger.turns[0])
