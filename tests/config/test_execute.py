"""One job: what is written, what is said and which exit code, for every way a task can end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import types

import pytest

from full_disk import fill
from rlhf_suite.cli.execute import execute
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.run_folders.record import fingerprint, load
from rlhf_suite.run_folders.run_folder import RunFolder


def a_run():
    run = Run.of("sft")
    run.logger.progress, run.actor.model_name_or_path = False, "builtin:tiny"
    return run


@pytest.fixture
def ends(monkeypatch, tmp_path):
    """Run a task that returns or raises what it is given; gives the exit code."""

    def execute_with(end, config=None, folder=tmp_path):
        def run(_, folder, *plan):
            assert RunFolder(folder).status()["state"] == "running"
            if isinstance(end, BaseException):
                raise end
            return end

        config = config or a_run()
        task = types.ModuleType(f"rlhf_suite.tasks.{config.task}")
        task.run = run
        monkeypatch.setitem(sys.modules, task.__name__, task)
        return execute(config, folder)

    before = dict(os.environ)
    yield execute_with
    os.environ.clear()
    os.environ.update(before)


def test_a_run_leaves_its_configuration_and_its_metrics(ends, tmp_path):
    assert ends({"eval/gpt_loss": 1.5}) == 0
    assert load(tmp_path / "config.yaml") == a_run()
    status = RunFolder(tmp_path).status()
    assert (status["state"], status["metrics"]) == ("done", {"eval/gpt_loss": 1.5})
    assert status["fingerprint"] == fingerprint(a_run())


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("data.dataset: no rows"), 2, "data.dataset: no rows"),
        (RunError("actor-0 died while training"), 1, "actor-0 died while training"),
        (KeyError("loss"), 1, "error.log"),
    ],
)
def test_a_failure_is_told_without_a_traceback_and_recorded(ends, tmp_path, capsys, error, code, said):
    assert ends(error) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown
    status = RunFolder(tmp_path).status()
    assert status["state"] == "failed"
    assert type(error).__name__ in status["error"]


def test_the_traceback_of_an_unexpected_error_is_kept(ends, tmp_path):
    ends(KeyError("loss"))
    text = (tmp_path / "error.log").read_text()
    assert "Traceback" in text
    assert "KeyError: 'loss'" in text


def test_an_expected_error_leaves_no_error_log(ends, tmp_path):
    ends(RunError("x"))
    assert not (tmp_path / "error.log").exists()


@pytest.mark.notices(
    "an interrupted run has failed",
    "cli/execute.py",
    'record.mark_stopped("interrupted")',
    'record.mark_failed("interrupted")',
)
def test_an_interrupted_run_is_stopped_and_has_not_failed(ends, tmp_path, capsys):
    assert ends(KeyboardInterrupt()) == 130
    assert "no checkpoint was saved (ckpt.save_steps=-1), so it cannot be continued" in capsys.readouterr().err
    status = RunFolder(tmp_path).status()
    assert (status["state"], status["error"]) == ("stopped", "interrupted")


def test_an_interrupted_run_that_cannot_be_resumed_does_not_offer_it(ends, capsys):
    assert ends(KeyboardInterrupt(), Run.of("chat")) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_full_disk_is_one_message_and_the_status_says_failed(ends, small, tmp_path, capsys):
    folder = small / "run"
    folder.mkdir()
    RunFolder(folder).start("abc")
    (folder / "config.yaml").write_bytes(bytes(4096))
    assert ends(OSError(errno.ENOSPC, "No space left on device"), folder=folder) == 1
    fill(small)
    assert ends(ValueError("a library on a full disk"), folder=folder) == 1
    for said in capsys.readouterr().err.splitlines():
        assert said.startswith(str(folder)) and "the disk is full" in said
    assert RunFolder(folder).status()["state"] == "failed"


def test_a_failure_that_cannot_be_written_down_is_shown(ends, tmp_path, capsys):
    (tmp_path / "error.log").mkdir()
    assert ends(KeyError("loss")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_stop_that_a_library_turned_into_another_exit_is_recorded_as_a_stop(monkeypatch, tmp_path, capsys):
    """Ray makes `SystemExit: 1` of what a signal handler raises during one of its calls."""

    def run(_, folder, plan):
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            raise SystemExit(1) from None

    task = types.ModuleType("rlhf_suite.tasks.sft")
    task.run = run
    monkeypatch.setitem(sys.modules, task.__name__, task)
    assert execute(a_run(), tmp_path) == 143
    status = RunFolder(tmp_path).status()
    assert (status["state"], status["error"]) == ("stopped", "stopped by SIGTERM")
    assert "SystemExit" not in capsys.readouterr().err


PRESS = """
import os, signal, sys
class Press:
    def find_spec(self, name, path, target=None):
        if name == "rlhf_suite.cli.commands":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Press())
from rlhf_suite.cli.__main__ import command
command()
"""


@pytest.mark.notices(
    "Ctrl-C in the first second shows a traceback", "cli/__init__.py", "except KeyboardInterrupt:", "except EOFError:"
)
def test_ctrl_c_while_the_command_is_loaded_shows_no_traceback():
    ended = subprocess.run([sys.executable, "-c", PRESS, "--help"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
