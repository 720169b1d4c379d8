"""Messages of Anthropic and Responses of OpenAI at the endpoint, asked by the unchanged clients of both."""

from __future__ import annotations

import json

import pytest
from endpoint_episodes import CALL, TOOL, Model, client, echo, head, post, status_of, trained, user

from rlhf_suite.agents import chat, messages, responses
from rlhf_suite.agents.request import Refused, Wishes
from rlhf_suite.data.generation import SamplingSettings
from rlhf_suite.serving import chat_server

pytestmark = pytest.mark.stack
PARAMETERS = TOOL["function"]["parameters"]
OF_ANTHROPIC = {"name": "add", "description": "Add.", "input_schema": PARAMETERS}
OF_RESPONSES = {"type": "function", "name": "add", "description": "Add.", "parameters": PARAMETERS, "strict": None}
THOUGHT = "<think>\nthree?\n</think>\n"


def calls_once(prompt: str) -> str:
    return "done" if "tool\n" in prompt else f"{THOUGHT}so\n{CALL}"


def anthropic_client(base_url: str, api_key: str):
    from anthropic import Anthropic  # seconds, which other files of tests need not wait

    return Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)


def ask_anthropic(model, streams: bool, **request):
    """Return an answer, and with a stream the texts of its events too."""
    request = {"model": "claude", "max_tokens": 400} | request
    if not streams:
        return model.messages.create(**request)
    with model.messages.stream(**request) as stream:
        kinds = [event.type for event in stream]
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
        return stream.get_final_message()


@pytest.mark.notices(
    "the thinking of a turn is not shown to clients of Anthropic",
    "agents/messages.py",
    'if thoughts := message.get("reasoning_content"):',
    'if thoughts := message.get("nothing"):',
)
@pytest.mark.notices(
    "answers of tools follow what the user says beside them",
    "agents/messages.py",
    "return [*answers, *([message] if",
    "return [*answers[:0], *([message] if",
)
@pytest.mark.parametrize("streams", [False, True])
def test_the_client_of_anthropic_calls_a_tool_and_its_tokens_are_one_ledger(play, tokenizer, streams):
    seen = []

    def run_agent(task, base_url, api_key):
        model = anthropic_client(base_url, api_key)
        more = {"tools": [OF_ANTHROPIC], "system": [{"type": "text", "text": "be brief"}]}
        conversation = [{"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]}]
        counted = [model.messages.count_tokens(model="claude", messages=conversation, **more).input_tokens]
        first = ask_anthropic(model, streams, messages=conversation, **more)
        (call,) = [block for block in first.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
        conversation += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
        ]
        counted.append(model.messages.count_tokens(model="claude", messages=conversation, **more).input_tokens)
        second = ask_anthropic(model, streams, messages=conversation, **more)
        seen.extend([first, second, counted])
        return 1.0

    policy = Model(tokenizer, calls_once)
    _, (ledger,) = play(run_agent, policy)
    first, second, counted = seen
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.content[0].thinking == "three?" and first.content[1].text == "so"
    assert (first.stop_reason, first.content[2].input) == ("tool_use", {"a": 1, "b": 2})
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "done")
    lengths = list(map(len, policy.asked))
    assert counted == lengths == [answer.usage.input_tokens for answer in (first, second)]
    assert [answer.usage.output_tokens for answer in (first, second)] == list(map(len, ledger.turns))
    text = tokenizer.decode(ledger.ids)
    assert "<|im_start|>system\nbe brief<|im_end|>" in text
    assert "<|im_start|>tool\n3<|im_end|>\n<|im_start|>user\ngo on<|im_end|>" in text
    assert trained([ledger]) == sorted(policy.written)


@pytest.mark.notices(
    "the number of tokens that a prompt will have is that of a new rendering",
    "agents/endpoint.py",
    "return len(continuation.kept) + len(continuation.ids)",
    "return len(self.session.bridge.prompt(request.messages, request.tools))",
)
def test_the_number_of_tokens_is_that_of_the_ledger_and_not_of_a_rendering(play, tokenizer):
    """The second prompt has the reasoning of the first turn, which the chat template leaves out."""
    seen = []

    def run_agent(task, base_url, api_key):
        model = anthropic_client(base_url, api_key)
        conversation = [user("?")]
        first = ask_anthropic(model, False, messages=conversation)
        conversation += [{"role": "assistant", "content": first.content}, user("more")]
        seen.append(model.messages.count_tokens(model="m", messages=conversation).input_tokens)
        ask_anthropic(model, False, messages=conversation)
        return 1.0

    policy = Model(tokenizer, lambda prompt: THOUGHT + "yes")
    play(run_agent, policy)
    assert seen == [len(policy.asked[1])]


@pytest.mark.parametrize("streams", [False, True])
def test_limits_and_strings_end_turns_of_messages(play, tokenizer, streams):
    seen = []

    def run_agent(task, base_url, api_key):
        model = anthropic_client(base_url, api_key)
        for more in ({"max_tokens": 2}, {"stop_sequences": ["wer"]}):
            answer = ask_anthropic(model, streams, messages=[user("x")], **more)
            seen.append((answer.stop_reason, answer.stop_sequence, answer.content[0].text))
        return 1.0

    play(run_agent, Model(tokenizer, lambda prompt: "the answer"))
    assert seen[0][:2] == ("max_tokens", None) and seen[1] == ("stop_sequence", "wer", "the ans")


def ask_responses(model, streams: bool, **request):
    if not streams:
        return model.responses.create(model="gpt", **request)
    with model.responses.stream(model="gpt", **request) as stream:
        events = list(stream)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        return events[-1].response  # get_final_response of the client knows complete ones only


@pytest.mark.notices(
    "items of one turn of Responses are several turns",
    "agents/responses.py",
    'if not messages or messages[-1]["role"] != "assistant":',
    "if True:",
)
@pytest.mark.parametrize("streams", [False, True])
def test_the_client_of_openai_calls_a_tool_by_responses_and_its_tokens_are_one_ledger(play, tokenizer, streams):
    seen = []

    def run_agent(task, base_url, api_key):
        model = client(base_url, api_key)
        more = {"tools": [OF_RESPONSES], "instructions": "be brief"}
        conversation = [{"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]}]
        first = ask_responses(model, streams, input=conversation, **more)
        (call,) = [item for item in first.output if item.type == "function_call"]
        conversation += [item.model_dump(exclude_none=True) for item in first.output]
        conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
        seen.extend([first, ask_responses(model, streams, input=conversation, **more)])
        return 1.0

    policy = Model(tokenizer, calls_once)
    _, (ledger,) = play(run_agent, policy)
    first, second = seen
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output[0].content[0].text == "three?" and first.output_text == "so"
    assert json.loads(first.output[2].arguments) == {"a": 1, "b": 2}
    assert second.output_text == "done" and second.status == "completed"
    assert [answer.usage.input_tokens for answer in seen] == list(map(len, policy.asked))
    assert [answer.usage.output_tokens for answer in seen] == list(map(len, ledger.turns))
    assert trained([ledger]) == sorted(policy.written)


SPAWN = {"type": "function", "name": "spawn", "description": "Start one.", "parameters": PARAMETERS, "strict": None}
AGENTS = {"type": "namespace", "name": "agents", "description": "Of helpers.", "tools": [SPAWN]}


@pytest.mark.notices(
    "a call of a tool in a namespace loses the namespace",
    "agents/responses.py",
    "if space := namespaces.get(called):",
    "if space := namespaces.get(None):",
)
@pytest.mark.notices(
    "the history of a conversation has tools without their namespace",
    "agents/responses.py",
    'if item.get("namespace") is not None and isinstance(name, str):',
    "if False:",
)
@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_of_a_namespace_is_called_by_its_joined_name_and_answered_by_its_own(play, tokenizer, streams):
    """Two namespaces may have a tool of the same name. The model sees one name for each, and the client its own two."""
    seen = []

    def run_agent(task, base_url, api_key):
        model = client(base_url, api_key)
        more = {"tools": [OF_RESPONSES, AGENTS, AGENTS | {"name": "games"}]}
        conversation = [user("1 + 2?")]
        first = ask_responses(model, streams, input=conversation, **more)
        conversation += [item.model_dump(exclude_none=True) for item in first.output]
        called = [item for item in first.output if item.type == "function_call"]
        conversation += [{"type": "function_call_output", "call_id": each.call_id, "output": "3"} for each in called]
        second = ask_responses(model, streams, input=conversation, **more)
        seen.extend([[(each.namespace, each.name) for each in called], second.output_text])
        return 1.0

    names = ("games__spawn", "add", "agents__spawn")
    text = "\n".join(CALL.replace('"add"', f'"{name}"') for name in names)
    policy = Model(tokenizer, lambda prompt: "done" if "tool\n" in prompt else text)
    _, (ledger,) = play(run_agent, policy)
    assert seen == [[("games", "spawn"), (None, "add"), ("agents", "spawn")], "done"]
    assert trained([ledger]) == sorted(policy.written)


def test_tools_of_namespaces_are_described_and_have_one_meaning_each():
    def read(*tools):
        return responses.read({"input": "x", "tools": list(tools)}, Wishes(SamplingSettings(), overrides=True))

    (tool,) = read(AGENTS | {"tools": [{"type": "custom", "name": "x"}, SPAWN]}).tools
    described = {"name": "agents__spawn", "description": "Of helpers.\nStart one.", "parameters": PARAMETERS}
    assert tool == {"type": "function", "function": described}
    with pytest.raises(Refused, match="two tools of the name 'agents__spawn'"):
        read(AGENTS, OF_RESPONSES | {"name": "agents__spawn"})


@pytest.mark.notices(
    "instructions are inherited by what goes on from an answer",
    "agents/endpoint.py",
    "(*request.messages[request.instructions :], message)",
    "(*request.messages, message)",
)
def test_a_response_goes_on_from_the_one_that_it_names(play, tokenizer):
    """The instructions are those of each request; the rest of the conversation is that of the earlier ones."""
    found = []

    def run_agent(task, base_url, api_key):
        model, last = client(base_url, api_key), None
        for _ in range(3):
            more = {} if last is None else {"previous_response_id": last}
            answer = model.responses.create(model="gpt", input="go on", instructions="be brief", **more)
            last = answer.id
        found.append(status_of(post(f"{base_url}/responses", headers=head(api_key), json=UNKNOWN)))
        return 1.0

    policy = Model(tokenizer, echo)
    _, ledgers = play(run_agent, policy)
    assert [tokenizer.decode(ids).count("be brief") for ids in policy.asked] == [1, 1, 1]
    assert [tokenizer.decode(ids).count("go on") for ids in policy.asked] == [1, 2, 3]
    assert [len(ledger.turns) for ledger in ledgers] == [3]
    assert found == [(400, "previous_response_id names no answer of this episode")]


UNKNOWN = {"input": "x", "previous_response_id": "resp_000099"}


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_that_a_limit_cut_off_is_incomplete(play, tokenizer, streams):
    seen = []

    def run_agent(task, base_url, api_key):
        answer = ask_responses(client(base_url, api_key), streams, input="x", max_output_tokens=2)
        seen.append((answer.status, answer.incomplete_details.reason))
        return 1.0

    play(run_agent, Model(tokenizer, lambda prompt: "the answer"))
    assert seen == [("incomplete", "max_output_tokens")]


def test_one_conversation_may_be_led_in_three_apis(play, tokenizer):
    """They share the sessions and the ledgers: a turn that one API asked for is known to the others."""

    def run_agent(task, base_url, api_key):
        said, openai = [*task.messages], client(base_url, api_key)
        text = openai.chat.completions.create(model="m", messages=said).choices[0].message.content
        said += [{"role": "assistant", "content": text}, user("one")]
        text = openai.responses.create(model="m", input=said).output_text
        said += [{"role": "assistant", "content": text}, user("two")]
        ask_anthropic(anthropic_client(base_url, api_key), False, messages=said)
        return 1.0

    policy = Model(tokenizer, echo)
    _, (ledger,) = play(run_agent, policy)
    assert len(ledger.turns) == 3 and trained([ledger]) == sorted(policy.written)


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (chat.read, {"messages": [user("x")]}),
        (messages.read, {"messages": [user("x")], "max_tokens": 9}),
        (responses.read, {"input": "x"}),
    ],
    ids=["chat", "messages", "responses"],
)
def test_a_wish_for_another_sampling_is_refused_or_has_no_effect(read, body):
    required = {"tool_choice": {"type": "any"} if "max_tokens" in body else "required"}
    for more in ({"temperature": 0.25}, {"top_p": 0.5}, required, {"unheard_of": 1}):
        name = next(iter(more))
        with pytest.raises(Refused, match=name):
            read(body | more, Wishes(SamplingSettings()))
        (wish,) = read(body | more, Wishes(SamplingSettings(), overrides=True)).overridden
        assert wish.startswith(name)
    assert read(body | {"temperature": 1.0}, Wishes(SamplingSettings())).overridden == ()


def test_several_answers_are_refused_whatever_the_run_says():
    with pytest.raises(Refused, match="n=2"):
        chat.read({"messages": [user("x")], "n": 2}, Wishes(SamplingSettings(), overrides=True))


def test_tools_that_a_service_runs_are_refused_or_left_out():
    searches = [{"type": "web_search_20250305", "name": "web_search"}, OF_ANTHROPIC]
    body = {"messages": [user("x")], "tools": searches}
    with pytest.raises(Refused, match="web_search_20250305"):
        messages.read(body, Wishes(SamplingSettings()))
    (tool,) = messages.read(body, Wishes(SamplingSettings(), overrides=True)).tools
    assert tool["function"] == {"name": "add", "description": "Add.", "parameters": PARAMETERS}
    body = {"input": "x", "tools": [{"type": "web_search"}, OF_RESPONSES]}
    with pytest.raises(Refused, match="web_search"):
        responses.read(body, Wishes(SamplingSettings()))
    assert responses.read(body, Wishes(SamplingSettings(), overrides=True)).tools == (tool,)


@pytest.mark.notices(
    "a program samples at a temperature of its own, and nobody is told",
    "serving/chat_server.py",
    "for wish in given.overridden:",
    "for wish in given.overridden[:0]:",
)
def test_what_a_client_asked_for_in_vain_is_logged_once(play, tokenizer, monkeypatch, capfd):
    monkeypatch.setattr(chat_server, "OVERRIDDEN", set())

    def run_agent(task, base_url, api_key):
        model = anthropic_client(base_url, api_key)
        for _ in range(2):
            ask_anthropic(model, False, messages=[user("x")], extra_body={"temperature": 0.25, "effort": 3})
        return 1.0

    policy = Model(tokenizer, echo)
    play(run_agent, policy, overrides=True)
    said = capfd.readouterr().err
    assert said.count("temperature=0.25") == 1 and said.count("asks for effort") == 1 and len(policy.asked) == 2


def test_errors_of_messages_reach_the_client_of_anthropic(play, tokenizer):
    import anthropic

    found = []

    def run_agent(task, base_url, api_key):
        asks = [
            (api_key, {"extra_body": {"temperature": 0.5}}),
            ("wrong", {}),
            (api_key, {"messages": [user("word " * 9000)]}),
        ]
        for key, more in asks:
            with pytest.raises(anthropic.APIStatusError) as error:
                ask_anthropic(anthropic_client(base_url, key), False, **({"messages": [user("x")]} | more))
            found.append((type(error.value), error.value.body["error"]["type"], error.value.message))
        models = anthropic_client(base_url, api_key).models.list().data
        found.append([model.id for model in models])
        return 0.0

    play(run_agent, Model(tokenizer, echo))
    assert found[0][:2] == (anthropic.BadRequestError, "invalid_request_error")
    assert found[1][:2] == (anthropic.AuthenticationError, "authentication_error")
    assert "prompt is too long: " in found[2][2] and found[3] == ["policy"]


@pytest.mark.parametrize(
    ("read", "body", "said"),
    [
        (messages.read, {"messages": []}, "messages must be a list with at least one"),
        (messages.read, {"messages": [{"role": "tool", "content": "x"}]}, "must have the role user or assistant"),
        (messages.read, {"messages": [user([{"type": "image", "source": {}}])]}, "a block of type 'image'"),
        (messages.read, {"messages": [user("x"), {"role": "assistant", "content": "y"}]}, "is of the assistant"),
        (messages.read, {"messages": [user("\ud800")]}, "surrogate"),
        (messages.read, {"messages": [user("x")], "max_tokens": 0}, "max_tokens=0"),
        (messages.read, {"messages": [user("x")], "tools": [{"input_schema": {}}]}, "tools[0] must have a name"),
        (messages.read, {"messages": [user("x")], "container": "c"}, "container='c' is not supported"),
        (responses.read, {"input": []}, "input must be a list with at least one"),
        (responses.read, {"input": [{"type": "computer_call"}]}, "an item of type 'computer_call'"),
        (responses.read, {"input": [user([{"type": "input_image"}])]}, "images are not understood"),
        (responses.read, {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "not a JSON object"),
        (responses.read, {"input": "x", "max_output_tokens": True}, "max_output_tokens=True"),
        (responses.read, {"input": "x", "conversation": "c"}, "conversation='c' is not supported"),
        (responses.read, {"input": "x", "tools": [{"type": "function"}]}, "tools[0] must have a name"),
        (responses.read, {"input": "x", "tools": [AGENTS | {"name": ""}]}, "tools[0] must have a name"),
        (responses.read, {"input": "x", "tools": [AGENTS | {"tools": None}]}, "tools[0].tools must be a list"),
        (responses.read, {"input": "x", "tools": [AGENTS | {"tools": [{}, 3]}]}, "tools[0].tools[1] must be an object"),
    ],
)
def test_a_request_that_is_not_understood_is_refused_whatever_the_run_says(read, body, said):
    with pytest.raises(Refused) as refused:
        read(body, Wishes(SamplingSettings(), overrides=True))
    assert said in refused.value.message and refused.value.status == 400
