"""Rows mean the same in JSON lines, parquet, Arrow files and saved data sets: nulls that Arrow adds are not values."""

from __future__ import annotations

import json
import random
from importlib import import_module

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.preferences import PairEncoder
from rlhf_suite.data.row import Row
from rlhf_suite.data.sources import DATASET, locate
from rlhf_suite.data.text_encoders import ConversationEncoder, PromptEncoder

# Shows every key of a message: a null that a row does not have changes the text.
PLAIN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content or [] %}{% if 'image' in part %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer(tokenizer):
    tokenizer.chat_template = PLAIN
    return tokenizer


def read(path, split="train"):
    return [row.values for row in locate(str(path), split, DATASET).rows()]


def written(rows, folder):
    """The rows in every format that has types."""
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=3)
    for name, new in (("file.arrow", pyarrow.ipc.new_file), ("stream.arrow", pyarrow.ipc.new_stream)):
        with new(str(folder / name), table.schema) as sink:
            sink.write_table(table, max_chunksize=3)
    import_module("datasets").Dataset(table).save_to_disk(str(folder / "saved"))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [folder / name for name in ("rows.parquet", "file.arrow", "stream.arrow", "saved")]


def some(draw, values):
    """Some of the keys, in their order."""
    return {key: value for key, value in values.items() if draw.random() < 0.6}


ARGUMENTS = {"city": "Paris", "days": 3, "near": True, "where": {"x": 1.5, "names": ["a", "b"]}}
PARTS = [{"type": "text", "text": "hello "}, {"type": "image", "image": "seven.png"}, {"type": "text", "text": "Paris"}]


def property_of(draw, whole):
    """A JSON schema of one argument."""
    keys = {"description": "where", "enum": ["Paris", None], "minLength": 2}
    is_nullable = whole or draw.random() < 0.5
    schema = {"type": ["string", "null"][: 1 + is_nullable]} | (keys if whole else some(draw, keys))
    return schema | ({"default": None} if is_nullable else {})


def tool(draw, name, whole):
    properties = {each: property_of(draw, whole) for each in ("city", "unit") if whole or draw.random() < 0.7}
    required = [each for each, schema in properties.items() if "default" not in schema]
    function = {"name": name, "parameters": {"type": "object", "properties": properties, "required": required}}
    has_description = whole or draw.random() < 0.5
    return {"type": "function", "function": function | ({"description": "it answers"} if has_description else {})}


def answer(draw, whole):
    called = [{"function": {"name": "find", "arguments": ARGUMENTS if whole else some(draw, ARGUMENTS)}}]
    kinds = [{"content": [{"type": "text", "text": "hello user"}]}, {"content": None, "tool_calls": called}]
    return {"role": "assistant", **(kinds[1] if whole else draw.choice(kinds))}


def random_row(draw, whole):
    """A row; `whole`: with every key, so that Arrow, which has one order of keys, has that of the first row."""
    question = {"role": "user", "content": PARTS if whole else draw.sample(PARTS, k=draw.randint(1, 3))}
    tools = [tool(draw, name, whole) for name in ("find", "go")[: 2 if whole else draw.randint(1, 2)]]
    row = {
        "input": [question, answer(draw, whole)],
        "prompt": [question],
        "output": [answer(draw, whole)],
        "tools": tools,
    }
    other = [{"role": "assistant", "content": [{"type": "text", "text": f"Paris {draw.random()}"}]}]
    checks = {"numbers": [1, 2], "name": "add", "more": {"a": 1, "b": 2}}
    return row | {
        "rejected": other,
        "label": checks if whole else some(draw, checks),
        "extra": {"id": draw.randint(1, 9)},
    }


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_all_formats_are_encoded_to_the_same_tokens_labels_and_columns(tokenizer, tmp_path, seed):
    draw = random.Random(seed)
    rows = [random_row(draw, whole=number == 0) for number in range(8)]
    shared = {"apply_chat_template": True, "tools_key": "tools", "max_len": 4096}
    encoders = [
        ConversationEncoder(tokenizer, DataConfig.of("sft", **shared)),
        ConversationEncoder(tokenizer, DataConfig.of("sft", **shared, input_key="prompt", output_key="output")),
        ConversationEncoder(tokenizer, DataConfig.of("sft", **shared, multiturn=True)),
        PairEncoder(tokenizer, DataConfig.of("dpo", **shared, prompt_key="prompt", chosen_key="output")),
        PromptEncoder(
            tokenizer,
            DataConfig.of("ppo", **shared, input_key="prompt", label_key="label", reward_columns=["extra", "label"]),
            keeps_chat=True,
        ),
        PromptEncoder(tokenizer, DataConfig.of("generate", **shared, input_key="prompt", label_key="label")),
    ]

    def encoded(path):
        return [each.encode(Row(values, "", 1)) for each in encoders for values in read(path)]

    files = written(rows, tmp_path)
    expected = encoded(tmp_path / "rows.jsonl")
    for file in files:
        assert encoded(file) == expected, file.name


def test_a_part_of_text_is_not_an_image_and_a_call_has_the_arguments_of_its_row(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": "x.png"}]
    calls = [{"city": "Paris"}, {"a": 1, "b": [{"c": 2}, {"d": "x"}]}]
    rows = [{"part": part, "call": call} for part, call in zip(parts, calls, strict=True)]
    for file in written(rows, tmp_path):
        assert read(file) == rows, file.name


@pytest.mark.parametrize(
    "schemas",
    [
        [{"type": "string", "default": None}, {"type": "string", "default": None}],
        [{"type": ["string", "null"], "default": None}, {"type": ["string"], "default": "a"}, {"type": ["string"]}],
        [{"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, {"type": "string", "default": "a"}],
        [{"enum": ["a", None], "default": None}, {"enum": ["a"]}],
        [{"anyOf": [{"const": "a"}, {"const": None}]}],
        [{"const": None, "description": "nothing"}, {"type": "string"}],
        [{"type": "object", "properties": {"default": {"type": "string"}, "const": {"type": "string"}}}],
    ],
)
def test_nulls_that_a_json_schema_says_stay(tmp_path, schemas):
    rows = [{"schema": {"properties": {"a": each}, "required": ["a"] * ("default" not in each)}} for each in schemas]
    for file in written(rows, tmp_path):
        assert read(file) == rows, file.name


def test_arguments_that_are_called_like_words_of_schemas_are_none(tmp_path):
    rows = [{"call": {"default": "x", "city": "Paris"}}, {"call": {"city": "Rome"}}]
    for file in written(rows, tmp_path):
        assert read(file) == rows, file.name


def test_nulls_in_lists_in_maps_and_in_columns_stay(tmp_path):
    rows = [{"list": [None, {"a": 1}], "column": None, "empty": []}, {"list": None, "column": "x", "empty": [None]}]
    for file in written(rows, tmp_path):
        assert read(file) == rows, file.name
    kind = pyarrow.map_(pyarrow.string(), pyarrow.struct([("x", pyarrow.int64()), ("y", pyarrow.int64())]))
    table = pyarrow.table({"map": pyarrow.array([[("a", {"x": 1}), ("b", None)], None], kind)})
    pyarrow.parquet.write_table(table, tmp_path / "map.parquet")
    assert read(tmp_path / "map.parquet") == [{"map": {"a": {"x": 1}, "b": None}}, {"map": None}]


def test_objects_that_are_stored_as_json_text_are_read_as_objects(tmp_path):
    texts = ['{"role": "user", "content": null}', '{"tool_calls": [{"city": "Paris"}]}', None]
    table = pyarrow.table({"m": pyarrow.array(texts, pyarrow.json_())})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    expected = [json.loads(text) if text else None for text in texts]
    assert [each["m"] for each in read(tmp_path / "rows.parquet")] == expected
    import_module("datasets").Dataset(table).save_to_disk(str(tmp_path / "saved"))
    assert [each["m"] for each in read(tmp_path / "saved")] == expected


@pytest.mark.parametrize("gap", [None, float("nan")])
def test_integers_with_a_gap_are_integers(tmp_path, tokenizer, gap):
    """pandas stores such a column as floating-point numbers."""
    columns = {"input": ["a", "b", "c"], "label": [72, gap, 3], "reward": [1.5, gap, 2.0], "score": [1.0, 2.0, 3.0]}
    frame = pandas.DataFrame(columns)
    assert str(frame["label"].dtype) == "float64"
    for file in written([row._asdict() for row in frame.itertuples(index=False)], tmp_path):
        found = read(file)
        assert [each["label"] for each in found] == [72, None, 3]
        assert isinstance(found[0]["label"], int) and isinstance(found[0]["score"], float)
        assert found[0]["reward"] == 1.5 and isinstance(found[2]["reward"], float)
    frame.to_parquet(tmp_path / "pandas.parquet")
    config = DataConfig.of("ppo", label_key="label", input_template=None)
    assert PromptEncoder(tokenizer, config).encode(Row(read(tmp_path / "pandas.parquet")[0], "", 1)).label == "72"


def test_numbers_with_a_gap_that_are_not_all_whole_or_too_large_stay(tmp_path):
    for number, values in enumerate([[1.0, None, 2.5], [float("inf"), None], [2.0**60, None], [None, None]]):
        column = pyarrow.array(values, pyarrow.float64())
        pyarrow.parquet.write_table(pyarrow.table({"x": column}), tmp_path / f"{number}.parquet")
        assert repr([each["x"] for each in read(tmp_path / f"{number}.parquet")]) == repr(values)


def test_a_saved_data_set_gives_values_whatever_format_it_was_saved_with(tmp_path):
    saved = import_module("datasets").Dataset.from_list([{"x": [1, 2], "y": {"a": 1}}, {"x": [3], "y": {"b": 2}}])
    saved.with_format("numpy", columns=["x"]).save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved") == [{"x": [1, 2], "y": {"a": 1}}, {"x": [3], "y": {"b": 2}}]
