"""Children that follow their parent, signals that are passed on, and the lock that both hold."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from rlhf_suite.errors import RunError
from rlhf_suite.launch.processes import exclusive_lock, run_child
from rlhf_suite.polling import poll_until

# A parent that holds the lock and waits for a child, which tells its own process id.
PARENT = """
import os, signal, sys
from pathlib import Path
from rlhf_suite.launch.processes import run_child, exclusive_lock
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits it as ignored
CHILD = '''
import os, signal, sys, time
from rlhf_suite.launch.processes import kill_with_parent
def note(number, frame):
    print(signal.Signals(number).name, flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGINT, note)
kill_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(3600)
'''
with exclusive_lock(Path(sys.argv[1]), 0) as lock:
    run_child([sys.executable, "-c", CHILD, str(os.getpid())], keep=[lock])
"""


@pytest.fixture
def family(tmp_path):
    """A parent with a child that sleeps: the process, and the child."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True)
    yield parent, psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()


def gone(process):
    return psutil.wait_procs([process], timeout=300)[1] == []


def test_a_child_dies_with_its_killed_parent_and_then_the_lock_is_free(family, tmp_path):
    parent, child = family
    with pytest.raises(RunError, match="another process works in"), exclusive_lock(tmp_path / "lock", 0):
        pass
    parent.kill()
    with exclusive_lock(tmp_path / "lock", 10):
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_child_once_and_both_end(family, number):
    parent, child = family
    parent.send_signal(number)
    said, _ = parent.communicate(timeout=300)
    assert said.split() == [number.name]
    assert gone(child)
    assert parent.returncode != 0


def test_the_exit_code_is_the_childs():
    assert run_child([sys.executable, "-c", "raise SystemExit(7)"]) == 7
    assert run_child([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == -signal.SIGKILL


def test_a_lock_is_waited_for(tmp_path):
    work = f"touch {tmp_path}/begun; sleep 0.3; touch {tmp_path}/done"
    holder = subprocess.Popen(["flock", tmp_path / "lock", "sh", "-c", work])
    assert poll_until((tmp_path / "begun").exists, 300)
    with exclusive_lock(tmp_path / "lock", 10):
        assert (tmp_path / "done").exists()
    holder.wait()
