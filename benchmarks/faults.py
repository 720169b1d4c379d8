"""Faults in real runs: what the user reads, how long it takes, and what is left behind.

    python benchmarks/faults.py [words of names ...] [--write]

Each fault is made in a run on two CPU cores. The seconds are those from the fault to the end of the run, or until two
more steps are done where the run goes on. Afterwards processes and folders for temporary files are looked for. --write
writes the rows of these faults into the section of docs/faults_measured.md, and keeps those of the others.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil

from common import ROOT, publish, scratch, write_section

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

import jobs  # noqa: E402

import full_disk  # noqa: E402 - they are found by the line above
from rlhf_suite.launch.session import clear_abandoned  # noqa: E402
from rlhf_suite.models.builtin import create_tiny  # noqa: E402

PAGE, HEADING = ROOT / "docs" / "faults_measured.md", "## Measured faults"
DEADLINE_S, GONE_S = 900.0, 30.0
BESIDE = ("Run folder", "In each of the last")  # what is said of every run, and of random weights
SHOWN = 240  # characters of what the user reads
SFT = ["task=sft", "demo=sft", "eval.steps=1000", "train.max_steps=100000"]
PPO = [
    *(word for word in jobs.SMALL if not word.startswith(("data.max_samples", "eval."))),
    *("data.max_samples=4000", "eval.dataset=null", "eval.steps=-1", "actor.model_name_or_path={model}"),
]
DEFINED = "def reward_func(queries, prompts, labels):\n    "
REWARDS = {
    "broken": f"{DEFINED}raise KeyError('no such table')\n",
    "plain": f"{DEFINED}return [0.0] * len(queries)\n",
}
FILE = ["reward.rule=null", "reward.remote_url={folder}/{reward}.py"]
DISK_KB = 1 << 17
LONG = "a-folder-for-temporary-files-whose-name-is-longer-than-what-sockets-leave-room-for"


def after_three_steps(job: jobs.Job) -> bool:
    return job.folder.status()["last_step"] >= 3


def while_ray_starts(job: jobs.Job) -> bool:
    return any("raylet" in process.name() for process in job.family())


@dataclass(frozen=True)
class Fault:
    """A fault: the run, what is done to it (None: the words are enough), and when."""

    name: str
    words: list[str]
    make: Callable[[jobs.Job], object] | None = None
    when: Callable[[jobs.Job], bool] = after_three_steps
    goes_on: bool = False  # the run, as if nothing had happened
    small_disk: bool = False  # the run folder is on a disk of its own
    temporary: str = ""  # name of a folder in TMPDIR that becomes TMPDIR
    is_abandoned: bool = False  # nobody is left who clears up; the next run on the machine does


def sent(number: int) -> Callable[[jobs.Job], object]:
    """Send a signal to the driver."""
    return lambda job: os.kill(job.process.pid, number)


def fill_disk(job: jobs.Job) -> None:
    """Write into the file system of the run folder until nothing more fits."""
    full_disk.fill(job.folder.path.parent)


def kill_reward_process(job: jobs.Job) -> None:
    named(job, "rewards.worker").kill()


def kill_driver_and_watcher(job: jobs.Job) -> None:
    named(job, "watch.py").kill()
    job.process.kill()


def named(job: jobs.Job, word: str) -> psutil.Process:
    """Return the process of a run whose command has a word."""
    return next(each for each in job.family() if word in " ".join(each.cmdline()))


FAULTS = (
    Fault("`task=sft` gets SIGTERM", SFT, sent(signal.SIGTERM)),
    Fault("`task=ppo` gets SIGTERM", PPO, sent(signal.SIGTERM)),
    Fault("`task=ppo` gets SIGTERM while Ray starts", PPO, sent(signal.SIGTERM), while_ray_starts),
    Fault("the driver of `task=ppo` is killed", PPO, sent(signal.SIGKILL)),
    Fault("the driver and its watcher are killed", PPO, kill_driver_and_watcher, is_abandoned=True),
    Fault("the reward process is killed", [*PPO, *FILE], kill_reward_process, goes_on=True),
    Fault("an engine is killed", PPO, lambda job: job.actor("engine-0").kill(), goes_on=True),
    Fault(
        "an engine is killed, and may not be started again",
        [*PPO, "vllm.max_restarts=0"],
        lambda job: job.actor("engine-0").kill(),
    ),
    Fault("an engine hangs", [*PPO, "launch.timeout_s=60"], lambda job: job.actor("engine-0").suspend()),
    Fault("a rank of the policy is killed", PPO, lambda job: job.actor("actor-0").kill()),
    Fault("the disk of `task=sft` is full", SFT, fill_disk, small_disk=True),
    Fault("the disk of `task=ppo` is full", PPO, fill_disk, small_disk=True),
    Fault("the loss diverges", [*SFT, "actor.adam.lr=1e30"]),
    Fault("a reward function raises an error", [*PPO, *FILE]),
    Fault("TMPDIR is too long for sockets", PPO, temporary=LONG),
    Fault("a flag is misspelt", ["task=ppo", "algo.advantage.lamda=0.9"]),
)


def measure(fault: Fault, folder: Path) -> dict[str, object]:
    """Make a fault, and wait for the end of the run and of its processes."""
    for name, code in REWARDS.items():
        (folder / f"{name}.py").write_text(code)
    create_tiny(folder / "model")
    names = {"model": folder / "model", "folder": folder, "reward": "plain" if fault.make else "broken"}
    disk = full_disk.small_disk(folder / "disk", DISK_KB) if fault.small_disk else nullcontext(folder)
    with disk as place:
        job = jobs.Job(place / "run", [word.format(**names) if "{" in word else word for word in fault.words])
        family, began = job.family(), job.began
        if fault.make is not None:
            job.wait_for(lambda: fault.when(job), DEADLINE_S)
            family, began = job.family(), time.monotonic()
            fault.make(job)
        if fault.goes_on:
            until = job.folder.status()["last_step"] + 2
            job.wait_for(lambda: job.folder.status()["last_step"] >= until, DEADLINE_S)
            seconds, reads = time.monotonic() - began, what_is_read(job, folder)
            job.process.terminate()
            job.ended(DEADLINE_S)
        else:
            code = job.ended(DEADLINE_S).code
            seconds, reads = time.monotonic() - began, what_is_read(job, folder)
        left = [*jobs.survivors(family, GONE_S), *sessions()]
        if fault.is_abandoned:
            clear_abandoned(Path(tempfile.gettempdir()))
            after = [*jobs.survivors(family, GONE_S), *sessions()]
            left = [f"{len(left)} processes and folders, after the next run on the machine {len(after) or 'nothing'}"]
    how = "goes on" if fault.goes_on else code
    return {"fault": fault.name, "code": how, "reads": reads, "seconds": round(seconds, 1), "left": left}


def sessions() -> list[str]:
    """Return the folders of runs for temporary files."""
    return [path.name for path in Path(tempfile.gettempdir()).glob("rs-*")]


def what_is_read(job: jobs.Job, folder: Path) -> str:
    """Return what the error stream says so far, in one line, without the paths of this machine."""
    said = [line for line in job.said[1].read_text().splitlines() if line.strip() and not line.startswith(BESIDE)]
    reads = re.sub(r"\s+", " ", " ".join(said)).replace(f"{folder}/", "").replace(f"{ROOT}/", "")
    return reads.replace(tempfile.gettempdir(), "/tmp/...")


HEAD = f"""{HEADING}

`python benchmarks/faults.py --write` makes each fault in a real run on two CPU cores and writes this table. The cores
also had other work, at load averages up to 30, so the seconds are upper bounds. They count from the fault to the end of
the run. If the run continues, they count until two more steps are done. The last four faults exist from the beginning,
so their seconds count from the start of the run. "Left behind" are processes of the run that still exist after
{GONE_S:g} s, and its folders for temporary files.

| fault | what the user reads | exit code | seconds | left behind |
|---|---|---|---|---|
"""


def row(found: dict[str, object]) -> str:
    reads = str(found["reads"]).replace("|", "\\|").replace("`", "'")
    shown = f"`{reads[:SHOWN]}{' ...' if len(reads) > SHOWN else ''}`" if reads else "nothing"
    left = found["left"]
    assert isinstance(left, list)
    return f"| {found['fault']} | {shown} | {found['code']} | {found['seconds']} | {', '.join(left) or 'nothing'} |"


def write(found: list[dict[str, object]]) -> None:
    """Write the section with these rows and those that the page has of other faults."""
    rows = {
        line.split("|")[1].strip(): line for line in PAGE.read_text().partition(HEADING)[2].splitlines() if "|" in line
    }
    rows |= {str(each["fault"]): row(each) for each in found}
    write_section(PAGE, HEADING, HEAD + "".join(f"{rows[each.name]}\n" for each in FAULTS if each.name in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only the faults whose names have one of these words")
    parser.add_argument("--write", action="store_true", help="write the section of docs/faults_measured.md")
    given = parser.parse_args()
    found = []
    for fault in FAULTS:
        if given.words and not any(word in fault.name for word in given.words):
            continue
        with scratch() as folder, tempfile.TemporaryDirectory(prefix="rf-", dir="/tmp") as short:
            own = str(Path(short, fault.temporary))
            Path(own).mkdir(exist_ok=True)
            os.environ["TMPDIR"], tempfile.tempdir = own, own
            found.append(measure(fault, folder))
            tempfile.tempdir = None
            del os.environ["TMPDIR"]
        publish("faults", found[-1], save=False)
    if given.write:
        write(found)


if __name__ == "__main__":
    main()
