"""`rlhf-suite doctor`: what this machine lacks for runs, with the remedy, before one is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from rlhf_suite.doctor.findings import FAULT, NOTE, Finding
from rlhf_suite.errors import UserError
from rlhf_suite.foreign_text import printable

USAGE = """usage: rlhf-suite doctor [--quick]

Says what this machine and this environment offer to runs, and what they lack, each with its remedy: versions of
packages, the builds of torch and vLLM, the NVIDIA driver, GPUs and who uses them, shared memory, the host's name, and
the jail for programs. Then it uses the devices for a moment: a product in bf16, memory shared between processes, a sum
over processes, the imports of vLLM. It needs no Ray and half a minute; --quick leaves the use of the devices out. The
exit code is 0 without a fault, 1 with one, and 2 if the command line is wrong."""

FINE, FAULTY = 0, 1
TRIAL_S = 120.0
SAID = 300  # characters of what a trial said before it failed
LINE_LIMIT = 2000


def main(words: Sequence[str]) -> int:
    """Print the findings; return the exit code."""
    if any(word != "--quick" for word in words):
        raise UserError(USAGE)
    findings = list[Finding]()
    for finding in examine(is_quick="--quick" in words):
        print(printable(str(finding), LINE_LIMIT, keep_lines=True), flush=True)
        findings.append(finding)
    faults, notes = (sum(finding.state == state for finding in findings) for state in (FAULT, NOTE))
    print(f"{len(findings)} findings: {faults} faults, {notes} notes")
    return FAULTY if faults else FINE


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
        return [Finding(**finding) for finding in json.loads(done.stdout.splitlines()[-1])]
    except subprocess.TimeoutExpired:
        return [Finding(FAULT, name, f"the trial did not end in {TRIAL_S:.0f} s", f"see where: {' '.join(command)}")]
    except subprocess.CalledProcessError as error:
        last = [line for line in error.stderr.splitlines() if line.strip()][-1:] or [f"exit code {error.returncode}"]
        return [Finding(FAULT, name, last[0].strip()[:SAID], f"the whole error: {' '.join(command)}")]
