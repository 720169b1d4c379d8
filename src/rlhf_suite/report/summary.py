"""The summary at the end of a run: how its numbers changed, responses before and after, and where its files are."""

from __future__ import annotations

import shlex
import statistics
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from rlhf_suite.config import name_program
from rlhf_suite.config.check.formatting import quote
from rlhf_suite.config.declarations.metrics import LOWER, PASS_AT_K, direction_of
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import TRAINED
from rlhf_suite.config.declarations.tools import ChatConfig
from rlhf_suite.foreign_files import parquet, read_json
from rlhf_suite.report.curves import draw_calls, draw_curves, panels, series
from rlhf_suite.report.history import Points
from rlhf_suite.report.samples import Sample, show_samples, write_samples
from rlhf_suite.report.timeline import draw_timeline
from rlhf_suite.run_folders.run_folder import RunFolder, list_samples_files
from rlhf_suite.tracking.console import HEADLINES, evaluation_results
from rlhf_suite.train.checkpoint import store_of

SAMPLES = 8
SHORT = 0.8  # of the length of responses in the next step: the first steps of a stream have less


def summarise(folder: RunFolder, run: Run) -> list[str]:
    """Write `curves.png`, `timeline.png` of an RL run, `calls.png` where the run measured that and, where the run
    evaluated samples, `samples.md`; return the lines of the final summary."""
    if not folder.metrics.exists():  # a task that trains nothing
        return []
    curves = series(folder.metrics)
    places = [f"Run folder: {folder.path}"]
    if panels(curves):  # steps of clients may have neither a reward nor a loss that says something
        places.append(f"Curves: {draw_curves(folder)}")
    if (timeline := draw_timeline(folder)) is not None:
        places.append(f"Timeline: {timeline}")
    if (calls := draw_calls(folder)) is not None:
        places.append(f"Pass rates by allowed calls: {calls}")
    samples = before_and_after(folder.evaluations)
    if samples:
        write_samples(folder, samples)
        if run.logger.progress:
            show_samples(samples)
        places.append(f"Samples: {folder.path / 'samples.md'}")
    if run.task == "serve_train":
        return [*describe_time(curves), *changes(curves), *places]
    outputs = folder.status().get("outputs", {})
    model = outputs.get("actor", run.ckpt.output_dir or folder.model)
    places += [*best_checkpoint(folder, run), f"Model: {model}"]
    places += [f"Best model: {outputs['best']}"] if "best" in outputs else []
    places.append(f"Next: {next_command(run, outputs.get('best', model))}")
    return [*describe_time(curves), *changes(curves), *first_steps_of_a_stream(curves), *places]


def best_checkpoint(folder: RunFolder, run: Run) -> list[str]:
    """Return the line about the checkpoint of the best evaluation, if one is kept."""
    checkpoints = store_of(run.ckpt, folder).all("best") if run.task in TRAINED else []
    if not checkpoints:
        return []
    last = checkpoints[-1]
    best = read_json(last.path / "metric.json")["best"]
    return [f"Best checkpoint: {last.path} ({best['metric']} {best['best_so_far']:.4g} at step {last.step})"]


def next_command(run: Run, model: str | Path) -> str:
    """Return a command that uses what a run has made, with the texts around a prompt that it was trained with."""
    if run.task == "rm":
        return f"{name_program()} task=serve_rm {word('reward.model_name_or_path', model)}"
    if run.task == "prm":
        judge = word("reward.process.model_name_or_path", model)
        return f"{name_program()} task=score reward.process.enable=true {judge} data.dataset=<file>"
    data, words = run.data, [word("actor.model_name_or_path", model)]
    if not data.apply_chat_template:
        words += ["data.apply_chat_template=false", word("data.input_template", data.input_template)]
    if data.max_len < 4 * ChatConfig().max_new_tokens:
        words += [f"chat.max_len={data.max_len}", f"chat.max_new_tokens={data.max_len // 2}"]
    return f"{name_program()} task=chat {' '.join(words)}"


def word(key: str, value: str | Path | None) -> str:
    """Return a flag and its value as one writes them in a shell."""
    return f"{key}=null" if value is None else shlex.quote(f"{key}={quote(str(value))}")


def changes(curves: dict[str, Points]) -> list[str]:
    """Return one line per headline metric: its first and last value, and for evaluations the best one."""
    names = headlines(curves)
    width = max(map(len, names), default=0)
    return [f"{name:<{width}}  {change(name, curves)}" for name in names]


def headlines(curves: dict[str, Points]) -> list[str]:
    """Return the names of the headline metrics of a run, evaluations first."""
    shown = {*evaluation_results(curves), *(name for name in curves if name.startswith("train/"))}
    return sorted((name for name in curves if name in shown and is_headline(name)), key=order)


def is_headline(name: str) -> bool:
    """Return whether the summary shows a metric: those of the progress line, and every pass@k."""
    last = name.rpartition("/")[2]
    return last in HEADLINES or PASS_AT_K.fullmatch(last) is not None


def order(name: str) -> tuple[bool, str]:
    """Return the sort key of a metric: evaluations first."""
    return (name.startswith("train/"), name)


def change(name: str, curves: dict[str, Points]) -> str:
    """Return `0.359 -> 0.893 (standard error 0.019)`, and the best step of an evaluation if it is not the last."""
    points, errors = curves[name], curves.get(f"{name}_stderr")
    text = " -> ".join(f"{value:.4g}" for _, value in (points if len(points) == 1 else (points[0], points[-1])))
    if errors:
        text += f" (standard error {errors[-1][1]:.2g})"
    found_best = best(name, points) if name.startswith("eval/") else None
    if found_best is not None and found_best[1] != points[-1][1]:
        text += f", best {found_best[1]:.4g} at step {found_best[0]}"
    return text


def best(name: str, points: Points) -> tuple[int, float] | None:
    """Return the step and the value of the best point of a metric; None for a metric without a direction."""
    direction = direction_of(name)
    if direction is None:
        return None
    return (min if direction == LOWER else max)(points, key=lambda point: point[1])


def first_steps_of_a_stream(curves: dict[str, Points]) -> list[str]:
    """Return a sentence about the first steps of a stream, if they learnt from responses that are shorter than usual.

    Groups that began together end in the order of their length, so the first steps have the short ones: each of them
    leaves groups behind, and the next step has much longer responses.
    """
    left, lengths = dict(curves.get("async/overtaken", ())), curves.get("train/response_length", [])
    is_early = [left.get(step, 0) > 0 and length < SHORT * after for (step, length), (_, after) in pairwise(lengths)]
    early = lengths[: len([*takewhile(bool, is_early)])]
    if not early:
        return []
    usual = statistics.median(length for _, length in lengths[len(early) :])
    if not usual:  # most later responses are empty
        return []
    steps = f"Step {early[0][0]}" if len(early) == 1 else f"Steps {early[0][0]} to {early[-1][0]}"
    shares = [length / usual for _, length in early]
    share = f"{min(shares):.2f}" if len(early) == 1 else f"{min(shares):.2f} to {max(shares):.2f}"
    return [
        f"{steps} learnt from the responses that ended first, which had {share} of the usual length: "
        f"{left[early[0][0]]:.0f} groups that had begun earlier were still being written (async/overtaken). "
        "They follow in later steps."
    ]


def describe_time(curves: dict[str, Points]) -> list[str]:
    """Return how long the steps took, and the shares of the longest phases."""
    seconds = {
        name.partition("/")[2]: sum(v for _, v in points)
        for name, points in curves.items()
        if name.startswith("timing/")
    }
    total = seconds.pop("step_total", 0.0)
    if total <= 0:
        return []
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:5]
    shares = ", ".join(f"{name} {value / total:.0%}" for name, value in longest if value / total >= 0.01)
    return [f"Time in steps: {total:.1f} s ({shares})"]


def before_and_after(evaluations: Path, count: int = SAMPLES) -> list[Sample]:
    """Return the first sample of a few prompts in the first and in the last evaluation; prompts that changed come
    first.

    An evaluation may lack prompts whose reward failed (reward.on_error=drop).
    """
    files = [*list_samples_files(evaluations).values()]
    if len(files) < 2:
        return []
    tables = (first_samples(file) for file in (files[0], files[-1]))
    before, after = ({row["prompt_index"]: row for row in rows} for rows in tables)
    pairs = [
        Sample(b["prompt"], response_of(b), response_of(a), b["label"], (b["reward"], a["reward"]))
        for b, a in ((before[index], after[index]) for index in before if index in after)
    ]
    return sorted(pairs, key=lambda pair: pair.before == pair.after)[:count]


def first_samples(path: Path) -> list[dict[str, Any]]:
    """Return the first sample of each prompt in the file of an evaluation."""
    with parquet(path) as file:
        rows: list[dict[str, Any]] = file.read().filter(pc.field("sample") == 0).to_pylist()
        return rows


def response_of(row: dict[str, Any]) -> str:
    """Return the response of a sample as reward models saw it: with its special tokens, if the text begins with the
    prompt."""
    query, prompt = row["reward_query"] or "", row["prompt"] or ""
    _, shown_prompt, answer = query.partition(prompt) if prompt else ("", query, query)
    return answer if shown_prompt else row["response"] or ""
