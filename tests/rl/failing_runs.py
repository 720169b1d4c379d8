"""Runs without Ray in which one phase fails: what ends them, and what they leave behind.

A run is built by the suite itself. The mistake is in what it calls: the engine, a rank of a model, or a file of the
user's. `SCHEDULES` x `PHASES` is the matrix; a cell is None where the schedule has no such phase.
"""

from __future__ import annotations

import gc
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from plain_run import run, small

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.polling import poll_until

LIMIT_S = 120.0  # after which a run counts as one that never ends; the machine may have other work
GONE_S = 15.0  # for threads that the end of a run has told to end
EVALUATED_AT = 0.9  # the temperature by which the engine tells evaluations from rollouts

AHEAD = {"train__async_enable": True}
SCHEDULES: dict[str, dict[str, Any]] = {
    "with the step": {},
    "0 ahead": AHEAD | {"train__async_queue_size": 0},
    "1 ahead": AHEAD | {"train__async_queue_size": 1},
    "2 ahead": AHEAD | {"train__async_queue_size": 2},
    "stream": AHEAD | {"train__async_queue_size": 2, "train__partial_rollout_enable": True},
    "stream on shared devices": {
        "train__async_queue_size": 2,
        "train__partial_rollout_enable": True,
        "train__colocate_all": True,
    },
    "replay": {},
}
COUNT = """
import threading
lock, seen = threading.Lock(), 0

def reach(count=1):
    global seen
    with lock:
        seen += count
        if seen > LIMIT:
            raise ArithmeticError("TEXT")

"""
REWARD = (
    "def reward_func(queries, prompts, labels):\n    reach(len(queries))\n    return [float(len(q)) for q in queries]\n"
)
ENVIRONMENT = """
from rlhf_suite.agents.base import Start, Step

class Environment:
    async def reset(self, task):
        return Start()

    async def step(self, turn):
        reach()
        return Step(reward=len(turn.ids) / 6, done=True)

    async def close(self): ...
"""
ESTIMATOR = """
from rlhf_suite.algo.advantage import Credit, compute_reward_to_go

def own(inputs, config):
    reach()
    each = compute_reward_to_go(inputs, inputs.rewards - inputs.rewards.mean())
    return Credit(each, each)
"""
OF_ROLLOUT, OF_GROUPS = 4, 2  # samples and groups of a step


@dataclass(frozen=True)
class Phase:
    """Where a run fails. `place`: what the engine or a rank is asked to do; else `file` holds the function of the user
    for the flag `flag`. It happens `per_step` times a step."""

    place: str = ""
    per_step: int = 1
    file: str = ""
    flag: str = ""
    name: str = ""  # of the function in the file
    more: tuple[tuple[str, Any], ...] = ()
    in_replay: bool = False


NO_REWARD = (("reward__rule", None), ("reward__stop_properly_penalty_coef", None))
FILTER = (("rollout__vllm_generate_batch_size", 2),)
PHASES = {
    "generation": Phase("generation", OF_ROLLOUT),
    "environment": Phase(
        per_step=OF_ROLLOUT,
        file=ENVIRONMENT,
        flag="train__agent_func_path",
        more=(*NO_REWARD, ("agent__kind", "environment")),
    ),
    "reward": Phase(per_step=OF_ROLLOUT, file=REWARD, flag="reward__remote_url", more=NO_REWARD),
    "prompt filter": Phase(
        file="def own(candidates, generator):\n    reach()\n    return range(len(candidates))\n",
        flag="algo__prompt_filter",
        name="own",
        more=FILTER,
    ),
    "group filter": Phase(
        per_step=OF_GROUPS, file="def own(group):\n    reach()\n", flag="algo__group_filter", name="own", more=FILTER
    ),
    "experience": Phase("ref.log_probs", in_replay=True),
    "estimator": Phase(file=ESTIMATOR, flag="algo__advantage__estimator", name="own", in_replay=True),
    "update": Phase("actor.update", in_replay=True),
    "sync": Phase("sync"),
    "probe": Phase("probe"),
    "evaluation": Phase(
        "evaluation",
        4,
        more=(
            ("eval__dataset", "builtin:reverse_eval"),
            ("eval__steps", 1),
            ("eval__max_samples", 2),
            ("eval__n_samples_per_prompt", 2),
            ("eval__temperature", EVALUATED_AT),
        ),
    ),
    "checkpoint": Phase("actor.save_state", more=(("ckpt__save_steps", 1),), in_replay=True),
    "rollout file": Phase(in_replay=True),
}
TIMES = (1, 2, 3)  # the first, the second, and the S-th with two rollouts ahead


class Fault(RuntimeError):
    """The error of the test: the very object must end the run."""


class Trip:
    """Counts how often each place is reached, and fails one of them from a number on."""

    def __init__(self, place: str, after: int, error: Exception) -> None:
        self.place, self.after, self.error = place, after, error
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def __call__(self, place: str) -> None:
        with self.lock:
            self.counts[place] += 1
            if place == self.place and self.counts[place] > self.after:
                raise self.error


@dataclass(frozen=True)
class Outcome:
    """How a run ended that was made to fail."""

    said: str  # its error
    is_the_fault: bool  # the very object that was raised
    seconds: float  # from the fault on is hard to say: of the whole run
    left: list[str]  # threads, processes, futures


def cases() -> list[tuple[str, str]]:
    """Return the schedules and phases that go together."""
    return [
        (schedule, phase)
        for schedule in SCHEDULES
        for phase, what in PHASES.items()
        if (what.in_replay or schedule != "replay") and (phase != "rollout file" or schedule == "replay")
    ]


def cells() -> list[tuple[str, str, int, bool]]:
    """Return each schedule and phase with each number of `TIMES`, and whether CI tries it: one number of the three for
    each schedule and phase, so that every schedule and every phase meets all three."""
    return [
        (schedule, phase, number, (list(SCHEDULES).index(schedule) + list(PHASES).index(phase)) % len(TIMES) == place)
        for schedule, phase in cases()
        for place, number in enumerate(TIMES)
    ]


def expected(phase: str, number: int) -> str:
    """Return what the error of a run must say."""
    return f"step_{number:06d}.parquet" if phase == "rollout file" else f"{phase} {number} failed"


def configured(folder: Path, schedule: str, phase: str, number: int) -> Run:
    """Return the flags of a run of four steps; files of the user are written into `folder`."""
    what, flags = PHASES[phase], {"train__num_episodes": 2} | SCHEDULES[schedule]
    flags |= dict(what.more)
    if what.file:
        file = folder / "own.py"
        head = COUNT.replace("LIMIT", str(what.per_step * (number - 1))).replace("TEXT", expected(phase, number))
        file.write_text(head + what.file)
        flags[what.flag] = f"{file}:{what.name}" if what.name else str(file)
    if schedule == "replay":
        flags["rollout__replay"] = str(folder / "recorded")
    return small(**flags)


def failing_run(world: Any, folder: Path, schedule: str, phase: str, number: int) -> Outcome:
    """Make a run fail where `phase` happens for the `number`-th time. The folder may hold a recorded run to replay."""
    config = configured(folder, schedule, phase, number)
    if phase == "rollout file":
        shutil.copytree(folder / "recorded", folder / "damaged")
        (folder / f"damaged/rollouts/step_{number:06d}.parquet").write_bytes(b"PAR1 and nothing else")
        config.rollout.replay = str(folder / "damaged")
    what, fault = PHASES[phase], Fault(expected(phase, number))
    trip = Trip(what.place, what.per_step * (number - 1), fault)
    return ended(lambda: run(world, folder / "run", config, trip=trip), fault)


def ended(work: Callable[[], object], fault: Exception | None = None) -> Outcome:
    """Do `work`, which must raise, and return how it ended."""
    leave_out_libraries()
    threads, processes, futures = {*threading.enumerate()}, children(), pending()
    errors: list[BaseException] = []

    def tried() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    began = time.monotonic()
    thread = threading.Thread(target=tried, name="the run", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    seconds = time.monotonic() - began
    if thread.is_alive():
        return Outcome("it does not end", False, seconds, [])

    def left() -> list[str]:
        found = [f"thread {each.name}" for each in {*threading.enumerate()} - threads]
        return found + [f"process {each}" for each in children() - processes] + [*(pending() - futures)]

    poll_until(lambda: not left(), GONE_S, 0.2)
    said = f"{type(errors[0]).__name__}: {errors[0]}" if errors else "it was done"
    return Outcome(said, bool(errors) and errors[0] is fault, seconds, left())


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@cache
def leave_out_libraries() -> None:
    """Keep the million objects of imported modules out of every later search for futures."""
    gc.collect()
    gc.freeze()


def pending() -> set[str]:
    """Return the futures of threads for which nobody will ever see a result."""
    return {f"future {id(each)}" for each in gc.get_objects() if issubclass(type(each), Future) and not each.done()}
