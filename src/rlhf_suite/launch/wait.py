"""Wait for actors. Each wait has a name and a deadline. A failure names the actor, what it did, and its last output.

The pending call of a dead actor fails within milliseconds; that of a hung actor never does. So the wait checks each
call separately: it notices a death while the other actors are busy or hang in a collective that waits for the dead
actor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.actor_log import TAIL_LINES, Member
from rlhf_suite.launch.out_of_memory import advise
from rlhf_suite.launch.signs import signs_of
from rlhf_suite.waits import LIMIT, Wait, sign_of_life, waiting

# Ray reports a finished call at once. The interval only bounds how long a signal to the driver is not handled.
POLL_S = 1.0
# When an actor dies, its peers fail too ("connection closed by peer"), sometimes before Ray reports the death itself.
# So after a first failure the wait continues for this long, to find the cause.
CAUSE_S = 2.0
LOOK_S = 5.0  # between two looks for signs of life


class ActorDied(RunError):
    """The process of the actor `name` ended while a call to it was unfinished. `actor_id`: Ray's number of it, ""
    where it is not known."""

    def __init__(self, message: str, name: str = "", actor_id: str = "") -> None:
        super().__init__(message)
        self.name, self.actor_id = name, actor_id


def wait_for(refs: Sequence[ray.ObjectRef], activity: str, timeout_s: float, actors: Sequence[Member]) -> list[Any]:
    """Return the results of `refs`, in their order.

    Args:
        refs: the calls to wait for.
        what: what the actors do; it completes "waiting for", as in "the policy update of step 12".
        timeout_s: the deadline in seconds, from the last sign of life of those who have not answered.
        actors: the actor of each call.

    Raises:
        UserError, RunError: an actor raised this error.
        ActorDied: the process of an actor ended.
        RunError: an actor raised another exception, or did not answer in time.
    """
    if len(refs) != len(actors):
        raise AssertionError(f"{len(refs)} calls but {len(actors)} actors")
    with waiting(activity, names_of(actors), timeout_s, LIMIT) as wait:
        _wait_until_done(dict(zip(refs, actors, strict=True)), wait, timeout_s)
        return _fetch(refs, activity, timeout_s, actors)


def _wait_until_done(member: Mapping[ray.ObjectRef, Member], wait: Wait, timeout_s: float) -> None:
    """Wait until the call of each member is done, or raise an error of `wait_for`."""
    deadline, looked, signs = time.monotonic() + timeout_s, time.monotonic(), list[bytes | None]()
    pending, failures = list(member), list[tuple[Member, Exception]]()
    while pending and time.monotonic() < deadline:
        done, pending = ray.wait(pending, timeout=min(POLL_S, max(0.0, deadline - time.monotonic())))
        wait.who = names_of([member[ref] for ref in pending])
        if not failures and time.monotonic() - looked >= min(LOOK_S, timeout_s / 4):
            looked, before, signs = time.monotonic(), signs, signs_of([member[ref] for ref in pending])
            if signs != before and any(signs):
                deadline = looked + timeout_s
                sign_of_life()
        failed = [(member[ref], error) for ref in done if (error := _error(ref, timeout_s)) is not None]
        if failed and not failures:
            deadline = min(deadline, time.monotonic() + CAUSE_S)
        failures += failed
        if any(_is_cause(error) for _, error in failed):
            break
    if failures:
        raise _explain(failures, wait.what)
    if pending:
        raise _make_late_error([member[ref] for ref in pending], wait.what, timeout_s)


def _fetch(refs: Sequence[ray.ObjectRef], activity: str, timeout_s: float, actors: Sequence[Member]) -> list[Any]:
    """Return the results of finished calls. This has a deadline, because the daemon of the node that has them
    may hang.
    """
    try:
        return ray.get(list(refs), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise _make_late_error(list(actors), f"the results of {activity}", timeout_s) from None


async def reply(ref: ray.ObjectRef, activity: str, timeout_s: float, actor: Member, flags: str = LIMIT) -> Any:
    """Return the result of a call without blocking the event loop. Errors are those of `wait_for`. `flags`: those that
    the limit comes from."""
    result = asyncio.wrap_future(ref.future())
    with waiting(activity, names_of([actor]), timeout_s, flags):
        done, _ = await asyncio.wait([result], timeout=timeout_s)
    if not done:
        raise _make_late_error([actor], activity, timeout_s, flags)
    error = result.exception()
    if isinstance(error, Exception):
        raise _explain([(actor, _unwrap(error))], activity)
    return result.result()  # no-limit: it is done


def _error(ref: ray.ObjectRef, timeout_s: float) -> Exception | None:
    """Return the error of a finished call, without the wrapper of Ray if it is one of ours, or None."""
    try:
        ray.get(ref, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        return _unwrap(error)
    return None


def _unwrap(error: Exception) -> Exception:
    """Return an error of ours without Ray's wrapper."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, UserError | RunError):
        return error.cause
    return error


def _is_cause(error: Exception) -> bool:
    """Return whether the error is a cause by itself. Any other error may be a consequence of the death of a peer."""
    return isinstance(error, UserError | RunError | RayActorError)


def _explain(failures: list[tuple[Member, Exception]], activity: str) -> Exception:
    """Return the error to raise: the first failure that is a cause, or else the first failure."""
    who, error = next((failure for failure in failures if _is_cause(failure[1])), failures[0])
    if isinstance(error, UserError | RunError):
        return error
    if isinstance(error, RayActorError):
        said = f"{who.name} died during {activity}: {_cause_of_death(error)}\n{who.tail()}"
        return ActorDied(said, who.name, error.actor_id or "")
    if isinstance(error, RayTaskError):
        summary = f"{type(error.cause).__name__}: {error.cause}{advise(error.cause)}"
        return RunError(f"{who.name} failed during {activity}: {summary}\n{_trace(error)}\nits log: {who.log}")
    return RunError(f"{who.name} failed during {activity}: {type(error).__name__}: {error}\n{who.tail()}")


def _trace(error: RayTaskError) -> str:
    """Return the end of the traceback of the actor, without the marks under source lines."""
    lines = [line for line in str(error).splitlines() if line.strip(" ^~")]
    return "\n".join(f"    {line}" for line in lines[1:][-TAIL_LINES:])


def _cause_of_death(error: RayActorError) -> str:
    """Return what Ray knows about a death: its last sentence, without the general advice that follows."""
    said = str(error).split("Some common causes include")[0].strip().splitlines()
    return said[-1].strip()


def names_of(actors: Sequence[Member]) -> list[str]:
    """Return the names of actors, each once."""
    return sorted({who.name for who in actors})


def _make_late_error(late: list[Member], activity: str, timeout_s: float, flags: str = LIMIT) -> RunError:
    """Return the error for actors that did not answer in time, with the end of the log of the first one."""
    names = ", ".join(names_of(late))
    return RunError(
        f"no answer within {timeout_s:g} s ({flags}) from {names}, waiting for {activity}\n{late[0].tail()}"
    )
