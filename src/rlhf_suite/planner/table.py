"""The tables that `rlhf-suite plan` prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from rlhf_suite.planner.budget import BUDGET
from rlhf_suite.planner.needs import Estimate, Process, gib
from rlhf_suite.planner.remedies import Words


def show(console: Console, estimate: Estimate) -> None:
    """Print what a run needs, and whether it fits."""
    device = estimate.target.device
    tokens = f"{estimate.tokens.sequences} x {estimate.tokens.length} tokens"
    unit = "GPU" if device else "process"
    for use in estimate.devices:
        shared = " (sharing)" if len(use.processes) > 1 else ""
        title = f"{use.count} x {unit}: " + ", ".join(process.name for process in use.processes) + shared
        console.print(table(f"{title}, at most {gib(use.peak)}", process_rows(use.processes)))
    if estimate.engine is not None:
        longest = estimate.engine.kv_tokens / estimate.longest
        console.print(f"KV cache of an engine: {estimate.engine.kv_tokens} tokens, {longest:.1f} x data.max_len")
    if device is not None or len(estimate.host) > 1:
        console.print(table(f"Host memory, all processes: {gib(sum(estimate.host.values()))}", rows_of(estimate.host)))
    for title, terms in (("/dev/shm", estimate.shared_memory), ("Disk", estimate.disk)):
        if terms:
            console.print(table(f"{title}: {gib(sum(terms.values()))}", rows_of(terms)))
    if estimate.times:
        rows = ((name, "", duration(seconds)) for name, seconds in estimate.times.items())
        console.print(table("Time of a step, if every sequence has data.max_len tokens", rows))
    kind = f"{gib(estimate.target.usable)} of {device.name if device else 'this machine'}"
    for line in (*say_deadline(estimate), f"The actor's batches: {estimate.rows}.", *say_decisions(estimate)):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"Longest micro-batch of a rank: {tokens}. Fullest: {gib(estimate.peak)} of {kind}.")
    console.print("It fits." if estimate.fits else "It does not fit: " + "; ".join(estimate.problems) + ".")


def say_decisions(estimate: Estimate) -> Iterator[str]:
    """Yield what the plan decides where flags are null: whether activations are recomputed, and the tokens of a micro-
    batch. That a CPU keeps activations is what one expects, and is not said."""
    for name, recomputes in estimate.checkpointing.items():
        if not recomputes and estimate.target.device is None:
            continue
        does = "recomputes activations in the backward pass" if recomputes else "keeps its activations, which fit"
        yield f"By the plan the {name} {does} ({name}.gradient_checkpointing_enable=null)."
    if estimate.budget is not None:
        yield f"By the plan a micro-batch has at most {estimate.budget} tokens ({BUDGET}=null)."


def say_deadline(estimate: Estimate) -> Iterator[str]:
    """Yield how long a process may show no sign of life, where that is known, beside the deadline of all waits."""
    if not estimate.silences:
        return
    name, seconds = max(estimate.silences.items(), key=lambda silence: silence[1])
    limit = f"launch.timeout_s={estimate.timeout_s:g}"
    if not estimate.is_late:
        yield f"Longest time without a sign of life: {name}, {duration(seconds)}. Deadline: {limit}."
        return
    more = math.ceil(2 * seconds / 100) * 100
    late = f"{name[0].upper()}{name[1:]} takes {duration(seconds)}, and {limit} ends the run"
    yield f"{late}: write launch.timeout_s={more}."


def show_proposals(
    console: Console, proposals: Sequence[tuple[Words, Estimate]], command: Callable[[Words], str]
) -> None:
    """Print changes with which the run fits, the mildest first, each with the whole `command` that plans it."""
    if not proposals:
        console.print("No change known here makes it fit: take a smaller model or data.max_len, or larger GPUs.")
        return
    console.print("It would fit with one of:" if len(proposals) > 1 else "It would fit with:")
    for words, planned in proposals:
        cache = (
            f"; KV cache of {planned.engine.kv_tokens / planned.longest:.1f} x data.max_len" if planned.engine else ""
        )
        for text in (f"{' '.join(words)}    ({gib(planned.peak)}{cache})", f"  {command(words)}"):
            console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)


def table(title: str, rows: Iterable[tuple[str, str, str]]) -> Table:
    result = Table(title=title, title_justify="left", show_header=False)
    result.add_column()
    result.add_column()
    result.add_column(justify="right")
    for row in rows:
        result.add_row(*row)
    return result


def process_rows(processes: Iterable[Process]) -> Iterable[tuple[str, str, str]]:
    """Yield the terms of each process: those that it always holds, then its moments, of which one counts."""
    for process in processes:
        yield process.name, "", gib(process.memory.peak)
        yield from (("", name, gib(size)) for name, size in process.memory.always.items() if size)
        for name, size in process.memory.moments.items():
            if size:
                yield "", f"at one moment: {name}", f"({gib(size)})"


def rows_of(terms: Mapping[str, int]) -> Iterable[tuple[str, str, str]]:
    return ((name, "", gib(size)) for name, size in terms.items() if size)


def duration(seconds: float) -> str:
    """Return a time with two significant digits."""
    digits = 0 if seconds >= 10 else 1 - math.floor(math.log10(max(seconds, 1e-6)))
    return f"{seconds:.{digits}f} s"
