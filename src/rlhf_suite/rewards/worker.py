"""The process that runs reward code: one JSON line in, one out, until its parent closes the line or kills it.

`python -m rlhf_suite.rewards.worker <socket fd> <parent pid> rule|file <name or path> <rules as JSON>`.
Start with `reward_process.IsolatedScorer`.
Its stdout and stderr belong to the reward code. It imports nothing but what the rule or the file needs.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict
from io import BufferedRWPair
from pathlib import Path

from rlhf_suite.config.reward import RuleConfig
from rlhf_suite.foreign_text import printable
from rlhf_suite.rewards.base import RewardRow, Scorer
from rlhf_suite.sandbox import jail

EVALUATES = ("reasoning_gym",)  # rules that may evaluate a response as Python in this process
SOURCES = {"rule": "rlhf_suite.rewards.rules", "file": "rlhf_suite.rewards.file"}


def main(socket_fd: int, parent: int, kind: str, name: str, rules: RuleConfig) -> None:
    """Load the reward, say so, then answer requests."""
    limit_memory()
    threading.Thread(target=die_with, args=(parent,), daemon=True).start()
    channel = socket.socket(fileno=socket_fd).makefile("rwb")
    try:
        scorer = load(kind, name, rules)
    except (Exception, SystemExit) as error:
        reply(channel, {"error": describe(error)})
        return
    if kind == "rule" and name in EVALUATES:
        lock()
    reply(channel, {})
    for line in channel:
        request = json.loads(line)
        limit_cpu(request["limit_s"])
        reply(channel, answer(scorer, [RewardRow(**row) for row in request["rows"]]))


def load(kind: str, name: str, rules: RuleConfig) -> Scorer:
    module = importlib.import_module(SOURCES[kind])
    return module.make_scorer(name, rules) if kind == "rule" else module.make_scorer(name)


def answer(scorer: Scorer, rows: list[RewardRow]) -> dict[str, object]:
    """`{"outcomes": [...]}`, or `{"error": reason}` when the reward code raised."""
    try:
        return {"outcomes": [asdict(outcome) for outcome in scorer(rows)]}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return {"error": describe(error)}


def reply(channel: BufferedRWPair, message: dict[str, object]) -> None:
    channel.write(json.dumps(message).encode() + b"\n")
    channel.flush()


def describe(error: BaseException) -> str:
    """`file.py:12: KeyError: 'x'`: where it was raised, and what."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    return printable(f"{where}{type(error).__name__}: {error}", keep_lines=True)


def lock() -> None:
    """From here on: no keys in the environment; as far as Landlock goes, no files but libraries, and no TCP."""
    os.environ.clear()
    os.environ["LANG"] = "C.UTF-8"
    jail.libc.prctl(jail.NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    jail.landlock(None)


def limit_memory() -> None:
    """Half the machine at most, so that a runaway allocation fails here and not the whole run; no core dumps."""
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    resource.setrlimit(resource.RLIMIT_DATA, (half, half))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu(limit_s: float) -> None:
    """CPU time for one request: all cores for its whole deadline. Ends a loop whose parent was killed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed = (limit_s + 1) * (os.cpu_count() or 1)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime + allowed) + 1, hard))


def die_with(parent: int) -> None:
    """Kill this process group once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], RuleConfig(**json.loads(sys.argv[5])))
