"""What SIGTERM and SIGUSR2 do to a process, depending on whether a loop is at work."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from rlhf_suite.launch.stop import SIGNALS, Stopped, block_signals, defer_signals, get_stop_signal, stoppable

EACH = pytest.mark.parametrize("number", SIGNALS)


@pytest.fixture(autouse=True)
def hangs_up():
    """A test run under nohup inherits SIGHUP as ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def send(number: int) -> None:
    signal.pthread_kill(threading.get_ident(), number)  # another thread of a test process must not take it


@EACH
def test_a_signal_before_the_first_step_ends_the_run_at_once(number):
    with pytest.raises(Stopped) as stop, stoppable():
        send(number)
    assert (stop.value.number, stop.value.code, stop.value.saved) == (number, 128 + number, "")


@EACH
def test_a_signal_during_a_step_is_only_noted(number):
    with stoppable(), defer_signals():
        assert get_stop_signal() is None
        send(number)
        assert get_stop_signal() == number
    assert get_stop_signal() is None


def test_a_hangup_that_the_user_ignores_is_ignored():
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stoppable(), defer_signals():
        send(signal.SIGHUP)
        assert get_stop_signal() is None


def test_a_signal_that_is_repeated_at_once_is_the_same_request():
    with stoppable(), defer_signals():
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert get_stop_signal() == signal.SIGTERM


def test_a_second_signal_ends_the_run_at_once_in_the_name_of_the_first(monkeypatch):
    monkeypatch.setattr("rlhf_suite.launch.stop.REPEATED_S", 0.0)
    with pytest.raises(Stopped, match="stopped by SIGUSR2"), stoppable(), defer_signals():
        send(signal.SIGUSR2)
        send(signal.SIGTERM)


def test_an_interruption_that_a_library_swallows_is_raised_again_behind_the_step():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt), stoppable(), defer_signals():
            with contextlib.suppress(BaseException):  # what an import in a library does
                send(signal.SIGINT)
            get_stop_signal()
        with stoppable():
            assert get_stop_signal() is None
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_exit_that_a_library_makes_of_the_stop_keeps_its_code():
    with pytest.raises(Stopped) as stop, stoppable():
        try:
            send(signal.SIGTERM)
        except SystemExit:
            raise SystemExit(1) from None
    assert stop.value.code == 143


def test_the_exit_of_a_handler_that_a_library_installs_in_a_shielded_block_is_a_stop():
    with pytest.raises(Stopped, match="SIGTERM"), stoppable(), block_signals():
        raise SystemExit(15)  # as Ray's handler does, in the name of a signal that another thread took


def test_handlers_are_put_back_also_those_that_a_library_changed():
    before = [signal.getsignal(number) for number in SIGNALS]
    with stoppable():
        ours = signal.getsignal(signal.SIGTERM)
        with block_signals():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == ours
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_children_of_a_shielded_block_do_not_receive_the_signals_and_this_process_does():
    with stoppable(), defer_signals():
        with block_signals():
            child = subprocess.Popen(
                [sys.executable, "-c", "print('up', flush=True); input(); print('alive')"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert child.stdout.readline() == "up\n"
            for number in SIGNALS:
                child.send_signal(number)
            send(signal.SIGTERM)
            assert get_stop_signal() is None
        assert get_stop_signal() == signal.SIGTERM
    assert child.communicate("\n", timeout=300)[0] == "alive\n"
    assert child.returncode == 0


# A process whose main thread reacts to no signal, as in code of C that takes long; WITHIN is what it is within.
STUCK = """
import signal, sys
from contextlib import nullcontext
from pathlib import Path
from rlhf_suite.launch import stop
stop.REPEATED_S, stop.END_S = 0.0, 0.1
record = Path(sys.argv[1])
within = getattr(stop, "WITHIN", nullcontext)
with stop.stoppable(), stop.record_end(lambda end: record.write_text(str(end))), within():
    for number in stop.SIGNALS:
        signal.signal(number, lambda *_: None)
    print("up", flush=True)
    while True:
        signal.pause()
"""


@pytest.mark.notices(
    "a signal is answered when the main thread comes to it",
    "launch/stop.py",
    "                    self.hear(numbers[0])",
    "                    pass",
)
@pytest.mark.notices(
    "a second signal waits for the main thread",
    "launch/stop.py",
    "        os._exit(128 + stop.number)\n",
    "        return\n",
)
@pytest.mark.notices(
    "a process that is ended at once leaves no word",
    "launch/stop.py",
    "        for record in _state.at_the_end:\n",
    "        for record in ():\n",
)
@pytest.mark.parametrize(
    ("within", "said"),
    [("nullcontext", "the run ends"), ("defer_signals", "the run stops after this step and saves it")],
)
def test_a_stuck_process_answers_a_signal_at_once_and_is_ended_by_a_second_one(tmp_path, within, said):
    code = STUCK.replace("WITHIN", within)
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path / "end"], stdout=pipe, stderr=pipe, text=True)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline() == f"SIGTERM: {said}; a second signal ends it at once\n"
    process.send_signal(signal.SIGUSR2)
    assert process.stderr.readline() == "SIGUSR2 again: the run ends at once\n"
    assert process.wait(60) == 128 + signal.SIGTERM
    assert (tmp_path / "end").read_text() == "stopped by SIGTERM"


def test_what_a_forked_child_is_sent_is_not_for_its_parent(capfd):
    with stoppable():
        pid = os.fork()
        if pid == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            except BaseException:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        send(signal.SIGWINCH)
    assert "SIGTERM" not in capfd.readouterr().err


def test_a_thread_that_never_ends_does_not_hold_a_process_that_has_failed():
    code = (
        "import threading; from rlhf_suite.launch import stop; stop.LEAVE_S = 0.1\n"
        "threading.Thread(target=threading.Event().wait).start(); stop.leave(3)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 3


def test_a_process_that_has_succeeded_ends_what_it_began_but_does_not_take_the_interpreter_apart():
    code = """if True:
        import atexit, os, threading
        from rlhf_suite.launch.stop import leave
        class Held:
            def __del__(self):
                print("taken apart")
        held, is_over = Held(), threading.Event()
        atexit.register(lambda: print("registered"))
        threading.Thread(target=lambda: (is_over.wait(), print("thread"))).start()
        threading.Timer(0.2, is_over.set).start()
        leave(0)
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "thread\nregistered\n", "")


@pytest.mark.notices(
    "a pool of threads that nobody has closed holds a process that has succeeded",
    "launch/stop.py",
    "threading._shutdown()",
    "[thread.join() for thread in threading.enumerate() if thread is not threading.main_thread()]",
)
@pytest.mark.parametrize("code", [0, 3])
def test_a_pool_of_threads_that_nobody_has_closed_does_not_hold_a_process(code):
    """As the server of a reward model has them, and many libraries. What it is at work on is finished first."""
    source = f"""if True:
        import time
        from concurrent.futures import ThreadPoolExecutor
        from rlhf_suite.launch.stop import leave
        pool = ThreadPoolExecutor(2)
        pool.submit(time.sleep, 0.2).add_done_callback(lambda _: print("done", flush=True))
        leave({code})
    """
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=30)
    assert (ended.returncode, ended.stderr) == (code, "")
    assert ended.stdout == ("done\n" if code == 0 else ended.stdout)


@pytest.mark.notices(
    "a signal shows a traceback of what cleans up", "launch/stop.py", "signal.signal(number, signal.SIG_IGN)", "pass"
)
def test_a_signal_behind_the_end_shows_no_traceback_of_what_cleans_up():
    code = """if True:
        import atexit, os, signal
        from rlhf_suite.launch.stop import SIGNALS, leave
        atexit.register(lambda: [os.kill(os.getpid(), number) for number in (signal.SIGINT, *SIGNALS)])
        leave(1)
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")
