"""The folder of a cluster on this machine: who can enter it, and when it and its processes are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from rlhf_suite.launch.session import MAX_ROOT_BYTES, clear_abandoned, root_problem, session
from rlhf_suite.launch.watch import members
from rlhf_suite.polling import poll_until

# Opens a session with a stopped member that ignores SIGTERM; tells both, then waits to be killed.
DRIVER = """
import os, signal, subprocess, sys, tempfile, time
from rlhf_suite.launch.session import session
tempfile.tempdir = sys.argv[1]
with session() as place:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"
    member = subprocess.Popen([sys.executable, "-c", code], env=os.environ | place.environment,
                              stdout=subprocess.PIPE, start_new_session=True)
    member.stdout.readline()
    member.send_signal(signal.SIGSTOP)
    print(place.folder, member.pid, flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def root(monkeypatch):
    """A folder for temporary files, with a path that is short enough."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.mark.notices(
    "processes outlive a run whose folder for temporary files is a link",
    "launch/watch.py",
    "set(), folder.resolve()",
    "set(), folder",
)
def test_a_process_that_writes_into_the_session_is_found_through_a_link(root, monkeypatch):
    """Its environment does not tell, as that of Ray's workers."""
    (root / "real").mkdir()
    (root / "link").symlink_to(root / "real")
    monkeypatch.setattr(tempfile, "tempdir", str(root / "link"))
    with session() as place, (place.folder / "log").open("w") as log:
        member = subprocess.Popen(["sleep", "3600"], stdout=log)
        try:
            assert member.pid in members(place.folder)
        finally:
            member.kill()


def start(root: Path) -> tuple[subprocess.Popen, Path, psutil.Process]:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(root)], stdout=subprocess.PIPE, text=True)
    folder, number = driver.stdout.readline().split()
    member = psutil.Process(int(number))
    assert poll_until(lambda: member.status() == psutil.STATUS_STOPPED, 300)
    return driver, Path(folder), member


def watcher_of(driver: subprocess.Popen) -> psutil.Process:
    (watcher,) = (p for p in psutil.Process(driver.pid).children() if "watch.py" in " ".join(p.cmdline()))
    return watcher


def kill(driver: subprocess.Popen) -> None:
    driver.kill()
    driver.communicate()


def test_only_this_user_can_enter_and_nothing_is_left(root):
    with session() as place:
        assert place.folder.parent == root
        assert place.folder.stat().st_mode & 0o777 == 0o700
        assert Path(place.environment["TMPDIR"]).is_relative_to(place.folder)
    assert list(root.iterdir()) == []


def test_a_killed_driver_takes_its_stopped_processes_and_its_folder_with_it(root):
    driver, folder, member = start(root)
    watcher = watcher_of(driver)
    kill(driver)
    assert psutil.wait_procs([member, watcher], timeout=300)[1] == []
    assert not folder.exists()


def test_what_a_killed_driver_and_its_killed_watcher_left_is_cleared_by_the_next_run(root):
    driver, folder, member = start(root)
    watcher = watcher_of(driver)
    watcher.kill()
    assert poll_until(lambda: watcher.status() == psutil.STATUS_ZOMBIE, 300)  # its driver does not wait for it
    kill(driver)
    assert folder.exists() and member.status() == psutil.STATUS_STOPPED
    with session() as place:
        assert [each for each in root.iterdir() if each != place.folder] == []
        assert psutil.wait_procs([member], timeout=300)[1] == []


def test_what_belongs_to_a_living_run_or_is_not_a_session_is_kept(root):
    driver, folder, member = start(root)
    (root / "rs-notes").mkdir()
    (root / "rs-link").symlink_to(folder)
    clear_abandoned(root)
    assert {each.name for each in root.iterdir()} == {folder.name, "rs-notes", "rs-link"}
    assert member.is_running()
    kill(driver)


def test_a_driver_that_goes_on_is_spared_although_it_still_writes_into_the_folder(root):
    """As Ray's driver does: its log stays open."""
    goes_on = "    log = open(place.folder / 'log', 'w')\nprint('goes on')\n"
    code = DRIVER.removesuffix("    time.sleep(3600)\n") + goes_on
    driver = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)
    assert driver.communicate(timeout=60)[0].splitlines()[-1] == "goes on"
    assert driver.returncode == 0
    assert list(root.iterdir()) == []


def test_processes_that_hinder_the_driver_from_leaving_are_killed(root, monkeypatch):
    with session() as place:
        member = subprocess.Popen(["sleep", "3600"], env=os.environ | place.environment)
        member.send_signal(signal.SIGSTOP)
        place.leave()
        assert member.wait(30) == -signal.SIGKILL  # by the watcher, since this block does not end


@pytest.mark.parametrize(("name", "said"), [("x" * 40, "leave room for"), ("tmp-é", "other than ASCII")])
def test_a_folder_for_temporary_files_that_cannot_hold_sockets_is_named(monkeypatch, name, said):
    assert root_problem() is None
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{name}")
    problem = root_problem()
    assert problem is not None and said in problem and name in problem
    assert len("/tmp/slurm.12345678") < MAX_ROOT_BYTES
