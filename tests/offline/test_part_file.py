"""An output that grows in order: what a kill at each instant leaves, and what the continued run makes of it."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from rlhf_suite.errors import UserError
from rlhf_suite.offline.part_file import PartFile

ROWS = [[{"n": 1, "text": "é"}], [], [{"n": 2, "text": None}, {"n": 3, "text": "\ud800"}], [{"n": 4, "tags": ["a"]}]]
ENDS = [2, 3, 7, 9]


class Killed(Exception):
    """Stands for kill -9: nothing after it happens."""


def opened(folder, name="out.jsonl", resume=False):
    return PartFile(folder / name, folder / "progress.json", 1, resume)


def written(part, start=0):
    for rows, end in zip(ROWS[start:], ENDS[start:], strict=True):
        part.append(rows, end, {"samples": len(rows)})
    part.finish()


@pytest.fixture
def whole(tmp_path):
    folder = tmp_path / "whole"
    folder.mkdir()
    written(opened(folder))
    return (folder / "out.jsonl").read_bytes()


def test_the_output_holds_all_rows_in_order_and_the_totals_add_up(tmp_path):
    part = opened(tmp_path)
    assert part.progress.next_row == 1
    written(part)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows == [*ROWS[0], ROWS[2][0], {"n": 3, "text": "?"}, *ROWS[3]]  # half a surrogate pair is no text
    assert (part.progress.next_row, part.progress.totals, part.progress.done) == (9, {"samples": 4}, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "progress.json"]


@pytest.mark.notices(
    "a continued output keeps half a row of the killed run",
    "offline/part_file.py",
    "self.file.truncate(self.progress.bytes)",
    "pass",
)
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_killed_run_continues_byte_for_byte(tmp_path, whole, after):
    first = opened(tmp_path)
    for rows, end in zip(ROWS[:after], ENDS[:after], strict=True):
        first.append(rows, end, {"samples": len(rows)})
    first.file.write(b'{"n": "half a row' + b" that is longer than all rows after it" * 9)  # the kill cut it short
    first.file.flush()
    again = opened(tmp_path, resume=True)
    assert again.progress.next_row == [1, *ENDS][after]
    written(again, after)
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert again.progress.totals == {"samples": 4}


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize("step", ["before", "after"])
def test_a_kill_around_the_last_rename_loses_nothing(tmp_path, whole, monkeypatch, name, step):
    import rlhf_suite.offline.part_file as module

    def put(source, target):
        if step == "after":
            source.rename(target)
        raise Killed

    part = opened(tmp_path, name)
    with monkeypatch.context() as patch:
        patch.setattr(module, "put", put)
        with pytest.raises(Killed):
            written(part)
    again = opened(tmp_path, name, resume=True)
    assert again.progress.next_row == 9
    again.finish()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [name, "progress.json"]
    if name.endswith("jsonl"):
        assert (tmp_path / name).read_bytes() == whole
    else:
        assert pq.read_table(tmp_path / name)["n"].to_pylist() == [1, 2, 3, 4]


def test_a_finished_run_stays_finished(tmp_path, whole):
    written(opened(tmp_path))
    again = opened(tmp_path, resume=True)
    assert again.progress.done
    again.finish()
    assert (tmp_path / "out.jsonl").read_bytes() == whole


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.part"])
def test_another_runs_output_is_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text("mine\n")
    with pytest.raises(UserError, match=r"ckpt\.load_enable=true"):
        opened(tmp_path)
    assert (tmp_path / name).read_text() == "mine\n"
    assert not (tmp_path / "progress.json").exists()


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_what_appears_in_the_outputs_place_meanwhile_is_kept(tmp_path, name):
    part = opened(tmp_path, name)
    (tmp_path / name).write_text("mine\n")
    written(part)
    assert (tmp_path / name).read_text() == "mine\n"
    assert part.path == (tmp_path / name).with_stem("out-1")
    assert part.path.exists() and part.progress.done


def test_a_part_that_is_gone_is_not_made_up(tmp_path):
    opened(tmp_path).append(ROWS[0], 2, {})
    (tmp_path / "out.jsonl.part").unlink()
    with pytest.raises(UserError, match="which is missing"):
        opened(tmp_path, resume=True)


def test_parquet_gives_a_column_the_type_that_all_its_values_fit_in(tmp_path):
    part = opened(tmp_path, "out.parquet")
    part.append([{"a": 1, "b": None}, {"a": 2.5, "b": []}, {"a": None, "b": ["x"]}], 4, {})
    part.finish()
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [
        {"a": 1.0, "b": None},
        {"a": 2.5, "b": []},
        {"a": None, "b": ["x"]},
    ]


@pytest.mark.notices(
    "columns of a parquet output that its first row lacks are lost",
    "offline/part_file.py",
    "names = dict.fromkeys(name for row in rows for name in row)",
    "names = dict.fromkeys(rows[0])",
)
def test_parquet_has_each_column_that_any_of_the_rows_has(tmp_path):
    part = opened(tmp_path, "out.parquet")
    part.append([{"a": 1}, {"a": 2, "b": "x"}], 2, {})
    part.finish()
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]


def test_an_output_without_rows_is_a_parquet_file_without_rows(tmp_path):
    part = opened(tmp_path, "out.parquet")
    part.append([], 2, {})
    part.finish()
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 0


def test_a_number_that_parquet_cannot_hold_is_told_and_nothing_is_lost(tmp_path):
    part = opened(tmp_path, "out.parquet")
    part.append([{"a": 2**70}], 1, {})
    with pytest.raises(UserError, match=r"out\.parquet\.part cannot become parquet.*choose a \.jsonl output"):
        part.finish()
    assert json.loads((tmp_path / "out.parquet.part").read_text()) == {"a": 2**70}


def test_a_column_that_parquet_cannot_hold_is_told_and_nothing_is_lost(tmp_path):
    part = opened(tmp_path, "out.parquet")
    part.append([{"a": 1}, {"a": "x"}], 3, {})
    with pytest.raises(UserError, match=r"choose a \.jsonl output"):
        part.finish()
    assert len((tmp_path / "out.parquet.part").read_text().splitlines()) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"next_row": -1}', '{"next": 3}', '{"next_row": "a"}', "\0"])
def test_a_damaged_record_is_one_message(tmp_path, text):
    path, record = tmp_path / "rows.jsonl", tmp_path / "progress.json"
    PartFile(path, record, 0, resume=False).append([{"a": 1}], 1, {})
    record.write_text(text)
    with pytest.raises(
        UserError, match=r"progress\.json is damaged, .* delete .*progress\.json and .*rows\.jsonl\.part"
    ):
        PartFile(path, record, 0, resume=True)


def test_a_part_that_has_lost_rows_is_refused_and_not_filled_with_zeros(tmp_path):
    path, record = tmp_path / "rows.jsonl", tmp_path / "progress.json"
    PartFile(path, record, 0, resume=False).append([{"a": 1}, {"a": 2}], 2, {})
    part = tmp_path / "rows.jsonl.part"
    before = part.read_bytes()[:-3]
    part.write_bytes(before)
    with pytest.raises(UserError, match=r"rows\.jsonl\.part has 15 bytes of the 18 that were written"):
        PartFile(path, record, 0, resume=True)
    assert part.read_bytes() == before
