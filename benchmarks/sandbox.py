"""What the jail for untrusted code costs. Milliseconds are a median and a 95th percentile.

cold          a template from its start to the answer of the first call, by what it imports
warm          a session of a running template: to the answer of its first call
round_trip    one more call of a session
close         the end of a session
program       a program of `reward.rule=code` that reads and prints; a function with its test
at_once       64 sessions, one after the other, each to the answer of its first call
concurrent    64 sessions in one event loop, 10 calls each
idle, used    MiB of the interpreter of a session, and after a call that uses numpy and sympy; what processes share
              is divided among them

With --job, instead, what tools cost a run: experiments/agents/fences/agent.py with 64 episodes at a time, after a
training with lessons that have code, so that nearly all of them call Python in every step.

tools         share of the RL steps in which a session worked for at least one episode
tools_alone   share in which, besides, no engine wrote and nothing was trained: the step waited for tools alone
sessions      the most sessions under way at one time, by looking 20 times a second
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from agents import commands, tool_time
from common import Run, publish, scratch, suite_run, watch
from rlhf_suite.sandbox.jail import choose_jail, offer
from rlhf_suite.sandbox.memory import family, proportional
from rlhf_suite.sandbox.process import Template
from rlhf_suite.sandbox.programs import Limits, prepare, run_checks, run_python
from rlhf_suite.sandbox.session import Session

SESSIONS, CALLS = 64, 10
IMPORTS = {"nothing": (), "numpy": ("numpy",), "numpy and sympy": ("numpy", "sympy")}
USE = "import numpy, sympy\na = numpy.ones(1000).sum()\ns = sympy.integrate(sympy.Symbol('x') ** 2)"
LIMITS = Limits(60.0, 512)
LOOK_S = 0.05
# What the job has in place of the example's own values: in the training before RL, and in RL.
TEACH = {"train.max_epochs": 4}
TRAIN = {"rollout.batch_size": 8, "train.batch_size": SESSIONS, "train.max_steps": 10}


def milliseconds(action: Callable[[], object], times: int) -> list[float]:
    """Return the median and the 95th percentile of an action's milliseconds."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        took.append((time.perf_counter() - began) * 1e3)
    took.sort()
    return [round(statistics.median(took), 2), round(took[int(len(took) * 0.95)], 2)]


def called(session: Session, code: str = "x = 0") -> Session:
    """Make a call and return its session."""
    problem = session.run(code, 60.0).problem
    assert problem is None, problem
    return session


def cold(imports: tuple[str, ...]) -> None:
    template = Template(replace(choose_jail(True, ""), imports=imports))
    with called(Session(template)):
        pass
    template.close()


async def concurrent(template: Template) -> None:
    async def episode() -> None:
        with closing(Session(template)) as one:
            for _ in range(CALLS):
                assert (await one.run_async("sum(range(1000))", 60.0)).value == "499500"

    await asyncio.gather(*(episode() for _ in range(SESSIONS)))


def memory_mb(sessions: list[Session]) -> float:
    """Return the memory of the interpreter of one of these sessions."""
    pids = [family(one.process.pid)[-1] for one in sessions if one.process is not None]
    return round(sum(map(proportional, pids)) / len(sessions) / 2**20, 1)


def of_template(imports: tuple[str, ...]) -> dict[str, Any]:
    """Measure the sessions of a warm template."""
    template = Template(replace(choose_jail(True, ""), imports=imports))
    template.wait_ready()
    opened: list[Session] = []
    result: dict[str, Any] = {"warm_ms": milliseconds(lambda: opened.append(called(Session(template))), 30)}
    result["round_trip_ms"] = milliseconds(lambda: called(opened[0], "x += 1"), 500)
    result["close_ms"] = milliseconds(lambda: opened.pop().close(), 30)
    began = time.perf_counter()
    opened = [called(Session(template)) for _ in range(SESSIONS)]
    result["at_once_s"] = round(time.perf_counter() - began, 2)
    result["idle_mb"] = memory_mb(opened)
    if len(imports) == 2:
        result["used_mb"] = memory_mb([called(each, USE) for each in opened])
    for each in opened:
        each.close()
    began = time.perf_counter()
    asyncio.run(concurrent(template))
    result["concurrent_s"] = round(time.perf_counter() - began, 2)
    template.close()
    return result


def job() -> dict[str, Any]:
    """Run the example, and return what its tools cost."""
    make, teach, train = commands("fences")
    with scratch() as folder:
        run = folder / "run"
        watch([sys.executable, *make.replace("/tmp/", f"{folder}/").split()[1:]], folder / "make.log")
        lessons = folder / "fences" / "taught.jsonl"
        with_code = [line for line in lessons.read_text().splitlines() if "```python" in line]
        lessons.write_text("\n".join(with_code) + "\n")
        watch([sys.executable, *changed(teach, TEACH, folder)], folder / "teach.log")
        counts: list[int] = []
        over = threading.Event()
        looking = threading.Thread(target=look, args=(over, counts))
        looking.start()
        try:
            found = suite_run(changed(train, TRAIN, folder)[1:], run)
        finally:
            over.set()
            looking.join()
        timeline = [json.loads(row) for row in (run / "timeline.jsonl").read_text().splitlines()]
    shares = tool_time(found, timeline)
    return {
        "episodes": SESSIONS,
        "steps": len(found.steps),
        "sessions": max(counts),
        "calls": round(Run.mean("agent/python_calls", found.steps), 3),
        "step_s": round(Run.mean("timing/step_total", found.steps), 3),
        "tools": shares["tool_share"],
        "tools_alone": shares["tool_share_alone"],
    }


def changed(line: str, values: dict[str, int], folder: Path) -> list[str]:
    """Return the words of a command of the example after `python`, with other values for some flags."""
    words = line.replace("/tmp/", f"{folder}/").split()[1:]
    names = [word.partition("=")[0] for word in words]
    return [f"{name}={values[name]}" if name in values else word for name, word in zip(names, words, strict=True)]


def look(over: threading.Event, counts: list[int]) -> None:
    """Count the sessions of the run that this process starts, again and again until it is over."""
    while not (started := psutil.Process().children()) and not over.wait(LOOK_S):
        pass
    while not over.wait(LOOK_S):
        counts.append(open_sessions(started[0].pid))


def open_sessions(pid: int) -> int:
    """Return how many sessions a process has: it holds a descriptor of the first process of each."""
    count = 0
    with suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                count += fd.readlink().name == "anon_inode:[pidfd]"
    return count


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="add the line to results/sandbox.jsonl")
    parser.add_argument("--job", action="store_true", help="measure the share of tools in the steps of a run")
    arguments = parser.parse_args()
    if arguments.job:
        publish("sandbox", {"job": job()}, arguments.save)
        return
    began = time.perf_counter()
    found = offer()
    result: dict[str, Any] = {"trial_s": round(time.perf_counter() - began, 2), "missing": found.missing}
    result["root"], result["load"] = os.geteuid() == 0, round(os.getloadavg()[0], 1)
    plain = [sys.executable, "-I", "-c", "pass"]
    result["plain_python_ms"] = milliseconds(lambda: subprocess.run(plain, check=True), 10)
    result["cold_ms"] = {
        name: milliseconds(lambda imports=imports: cold(imports), 5) for name, imports in IMPORTS.items()
    }
    result |= {name: of_template(imports) for name, imports in IMPORTS.items()}
    prepare(allow_weaker=True)
    limits = replace(LIMITS, allow_weaker=True)
    result["program_ms"] = {
        "reads and prints": milliseconds(lambda: run_python("print(int(input()) + 1)", "1", limits), 30),
        "function": milliseconds(lambda: run_checks("def f(x): return x", ["assert f(1) == 1"], limits), 30),
        "with sympy": milliseconds(lambda: run_python("import sympy\nprint(sympy.Symbol('x'))", "", limits), 30),
    }
    publish("sandbox", result, arguments.save)


if __name__ == "__main__":
    main()
