"""Rollouts and evaluations as `rollouts/step_<n>.parquet` and `evaluations/step_<n>.parquet`: tables of samples."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path

import pyarrow as pa

from rlhf_suite.background import Line
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.disk import file_aside
from rlhf_suite.foreign_files import parquet
from rlhf_suite.rl.sample_table import columns, make_table, token_columns, write_rows, write_table
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.run_folders.run_folder import list_samples_files, samples_file
from rlhf_suite.waits import result

THREAD = "files"
MOST = 2  # files that wait or are written: the samples of more would fill the memory
CLOSING_S = 10.0  # how long the end of a run that has failed waits for the last of them


class SampleFiles:
    """Writes files of samples one after the other, in a thread of its own, while the run goes on. What fails there is
    raised in who asks for the next file, or waits for all."""

    def __init__(self) -> None:
        self.line = Line[None](THREAD)
        self.unfinished: deque[Future[None]] = deque()
        self.lock = threading.Lock()

    def write(self, work: Callable[[], None]) -> None:
        """Have a file written, as soon as there are fewer than `MOST` of them. May be called on any thread."""
        with self.lock:
            self.unfinished.append(self.line.start(work))
        self.wait_for_all_but(MOST - 1)

    def finish(self) -> None:
        """Wait until all files are written."""
        self.wait_for_all_but(0)

    def wait_for_all_but(self, count: int) -> None:
        """Wait until at most so many files are left."""
        while True:
            with self.lock:
                if len(self.unfinished) <= count:
                    return
                first = self.unfinished.popleft()
            result(first, "a file of samples", THREAD)

    def close(self) -> None:
        """End the thread. What it was asked for is written first, where the run has failed within `CLOSING_S`."""
        wait([*self.unfinished], CLOSING_S)
        self.line.close()


def write_rollouts(folder: Path, step: int, scored: ScoredTrajectories, experience: Experience) -> None:
    """Write every ledger that was trained on: text, tokens, owners, log-probs, advantages, weight versions, reward."""
    per_token = {"ids": experience.ids.int(), **experience.columns("token")}
    tokens = {name: values.numpy() for name, values in per_token.items()}
    with file_aside(samples_file(folder, step), durable=False) as aside:
        write_table(aside, columns(scored), token_columns(tokens, experience.lengths.tolist()))


def write_evaluation(folder: Path, step: int, scored: ScoredTrajectories) -> None:
    """Write every ledger of an evaluation: prompt, response, label and reward."""
    with file_aside(samples_file(folder, step), durable=False) as aside:
        write_table(aside, columns(scored), {})


def append_rows(file: Path, shown: Mapping[str, pa.Array], tokens: Mapping[str, pa.Array]) -> None:
    """Add samples to a file, or begin one; `tokens` are the columns with lists of numbers."""
    table = make_table(shown, tokens)
    if file.exists():
        with parquet(file) as known:
            table = pa.concat_tables([known.read(), table])
    with file_aside(file, durable=False) as aside:
        write_rows(aside, table)


def forget_after(folder: Path, step: int) -> None:
    """Remove the files of samples of steps after `step`, which a resumed run makes again, from a folder and from those
    directly in it, such as that of a benchmark."""
    folders = [folder, *(place for place in folder.glob("*") if place.is_dir())]
    for number, file in (item for place in folders for item in list_samples_files(place).items()):
        if number > step:
            file.unlink()
