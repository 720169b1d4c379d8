"""Runs that are made to stand still, and what `rlhf-suite why` says of each.

    python benchmarks/stalls.py [words of names ...] [--write]

Each stall is made in a real run: code of the user that does not return, or an actor that is stopped (SIGSTOP) at a
chosen moment. Then `why` is asked every second until it names what the run waits for. With --write docs/stalls.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, publish, scratch

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

import jobs  # noqa: E402 - it is found by the line above

from rlhf_suite.cli.app import main as main_of_the_suite  # noqa: E402
from rlhf_suite.polling import poll_until  # noqa: E402

RECENT_S = 4.0  # an update that began so short a time ago goes on
NAMED_S = 60.0  # the longest time that `why` is asked
LASTING = r"[^\n]*: for ([5-9]|\d\d+) s"  # a wait of five seconds is none of a run that works
SHOWN = 3  # waits of a stall in the table
FLAG = "stall"  # the file that makes the code of the user wait
HANGS = f"""
import time
from pathlib import Path

def hang():
    while (Path(__file__).parent / "{FLAG}").exists():
        time.sleep(0.1)
"""
REWARD = HANGS + (
    "\ndef reward_func(queries, prompts, labels):\n    hang()\n    return [len(text) % 2 for text in queries]\n"
)
ROWS = HANGS + "\ndef rows(row):\n    hang()\n    return row\n"
ENVIRONMENT = (
    HANGS
    + """
from rlhf_suite.agents.base import Start, Step

class Environment:
    async def reset(self, task):
        return Start()

    async def step(self, turn):
        import asyncio
        await asyncio.to_thread(hang)
        return Step(reward=float(len(turn.content) % 2), done=True)

    async def close(self):
        pass
"""
)
FILES = {"reward.py": REWARD, "rows.py": ROWS, "environment.py": ENVIRONMENT}
LONG = ["train.max_steps=500", "eval.steps=500", "logger.progress=false"]


@dataclass(frozen=True)
class Stall:
    """A way to stand still: further words of the run, how the stall is made, and what has to be named."""

    name: str
    words: list[str]
    make: Callable[[jobs.Job, Path], None]
    named: str  # a regular expression


def after_a_step(job: jobs.Job) -> None:
    job.wait_for_step(1)


def user_code(job: jobs.Job, files: Path) -> None:
    after_a_step(job)
    (files / FLAG).touch()


def from_the_start(job: jobs.Job, files: Path) -> None:
    (files / FLAG).touch()


def stopped(actor: str) -> Callable[[jobs.Job, Path], None]:
    """Stop an actor between two steps or within one."""

    def make(job: jobs.Job, files: Path) -> None:
        after_a_step(job)
        job.actor(actor).suspend()

    return make


def stopped_in_update(job: jobs.Job, files: Path) -> None:
    """Stop the engine while the policy trains: the next that it is asked for is to take weights."""
    after_a_step(job)
    engine = job.actor("engine-0")

    def trains() -> bool:
        waits = json.loads(job.folder.waits.read_text())["waits"] if job.folder.waits.exists() else []
        return any("ppo_train" in wait["what"] and time.time() - wait["began"] < RECENT_S for wait in waits)

    job.wait_for(trains)
    engine.suspend()


def stopped_in_checkpoint(job: jobs.Job, files: Path) -> None:
    """Stop the policy as soon as a checkpoint begins to be written."""
    after_a_step(job)
    actor, before = job.actor("actor-0"), set(job.folder.checkpoints.rglob("*"))
    assert poll_until(lambda: set(job.folder.checkpoints.rglob("*")) - before, jobs.DEADLINE_S, 0.0005)
    actor.suspend()


STALLS = (
    Stall(
        "a reward function does not return",
        ["reward.rule=null", "reward.remote_url={files}/reward.py"],
        user_code,
        r"the scores of \d+ samples by the reward",
    ),
    Stall(
        "an environment does not answer",
        [
            *("reward.rule=null", "agent.kind=environment", "algo.advantage.estimator=rloo"),
            "train.agent_func_path={files}/environment.py",
        ],
        user_code,
        r"an episode of the prompt at \S+:\d+",
    ),
    Stall(
        "a function for rows does not return",
        ["data.row_format={files}/rows.py:rows", "data.cache_enable=false"],
        from_the_start,
        r"the rows of builtin:\w+",
    ),
    Stall("an engine hangs while it generates", [], stopped("engine-0"), r"generations? \(engine-0\)"),
    Stall(
        "an engine hangs before it takes weights",
        ["train.max_epochs=200", "actor.adam.lr=1e-7"],
        stopped_in_update,
        r"the weight sync of version \d+ \(engine-0\)",
    ),
    Stall("a rank of the policy hangs", ["actor.num_gpus_per_node=2"], stopped("actor-1"), r"\(.*actor-1.*\)"),
    Stall(
        "the policy hangs while it writes a checkpoint",
        ["ckpt.save_steps=3", "train.max_epochs=4"],
        stopped_in_checkpoint,
        r"saving \S+ \(actor-0\)",
    ),
)


def asked(folder: Path) -> str:
    """What `why` says."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        main_of_the_suite(["why", str(folder)])
    return said.getvalue()


def measure(stall: Stall, folder: Path) -> dict[str, object]:
    """Make a stall, and ask until it is named."""
    files = folder / "files"
    files.mkdir(parents=True)
    for name, text in FILES.items():
        (files / name).write_text(text)
    if stall.make is from_the_start:
        (files / FLAG).touch()
    words = [*jobs.SMALL, *LONG, *(word.format(files=files) for word in stall.words)]
    job = jobs.Job(folder / "run", words)
    try:
        stall.make(job, files)
        began = time.monotonic()
        lasting = re.compile(f"({stall.named}){LASTING}")
        is_named = poll_until(lambda: lasting.search(asked(job.folder.path)) is not None, NAMED_S, 1.0)
        seconds, said = time.monotonic() - began, asked(job.folder.path)
    finally:
        for process in job.kill():
            with contextlib.suppress(Exception):
                process.kill()
    waits = [without_folder(line.strip(), folder) for line in said.splitlines() if re.match(r"  \S.*: for \d", line)]
    return {"stall": stall.name, "named": bool(is_named), "seconds": round(seconds, 1), "waits": waits}


def without_folder(line: str, folder: Path) -> str:
    return line.replace(f"{folder}/", "")


HEAD = """<!-- Written by: python benchmarks/stalls.py --write -->

# Stalled runs, and what `why` reports

`python benchmarks/stalls.py --write` makes each stall in a real run of `task=ppo` on two CPU cores, and asks
`rlhf-suite why <run folder>` every second until it names a wait of five seconds or more. The table has lines of `why`,
which also shows the end of the logs of the actors that it names. A full disk ends a run with a message (faults.md).

| stall | named after | what `why` says |
|---|---|---|
"""


def row(found: dict[str, object]) -> str:
    waits = found["waits"]
    assert isinstance(waits, list)
    shown = "<br>".join(f"`{line}`" for line in waits[:SHOWN]) + ("<br>and others" if len(waits) > SHOWN else "")
    return (
        f"| {found['stall']} | {found['seconds']} s | {shown} |"
        if found["named"]
        else f"| {found['stall']} | NOT | {shown} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only the stalls whose names have one of these words")
    parser.add_argument("--write", action="store_true", help="write docs/stalls.md")
    given = parser.parse_args()
    chosen = [each for each in STALLS if not given.words or any(word in each.name for word in given.words)]
    found = []
    for stall in chosen:
        with scratch() as folder:
            found.append(measure(stall, folder))
        publish("stalls", found[-1], save=False)
    if given.write:
        (ROOT / "docs" / "stalls.md").write_text(HEAD + "\n".join(map(row, found)) + "\n")
    sys.exit(not all(each["named"] for each in found))


if __name__ == "__main__":
    main()
