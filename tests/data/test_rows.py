"""Sources of every type to rows: malformed rows are named, and missing things are errors with a remedy."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest

from rlhf_suite.config.rules.data import probability_problems
from rlhf_suite.data.combine import combine, mixture
from rlhf_suite.data.row import BadRows, DataError, RowError
from rlhf_suite.data.sources import DATASET, EVAL, PROMPTS, Sources, limit_rows, locate, source_names
from rlhf_suite.errors import UserError


def load(spec, *, split="train", probs=None, max_samples=None, seed=0, bad=None, flags=DATASET):
    sources, bad = Sources(str(spec), split, max_samples, probs, flags), bad or BadRows("stop")
    return list(combine([read(name, sources, bad) for name in sources.names], sources, seed))


def read(name, sources, bad):
    """The rows of a source as the loader takes them."""
    good = []
    for row in limit_rows(locate(name, sources.split, sources.flags).rows(), sources.max_samples):
        if isinstance(row, RowError):
            bad.add(row.where, row.reason)
        else:
            good.append(row)
    return good


def values(rows):
    return [row.values for row in rows]


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = [{"input": "a", "label": "1"}, {"input": "é\n", "label": "2"}, {"input": "c", "label": "3"}]


def write(path, rows=ROWS):
    """ROWS in the format of the file's name."""
    kind = path.suffix.lower()
    if kind == ".jsonl":
        write_jsonl(path, rows)
    elif kind == ".json":
        path.write_text(json.dumps(rows))
    elif kind == ".csv":
        path.write_text("input,label\n" + "".join(f'"{row["input"]}",{row["label"]}\n' for row in rows))
    elif kind == ".tsv":
        path.write_text("input\tlabel\n" + "".join(f'"{row["input"]}"\t{row["label"]}\n' for row in rows))
    elif kind == ".arrow":
        write_arrow(path, rows, pyarrow.ipc.new_file)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.json.gz", "x.CSV.GZ", "x.tsv.gz"])
def test_text_files_may_be_compressed(tmp_path, name):
    plain = write(tmp_path / name[:-3])
    (tmp_path / name).write_bytes(gzip.compress(plain.read_bytes()))
    rows, same = load(tmp_path / name), load(plain)
    assert values(rows) == ROWS and [row.line for row in rows] == [row.line for row in same]
    plain.unlink()
    assert values(load(tmp_path)) == ROWS


def test_a_pattern_is_one_source_of_all_files_it_stands_for(tmp_path):
    for name, rows in (
        ("b1.jsonl", ROWS[1:2]),
        ("a1.jsonl", ROWS[:1]),
        ("deep/er/c1.jsonl", ROWS[2:]),
        ("b2.csv", ROWS),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, rows)
    assert values(load(tmp_path / "*.jsonl")) == ROWS[:2]
    assert values(load(tmp_path / "[b-z]?.jsonl")) == ROWS[1:2]
    assert values(load(tmp_path / "**" / "*1.jsonl")) == ROWS
    spec = f"{tmp_path / '*.jsonl'},{tmp_path / 'b2.csv'}"
    assert len(load(spec)) == 5 and len(load(spec, probs=[0.5, 0.5])) >= 5
    write(tmp_path / "odd[1].jsonl", ROWS[:1])
    assert values(load(tmp_path / "odd[1].jsonl")) == ROWS[:1]


def test_a_pattern_without_files_is_an_error_that_names_it(tmp_path):
    with pytest.raises(UserError, match=r"data\.prompt_dataset: no file matches '.*none\*\.jsonl'; paths are relative"):
        load(tmp_path / "none*.jsonl", flags=PROMPTS)
    (tmp_path / "x.doc").write_text("text")
    with pytest.raises(UserError, match=r"cannot read '.*x\.doc'; known file types"):
        load(tmp_path / "*.doc")


def write_arrow(path, rows, kind):
    table = pyarrow.Table.from_pylist(rows)
    with kind(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def test_an_arrow_stream_is_read_like_an_arrow_file(tmp_path):
    assert values(load(write_arrow(tmp_path / "x.arrow", ROWS, pyarrow.ipc.new_stream))) == ROWS


KINDS = ["x.jsonl", "x.json", "x.csv", "x.tsv", "x.parquet", "x.arrow"]


@pytest.mark.parametrize("name", [*KINDS, "x.JSONL", "x.Json", "x.CSV", "x.PARQUET"])
def test_every_file_type_gives_the_same_rows_whatever_the_case_of_its_name(tmp_path, name):
    path = write(tmp_path / name)
    rows = load(path, split="test")
    assert values(rows) == ROWS
    assert rows[0].source == str(path) and rows[0].where.startswith(f"{path}:")


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"data": ROWS}),
        json.dumps(ROWS, indent=2),
        "\n".join(json.dumps(row) for row in ROWS),  # lines in a file named .json
        "\ufeff" + json.dumps(ROWS),
    ],
)
def test_json_files_of_other_shapes(tmp_path, text):
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    assert values(load(tmp_path / "x.json")) == ROWS


def test_one_object_in_a_json_file_is_one_row(tmp_path):
    (tmp_path / "x.json").write_text('{"input": "a"}\n')
    assert values(load(tmp_path / "x.json")) == [{"input": "a"}]


@pytest.mark.notices(
    "lines of a file are counted from 0", "data/files.py", "enumerate(lines, start=1)", "enumerate(lines)"
)
def test_lines_are_counted_as_an_editor_does(tmp_path):
    (tmp_path / "x.jsonl").write_text('\ufeff{"n": 1}\n\n  \n{"n": 4}\n', encoding="utf-8")
    assert [(row.values["n"], row.line) for row in load(tmp_path / "x.jsonl")] == [(1, 1), (4, 4)]
    (tmp_path / "x.csv").write_text('n,t\n2,"two\nlines"\n\n5,x\n')
    assert [(row.values["n"], row.line) for row in load(tmp_path / "x.csv")] == [("2", 2), ("5", 5)]


def test_malformed_jsonl_lines_are_skipped_and_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": \n[3]\n{"n": "\xff"}\n"five"\n{"n": 6}')
    bad = BadRows("skip")
    assert values(load(path, bad=bad)) == [{"n": 1}, {"n": 6}]
    assert bad.first == {
        "not JSON: Expecting value": f"{path}:2",
        "a JSON list, not an object of columns": f"{path}:3",
        "not UTF-8": f"{path}:4",
        "a JSON str, not an object of columns": f"{path}:5",
    }


def test_half_a_surrogate_pair_is_a_bad_row_in_any_field(tmp_path):
    good = {"n": 1, "text": "\U0001f600 \\ud800", "é": ["\ue000"]}
    broken = [{"n": "\ud800"}, {"n": [{"a": "x\udfffy"}]}, {"\udc00": 1}, {"n": "\ude00\ud83d"}]
    rows = [json.dumps(row) for row in (good, *broken, good)]
    (tmp_path / "x.jsonl").write_text("\n".join(rows))
    (tmp_path / "x.json").write_text(f"[{','.join(rows)}]")
    for path in (tmp_path / "x.jsonl", tmp_path / "x.json"):
        bad = BadRows("skip")
        assert values(load(path, bad=bad)) == [good, good]
        assert bad.bad.total() == 4 and [*bad.first.values()] == [f"{path}:2"]
        assert next(iter(bad.first)).startswith("a text has half of a surrogate pair")


def test_lines_that_python_cannot_hold_are_bad_rows(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"n": ' + "[" * 9**6 + "\n{" + f'"n": 1{"0" * 5000}' + '}\n{"n": 3}\n')
    bad = BadRows("skip")
    assert values(load(tmp_path / "x.jsonl", bad=bad)) == [{"n": 3}]
    assert [reason.rpartition(": ")[2] for reason in bad.bad] == [
        "it is nested too deeply",
        "a number has too many digits",
    ]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_text_that_is_not_utf8_is_a_bad_row_of_a_table(tmp_path, kind):
    raw = pyarrow.array([b"a", b"\xed\xa0\x80", b"c"], pyarrow.binary())
    table = pyarrow.table({"n": [1, 2, 3], "text": pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())})
    path, bad = tmp_path / f"x.{kind}", BadRows("skip")
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    assert values(load(path, bad=bad)) == [{"n": 1, "text": "a"}, {"n": 3, "text": "c"}]
    assert bad.first == {"not UTF-8": f"{path}:2"}


def test_malformed_csv_lines_are_skipped_and_named(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b'n,t\n1,a\n2\n3,a,b\n4,\xff\n5,"a"b\n6,c\n7,"open\n8,d\n')
    bad = BadRows("skip")
    assert [row.values["n"] for row in load(path, bad=bad)] == ["1", "6"]
    assert [(where, reason) for reason, where in bad.first.items()] == [
        (f"{path}:3", "1 fields where the header has 2"),
        (f"{path}:4", "3 fields where the header has 2"),
        (f"{path}:5", "not UTF-8"),
        (f"{path}:6", "not CSV: ',' expected after '\"'"),
        (f"{path}:8", "not CSV: unexpected end of data"),
    ]


def test_malformed_items_of_a_json_list_are_skipped_and_numbered(tmp_path):
    (tmp_path / "x.json").write_text('[{"n": 1}, 2, {"n": 3}]')
    bad = BadRows("skip")
    assert [row.line for row in load(tmp_path / "x.json", bad=bad)] == [1, 3]
    assert bad.first == {"a JSON int, not an object of columns": f"{tmp_path / 'x.json'}:2"}


def test_a_bad_row_stops_the_run_when_asked_to(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"n": 1}\nnonsense\n')
    with pytest.raises(
        DataError, match=r"x\.jsonl:2: not JSON: Expecting value\. Repair the row, or .*on_bad_row=skip"
    ):
        load(tmp_path / "x.jsonl", bad=BadRows("stop"))


def test_a_long_csv_field_is_read(tmp_path):
    (tmp_path / "x.csv").write_text("t\n" + "a" * 200_000 + "\n")
    assert len(load(tmp_path / "x.csv")[0].values["t"]) == 200_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b'[{"n": 1}, {"n": ', r"x\.json:1:18: not JSON: Expecting value"),
        ("x.json", b'[{"n": "\xff"}]', r"x\.json: not UTF-8 \(byte 8\)"),
        ("x.parquet", b"nonsense", r"x\.parquet: not a whole parquet file"),
        ("x.arrow", b"nonsense", r"x\.arrow: not a whole arrow file"),
        (
            "x.doc",
            b"text",
            r"data\.dataset: cannot read .*x\.doc'; known file types: \.jsonl, \.json, \.csv, ",
        ),
        ("x.json", b'[{"n": 1' + b"0" * 5000 + b"}]", r"x\.json: cannot be read as JSON: Exceeds the limit"),
        ("x.jsonl.gz", b"nonsense", r"x\.jsonl\.gz: not a whole gzip file: Not a gzipped file"),
        ("x.csv.gz", gzip.compress(b"n,t\n" * 9, mtime=0)[:-9], r"x\.csv\.gz: not a whole gzip file"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(tmp_path / name, bad=BadRows("skip"))


@pytest.mark.parametrize("spec", ["absent.jsonl", "/no/such/folder", "./absent", "a/b/c"])
def test_a_missing_path_is_an_error_that_names_the_flag(spec):
    with pytest.raises(
        UserError, match=rf"data\.prompt_dataset: the file or folder '{spec}' does not exist; paths are relative to /"
    ):
        load(spec, flags=PROMPTS)


def test_a_hub_name_that_cannot_be_loaded_is_an_error(monkeypatch, tmp_path, datasets):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"data\.dataset: 'nobody/nothing:main' is not a file or folder here"):
        load("nobody/nothing:main@data")


def test_a_saved_dataset_is_read(tmp_path, datasets):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    rows = load(tmp_path / "one", split="test")
    assert values(rows) == ROWS and [row.line for row in rows] == [1, 2, 3]


def test_a_saved_dataset_dict_needs_its_split(tmp_path, datasets):
    sets = {"train": datasets.Dataset.from_list(ROWS[:2]), "held_out": datasets.Dataset.from_list(ROWS[2:])}
    datasets.DatasetDict(sets).save_to_disk(tmp_path / "both")
    assert values(load(tmp_path / "both", split="held_out")) == ROWS[2:]
    with pytest.raises(UserError, match=r"eval\.split=test: .* has no such split; available: train, held_out"):
        load(tmp_path / "both", split="test", flags=EVAL)


def test_a_folder_of_unmarked_files_is_read_whole_in_order(tmp_path):
    write_jsonl(tmp_path / "b.JSONL", [{"n": 2}])
    write_jsonl(tmp_path / "a.jsonl", [{"n": 1}])
    write_jsonl(tmp_path / "deep" / "c.jsonl", [{"n": 3}])
    (tmp_path / "README.md").write_text("not data")
    rows = load(tmp_path, split="test")
    assert values(rows) == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert rows[2].where == f"{tmp_path}/deep/c.jsonl:1"
    assert values(load(f"{tmp_path}@deep")) == [{"n": 3}]


@pytest.mark.notices(
    "the files of all splits of a folder are read",
    "data/sources.py",
    "if split.lower() in words[path]] if named_splits",
    "] if named_splits",
)
def test_a_folder_of_marked_files_needs_its_split(tmp_path):
    write_jsonl(tmp_path / "train-00000.jsonl", [{"n": 1}])
    write_jsonl(tmp_path / "train-00001.jsonl", [{"n": 2}])
    write_jsonl(tmp_path / "test" / "all.jsonl", [{"n": 3}])
    assert values(load(tmp_path, split="train")) == [{"n": 1}, {"n": 2}]
    assert values(load(tmp_path, split="test")) == [{"n": 3}]
    with pytest.raises(UserError, match=r"data\.dataset_split=validation: .*available: test, train"):
        load(tmp_path, split="validation")


def test_a_folder_without_data_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"data\.dataset: no data files in"):
        load(tmp_path)


def test_a_path_with_an_at_sign_is_a_path(tmp_path):
    assert values(load(write(tmp_path / "me@home.jsonl"))) == ROWS


def test_sources_follow_each_other(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", [{"n": 1}, {"n": 2}])
    two = write_jsonl(tmp_path / "two.jsonl", [{"n": 3}])
    assert source_names(f"{one}, {two},") == [str(one), str(two)]
    assert [row.values["n"] for row in load(f"{one}, {two}")] == [1, 2, 3]


def test_max_samples_takes_the_first_rows_of_each_source(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"n": n} for n in range(5)])
    assert [row.values["n"] for row in load(path, max_samples=3)] == [0, 1, 2]


def test_rows_past_max_samples_are_not_even_parsed(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"n": 1}\nnonsense\n')
    assert len(load(tmp_path / "x.jsonl", max_samples=1, bad=BadRows("stop"))) == 1


@pytest.mark.notices("max_samples cuts the last sources away", "data/combine.py", "np.sort(chosen)", "np.arange(limit)")
def test_max_samples_of_several_sources_cuts_none_away_whole(tmp_path):
    paths = [write_jsonl(tmp_path / f"{k}.jsonl", [{"k": k, "n": n} for n in range(100)]) for k in range(2)]
    rows = load(",".join(map(str, paths)), max_samples=50, seed=1)
    counts = Counter(row.values["k"] for row in rows)
    assert len(rows) == 50 and min(counts.values()) >= 15
    assert [(row.values["k"], row.values["n"]) for row in rows] == sorted(
        (row.values["k"], row.values["n"]) for row in rows
    )
    assert rows == load(",".join(map(str, paths)), max_samples=50, seed=1)
    assert rows != load(",".join(map(str, paths)), max_samples=50, seed=2)


@pytest.mark.notices("a mixture ignores its probabilities", "data/combine.py", "size=1000, p=probs)", "size=1000)")
@pytest.mark.notices(
    "a mixture ends when its first source is used up",
    "data/combine.py",
    "while (drawn < lengths).any():",
    "while (drawn < lengths).all():",
)
@pytest.mark.parametrize(("lengths", "probs"), [([40, 700], [0.5, 0.5]), ([3, 5, 2], [0.2, 0.3, 0.5]), ([900], [1.0])])
@pytest.mark.parametrize("seed", [0, 5])
def test_a_mixture_is_that_of_the_datasets_library(datasets, lengths, probs, seed):
    sets = [
        datasets.Dataset.from_dict({"source": [k] * length, "index": range(length)}) for k, length in enumerate(lengths)
    ]
    expected = datasets.interleave_datasets(sets, probs, seed=seed, stopping_strategy="all_exhausted")
    assert mixture(lengths, probs, seed).tolist() == [[row["source"], row["index"]] for row in expected]


@pytest.mark.notices(
    "probabilities that were rounded end in a traceback",
    "data/combine.py",
    "np.asarray(shares) / sum(shares)",
    "np.asarray(shares)",
)
@pytest.mark.parametrize("count", [3, 6, 7])
def test_rounded_probabilities_are_those_that_were_meant(count):
    lengths, rounded = [5] * count, [round(1 / count, 6)] * count
    assert (mixture(lengths, rounded, 0) == mixture(lengths, [1 / count] * count, 0)).all()
    assert not [*probability_problems("data.dataset_probs", rounded, "data.dataset", count)]


def test_a_mixture_draws_no_more_than_it_needs():
    assert mixture([1000, 1000], [1 - 1e-9, 1e-9], 0, limit=50).tolist() == [[0, index] for index in range(50)]


def test_a_mixture_has_every_row_and_the_proportions(tmp_path):
    paths = [write_jsonl(tmp_path / f"{k}.jsonl", [{"k": k, "n": n} for n in range(400)]) for k in range(2)]
    spec = ",".join(map(str, paths))
    rows = load(spec, probs=[0.8, 0.2], seed=3)
    seen = Counter((row.values["k"], row.values["n"]) for row in rows)
    assert len(seen) == 800
    assert sum(count for (k, _), count in seen.items() if k == 0) / len(rows) == pytest.approx(0.8, abs=0.03)
    assert rows == load(spec, probs=[0.8, 0.2], seed=3) and rows != load(spec, probs=[0.8, 0.2], seed=4)
    assert load(spec, probs=[0.8, 0.2], seed=3, max_samples=400) == rows[:400]
