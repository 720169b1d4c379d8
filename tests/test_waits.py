"""Waits: those that are open, and their record in the folder of a run."""

import json
import threading

import pytest

from rlhf_suite.polling import poll_until
from rlhf_suite.waits import MAX_WAITS, keep, open_waits, record, recorded, waiting


def names():
    return [wait.what for wait in open_waits()]


def test_waits_are_open_while_their_blocks_last_whatever_ends_them():
    with waiting("the outer"):
        with pytest.raises(ValueError, match="x"), waiting("the inner", ["actor-0"], 60.0):
            assert names() == ["the outer", "the inner"]
            assert open_waits()[1].who == ["actor-0"] and open_waits()[1].limit_s == 60.0
            raise ValueError("x")
        assert names() == ["the outer"]
    assert names() == []


def test_the_record_has_the_waits_of_all_threads_and_the_place_of_the_main_thread():
    begun, end = threading.Event(), threading.Event()

    def other():
        with waiting("another thread's"):
            begun.set()
            assert end.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(60)
    with waiting("mine"):
        now = record()
    end.set()
    thread.join()
    assert [each["what"] for each in now["waits"]] == ["another thread's", "mine"]
    assert any(call.endswith("in test_the_record_has_the_waits_of_all_threads_and_the_place_of_the_main_thread")
               for call in now["main_thread"])  # fmt: skip


def test_of_many_waits_the_oldest_are_written_and_the_others_counted():
    blocks = [waiting(str(i)) for i in range(MAX_WAITS + 3)]
    for block in blocks:
        block.__enter__()
    now = record()
    for block in blocks:
        block.__exit__(None, None, None)
    assert [each["what"] for each in now["waits"]] == [str(i) for i in range(MAX_WAITS)]
    assert now["more_waits"] == 3


def test_a_run_is_recorded_while_it_lasts(tmp_path):
    file = tmp_path / "waits.json"
    with waiting("the end of the test"), recorded(file):
        assert poll_until(file.exists, 60)
        assert json.loads(file.read_text())["waits"][0]["what"] == "the end of the test"
    assert not file.exists()


def test_a_run_that_fails_leaves_its_record(tmp_path):
    file = tmp_path / "waits.json"
    with pytest.raises(ValueError, match="x"), recorded(file):
        assert poll_until(file.exists, 60)
        raise ValueError("x")
    assert file.exists()


def test_a_full_disk_ends_no_run(small):
    (small / "filler").write_bytes(b"x" * 60_000)
    with pytest.raises(OSError, match="No space"):
        (small / "more").write_bytes(b"x" * 60_000)
    for _ in range(40):
        keep(small / "waits.json")
