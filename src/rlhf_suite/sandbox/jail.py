"""The jail of this process: what the machine offers is tried once, and templates are kept for what code imports.

A switch may be on and the thing refused still, so nothing is read from switches: the trial starts a jail, runs code in
it, and lets this code try what it must not be able to do.
"""

from __future__ import annotations

import atexit
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rlhf_suite.foreign_text import printable
from rlhf_suite.sandbox import kernel
from rlhf_suite.sandbox.confine import JailOptions
from rlhf_suite.sandbox.process import SandboxError, Template, jail_options
from rlhf_suite.sandbox.session import Session

BARE_NEEDS_LANDLOCK = 6  # below it, nothing keeps code without namespaces from signals and abstract sockets
TRIAL_S = 30.0
# Each of these must be refused. OUTSIDE is a folder that everybody may write to, with a file `kept`.
FORBIDDEN = {
    "opening a socket": "socket.socket()",
    "a file in memory": "os.close(os.memfd_create('x'))",
    "reading a file outside": "open(OUTSIDE + '/kept').close()",
    "writing a file outside": "open(OUTSIDE + '/new', 'w').close()",
    "a new namespace": "refuse(libc.unshare(0x10000000))",
    "tracing a process": "refuse(libc.ptrace(0, 0, 0, 0))",
}
IN_SPACES = {"asking whether a file outside exists": "os.stat(OUTSIDE)"}
IF_BARE = {"starting a process": "os.fork() or os._exit(0)"}
PROBE = """
import ctypes, json, os, socket
import colorsys  # not loaded yet: whether the libraries can be read
OUTSIDE, libc = {outside!r}, ctypes.CDLL(None)
def refuse(result):
    if result < 0:
        raise OSError
def works(text):
    try:
        exec(text)
        return True
    except OSError:
        return False
json.dumps([name for name, text in {forbidden!r}.items() if works(text)])
"""


@dataclass(frozen=True)
class Offer:
    """What this machine offers to a jail. `options` is None if there can be none; `missing` has a line per layer."""

    options: JailOptions | None
    missing: tuple[str, ...]

    @property
    def is_weaker(self) -> bool:
        """Return whether namespaces are missing, so that only a flag allows the jail."""
        return self.options is not None and self.options.bare


@cache
def offer() -> Offer:
    """Try which jail this machine offers, the strongest first. It takes about a quarter of a second, once."""
    missing = list[str]()
    wanted = [jail_options(bare=False)]
    if wanted[0].root:
        wanted.append(replace(wanted[0], user_spaces=False))
    for options in wanted:
        problem = trial_problem(options)
        if problem is None:
            return Offer(options, (*missing, *lesser_gaps()))
        kind = "namespaces" if options.user_spaces or not options.root else "namespaces without one for users"
        missing.append(f"{kind}: {problem}")
    bare = jail_options(bare=True)
    problem = f"Landlock: version {kernel.landlock_version()}, and {BARE_NEEDS_LANDLOCK} is needed (Linux 6.12)"
    if kernel.landlock_version() >= BARE_NEEDS_LANDLOCK and (problem := trial_problem(bare) or "") == "":
        missing.append(
            "without namespaces code can ask which files exist (stat), and the disk that it writes to is only looked "
            "at ten times a second; it cannot start processes"
        )
        return Offer(bare, (*missing, *lesser_gaps()))
    return Offer(None, (*missing, f"a jail without namespaces: {problem}"))


def lesser_gaps() -> Iterator[str]:
    """Yield what is missing and leaves a jail strong enough."""
    if kernel.landlock_version() < BARE_NEEDS_LANDLOCK:
        version = kernel.landlock_version()
        effect = "so some of files, TCP and signals have one lock, not two"
        yield f"Landlock {BARE_NEEDS_LANDLOCK}: it is {version}, {effect}"
    yield "a limit of memory for several processes: their sum is looked at ten times a second"


def trial_problem(options: JailOptions) -> str | None:
    """Return why such a jail does not work here, or None."""
    template = Template(options)
    try:
        with tempfile.TemporaryDirectory(prefix="rlhf_suite_") as folder, Session(template) as session:
            Path(folder, "kept").write_text("kept", encoding="utf-8")
            Path(folder).chmod(0o777)
            forbidden = FORBIDDEN | (IF_BARE if options.bare else IN_SPACES)
            result = session.run(PROBE.format(outside=folder, forbidden=forbidden), TRIAL_S)
        if result.problem is not None or result.value is None:
            return f"code does not run in it: {printable(result.problem or 'no answer')}"
        got_through = json.loads(result.value.strip("'"))
        return f"not refused: {', '.join(map(str, got_through))}" if got_through else None
    except SandboxError as error:
        return str(error)
    finally:
        template.close()


def choose_jail(allow_weaker: bool, remedy: str) -> JailOptions:
    """Return the jail to use. Raise SandboxError, ending in `remedy`, if only a weaker one is there and not allowed."""
    offered = offer()
    if offered.options is not None and (allow_weaker or not offered.is_weaker):
        return offered.options
    reasons = "; ".join(offered.missing)
    if offered.options is None:
        raise SandboxError(f"this machine offers no jail for untrusted code: {reasons}")
    raise SandboxError(f"this machine offers only a weaker jail for untrusted code: {reasons}; {remedy}")


class Templates:
    """The templates of this process, by their options. A template that has ended is replaced."""

    def __init__(self) -> None:
        self.lock, self.owner = threading.Lock(), os.getpid()
        self.started: dict[JailOptions, Template] = {}

    def get(self, options: JailOptions) -> Template:
        """Return the template with these options, started if there is none; it may not be ready yet."""
        with self.lock:
            if self.owner != os.getpid():  # a fork must not share the templates of its parent
                self.owner, self.started = os.getpid(), {}
            template = self.started.get(options)
            if template is None or not template.is_alive:
                template = self.started[options] = Template(options)
            return template

    def close(self) -> None:
        """End all templates of this process."""
        with self.lock:
            while self.started and self.owner == os.getpid():
                self.started.popitem()[1].close()


templates = Templates()
atexit.register(templates.close)
