"""Waits: those that are open, and their record in the folder of a run."""

import asyncio
import json
import threading
from concurrent.futures import Future

import pytest

from rlhf_suite.errors import RunError
from rlhf_suite.polling import poll_until
from rlhf_suite.waits import (
    MAX_WAITS,
    Patience,
    in_coroutine,
    keep,
    open_waits,
    record,
    record_waits,
    result,
    sign_of_life,
    waiting,
)


@pytest.fixture(autouse=True)
def no_waits_of_other_tests(monkeypatch):
    """A test before may have left a thread that waits for ever on purpose."""
    monkeypatch.setattr("rlhf_suite.waits._open", {})


def names():
    return [wait.what for wait in open_waits()]


@pytest.mark.notices(
    "a wait stays open after an error",
    "waits.py",
    "    finally:\n        del _open[number]\n",
    "    else:\n        del _open[number]\n    finally:\n",
)
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
    with waiting("the end of the test"), record_waits(file):
        assert poll_until(file.exists, 60)
        assert json.loads(file.read_text())["waits"][0]["what"] == "the end of the test"
    assert not file.exists()


def test_a_run_that_fails_leaves_its_record(tmp_path):
    file = tmp_path / "waits.json"
    with pytest.raises(ValueError, match="x"), record_waits(file):
        assert poll_until(file.exists, 60)
        raise ValueError("x")
    assert file.exists()


def test_a_full_disk_ends_no_run(small):
    (small / "filler").write_bytes(b"x" * 60_000)
    with pytest.raises(OSError, match="No space"):
        (small / "more").write_bytes(b"x" * 60_000)
    for _ in range(40):
        keep(small / "waits.json")


@pytest.fixture
def impatient(monkeypatch):
    """No sign of life for 0.1 s is too long, and there is a look every 10 ms."""
    monkeypatch.setattr("rlhf_suite.waits._life.limit_s", 0.1)
    monkeypatch.setattr("rlhf_suite.waits.LOOK_S", 0.01)


def test_a_wait_for_a_thread_ends_when_nothing_happens_and_says_where_the_thread_is(impatient):
    begun, end = threading.Event(), threading.Event()

    def work():
        begun.set()
        end.wait()

    threading.Thread(target=work, name="a rollout", daemon=True).start()
    assert begun.wait(60)
    said = (
        r"happened for 0.1 s \(launch.timeout_s\), waiting for x; the thread a rollout is at .*threading.py:\d+ in wait"
    )
    with pytest.raises(RunError, match=said):
        result(Future(), "x", "a rollout")
    end.set()


@pytest.mark.notices(
    "silence of any length is waited for",
    "waits.py",
    "if self.silent_s > _life.limit_s:",
    "if self.silent_s > 100 * _life.limit_s:",
)
@pytest.mark.notices(
    "a wait that goes on is ended",
    "waits.py",
    "0.0 if signs != self.signs or is_somebody_within_a_limit() else silent_s",
    "silent_s",
)
@pytest.mark.notices(
    "a wait within its own limit is no sign of life",
    "waits.py",
    "signs != self.signs or is_somebody_within_a_limit()",
    "signs != self.signs",
)
def test_work_that_goes_on_is_waited_for(impatient):
    """With a limit of 0.1 s and a sign of life at each look, a patience of 100 looks ends nothing."""
    patience, looks = Patience("x"), range(100)
    for _ in looks:
        sign_of_life()
        patience.looked -= 1.0
        patience.look()
    with waiting("a call with a limit of its own", limit_s=60.0):
        for _ in looks:
            patience.looked -= 1.0
            patience.look()
    patience.look()
    with pytest.raises(RunError, match="nothing has happened"):
        for _ in looks:
            patience.looked -= 1.0
            patience.look()


@pytest.mark.notices(
    "the line of a coroutine is that of its caller",
    "waits.py",
    "        frames.insert(0, (frame",
    "        frames.append((frame",
)
def test_the_line_of_a_coroutine_is_the_innermost_of_the_user():
    async def inner():
        await asyncio.sleep(0)

    async def outer():
        await inner()

    work = outer()
    work.send(None)
    assert in_coroutine(work).endswith(" in inner")
    work.close()
