"""Waiting for actors: each wait has a name and a deadline; a failure says who failed, doing what, and its last words.

A dead actor fails its pending call within milliseconds, a hung one never does. So the wait looks at each call by
itself: a death is noticed while the others are busy, or stuck in a collective that waits for the dead one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.actor_log import TAIL_LINES, Member

# Ray reports a finished call at once; the poll only bounds how long a signal to the driver goes unheard.
POLL_S = 1.0
# When an actor dies its peers fail too ("connection closed by peer"), at times before the death itself is reported.
# After a first failure the wait goes on this long in search of the cause.
CAUSE_S = 2.0


def wait_for(refs: Sequence[ray.ObjectRef], what: str, timeout_s: float, actors: Sequence[Member]) -> list[Any]:
    """The results of `refs`, in their order; `actors[i]` is who computes `refs[i]`, `what` is what they do.

    `what` reads on from "waiting for", for example "the policy update of step 12".

    Raises:
        UserError, RunError: raised by an actor, as they are.
        RunError: an actor died, or raised anything else, or did not answer within `timeout_s` seconds.
    """
    if len(refs) != len(actors):
        raise AssertionError(f"{len(refs)} calls but {len(actors)} actors")
    member = dict(zip(refs, actors, strict=True))
    deadline = time.monotonic() + timeout_s
    pending, failures = list(refs), list[tuple[Member, Exception]]()
    while pending and time.monotonic() < deadline:
        done, pending = ray.wait(pending, timeout=min(POLL_S, max(0.0, deadline - time.monotonic())))
        failed = [(member[ref], error) for ref in done if (error := _error(ref, timeout_s)) is not None]
        if failed and not failures:
            deadline = min(deadline, time.monotonic() + CAUSE_S)
        failures += failed
        if any(_is_cause(error) for _, error in failed):
            break
    if failures:
        raise _explain(failures, what)
    if pending:
        raise _expired([member[ref] for ref in pending], what, timeout_s)
    return _fetched(refs, what, timeout_s, actors)


def _fetched(refs: Sequence[ray.ObjectRef], what: str, timeout_s: float, actors: Sequence[Member]) -> list[Any]:
    """The results of finished calls; a node whose daemon hangs may keep those that are not in this process."""
    try:
        return ray.get(list(refs), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise _expired(list(actors), f"the results of {what}", timeout_s) from None


def first_done(refs: Sequence[ray.ObjectRef], what: str, timeout_s: float, actors: Sequence[Member]) -> list[int]:
    """Positions of the calls that are done, once any of them is; the errors are those of `wait_for`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if ray.wait(list(refs), timeout=POLL_S)[0]:
            done = set(ray.wait(list(refs), num_returns=len(refs), timeout=0)[0])
            positions = [position for position, ref in enumerate(refs) if ref in done]
            wait_for([refs[i] for i in positions], what, timeout_s, [actors[i] for i in positions])
            return positions
    raise _expired(list(actors), what, timeout_s)


def _error(ref: ray.ObjectRef, timeout_s: float) -> Exception | None:
    """The error of a finished call, unwrapped when it is one of ours."""
    try:
        ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        return error.cause if isinstance(error.cause, UserError | RunError) else error
    except ray.exceptions.RayError as error:
        return error
    return None


def _is_cause(error: Exception) -> bool:
    """Whether the error speaks for itself; anything else may be the echo of a peer's death."""
    return isinstance(error, UserError | RunError | RayActorError)


def _explain(failures: list[tuple[Member, Exception]], what: str) -> Exception:
    who, error = next((failure for failure in failures if _is_cause(failure[1])), failures[0])
    if isinstance(error, UserError | RunError):
        return error
    if isinstance(error, RayActorError):
        return RunError(f"{who.name} died during {what}: {_cause_of_death(error)}\n{who.tail()}")
    if isinstance(error, RayTaskError):
        summary = f"{type(error.cause).__name__}: {error.cause}"
        return RunError(f"{who.name} failed during {what}: {summary}\n{_trace(error)}\nits log: {who.log}")
    return RunError(f"{who.name} failed during {what}: {type(error).__name__}: {error}\n{who.tail()}")


def _trace(error: RayTaskError) -> str:
    """The end of the actor's own traceback, without the marks under the source lines."""
    lines = [line for line in str(error).splitlines() if line.strip(" ^~")]
    return "\n".join(f"    {line}" for line in lines[1:][-TAIL_LINES:])


def _cause_of_death(error: RayActorError) -> str:
    """What Ray knows of a death: its last sentence, less the general advice that follows it."""
    said = str(error).split("Some common causes include")[0].strip().splitlines()
    return said[-1].strip()


def _expired(late: list[Member], what: str, timeout_s: float) -> RunError:
    names = ", ".join(sorted({who.name for who in late}))
    return RunError(
        f"no answer within {timeout_s:g} s (launch.timeout_s) from {names}, waiting for {what}\n{late[0].tail()}"
    )
