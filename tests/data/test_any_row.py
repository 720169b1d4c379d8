"""Rows of any shape: each is encoded, or is one row error; an encoder never fails otherwise, and none writes a value as
Python does."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from templates import LLAMA3, QWEN3

from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.images import with_places
from rlhf_suite.data.messages import message_of
from rlhf_suite.data.preferences import LabelledEncoder, PairEncoder
from rlhf_suite.data.row import Row, RowError, number
from rlhf_suite.data.sources import DATASET, locate
from rlhf_suite.data.steps import StepEncoder
from rlhf_suite.data.text_encoders import ConversationEncoder, DocumentEncoder, PromptEncoder
from rlhf_suite.errors import UserError

# Renders the parts of a list and a text alike, as templates of models that read images do.
OF_PARTS = """{%- for message in messages %}{{ message.role + ': ' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ part.text + ('' if loop.last else '\\n') }}{% endfor %}{% endif %}
{%- endfor %}"""
TEXTS = st.sampled_from(["", " ", "hello", "<image>", "\ud800", "\0", "+", "1", '{"a": 1}', "[" * 2000, '"\\ud800"'])
NUMBERS = st.sampled_from([0, 1, -1, 5, 10**400, 0.5, float("nan"), float("inf"), True, False])
PLAIN = st.one_of(st.none(), TEXTS, NUMBERS)
ANY = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2))
PARTS = st.lists(
    st.one_of(st.fixed_dictionaries({"type": st.sampled_from(["text", "image", "video", None]), "text": ANY}), ANY),
    max_size=2,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": PLAIN, "arguments": ANY}) | ANY}, optional={"type": PLAIN}
    )
    | ANY,
    max_size=2,
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "nobody"]) | ANY
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": ROLES}, optional={"content": PARTS | ANY, "tool_calls": CALLS | ANY}),
    st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "tool"]) | ANY, "value": ANY}),
    ANY,
)
CHATS = st.lists(MESSAGES, max_size=3) | ANY
LABELS = st.lists(PLAIN, max_size=2) | ANY
ROWS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("input", "output", "chosen", "rejected"), CHATS),
        **dict.fromkeys(("label", "steps", "tools", "number"), LABELS),
    },
)


def encoders(tokenizer):
    chat = {"apply_chat_template": True, "max_len": 64}
    pairs = {"chosen_key": "chosen", "rejected_key": "rejected"}
    keys = {"input_key": "input", "tools_key": "tools"}
    steps = DataConfig.of("prm", input_key="input", label_key="label", steps_key="steps", max_len=64)
    answers = {"input_key": "input", "output_key": "output"}
    return [
        ConversationEncoder(tokenizer, DataConfig.of("sft", **chat, **keys, output_key=None)),
        ConversationEncoder(tokenizer, DataConfig.of("sft", **chat, **keys, output_key=None, multiturn=True)),
        ConversationEncoder(tokenizer, DataConfig.of("sft", **chat, **answers, reward_key="number")),
        ConversationEncoder(tokenizer, DataConfig.of("sft", **answers, max_len=64)),
        PromptEncoder(tokenizer, DataConfig.of("ppo", **chat, **keys, label_key="label", reward_columns=["number"])),
        PromptEncoder(tokenizer, DataConfig.of("ppo", input_key="input", label_key="label", max_len=64)),
        PairEncoder(tokenizer, DataConfig.of("rm", **chat, **pairs), margin_key="number"),
        PairEncoder(tokenizer, DataConfig.of("dpo", **pairs, max_len=64)),
        LabelledEncoder(tokenizer, DataConfig.of("kto", **chat, **answers, label_key="label")),
        StepEncoder(tokenizer, steps, AlgoConfig.of("prm", placeholder_token=";", reward_tokens=["+", "-"])),
        DocumentEncoder(tokenizer, DataConfig.of("sft", input_key="input", max_len=64)),
    ]


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(row=ROWS)
def test_a_row_of_any_shape_is_encoded_or_is_one_row_error(trained_tokenizer, row):
    for encoder in encoders(trained_tokenizer):
        try:
            encoder.encode(Row(row, "rows", 1))
        except RowError:
            continue


PART_TEXTS = st.fixed_dictionaries({"type": st.sampled_from(["text", "image", "video"]), "text": TEXTS})


@settings(max_examples=300, deadline=None, derandomize=True)
@given(contents=st.lists(TEXTS | st.lists(PART_TEXTS, max_size=2), min_size=1, max_size=2), count=st.integers(0, 2))
def test_images_have_as_many_places_as_there_are_images_or_the_row_is_refused(contents, count):
    messages = [{"role": "user", "content": content} for content in contents]
    try:
        placed = with_places(messages, count, Row({}, "rows", 1))
    except RowError:
        return
    parts = [part for message in placed if isinstance(message["content"], list) for part in message["content"]]
    assert sum(part["type"] == "image" for part in parts) == count
    assert "video" not in str(messages)


@pytest.mark.notices(
    "a content that is a list of texts is written into prompts as Python writes it",
    "data/template.py",
    "        if any(is_text_in_parts(message) for message in messages) and not self.reads_parts():\n",
    "        if False:\n",
)
@pytest.mark.parametrize("template", [None, LLAMA3, QWEN3, OF_PARTS], ids=["chatml", "llama3", "qwen3", "of parts"])
def test_parts_of_text_are_rendered_as_their_text(tokenizer, template):
    tokenizer.chat_template = template or tokenizer.chat_template
    encoder = PromptEncoder(tokenizer, DataConfig.of("ppo", apply_chat_template=True, input_key="input"))

    def prompt(content):
        return encoder.encode(Row({"input": [{"role": "user", "content": content}]}, "rows", 1)).text

    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    assert "{" not in prompt(parts) and "hello\nthere" in prompt(parts)
    if template != OF_PARTS:
        assert prompt(parts) == prompt("hello\nthere")


@pytest.mark.notices(
    "a message whose content is NaN is trained on as the word nan",
    "data/messages.py",
    '    check_content(value["role"], value.get("content"), key, row)\n',
    "",
)
@pytest.mark.parametrize("content", [float("nan"), 5, True, {"text": "hello"}, ["hello"], [5]], ids=str)
def test_a_content_that_is_neither_text_nor_parts_is_refused(tokenizer, content):
    encoder = PromptEncoder(tokenizer, DataConfig.of("ppo", apply_chat_template=True, input_key="input"))
    with pytest.raises(RowError, match="column 'input' has a message whose content"):
        encoder.encode(Row({"input": [{"role": "user", "content": content}]}, "rows", 1))


@pytest.mark.notices(
    "a number that no float can hold ends in a traceback",
    "data/row.py",
    "    except (TypeError, ValueError, OverflowError):\n",
    "    except (TypeError, ValueError):\n",
)
@pytest.mark.notices(
    "a ShareGPT conversation whose speaker is a list ends in a traceback",
    "data/messages.py",
    "SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None",
    "SHAREGPT_ROLES.get(speaker)",
)
def test_a_number_without_a_float_and_a_speaker_without_a_name_are_bad_rows():
    row = Row({"number": 10**400}, "rows", 1)
    with pytest.raises(RowError, match="column 'number' is not a number"):
        number(row, "number")
    with pytest.raises(RowError, match="column 'input' has an item from"):
        message_of({"from": ["human"], "value": "hello"}, "input", row)


def test_a_label_that_is_nan_is_missing(tokenizer):
    encoder = PromptEncoder(tokenizer, DataConfig.of("ppo", input_key="input", label_key="label"))
    with pytest.raises(RowError, match="column 'label' is NaN"):
        encoder.encode(Row({"input": "hello", "label": float("nan")}, "rows", 1))


@pytest.mark.notices(
    "of two values of one key in a line of JSON one is lost without a word",
    "data/files.py",
    "json.loads(text, object_pairs_hook=_to_object)",
    "json.loads(text)",
)
def test_an_object_that_has_a_key_twice_is_a_bad_row(tmp_path):
    lines, whole, inner = ('{"a": 1, "a": 2}\n{"a": 3}\n', '[{"a": 1, "a": 2}]', '{"a": {"b": 1, "b": 2}}\n{"a": 3}\n')
    for name, text in (("x.jsonl", lines), ("x.json", lines), ("y.jsonl", inner)):
        (tmp_path / name).write_text(text)
        bad, good = locate(str(tmp_path / name), "train", DATASET).rows()
        assert isinstance(bad, RowError) and bad.where.endswith(f"{name}:1") and good.values == {"a": 3}
        assert bad.reason == f"an object has the key '{'ab'[name == 'y.jsonl']}' 2 times"
    (tmp_path / "z.json").write_text(whole)
    with pytest.raises(UserError, match=r"z\.json: cannot be read as JSON: an object has the key 'a' 2 times"):
        list(locate(str(tmp_path / "z.json"), "train", DATASET).rows())


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.date32(), pa.duration("s")], ids=str)
def test_a_date_that_python_does_not_know_is_a_bad_row(tmp_path, datasets, kind):
    far = 2**31 - 1 if kind == pa.date32() else 2**62
    table = pa.table({"date": pa.array([1, far, 2], kind), "input": ["a", "b", "c"]})
    pq.write_table(table, tmp_path / "x.parquet")
    with pa.ipc.new_stream(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table)
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    for name in ("x.parquet", "x.arrow", "saved"):
        first, bad, last = locate(str(tmp_path / name), "train", DATASET).rows()
        assert (first.values["input"], last.values["input"]) == ("a", "c")
        assert bad.reason == "has a value that Python cannot hold, such as a date after the year 9999"


@pytest.mark.notices(
    "one broken image of a saved data set ends the run in a traceback",
    "data/sources.py",
    "except Exception as error:  # whatever decodes",
    "except UnicodeError as error:  # whatever decodes",
)
def test_a_broken_image_of_a_saved_data_set_is_a_bad_row(tmp_path, datasets):
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")
    images = [file.getvalue(), b"no image", file.getvalue()[:40], file.getvalue()]
    rows = datasets.Dataset.from_dict({"image": [{"bytes": image, "path": None} for image in images], "n": range(4)})
    rows.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "saved")
    first, *bad, last = locate(str(tmp_path / "saved"), "train", DATASET).rows()
    assert (first.values["n"], last.values["n"]) == (0, 3)
    assert all(row.reason.startswith("an image or another value cannot be decoded") for row in bad) and len(bad) == 2


def test_arrays_of_two_dimensions_are_lists(tmp_path, datasets):
    features = datasets.Features({"board": datasets.Array2D((2, 2), "int32"), "n": datasets.Value("int64")})
    datasets.Dataset.from_dict({"board": [[[1, 2], [3, 4]]], "n": [5]}, features).save_to_disk(tmp_path / "saved")
    (row,) = locate(str(tmp_path / "saved"), "train", DATASET).rows()
    assert row.values == {"board": [[1, 2], [3, 4]], "n": 5}


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b'a,"b\n', "not CSV"), (b"a\xff,b\n1,2\n", "not UTF-8"), ("a,b\n1,2\n".encode("utf-16"), "not UTF-8")],
)
def test_a_broken_line_of_column_names_is_an_error_that_names_the_line(tmp_path, content, problem):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(UserError, match=rf"x\.csv:1: the line with the names of the columns is {problem}"):
        list(locate(str(tmp_path / "x.csv"), "train", DATASET).rows())


def test_rows_of_python_whose_keys_are_no_names_are_bad_rows(tmp_path):
    (tmp_path / "rows.py").write_text("rows = [{1: 'a', 'b': 2}, {'input': 'a'}]")
    bad, good = locate(str(tmp_path / "rows.py"), "train", DATASET).rows()
    assert bad.reason == "not a dict whose keys are the names of columns" and good.values == {"input": "a"}
    (tmp_path / "own.py").write_text("a = []\na.append(a)\nrows = [{'input': a}]")
    with pytest.raises(UserError, match=r"data\.dataset=.*own\.py: its rows hold values that JSON cannot hold"):
        locate(str(tmp_path / "own.py"), "train", DATASET)
