"""Sessions: untrusted Python code, call after call, with names that persist between the calls."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rlhf_suite.foreign_text import printable
from rlhf_suite.sandbox.process import (
    MAX_REPLY_BYTES,
    START_S,
    JailedProcess,
    Resources,
    SandboxError,
    Template,
    wait,
    wait_async,
)

SOFT_SHARE = 0.8  # of a call's seconds: then its code gets an exception and the session lives on
BROKEN = "it broke the protocol"


@dataclass(frozen=True)
class CallResult:
    """What came of a call.

    Args:
        output: what it printed, without characters that act on a terminal.
        value: the `repr` of its last expression, None if there is none.
        problem: None if it ran to its end, else a traceback or why it was killed.
        timed_out: it met its soft or its hard limit of time.
        state_lost: the session has ended; the next call begins without names.
    """

    output: str
    value: str | None = None
    problem: str | None = None
    timed_out: bool = False
    state_lost: bool = False


class Session:
    """A jailed interpreter that answers calls, one at a time. It starts with the first call, and again after its end.

    Use `run` from ordinary code or `run_async` in an event loop, not both at the same time.
    """

    def __init__(self, template: Template, resources: Resources | None = None) -> None:
        self.template, self.resources = template, resources or Resources()
        self.process: JailedProcess | None = None
        self.calls = 0

    def run(self, code: str, timeout_s: float = 10.0) -> CallResult:
        """Run `code`; return within `timeout_s` seconds, not counting the start of the session."""
        if self.process is None:
            self.template.wait_ready()
            self.process = process = JailedProcess(self.template, self.resources)
            self._check_started(
                wait([process], lambda: process.is_ready or process.has_ended, time.monotonic() + START_S)
            )
        self._ask(code, timeout_s)
        return self._result(wait([self.process], self._is_answered, time.monotonic() + timeout_s), timeout_s)

    async def run_async(self, code: str, timeout_s: float = 10.0) -> CallResult:
        """Do what `run` does in an event loop. A call that is cancelled ends the session."""
        try:
            if self.process is None:
                await self._start_async()
            assert self.process is not None
            self._ask(code, timeout_s)
            answered = await wait_async(self.process, self._is_answered, time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise
        return self._result(answered, timeout_s)

    async def _start_async(self) -> None:
        if not self.template.is_ready:
            await asyncio.to_thread(self.template.wait_ready)
        async with self.template.slot():
            self.process = process = JailedProcess(self.template, self.resources)
            deadline = time.monotonic() + START_S
            self._check_started(await wait_async(process, lambda: process.is_ready or process.has_ended, deadline))

    def _check_started(self, in_time: bool) -> None:
        """Raise SandboxError if the session did not start."""
        assert self.process is not None
        if in_time and self.process.is_ready:
            return
        problem = self.process.start_problem or f"it took longer than {START_S:g} s"
        self.close()
        raise SandboxError(f"a session did not start: {problem}")

    def _ask(self, code: str, timeout_s: float) -> None:
        assert self.process is not None
        self.calls += 1
        self.process.output.clear()
        self.process.dropped_bytes = 0
        self.process.send({"id": self.calls, "code": code, "soft_s": timeout_s * SOFT_SHARE})

    def _is_answered(self) -> bool:
        """Return whether the reply is whole, or will never be."""
        assert self.process is not None
        process, reply = self.process, self.process.reply
        if process.has_ended or process.killed_because:
            return True
        size = struct.unpack(">I", reply[:4])[0] if len(reply) >= 4 else None
        return size is not None and (size > MAX_REPLY_BYTES or len(reply) >= 4 + size)

    def _result(self, answered: bool, timeout_s: float) -> CallResult:
        """Return what came of the call; end the session unless it has answered as it should."""
        assert self.process is not None
        process = self.process
        reply = self._parse_reply() if answered else None
        if reply is None:
            if not answered:
                why = f"it ran longer than {timeout_s:.3g} s"
            else:
                why = process.describe_ending() if process.has_ended or process.killed_because else BROKEN
            process.kill(why)
            output = make_printable(process.output)
            self.close()
            return CallResult(output, problem=f"{why}; the session has ended", timed_out=not answered, state_lost=True)
        process.reply.clear()
        value, problem = reply["value"], reply["problem"]
        return CallResult(
            make_printable(process.output),
            None if value is None else printable(value, MAX_REPLY_BYTES, keep_lines=True),
            None if problem is None else printable(problem, MAX_REPLY_BYTES, keep_lines=True),
            reply["timed_out"],
        )

    def _parse_reply(self) -> dict[str, Any] | None:
        """Return the reply if it is one to this call, else None."""
        assert self.process is not None
        reply = bytes(self.process.reply)
        if len(reply) < 4 or struct.unpack(">I", reply[:4])[0] != len(reply) - 4:
            return None
        try:
            value = json.loads(reply[4:])
        except (ValueError, RecursionError):
            return None
        kinds = {"id": int, "value": str | None, "problem": str | None, "timed_out": bool}
        if not isinstance(value, dict) or value.keys() != kinds.keys() or value["id"] != self.calls:
            return None
        return value if all(isinstance(value[name], kind) for name, kind in kinds.items()) else None

    def close(self) -> None:
        """End the session. The next call would start a new one."""
        if self.process is not None:
            self.process.close()
            self.process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make_printable(output: bytearray) -> str:
    """Return output as text that acts on no terminal."""
    return printable(output.decode(errors="replace"), len(output), keep_lines=True)
