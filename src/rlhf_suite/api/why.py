"""What a run is doing, what it waits for, or how it ended: the lines of `rlhf-suite why` and of `Run.why`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_suite.foreign_files import check_types, read_table
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.locks import is_alive
from rlhf_suite.run_folders.run_folder import RunFolder

FINE, WRONG = 0, 1
STALE_S = 30.0  # a living run writes its record every two seconds
INNERMOST = 3  # calls of a process beside the driver
MAX_PROCESSES = 1000
CLOCKS_S = 60.0  # by which the clocks of hosts may differ
# The records of `waits.py`: what each holds, and of which type it is.
RECORD: dict[str, Any] = {
    **{"time": float, "host": str, "pid": int, "waits": list[dict[str, Any]], "more_waits": int},
    **{"main_thread": list[str], "place": str, "failed": bool},
}
WAIT: dict[str, Any] = {
    **{"what": str, "who": list[str], "began": float, "limit_s": float | None},
    **{"flag": str, "place": str, "count": int},
}
NO_RECORD: dict[str, Any] = {"time": 0.0, "host": "?", "pid": 0, "waits": [], "more_waits": 0, "main_thread": []}
NO_WAIT: dict[str, Any] = {"what": "?", "who": [], "began": 0.0, "limit_s": None, "flag": "", "place": "", "count": 1}


def describe_run(folder: RunFolder) -> tuple[int, list[str]]:
    """Return the exit code and the lines about a run."""
    status, record = folder.status(), read_record(folder.waits)
    state = str(status["state"])
    lines = [f"{folder.path}: {state}, {status['last_step']} steps are done"]
    if state == "done":
        lines += [f"  {status['ended_early']}"] if status.get("ended_early") else []
        return FINE, [*lines, *(f"  {name}: {path}" for name, path in status.get("outputs", {}).items())]
    others = processes(folder, read_start(status))
    if state != "running":
        lines += [f"  {line}" for line in str(status["error"] or "").splitlines()]
        log = folder.path / "error.log"
        lines += [f"  the whole traceback is in {log}"] if log.exists() else []
        return WRONG, [*lines, *last_state(folder, record, others, "when it ended it waited")]
    where = f"process {status.get('pid')} on {status.get('host')}"
    if not is_alive(status):
        problem = f"  but {where} is gone: it was killed{remedy(folder)}"
        return WRONG, [*lines, problem, *last_state(folder, record, others, "when it was last seen it waited")]
    lines.append(f"  as {where} since {status.get('started')}")
    late = time.time() - record["time"] if record else 0.0
    if late > STALE_S:
        lines.append(f"  but it has written no record for {duration(late)}: it is stopped, or its node does not answer")
    return WRONG if late > STALE_S else FINE, [*lines, *last_state(folder, record, others, "now it waits")]


def remedy(folder: RunFolder) -> str:
    """Return how a run that was killed can be continued, or that it cannot."""
    from rlhf_suite.config.check.problems import Problem
    from rlhf_suite.preflight.folders import how_to_continue
    from rlhf_suite.run_folders.resume import load_earlier

    run = load_earlier(folder.config) if folder.config.exists() else None
    return "" if run is None or isinstance(run, Problem) else how_to_continue(run, folder.path)


def read_record(path: Path) -> dict[str, Any]:
    """Return a record of waits; empty if there is none. Raises DamagedFile."""
    if not path.exists():
        return {}
    record = NO_RECORD | read_table(path, RECORD)
    record["waits"] = [NO_WAIT | check_types(wait, WAIT, path) for wait in record["waits"]]
    return record


def read_start(status: Mapping[str, Any]) -> float:
    """Return when a run began, in seconds of the epoch; 0 if that is not known."""
    with suppress(ValueError, OverflowError):
        return datetime.strptime(str(status.get("started")), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    return 0.0


def processes(folder: RunFolder, since: float) -> dict[str, dict[str, Any]]:
    """Return the records of the processes beside the driver, by their names, less those of an earlier run here."""
    files = sorted(folder.logs.glob("*.json"))[:MAX_PROCESSES]
    records = {file.stem: read_record(file) for file in files}
    return {name: record for name, record in records.items() if record["time"] >= since - CLOCKS_S}


def last_state(
    folder: RunFolder, record: dict[str, Any], others: Mapping[str, dict[str, Any]], when: str
) -> Iterator[str]:
    """Yield what a run waited for at its last record, where its main thread was, what those concerned did, with the
    ends of their logs, and where its processes are."""
    if not record:
        return
    yield f"{when} for" + ("" if record["waits"] else " nothing") + f" ({clock(record['time'])})"
    yield from waits_of(record)
    came = "the error came from" if record.get("failed") else "its main thread was at"
    yield f"{came}, the innermost call last"
    yield from (f"  {line}" for line in record["main_thread"])
    names = [name for wait in record["waits"] for name in wait["who"]]
    for name in names:  # it grows: those concerned may wait for others
        known = others.get(name)
        if known is not None:
            yield f"{name} (process {known['pid']} on {known['host']}) at {clock(known['time'])}"
            yield from waits_of(known)
            places = [known["place"]] if known.get("place") else known["main_thread"][-INNERMOST:]
            yield from (f"  its main thread: {place}" for place in places)
            names += [other for wait in known["waits"] for other in wait["who"] if other not in names]
        log = folder.logs / f"{Path(name).name}.log"
        if log.exists():
            yield Member(name, log).tail()
    yield from hosts(record, others)


def waits_of(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each wait of a record, the oldest first."""
    moment = record["time"]
    for wait in record["waits"]:
        activity = wait["what"] + (f" and {wait['count'] - 1} others" if wait["count"] > 1 else "")
        whom = f" ({', '.join(wait['who'])})" if wait["who"] else ""
        place = f", at {wait['place']}" if wait["place"] else ""
        limit = f" of at most {duration(wait['limit_s'])}" if wait["limit_s"] else ""
        limit += f" ({wait['flag']})" if limit and wait["flag"] else ""
        yield f"  {activity}{whom}{place}: for {duration(moment - wait['began'])}{limit}, since {clock(wait['began'])}"
    if record["more_waits"]:
        yield f"  and for {record['more_waits']} others"


def hosts(record: Mapping[str, Any], others: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Yield on which host each process of a run is."""
    by_host: dict[str, list[str]] = {}
    for name, process in {"driver": record, **others}.items():
        by_host.setdefault(process["host"], []).append(f"{name} ({process['pid']})")
    yield from (f"processes on {host}: {', '.join(names)}" for host, names in by_host.items())


def clock(moment: float) -> str:
    """Return a moment as a time of this day, or with its date."""
    with suppress(ValueError, OverflowError, OSError):  # a record may say anything
        then, now = time.localtime(moment), time.localtime()
        return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M:%S", then)
    return "?"


def duration(seconds: float) -> str:
    """Return a number of seconds as people write it: 8 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
