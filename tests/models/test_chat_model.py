"""Streamed responses are those of transformers' generate on the whole prompt, and the prompt is read only once."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.tools import LONGEST, ChatConfig
from rlhf_suite.errors import UserError
from rlhf_suite.models.chat_model import ChatModel

GREEDY = ChatConfig(temperature=0, max_new_tokens=12, max_len=256)


@pytest.fixture
def model(folder, load, tmp_path):
    """Weights that matter, and a generation_config.json that would change what is sampled."""
    path = tmp_path / "model"
    shutil.copytree(folder(), path)
    load().model.save_pretrained(path)
    settings = {"repetition_penalty": 9.0, "do_sample": True, "top_k": 3, "eos_token_id": [7]}
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture
def windowed(model, tmp_path):
    """The same, attending to the last eight tokens only."""
    path = tmp_path / "windowed"
    shutil.copytree(model, path)
    config = json.loads((path / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def plain(path, ids):
    """Greedy continuation by a model that has seen nothing before."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ends = [7, AutoTokenizer.from_pretrained(path).eos_token_id]
    found = []
    for _ in range(GREEDY.max_new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *found]])).logits[0, -1]
        found.append(int(logits.argmax()))
        if found[-1] in ends:
            break
    return found


def prompts(talker):
    """Three prompts: a beginning, one that goes on from it, and one that branches off."""
    first = talker.tokenizer("reverse 1234 =")["input_ids"]
    longer = [*first, *talker.tokenizer(" 4321\nnow sort them")["input_ids"]]
    return [first, longer, [*longer[:20], *talker.tokenizer("quickly")["input_ids"]]]


@pytest.mark.parametrize("kind", ["model", "windowed"])
def test_responses_are_those_of_a_model_that_reads_everything_again(kind, request):
    path = request.getfixturevalue(kind)
    talker = ChatModel(str(path), GREEDY, DataConfig.of("chat"), "cpu")
    for ids in prompts(talker):
        pieces = []
        answer = talker.respond(ids, pieces.append)
        expected = plain(path, ids)
        assert answer.text == "".join(pieces) == talker.tokenizer.decode(expected, skip_special_tokens=True)
        assert answer.num_tokens == len(expected)
        assert answer.is_capped == (expected[-1] not in (7, talker.tokenizer.eos_token_id))
        assert not answer.is_interrupted


def test_what_was_read_or_written_is_not_read_again(model):
    talker = ChatModel(str(model), GREEDY, DataConfig.of("chat"), "cpu")
    read = []
    talker.model.get_input_embeddings().register_forward_hook(lambda module, args, out: read.append(args[0].shape[1]))
    first, _, _ = prompts(talker)
    answer = talker.respond(first, lambda text: None)
    written = plain(model, first)
    read.clear()
    talker.respond([*first, *written, 65, 66], lambda text: None)
    assert answer.num_tokens == len(written) and read[0] == 3, "the last token written, and two new ones"
    read.clear()
    talker.respond(first, lambda text: None)
    assert read[0] == 1, "the last token of a prompt is read for what comes after it"


def test_an_interrupted_response_keeps_its_text_and_does_not_affect_later_ones(model):
    talker = ChatModel(str(model), GREEDY, DataConfig.of("chat"), "cpu")
    first, longer, _ = prompts(talker)
    layer, calls = talker.model.model.layers[0], []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    hook = layer.register_forward_hook(interrupt)
    pieces = []
    answer = talker.respond(first, pieces.append)
    hook.remove()
    assert answer.is_interrupted and not answer.is_capped and answer.num_tokens == 3
    assert "".join(pieces) == answer.text == talker.tokenizer.decode(plain(model, first)[:3], skip_special_tokens=True)
    assert talker.respond(longer, pieces.append).text == talker.tokenizer.decode(
        plain(model, longer), skip_special_tokens=True
    )


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_sampling_follows_the_flags_and_not_the_model(model, penalty):
    config = ChatConfig(temperature=0.5, top_p=0.9, max_new_tokens=5, repetition_penalty=penalty)
    found = ChatModel(str(model), config, DataConfig.of("chat"), "cpu").model.generation_config
    assert (found.do_sample, found.temperature, found.top_p, found.top_k) == (True, 0.5, 0.9, 0)
    assert (found.repetition_penalty, found.max_new_tokens) == (penalty, 5)
    assert found.eos_token_id == sorted({7, AutoTokenizer.from_pretrained(model).eos_token_id})


def test_a_conversation_longer_than_the_model_was_made_for_is_refused(model):
    with pytest.raises(UserError, match=r"chat\.max_len=999999: .* was made for \d+ tokens\. Write chat\.max_len="):
        ChatModel(str(model), ChatConfig(max_len=999_999), DataConfig.of("chat"), "cpu")


@pytest.mark.notices(
    "a chat may be longer than its model was made for",
    "models/chat_model.py",
    "config.max_len or min(LONGEST, limit or LONGEST)",
    "config.max_len or LONGEST",
)
def test_a_conversation_has_the_room_that_the_model_has_and_at_most_4096_tokens(model, tmp_path):
    positions = AutoConfig.from_pretrained(model).max_position_embeddings
    for made_for, room in ((positions, min(positions, LONGEST)), (96, 96), (999_999, LONGEST)):
        copy = shutil.copytree(model, tmp_path / str(made_for))
        settings = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": made_for}))
        assert ChatModel(str(copy), ChatConfig(), DataConfig.of("chat"), "cpu").max_len == room
    assert ChatModel(str(model), ChatConfig(max_len=64), DataConfig.of("chat"), "cpu").max_len == 64
