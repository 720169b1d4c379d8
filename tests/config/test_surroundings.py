"""What a command meets around it: streams that are closed or full, a folder that is gone, names that lead nowhere."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

import rlhf_suite as rs
from rlhf_suite.cli import main
from rlhf_suite.disk import resolve_home
from rlhf_suite.errors import UserError

COMMAND = f"{shlex.quote(sys.executable)} -m rlhf_suite.cli"
CLOSED = ["--version >&-", "--version >&- 2>&- <&-", "task=sft --cfg job >&-", "schema >&-"]
FULL = ["--version >/dev/full", "task=sft --help >/dev/full", "schema >/dev/full", "gallery gone >/dev/full"]
NO_USER = "~no-such-user/x"
LONG = "n" * 300
READ = [["why"], ["report"], ["watch"], ["sweep", "status"]]
WRITTEN = [["gallery"]]
FLAGS = ["run_dir", "ckpt.path", "ckpt.output_dir"]


def run_in_shell(line, folder):
    """Run a command line of a shell in a folder."""
    return subprocess.run(
        ["bash", "-c", f"{COMMAND} {line}"], capture_output=True, text=True, cwd=folder, timeout=120, check=False
    )


@pytest.mark.notices(
    "a process that was started without an output fails, or its first file becomes the output",
    "cli/app.py",
    "    open_missing_streams()\n",
    "",
)
@pytest.mark.parametrize("line", CLOSED)
def test_a_closed_stream_is_replaced(line, tmp_path):
    done = run_in_shell(line, tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stderr


@pytest.mark.parametrize("line", FULL)
def test_a_full_disk_behind_the_output_is_one_sentence(line, tmp_path):
    done = run_in_shell(line, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("the output cannot be written: No space left on device. ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ["task=sft explain=true", "plan task=sft", "--config x.yaml"])
def test_a_deleted_folder_is_named(words, tmp_path):
    (tmp_path / "gone").mkdir()
    line = f"cd gone && rmdir ../gone && {COMMAND} {words}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 2 and "the current folder was deleted" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [*READ, *WRITTEN], ids=lambda words: words[0])
@pytest.mark.parametrize("name", [NO_USER, LONG], ids=["no user", "long"])
def test_commands_name_a_path_that_leads_nowhere(words, name, capsys):
    assert main([*words, name]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_name_the_home_of_nobody(flag, capsys):
    assert main(["task=sft", f"{flag}={NO_USER}", "explain=true"]) == 2
    assert f"{NO_USER}: the home folder" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--config", "--config-dir"])
def test_options_name_the_home_of_nobody(option, capsys):
    assert main(["task=sft", option, NO_USER, "explain=true"]) == 2
    assert f"{NO_USER}: the home folder" in capsys.readouterr().err


@pytest.mark.parametrize("path", [NO_USER, LONG, "a\0b"])
def test_python_names_a_path_that_leads_nowhere(path):
    for call in (rs.load, rs.load_sweep, rs.write_report):
        with pytest.raises(UserError, match=r"home folder|cannot be read"):
            call(path)


def test_a_home_folder_is_resolved(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_home("~/x") == tmp_path / "x" and str(resolve_home("x/~")) == "x/~"


@pytest.mark.parametrize(
    ("word", "remedy"),
    [("docter", "rlhf-suite doctor?"), ("reprot", "rlhf-suite report?"), ("help", "rlhf-suite --help")],
)
def test_a_command_that_is_misspelt_is_suggested(word, remedy, capsys):
    assert main([word]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{word} is not a command: ") and remedy in said


def test_tasks_are_no_misspelt_commands(capsys):
    for task in ("sft", "chat", "generate", "score"):
        assert main([task]) == 2
        assert f"write task={task}" in capsys.readouterr().err


@pytest.mark.notices(
    "a sweep over glob(...) of presets ends in Hydra's traceback",
    "composition/overrides.py",
    "    override.config_loader = loader  # Hydra sets it in lists of overrides alone\n",
    "",
)
def test_a_pattern_of_presets_is_a_sweep(capsys):
    assert main(["-m", "experiment=glob(*_cov)", "explain=true"]) == 0
    assert "This is the first of 2 jobs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "said"),
    [("experiment=glob(zzz*)", "no preset matches glob(zzz*)"), ("train.seed=glob(1*)", "train.seed has none")],
)
def test_a_pattern_that_matches_nothing_is_a_problem(word, said, capsys):
    assert main(["-m", "task=sft", word, "explain=true"]) == 2
    assert said in capsys.readouterr().err
