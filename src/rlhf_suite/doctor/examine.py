"""Look at everything that runs need of this machine: its facts, and its devices in use for a moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from rlhf_suite.doctor.findings import FAULT, MARK, Finding

TRIAL_S = 120.0
SAID = 300  # characters of what a trial said before it failed


def examine(is_quick: bool) -> Iterator[Finding]:
    """Yield the findings, those that take long last."""
    from rlhf_suite.background import together
    from rlhf_suite.doctor.checks import CHECKS
    from rlhf_suite.doctor.facts import read_facts
    from rlhf_suite.doctor.trial import TRIALS

    facts = read_facts()
    for check in CHECKS:
        yield from check(facts)
    if not is_quick:
        for findings in together("trials of this machine", [partial(run_trial, name) for name in TRIALS]):
            yield from findings


def run_trial(name: str) -> list[Finding]:
    """Run a trial in a process of its own, and return its findings, or why it had none."""
    from rlhf_suite.launch.environment import gpu_count, runtime_env

    command = [sys.executable, "-m", "rlhf_suite.doctor.trial", name]
    environment = os.environ | runtime_env("cuda" if gpu_count() else "cpu")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_S, env=environment, check=True)
        return read_findings(done.stdout)
    except (ValueError, TypeError, StopIteration):
        return [Finding(FAULT, name, "the findings cannot be read", f"see what it prints: {' '.join(command)}")]
    except subprocess.TimeoutExpired:
        return [Finding(FAULT, name, f"the trial did not end in {TRIAL_S:.0f} s", f"see where: {' '.join(command)}")]
    except subprocess.CalledProcessError as error:
        last = [line for line in error.stderr.splitlines() if line.strip()][-1:] or [f"exit code {error.returncode}"]
        return [Finding(FAULT, name, last[0].strip()[:SAID], f"the whole error: {' '.join(command)}")]


def read_findings(printed: str) -> list[Finding]:
    """Return the findings in what a trial has printed, beside lines of libraries.

    Raises:
        ValueError, TypeError, StopIteration: there are none, or not whole.
    """
    line = next(line for line in reversed(printed.splitlines()) if line.startswith(MARK))
    return [Finding(**finding) for finding in json.loads(line.removeprefix(MARK))]
