"""One run as its page shows it: its state, metrics, timings, configuration and samples, read from its folder."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_suite.config.check.names import unread
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.runs import TASKS, Run
from rlhf_suite.errors import UserError
from rlhf_suite.foreign_files import content, read_table
from rlhf_suite.foreign_text import printable
from rlhf_suite.locks import is_alive
from rlhf_suite.report.curves import (
    ACCURACY,
    KL,
    LENGTH,
    LOSS,
    REWARD,
    find_evaluation_points,
    find_training_points,
)
from rlhf_suite.report.history import Points
from rlhf_suite.report.sample_data import Arrays, Room, samples_of
from rlhf_suite.report.sample_files import Reader
from rlhf_suite.report.summary import best, first_steps_of_a_stream, is_headline, order
from rlhf_suite.report.timeline import LANES, clip_spans, colour_of, last_steps
from rlhf_suite.run_folders.record import read_saved_values
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.console import evaluation_results

ERROR_LIMIT = 20_000  # characters
TOKENIZER_BYTES = 256 << 20
MOST_IDS = 1 << 32  # of a tokenizer, by the type of its numbers

Spell = Callable[[Sequence[int]], list[str]]


def run_data(folder: RunFolder, name: str, arrays: Arrays, room: Room, reader: Reader) -> dict[str, Any]:
    """Return all that a page shows of a run that it calls `name`. Numbers of samples go to `arrays`,
    as many as there is `room` for; `reader` reads their files.

    Raises:
        UserError: the folder has no run.
    """
    if not folder.status_file.exists():
        raise UserError(f"{folder.path} is not the folder of a run: it has no {folder.status_file.name}")
    history = reader.history(folder.metrics)
    curves = history.curves
    values = config_values(folder)
    idle = unread_flags(values)
    return {
        "name": printable(name),
        "folder": printable(str(folder.path.resolve())),
        "task": str(values.get("task", "")),
        "status": status_of(folder),
        "unit": "iteration" if folder.loop.exists() else "RL step" if "timing/ppo_train" in curves else "step",
        "remarks": first_steps_of_a_stream(curves),
        "agents": agents(values),
        "headlines": headlines(curves),
        "panels": panels(curves),
        "metrics": {printable(metric): curve(points, room.points) for metric, points in curves.items()},
        "clock": curve(clock(folder, history.times), room.points),
        "timeline": timeline(folder),
        "colours": {phase: colour_of(phase) for phase in phases(curves)},
        "config": config_rows(folder, values, idle),
        "unread": len(idle),
        "samples": samples_of(folder, arrays, lambda ids: token_texts(folder, values, ids), room, reader),
    }


def status_of(folder: RunFolder) -> dict[str, Any]:
    """Return the state of a run and what tells how it ended. A run whose process is gone was killed."""
    status = folder.status()
    if status["state"] == "running" and "pid" in status and not is_alive(status):
        status["state"] = "killed"
    status["error"] = printable(status["error"] or "", ERROR_LIMIT, keep_lines=True)
    names = ("state", "error", "last_step", "started", "updated", "host", "outputs", "resumes")
    return {name: status.get(name) for name in names}


def curve(points: Points, most: int) -> list[list[float]]:
    """Return the steps and the values of a metric, at most so many. The last point is always there."""
    stride = max(1, -(-len(points) // most))
    kept = points[(len(points) - 1) % stride :: stride]
    return [[step for step, _ in kept], [value for _, value in kept]]


def headlines(curves: dict[str, Points]) -> list[dict[str, Any]]:
    """Return the metrics that say how a run went: first, last and best value, and where it was."""
    rows, evaluations = [], evaluation_results(curves)
    for name in sorted(filter(is_headline, curves), key=order):
        if name.startswith("train/") or name in evaluations:
            points, errors = curves[name], curves.get(f"{name}_stderr")
            at, value = (best(name, points) if name.startswith("eval/") else None) or (None, None)
            error = errors[-1][1] if errors else None
            row = {"first": points[0][1], "last": points[-1][1], "best": value, "at": at, "error": error}
            rows.append({"name": printable(name), **row})
    return rows


def panels(curves: dict[str, Points]) -> list[dict[str, Any]]:
    """Return the charts of the first page, each with the names of its metrics."""
    results = {name: curves[name] for name in evaluation_results(curves)}
    charts = (
        (panel, [*find_training_points(panel, curves), *find_evaluation_points(panel, results)])
        for panel in (REWARD, ACCURACY, LOSS, KL, LENGTH)
    )
    return [{"title": panel.title, "names": [*map(printable, names)]} for panel, names in charts if names]


def agents(values: dict[str, Any]) -> dict[str, str]:
    """Return the kind of the agent of each data source that has its own, and under "" that of all others."""
    own = re.compile(r"agent\.sources\.(.+)\.kind")
    shown_values = {
        printable(match[1]): str(values[key]) for key in values if (match := own.fullmatch(key)) is not None
    }
    return {"": str(values.get("agent.kind", ""))} | shown_values


def clock(folder: RunFolder, times: Points) -> Points:
    """Return the steps of the run and the seconds from its first row of metrics to each, without those in which the run
    did not work: from the last row before it was continued until then. `times` has the step and time of each row."""
    starts, seconds, before = folder.starts(), 0.0, math.inf
    by_step: dict[int, float] = {}
    for step, now in times:
        begin = max((time for time in starts if before < time <= now), default=before)
        seconds += max(0.0, now - begin)
        by_step[step], before = round(seconds, 3), now
    return sorted(by_step.items())


def timeline(folder: RunFolder) -> dict[str, Any] | None:
    """Return who was busy when in the last steps, in seconds; None if that is not known."""
    ends, intervals = last_steps(folder)
    if len(ends) < 2:
        return None
    bars = []
    for lane in LANES:
        of_lane = [interval for interval in intervals if interval.who == lane.who]
        for activity in dict.fromkeys(interval.what for interval in of_lane):
            spans = clip_spans([interval for interval in of_lane if interval.what == activity], ends[0], ends[-1])
            times = [[round(begin - ends[0], 4), round(end - begin, 4)] for begin, end in spans]
            bars.append({"who": lane.title, "what": activity, "colour": colour_of(activity), "spans": times})
    return {"ends": [round(end - ends[0], 4) for end in ends], "bars": [bar for bar in bars if bar["spans"]]}


def phases(curves: dict[str, Points]) -> list[str]:
    """Return the phases whose seconds were measured."""
    names = (name.removeprefix("timing/") for name in curves if name.startswith("timing/"))
    return [name for name in names if name != "step_total"]


def config_values(folder: RunFolder) -> dict[str, Any]:
    """Return the saved values of a run by their dotted names; none if it has not got as far."""
    return read_saved_values(folder.config) if folder.config.exists() else {}


def unread_flags(values: dict[str, Any]) -> set[str]:
    """Return the flags of a run that it does not read; none of a task that this version does not have."""
    task = str(values.get("task"))
    return unread(task, values) & values.keys() if task in TASKS else set()


def config_rows(folder: RunFolder, values: dict[str, Any], idle: set[str]) -> list[list[str]]:
    """Return of each flag but the `idle` ones: name, value, default and who set it; "" for a default or a setter that
    is not known."""
    task = str(values.get("task"))
    defaults = all_values(Run.of(task)) if task in TASKS else {}
    origins = read_table(folder.origins, {}) if folder.origins.exists() else {}
    return [
        [
            printable(text)
            for text in (
                key,
                spell(value),
                spell(defaults[key]) if key in defaults else "",
                str(origins.get(key, "")),
            )
        ]
        for key, value in values.items()
        if key not in idle
    ]


def token_texts(folder: RunFolder, values: dict[str, Any], ids: Sequence[int]) -> list[str]:
    """Return the text of each token id by the tokenizer of the run, or its number where that cannot be found."""
    from tokenizers import Tokenizer

    path = tokenizer_file(folder, str(values.get("actor.model_name_or_path") or ""))
    if path is None:
        return [f"[{number}]" for number in ids]
    try:
        tokenizer = Tokenizer.from_buffer(content(path, TOKENIZER_BYTES, follow=True))
    except Exception:  # of any kind: the library has none of its own
        return [f"[{number}]" for number in ids]
    return [token_text(tokenizer, number) for number in ids]


def token_text(tokenizer: Any, number: int) -> str:
    """Return the text of one token, or its name if it is a part of a character; its number if it has neither."""
    name = tokenizer.id_to_token(number) if 0 <= number < MOST_IDS else None
    if name is None:
        return f"[{number}]"
    text = str(tokenizer.decode([number], skip_special_tokens=False))
    if not text or "\ufffd" in text:
        return str(name)
    return f" {text}" if name.startswith("\u2581") and not text.startswith(" ") else text


def tokenizer_file(folder: RunFolder, model: str) -> Path | None:
    """Return the tokenizer of the models of a run, or of the model it began with; None if it is not on this machine."""
    from huggingface_hub import try_to_load_from_cache

    outputs = [Path(path) for path in folder.status().get("outputs", {}).values()]
    for place in (*outputs, folder.model, Path(model) if model else folder.model):
        if (file := place / "tokenizer.json").exists():
            return file
    for file in folder.checkpoints.glob("*/**/tokenizer.json"):
        return file
    if model.startswith("builtin:"):
        from rlhf_suite.models.builtin import builtin_folder

        with suppress(UserError):  # a model that this version does not have
            return builtin_folder(model, "actor.model_name_or_path") / "tokenizer.json"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        cached = try_to_load_from_cache(model, "tokenizer.json")
        return Path(cached) if isinstance(cached, str) else None
    return None
