"""A sweep as its page shows it: for each combination of its flags what the runs with different seeds say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_suite.config.declarations.metrics import direction_of, is_share
from rlhf_suite.foreign_text import printable
from rlhf_suite.report.statistics import LEAST, Statistic, interquartile_mean, interval, mean

SEEDS = ("train.seed",)  # runs that differ in these alone are tries of the same thing


@dataclass(frozen=True)
class SweptRun:
    """A run of a sweep: its number, its folder, and the values of the flags that vary in the sweep."""

    number: int
    folder: Path
    values: Mapping[str, str]

    @property
    def name(self) -> str:
        """Return the name of the run: its number and what is special about it, flags by their last word if that is
        enough."""
        last = [key.rpartition(".")[2] for key in self.values]
        keys = last if len(set(last)) == len(last) else [*self.values]
        pairs = zip(keys, self.values.values(), strict=True)
        return " ".join([str(self.number), *(f"{key}={value}" for key, value in pairs)])

    @property
    def combination(self) -> tuple[tuple[str, str], ...]:
        """Return the values without those of seeds."""
        return tuple((key, value) for key, value in self.values.items() if key not in SEEDS)


def read_sweep(jobs: Sequence[tuple[int, Path, Sequence[str]]]) -> list[SweptRun]:
    """Return the runs of jobs: number, folder and words of the command line, of which those that differ count."""
    words = [dict(word.partition("=")[::2] for word in overrides) for *_, overrides in jobs]
    keys = [
        key for key in dict.fromkeys(key for flags in words for key in flags) if len({e.get(key) for e in words}) > 1
    ]
    return [
        SweptRun(number, folder, {key: job[key] for key in keys if key in job})
        for (number, folder, _), job in zip(jobs, words, strict=True)
    ]


def sweep_data(runs: Sequence[SweptRun], shown: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the page shows of a sweep, whose runs it shows as `shown`: the flags that vary, and the combinations
    of their values, each with its runs and the statistics of every headline metric."""
    combinations = list(dict.fromkeys(run.combination for run in runs))
    flags = list(dict.fromkeys(key for combination in combinations for key, _ in combination))
    groups = []
    for combination in combinations:
        places = [place for place, run in enumerate(runs) if run.combination == combination]
        values = {key: printable(value) for key, value in combination}
        metrics = statistics([shown[place]["headlines"] for place in places])
        groups.append({"values": [values.get(flag) for flag in flags], "runs": places, "metrics": metrics})
    return {"flags": [*map(printable, flags)], "groups": groups, "least": LEAST}


def statistics(headlines: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the statistics of the last values of each metric over runs."""
    by_name: dict[str, list[float]] = {}
    for rows in headlines:
        for row in rows:
            by_name.setdefault(row["name"], []).append(row["last"])
    return {
        name: {
            "direction": direction_of(name),
            "values": values,
            "mean": float(mean(np.array(values))),
            "interval": find_interval(name, values, mean),
            "iqm": float(interquartile_mean(np.array(values))),
            "iqm_interval": find_interval(name, values, interquartile_mean),
        }
        for name, values in by_name.items()
    }


def find_interval(name: str, values: Sequence[float], statistic: Statistic) -> tuple[float, float] | None:
    """Return the interval of a statistic of a metric; that of a share ends at 0 and 1, beyond which it cannot be."""
    bounds = interval(np.array(values), statistic)
    return (max(bounds[0], 0.0), min(bounds[1], 1.0)) if bounds is not None and is_share(name) else bounds
