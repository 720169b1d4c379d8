"""Files that were cut off, overwritten or written by other tools: rows, bad rows, or one error that names the file."""

from __future__ import annotations

import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_suite.config.check.sources import SUFFIXES
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.data.sources import DATASET, locate
from rlhf_suite.errors import UserError

ROWS = [{"input": f"reverse {n:04d}", "output": str(n)[::-1]} for n in range(400)]
BOM = b"\xef\xbb\xbf"


def lines(rows, end="\n"):
    return "".join(json.dumps(row) + end for row in rows).encode()


def table_of(kind):
    """The bytes of ROWS in a file of a kind without compression."""
    table, sink = pa.Table.from_pylist(ROWS), pa.BufferOutputStream()
    if kind == ".parquet":
        pq.write_table(table, sink, use_dictionary=False, row_group_size=100)
        return sink.getvalue().to_pybytes()
    if kind == ".arrow":
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, 100)
        return sink.getvalue().to_pybytes()
    comma = "\t" if kind == ".tsv" else ","
    if kind in (".csv", ".tsv"):
        return "".join(f"{comma.join(row)}\n" for row in [list(ROWS[0]), *(row.values() for row in ROWS)]).encode()
    return {".jsonl": lines(ROWS), ".json": json.dumps(ROWS).encode(), ".txt": lines(ROWS)}[kind]


def written(path):
    content = table_of(path.suffixes[0])
    return gzip.compress(content) if path.suffix == ".gz" else content


def read(path):
    """The rows of a source; an error that is not the user's is raised."""
    return list(locate(str(path), "train", DATASET).rows())


@pytest.mark.notices(
    "a parquet file that is damaged in its middle ends in a traceback",
    "data/files.py",
    "    except (ArrowException, OSError) as error:\n",
    "    except FileNotFoundError as error:\n",
    cases=".parquet",
)
@pytest.mark.notices(
    "an arrow file whose offsets are damaged kills the process",
    "data/files.py",
    "map(check_offsets, batches())",
    "batches()",
    cases=".arrow",
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_damaged_file_gives_rows_or_one_error_that_names_it(tmp_path, suffix):
    chance, path = random.Random(suffix), tmp_path / f"data{suffix}"
    whole = written(path)
    for _ in range(60):
        damaged, place = bytearray(whole), chance.randrange(len(whole))
        if chance.random() < 0.5:
            del damaged[place:]
        else:
            damaged[place : place + 30] = chance.randbytes(30)
        path.write_bytes(damaged)
        try:
            assert all(isinstance(row, Row | RowError) for row in read(path))
        except UserError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize("damage", ["cut", "gone", "no rows", "state"])
def test_a_damaged_saved_data_set_is_one_error_that_names_it(tmp_path, datasets, damage):
    datasets.Dataset.from_list([] if damage == "no rows" else ROWS).save_to_disk(tmp_path / "saved")
    for file in (tmp_path / "saved").glob("*.arrow" if damage != "state" else "state.json"):
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(UserError, match=r"^data\.dataset: the data set that save_to_disk wrote to .*saved"):
        read(tmp_path / "saved")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "list.json"])
def test_a_mark_of_the_byte_order_and_ends_of_lines_of_windows_change_nothing(tmp_path, name, end):
    text = json.dumps(ROWS, indent=1).replace("\n", end).encode() if name == "list.json" else lines(ROWS, end)
    (tmp_path / name).write_bytes(BOM + text)
    assert [row.values for row in read(tmp_path / name)] == ROWS


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.parquet", "a.arrow"])
def test_a_column_that_is_there_twice_is_an_error(tmp_path, name):
    path, comma = tmp_path / name, "\t" if name == "a.tsv" else ","
    table = pa.table([["a"], ["b"], ["c"]], names=["input", "output", "output"])
    if name == "a.parquet":
        pq.write_table(table, path)
    elif name == "a.arrow":
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text(f"{comma.join(table.column_names)}\n{comma.join('abc')}\n")
    with pytest.raises(UserError, match="has 2 columns that are named 'output'"):
        read(path)


def test_columns_without_a_name_may_be_several(tmp_path):
    (tmp_path / "a.csv").write_text("input,output,,\nx,y,,\n")
    assert [row.values for row in read(tmp_path / "a.csv")] == [{"input": "x", "output": "y", "": ""}]


def test_folders_that_are_named_like_files_and_hidden_files_are_not_data(tmp_path):
    """As Spark writes tables, and as file managers, editors and downloads leave notes."""
    (tmp_path / "train.jsonl").mkdir()
    (tmp_path / "train.jsonl" / "part-0.jsonl").write_bytes(lines(ROWS))
    (tmp_path / ".cache").mkdir()
    for note in ("._part-0.jsonl", ".cache/download.json"):
        (tmp_path / note).write_bytes(b"\x00\xff")
    assert [row.values for row in read(tmp_path)] == ROWS


@pytest.mark.notices(
    "a saved data set whose offsets are damaged kills the process",
    "data/sources.py",
    "                check_offsets(batch)\n",
    "                batch.validate()\n",
)
def test_a_saved_data_set_whose_bytes_were_overwritten_is_not_followed_out_of_its_file(tmp_path, datasets):
    chance = random.Random(1)
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    whole = file.read_bytes()
    for _ in range(60):
        damaged, place = bytearray(whole), chance.randrange(len(whole))
        damaged[place : place + 30] = chance.randbytes(30)
        file.unlink()  # what is open keeps its bytes
        file.write_bytes(damaged)
        try:
            assert all(isinstance(row, Row | RowError) for row in read(tmp_path / "saved"))
        except UserError as error:
            assert str(tmp_path / "saved") in str(error)
