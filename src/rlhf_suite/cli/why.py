"""`rlhf-suite why <run folder>`: what a run is doing, what it waits for, or how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_suite.errors import UserError
from rlhf_suite.foreign_text import printable
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.locks import is_alive
from rlhf_suite.tracking.run_folder import RunFolder

USAGE = """usage: rlhf-suite why <run folder>

Says how far a run is, what it waits for and since when, with the end of the logs of the actors concerned; or how it
ended. It reads files only, so it works for a run on another node, and for one that was killed. The exit code is 0 if
the run works or is done, 1 if it failed, was stopped or killed, or stands still, and 2 if the folder has no run."""

FINE, WRONG = 0, 1
OUTPUT_LIMIT = 100_000  # characters
STALE_S = 30.0  # a living run writes its record every two seconds


def main(words: Sequence[str]) -> int:
    """Print what the run in a folder does; return the exit code."""
    if len(words) != 1:
        raise UserError(USAGE)
    folder = RunFolder(Path(words[0]).expanduser())
    if not folder.status_file.exists():
        raise UserError(f"{folder.path} is not the folder of a run: it has no {folder.status_file.name}")
    code, lines = described(folder)
    print(printable("\n".join(lines), OUTPUT_LIMIT, keep_lines=True))
    return code


def described(folder: RunFolder) -> tuple[int, list[str]]:
    """Return the exit code and the lines about a run."""
    status, record = folder.status(), read_record(folder)
    state = str(status["state"])
    lines = [f"{folder.path}: {state}, {status['last_step']} steps are done"]
    if state == "done":
        return FINE, [*lines, *(f"  {name}: {path}" for name, path in status.get("outputs", {}).items())]
    if state != "running":
        lines += [f"  {line}" for line in str(status["error"] or "").splitlines()]
        return WRONG, [*lines, *last_state(folder, record, "when it ended it waited")]
    where = f"process {status.get('pid')} on {status.get('host')}"
    if not is_alive(status):
        what = f"  but {where} is gone: it was killed. The same command with ckpt.load_enable=true continues it"
        return WRONG, [*lines, what, *last_state(folder, record, "when it was last seen it waited")]
    lines.append(f"  as {where} since {status.get('started')}")
    late = time.time() - record["time"] if record else 0.0
    if late > STALE_S:
        lines.append(f"  but it has written no record for {duration(late)}: it is stopped, or its node does not answer")
    return WRONG if late > STALE_S else FINE, [*lines, *last_state(folder, record, "now it waits")]


def read_record(folder: RunFolder) -> dict[str, Any]:
    """Return the last record of the waits of a run; empty if there is none."""
    try:
        record: dict[str, Any] = json.loads(folder.waits.read_text())
    except (OSError, ValueError):
        return {}
    return record


def last_state(folder: RunFolder, record: dict[str, Any], when: str) -> Iterator[str]:
    """Yield what a run waited for at its last record, where its main thread was, and the logs of those concerned."""
    if not record:
        return
    moment, waits, names = record["time"], record.get("waits", []), list[str]()
    clock = time.strftime("%H:%M:%S", time.localtime(moment))
    yield f"{when} for" + ("" if waits else " nothing") + f" ({clock})"
    for each in waits:  # the oldest first
        limit = f" of at most {duration(each['limit_s'])}" if each["limit_s"] else ""
        whom = f" ({', '.join(each['who'])})" if each["who"] else ""
        yield f"  {each['what']}{whom}: for {duration(moment - each['began'])}{limit}"
        names += [name for name in each["who"] if name not in names]
    if record.get("more_waits"):
        yield f"  and for {record['more_waits']} others"
    yield "its main thread was at, the innermost call last"
    yield from (f"  {line}" for line in record["main_thread"])
    for name in names:
        log = folder.logs / f"{name}.log"
        if log.exists():
            yield Member(name, log).tail()


def duration(seconds: float) -> str:
    """Return a number of seconds as people write it: 8 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
