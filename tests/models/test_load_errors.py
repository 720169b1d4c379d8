"""Files of a model that cannot be used end in one message, which names the flag and what is wrong, whatever kind of
error transformers or torch raises for them."""

from __future__ import annotations

import pytest
import torch
from copies import copy_of, edit

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import load_settings
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.data.template import ChatTemplate
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.models.load import load_model, load_tokenizer
from rlhf_suite.models.load_errors import explain_load_errors

FP32 = load_settings(param_dtype="fp32")
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def replace_weights(path, content):
    (path / WEIGHTS).unlink()
    (path / "pytorch_model.bin").write_bytes(content)


def cut_weights(path):
    """Have weights in torch's format that end too early."""
    torch.save({"x": torch.zeros(1000)}, path / "whole")
    replace_weights(path, (path / "whole").read_bytes()[:2000])


BROKEN = {
    "a list": (lambda path: (path / CONFIG).write_text("[]"), "cannot be loaded"),
    "null": (lambda path: (path / CONFIG).write_text("null"), r"cannot be loaded \(TypeError: "),
    "not JSON": (lambda path: (path / CONFIG).write_bytes(b"\xff\xfe{}"), "not a valid JSON file"),
    "a text for a number": (lambda path: edit(path / CONFIG, hidden_size="64"), "'hidden_size'.*expected int, got str"),
    "a wrong number of layers": (lambda path: edit(path / CONFIG, num_hidden_layers=3), r"`num_hidden_layers` \(3\)"),
    "a negative size": (lambda path: edit(path / CONFIG, hidden_size=-1), "negative dimension"),
    "no heads": (lambda path: edit(path / CONFIG, num_attention_heads=0), "ZeroDivisionError"),
    "no such type": (lambda path: edit(path / CONFIG, dtype="floaty"), "floaty"),
    "vocabulary": (lambda path: edit(path / CONFIG, vocab_size=999), r"embed_tokens.weight with .*\[999, 64\]"),
    "other heads": (
        lambda path: edit(path / CONFIG, num_key_value_heads=1),
        r"k_proj.weight with .* \[64, 64\]",
    ),
    "settings of generation": (lambda path: (path / "generation_config.json").write_text("[]"), "not a mapping"),
    "empty weights": (lambda path: replace_weights(path, b""), "EOFError"),
    "other weights": (lambda path: replace_weights(path, b"junk" * 10), "cannot be loaded"),
    "cut weights": (cut_weights, "cannot be loaded"),
}


@pytest.mark.notices(
    "only some kinds of errors that broken model files raise are explained",
    "models/load_errors.py",
    "    except Exception as error:\n        if not is_of_the_model(error):",
    "    except (OSError, ValueError, KeyError) as error:\n        if not is_of_the_model(error):",
    cases="null",
)
@pytest.mark.notices(
    "tensors whose shapes do not fit are not named",
    "models/load.py",
    '        "ignore_mismatched_sizes": True,  # `find_misfit` names them\n',
    "",
    cases="vocabulary",
)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_of_a_model_are_one_message(folder, tmp_path, name):
    path = copy_of(folder(), tmp_path / "broken")
    damage, message = BROKEN[name]
    damage(path)
    with pytest.raises(UserError, match=rf"(?s)^actor.model_name_or_path={path}: .*{message}.*config.json"):
        load_model(str(path), head="lm", ds=FP32)


@pytest.mark.parametrize("content", ["[]", "{", '{"tokenizer_class": 5}'])
def test_a_broken_tokenizer_is_one_message(folder, tmp_path, content):
    path = copy_of(folder(), tmp_path / "broken")
    (path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=f"^actor.model_name_or_path={path}: cannot be loaded"):
        load_tokenizer(str(path), DataConfig.of("sft"))


@pytest.mark.parametrize(
    "error",
    [
        RunError("a rank has failed"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
        AssertionError("of our own"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_not_wrong_with_the_model_stays_what_it_is(error):
    with pytest.raises(type(error)) as raised, explain_load_errors("actor.model_name_or_path", "x"):
        raise error
    assert raised.value is error


TEMPLATES = {
    "no file": (lambda path: str(path / "nowhere.jinja"), "nor a file that can be read .*No such file"),
    "a folder": (str, "nor a file that can be read .*Is a directory"),
    "a long name": (lambda path: "x" * 300, "nor a file that can be read .*too long"),
    "not UTF-8": (lambda path: file_with(path, b"\xff{{ messages }}"), "nor a file that can be read .*utf-8"),
    "wrong types": (lambda path: "{{ messages[0]['content'] + 1 }}", "cannot render a message"),
    "no such key": (lambda path: "{{ messages[0].x.y }}", "cannot render a message"),
    "no Jinja": (lambda path: "{% for %}", "cannot render a message"),
}


def file_with(path, content):
    file = path / "template.jinja"
    file.write_bytes(content)
    return str(file)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_that_cannot_be_used_is_one_message(folder, tmp_path, name):
    make, message = TEMPLATES[name]
    with pytest.raises(UserError, match=rf"^data.tokenizer_chat_template.*{message}"):
        load_tokenizer(str(folder()), DataConfig.of("sft", tokenizer_chat_template=make(tmp_path)))


def test_the_mark_at_the_start_of_a_file_is_not_a_part_of_the_template(folder, tmp_path):
    """Some editors write a byte order mark, which would stand before each prompt."""
    text = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    file = file_with(tmp_path, b"\xef\xbb\xbf" + text.encode())
    tokenizer = load_tokenizer(str(folder()), DataConfig.of("sft", tokenizer_chat_template=file))
    assert tokenizer.chat_template == text


def test_a_template_that_cannot_render_a_row_names_the_row(folder):
    """Also where its own code is wrong for some texts alone."""
    template = "{{ 1 // (messages[0].content|length - 2) }}"
    data = DataConfig.of("sft", apply_chat_template=True, tokenizer_chat_template=template)
    rendering = ChatTemplate(load_tokenizer(str(folder()), data), data)
    with pytest.raises(RowError, match=r"cannot render the conversation: .*zero"):
        rendering.text([{"role": "user", "content": "ab"}], Row({}, "rows.jsonl", 3))
