"""The process that runs reward code: it answers each line of JSON with one line, until its parent ends it.

`python -m rlhf_suite.rewards.worker <socket fd> <parent pid> rule|file <name or path> <rules as JSON> <choice as
JSON>`. `reward_process.IsolatedScorer` starts it. Its stdout and stderr are for the output of the reward code. It
imports only what the rule or the file needs.
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
import warnings
from dataclasses import asdict
from io import BufferedRWPair
from pathlib import Path

from rlhf_suite.config.declarations.reward import RuleConfig
from rlhf_suite.foreign_text import describe
from rlhf_suite.machine_limits import cpu_count, machine_memory
from rlhf_suite.registry import reward_rule
from rlhf_suite.rewards.base import Choice, Sample, ScoringFunction
from rlhf_suite.sandbox import kernel, programs
from rlhf_suite.sandbox.confine import list_paths
from rlhf_suite.waits import RECORD, record_here

RULE_BYTES = 2 << 30
SOURCES = {"rule": "rlhf_suite.rewards.rules", "file": "rlhf_suite.rewards.file"}


def main(socket_fd: int, parent: int, kind: str, name: str, rules: RuleConfig, choice: Choice) -> None:
    """Load the reward code, report whether that worked, then answer requests until the socket closes."""
    limit_memory(kind == "rule" and reward_rule.needs(name, "time_limit"))
    if (prefix := os.environ.pop(RECORD, None)) is not None and kind == "file":  # a rule may be locked away from files
        record_here(Path(f"{prefix}{os.getpid()}.json"))
    threading.Thread(target=kill_group_with, args=(parent,), daemon=True).start()
    channel = socket.socket(fileno=socket_fd).makefile("rwb")
    try:
        scorer = load(kind, name, rules, choice)
        if kind == "rule" and reward_rule.needs(name, "tests"):
            for gap in programs.prepare(rules.code_allow_weaker):
                sys.stderr.write(f"the sandbox lacks {gap}\n")
    except (Exception, SystemExit) as error:
        reply(channel, {"error": describe(error)})
        return
    if kind == "rule" and reward_rule.needs(name, "locked_process"):  # it may evaluate a response as Python
        lock()
    reply(channel, {})
    if kind == "rule" and reward_rule.needs(name, "time_limit"):
        answer_in_children(channel, scorer)
    else:
        answer_all(channel, scorer)


def answer_in_children(channel: BufferedRWPair, scorer: ScoringFunction) -> None:
    """Answer in a copy of this process. When a row ends it, say how, and go on with another copy: imports cost more
    than most rows.
    """
    warnings.simplefilter("ignore", DeprecationWarning)  # the thread of this process holds no lock
    while True:
        child = os.fork()
        if child == 0:
            kernel.prctl(kernel.DEATH_SIGNAL, signal.SIGKILL)
            answer_all(channel, scorer)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:  # the socket is closed
            return
        reply(channel, {"died": code})


def answer_all(channel: BufferedRWPair, scorer: ScoringFunction) -> None:
    """Answer requests until the socket closes."""
    for line in channel:
        request = json.loads(line)
        limit_cpu(request["limit_s"])
        rows = [Sample(**row) for row in request["rows"]]
        if request["cpu_s"] is not None:  # the signals of both timers end this process
            signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
            signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        outcomes = answer(scorer, rows)
        if request["cpu_s"] is not None:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        reply(channel, outcomes | {"number": request["number"]})


def load(kind: str, name: str, rules: RuleConfig, choice: Choice) -> ScoringFunction:
    """Return the scorer of a rule or a file. The import happens here, so that only one of the two is loaded."""
    module = importlib.import_module(SOURCES[kind])
    return module.make_scorer(name, rules, choice) if kind == "rule" else module.make_scorer(name, choice)


def answer(scorer: ScoringFunction, rows: list[Sample]) -> dict[str, object]:
    """Return `{"outcomes": [...]}`, or `{"error": reason}` when the reward code raised an exception."""
    try:
        return {"outcomes": [asdict(outcome) for outcome in scorer(rows)]}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return {"error": describe(error)}


def reply(channel: BufferedRWPair, message: dict[str, object]) -> None:
    """Send one message as a line of JSON."""
    channel.write(json.dumps(message).encode() + b"\n")
    channel.flush()


def lock() -> None:
    """Clear the environment, which may hold keys, and let Landlock (if there) deny files except libraries, and TCP."""
    os.environ.clear()
    os.environ["LANG"] = "C.UTF-8"
    kernel.prctl(kernel.NO_NEW_PRIVILEGES, 1)
    imported = filter(os.path.isabs, sys.path)
    kernel.landlock([*list_paths(), "/usr", sys.prefix, *imported, "/etc/localtime", "/dev/urandom"], None)


def limit_memory(is_rule: bool) -> None:
    """Limit this process to half of the machine's memory, or to RULE_BYTES for a rule that responses may blow up, so
    that a huge allocation fails here; disable core dumps.
    """
    allowed = machine_memory() // 2
    if is_rule:
        allowed = min(allowed, RULE_BYTES)
    kernel.limit(resource.RLIMIT_DATA, allowed, allowed)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu(limit_s: float) -> None:
    """Allow the CPU time of all cores until the deadline of one request. This ends a loop whose parent was killed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed = (limit_s + 1) * cpu_count()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(usage.ru_utime + usage.ru_stime + allowed) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def kill_group_with(parent: int) -> None:
    """Wait until the process `parent` has ended, then kill this process group."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _rules, _choice = RuleConfig(**json.loads(sys.argv[5])), Choice(**json.loads(sys.argv[6]))
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], _rules, _choice)
