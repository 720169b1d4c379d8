"""Run untrusted Python programs, each in a session of its own, with a deadline."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

from rlhf_suite.sandbox.interpreter import PASSED
from rlhf_suite.sandbox.jail import choose_jail, offer, templates
from rlhf_suite.sandbox.process import JailedProcess, Resources, SandboxError, Template, wait

PRELOADED = {"numpy": ("numpy", "np."), "sympy": ("sympy",)}  # imported by a template, for code with these words
MAX_PROGRAM_OUTPUT_BYTES = 16 << 20  # of a program that prints its answer; the rest is dropped
EXIT_S = 1.0  # how long a program whose tests have ended is given to end too
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
REMEDY = "set reward.rules.code_allow_weaker=true to use it, or run where namespaces are allowed (docs/rewards_code.md)"


@dataclass(frozen=True)
class Limits:
    """Limits of a program: seconds of wall time, and MiB of memory, for all of its processes.

    `allow_weaker` lets it run also where the machine offers only a weaker jail.
    """

    timeout_s: float
    memory_mb: int
    allow_weaker: bool = False


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended. `problem` is None when the program, or its checks, ran to the end."""

    stdout: str
    problem: str | None
    timed_out: bool = False


def prepare(allow_weaker: bool) -> tuple[str, ...]:
    """Try the jail and start its templates, so that no program waits for them. Return what the machine lacks.

    Raises:
        SandboxError: the machine offers no jail, or only a weaker one.
    """
    options = choose_jail(allow_weaker, REMEDY)
    for count in range(len(list_installed()) + 1):
        templates.get(replace(options, imports=list_installed()[:count]))
    template_for("", allow_weaker)
    return offer().missing


def template_for(code: str, allow_weaker: bool) -> Template:
    """Return the template, now ready, that has imported what `code` names."""
    used = (index + 1 for index, name in enumerate(list_installed()) if any(word in code for word in PRELOADED[name]))
    template = templates.get(
        replace(choose_jail(allow_weaker, REMEDY), imports=list_installed()[: max(used, default=0)])
    )
    template.wait_ready()
    return template


@cache
def list_installed() -> tuple[str, ...]:
    """Return the libraries that templates may import."""
    return tuple(name for name in PRELOADED if find_spec(name))


def run_python(code: str, stdin: str, limits: Limits) -> ProgramResult:
    """Run `code` with the text `stdin` as its input; return its output and how it ended.

    A program ends well with the exit code 0. Raises SandboxError if the jail does not work.
    """
    template = template_for(code, limits.allow_weaker)
    with ExitStack() as stack:
        deadline = time.monotonic() + limits.timeout_s
        given = stack.enter_context(seal_file(stdin.encode(errors="replace")))
        program = start(stack, template, limits, {"program": code}, stdin=given)
        program.output_bytes = MAX_PROGRAM_OUTPUT_BYTES
        in_time = wait([program], lambda: program.has_ended, deadline)
        problem = None if in_time and program.exit_code == 0 else problem_of(program, in_time, limits)
        return ProgramResult(program.output.decode(errors="replace"), problem, timed_out=not in_time)


def run_checks(code: str, checks: Sequence[str], limits: Limits) -> ProgramResult:
    """Run `code`, then `checks` (statements) that use its functions.

    The checks run in a second session, which the program cannot reach; their exit code says whether they passed.
    """
    for_program = template_for(code, limits.allow_weaker)
    for_checks = template_for("\n".join(checks), limits.allow_weaker)
    with ExitStack() as stack:
        deadline = time.monotonic() + limits.timeout_s
        (asked, asks), (answered, answers) = os.pipe(), os.pipe()
        ends = (asked, answers, answered, asks)
        try:
            program = start(stack, for_program, limits, {"serve": code}, peers=(asked, answers))
            tests = start(stack, for_checks, limits, {"check": list(checks)}, peers=(answered, asks))
        finally:  # so that the end of one session is an end of file for the other
            for fd in ends:
                os.close(fd)
        both = [program, tests]
        in_time = wait(both, lambda: tests.has_ended, deadline)
        if in_time and tests.exit_code == PASSED:
            return ProgramResult(program.output.decode(errors="replace"), None)
        problem = problem_of(tests, in_time, limits)
        if program.killed_because is not None or ("EOFError" in problem and ends_too(both, program)):
            problem = problem_of(program, in_time, limits)
        return ProgramResult(program.output.decode(errors="replace"), problem, timed_out=not in_time)


def ends_too(both: Sequence[JailedProcess], program: JailedProcess) -> bool:
    """Wait for the end of a program whose pipe is closed; return whether it came."""
    return wait(both, lambda: program.has_ended, time.monotonic() + EXIT_S)


def start(
    stack: ExitStack,
    template: Template,
    limits: Limits,
    request: dict[str, object],
    stdin: int | None = None,
    peers: Sequence[int] = (),
) -> JailedProcess:
    """Start a session that runs one request; closing `stack` ends it."""
    resources = Resources(limits.memory_mb, cpu_s=math.ceil(limits.timeout_s) + 1)
    process = JailedProcess(template, resources, stdin, separate_errors=True, peers=peers)
    stack.callback(process.close)
    process.send(request)
    return process


def problem_of(process: JailedProcess, in_time: bool, limits: Limits) -> str:
    """Return why a program did not end well; raise SandboxError if that was not its own doing."""
    if process.start_problem is not None:
        raise SandboxError(f"a session did not start: {process.start_problem}")
    return process.describe_ending() if in_time else f"it ran longer than {limits.timeout_s:.3g} s"


@contextmanager
def seal_file(content: bytes) -> Iterator[int]:
    """Yield a descriptor for reading of a file in memory that nobody can change any more."""
    file = os.memfd_create("stdin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(file), "wb") as writer:
            writer.write(content)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        reader = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(file)
    try:
        yield reader
    finally:
        os.close(reader)
