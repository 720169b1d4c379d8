"""Faults in real runs: what the user reads, how long it takes, and what is left behind.

    python benchmarks/faults.py [words of names ...] [--write]

Each fault is made in a run on two CPU cores. The seconds are those from the fault to the end of the run. Afterwards
processes and folders for temporary files are looked for. With --write the section of docs/faults.md.
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
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, publish, scratch, write_section

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

import jobs  # noqa: E402 - it is found by the line above

from rlhf_suite.models.builtin import create_tiny  # noqa: E402

PAGE, HEADING = ROOT / "docs" / "faults.md", "## Measured faults"
GONE_S = 30.0
BESIDE = ("Run folder", "In each of the last")  # what is said of every run, and of random weights
SHOWN = 240  # characters of what the user reads
SFT = ["task=sft", "demo=sft", "eval.steps=1000", "train.max_steps=100000"]
PPO = [
    *(word for word in jobs.SMALL if not word.startswith(("data.max_samples", "eval."))),
    *("data.max_samples=4000", "eval.dataset=null", "eval.steps=-1", "actor.model_name_or_path={model}"),
]
REWARD = "def reward_func(queries, prompts, labels):\n    raise KeyError('no such table')\n"


@dataclass(frozen=True)
class Fault:
    """A fault: the run, and what is done to it after its third step (None: the words are enough)."""

    name: str
    words: list[str]
    make: Callable[[jobs.Job], object] | None = None


def sent(number: int) -> Callable[[jobs.Job], object]:
    """Send a signal to the driver."""
    return lambda job: os.kill(job.process.pid, number)


FAULTS = (
    Fault("`task=sft` gets SIGTERM", SFT, sent(signal.SIGTERM)),
    Fault("`task=ppo` gets SIGTERM", PPO, sent(signal.SIGTERM)),
    Fault("the driver of `task=ppo` is killed", PPO, sent(signal.SIGKILL)),
    Fault("a rank of the policy is killed", PPO, lambda job: job.actor("actor-0").kill()),
    Fault(
        "an engine is killed, and may not be started again",
        [*PPO, "vllm.max_restarts=0"],
        lambda job: job.actor("engine-0").kill(),
    ),
    Fault("an engine hangs", [*PPO, "launch.timeout_s=60"], lambda job: job.actor("engine-0").suspend()),
    Fault("the loss diverges", [*SFT, "actor.adam.lr=1e30"]),
    Fault("a reward function raises an error", [*PPO, "reward.rule=null", "reward.remote_url={reward}"]),
    Fault("a flag is misspelt", ["task=ppo", "algo.advantage.lamda=0.9"]),
)


def measure(fault: Fault, folder: Path) -> dict[str, object]:
    """Make a fault, and wait for the end of the run and of its processes."""
    (folder / "reward.py").write_text(REWARD)
    create_tiny(folder / "model")
    names = {"model": folder / "model", "reward": folder / "reward.py"}
    job = jobs.Job(folder / "run", [word.format(**names) if "{" in word else word for word in fault.words])
    family, began = job.family(), job.began
    if fault.make is not None:
        job.wait_for(lambda: job.folder.status()["last_step"] >= 3)
        family, began = job.family(), time.monotonic()
        fault.make(job)
    ended = job.ended()
    seconds = time.monotonic() - began
    left = [*jobs.survivors(family, GONE_S), *(path.name for path in Path(tempfile.gettempdir()).glob("rs-*"))]
    said = [line for line in ended.err.splitlines() if line.strip() and not line.startswith(BESIDE)]
    reads = re.sub(r"\s+", " ", " ".join(said)).replace(f"{folder}/", "").replace(f"{ROOT}/", "")
    return {"fault": fault.name, "code": ended.code, "reads": reads, "seconds": round(seconds, 1), "left": left}


HEAD = f"""{HEADING}

`python benchmarks/faults.py --write` makes each fault in a real run on two CPU cores that also had other work, and
writes this table. The seconds are those from the fault to the end of the run, and for the last three from its start.
Left behind are processes of the run after {GONE_S:g} s, and its folders for temporary files.

| fault | what the user reads | exit code | seconds | left behind |
|---|---|---|---|---|
"""


def row(found: dict[str, object]) -> str:
    reads = str(found["reads"]).replace("|", "\\|").replace("`", "'")
    shown = f"`{reads[:SHOWN]}{' ...' if len(reads) > SHOWN else ''}`" if reads else "nothing"
    left = found["left"]
    assert isinstance(left, list)
    return f"| {found['fault']} | {shown} | {found['code']} | {found['seconds']} | {', '.join(left) or 'nothing'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only the faults whose names have one of these words")
    parser.add_argument("--write", action="store_true", help="write the section of docs/faults.md")
    given = parser.parse_args()
    found = []
    for fault in FAULTS:
        if given.words and not any(word in fault.name for word in given.words):
            continue
        with scratch() as folder, tempfile.TemporaryDirectory(prefix="rf-", dir="/tmp") as own:
            os.environ["TMPDIR"], tempfile.tempdir = own, own
            found.append(measure(fault, folder))
            tempfile.tempdir = None
            del os.environ["TMPDIR"]
        publish("faults", found[-1], save=False)
    if given.write:
        write_section(PAGE, HEADING, HEAD + "\n".join(map(row, found)) + "\n")


if __name__ == "__main__":
    main()
