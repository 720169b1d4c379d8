"""Every command of README.md and docs/ passes the checks of a run as printed: with local stand-ins for the models,
files and servers that it names, and flags of the reader's where it says `...`."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from math import prod
from pathlib import Path

import pytest

from page_commands import ROOT, Command, commands, write_files
from rlhf_suite.api.plans import Devices, target_of
from rlhf_suite.cli.app import main
from rlhf_suite.cli.commands import COMMANDS, ask
from rlhf_suite.cli.migrate import INCOMPLETE
from rlhf_suite.composition.arguments import parse
from rlhf_suite.composition.config_file import with_config_file
from rlhf_suite.config.check.problems import report
from rlhf_suite.preflight.devices import device_problems
from rlhf_suite.preflight.inspections.inspect_runs import inspect
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.run_folders.record import fingerprint, save
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.run_folders.sweep_folder import extend_sweep

pytestmark = pytest.mark.stack

OWN = re.compile(r"(?:^|\s)(?:run\.py|rlhf-suite)\s")
ALL = commands()
RUNS = [each for each in ALL if OWN.search(each.text)]
# What other programs do in the blocks; everything else has to be a command of the suite.
OTHERS = ("pip install ", "pip wheel ", "ray start ", "ray get-auth-token ", "export ", "case ", "eval ", "source ")
OTHERS += ("pip uninstall ",)
OTHERS += ("python3.11 -m venv ", "realpath ", "/tmp/cuda/bin/", "FAKE_CUDA_PYTHON=")  # docs/fake_gpu.md
SHOWN = ("--help", "-sc")  # answered without a run


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """The address of a server that only listens, in a folder with all that the commands read."""
    folder = tmp_path_factory.mktemp("pages")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as listener:
        patch.chdir(folder)
        write_runs()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def write_runs() -> None:
    """Write the run folders and the sweep that commands name."""
    for task, words in (("sft", "task=sft demo=sft"), ("ppo", "task=ppo demo=ppo")):
        (Path("outputs") / task / "T" / "rollouts").mkdir(parents=True)
        (Path("outputs") / task / "T" / "rollouts" / "step_1.parquet").touch()
        (run,) = preflight(parse(shlex.split(words))).runs
        record = RunFolder(Path("outputs") / task / "T")
        record.start(fingerprint(run))
        save(run, record.config)
        record.mark_done({})
    Path("sweeps/seeds").mkdir(parents=True)
    extend_sweep(Path("sweeps/seeds"), [])
    Path("train_ppo.sh").write_text("python -m openrlhf.cli.train_sft --max_len 2048 --dataset my.jsonl\n")


@pytest.mark.parametrize("command", RUNS, ids=lambda each: each.place)
def test_a_command_of_a_page_passes_the_checks(command: Command, server: str, capsys):
    words = command.words(server)
    is_planned = words[:1] == ["plan"]
    if (words[0] in COMMANDS and not is_planned) or any(word.startswith(SHOWN) for word in words):
        code = main(words)
        assert code == 0 or (words[0] == "migrate" and code == INCOMPLETE), capsys.readouterr().err
        return
    if is_planned:
        asked = ask(words)
        target_of(Devices(asked.gpu, asked.memory, asked.mfu, asked.tflops))
        words = asked.rest
    found = preflight(with_config_file(parse([new_output(word) for word in words])))
    problems = found.problems or ([] if is_planned else [*inspect(found.runs), *device_problems(found)])
    problems = [each for each in problems if not is_of_this_machine(each)]
    assert not problems, f"{command.text}\n{report(problems)}"
    if "-m" in words:
        assert len(found.runs) == prod(word.count(",") + 1 for word in words)


def new_output(word: str) -> str:
    """A flag for a file that is written; the stand-ins of another command may be there already."""
    return re.sub(r"^(\w+\.output_path=)", r"\1new_", word)


def is_of_this_machine(problem) -> bool:
    """Whether a problem is that this machine lacks what the command is for: GPUs, or an optional package."""
    is_gym = find_spec("reasoning_gym") is None and "the package reasoning-gym is not installed" in problem.what
    return is_gym or (problem.key, problem.what) == ("launch.device", "cuda, but no GPU is visible here")


def test_every_other_command_of_a_page_is_known():
    sessions = re.findall(r"@nox\.session(?:\(.*\))?\ndef (\w+)", (ROOT / "noxfile.py").read_text())
    unknown = []
    for each in ALL:
        session = re.match(r"python3 noxfile\.py -s (\w+)", each.text)
        script = re.match(r"(?:PYTHONPATH=\w+ )?python (benchmarks/\w+\.py)((?: --\w+)*)", each.text)
        if session:
            known = session[1] in sessions
        elif script:
            text = (ROOT / script[1]).read_text()
            known = all(f'"{option}"' in text for option in script[2].split())
        else:
            known = each in RUNS or each.text.startswith(OTHERS)
        unknown += [] if known else [f"{each.place}: {each.text}"]
    assert unknown == []
