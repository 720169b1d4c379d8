"""What a run leaves behind at every step: metrics, seconds per phase, rollouts as parquet, the progress bar."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_suite.config.logger import LoggerConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.rl.scoring import ScoredTrajectories
from rlhf_suite.train.console import Progress
from rlhf_suite.train.metrics import MetricLogger
from rlhf_suite.train.run_folder import RunFolder


class Journal:
    """Sinks of one run. `log` may be called several times a step; timings go out with the first."""

    def __init__(self, config: LoggerConfig, folder: RunFolder, task: str) -> None:
        self.config, self.folder, self.task = config, folder, task
        self.seconds: dict[str, float] = defaultdict(float)

    def begin(self, start: int, total: int) -> None:
        """Open the sinks; rows of steps after `start` are forgotten, since they will be made again."""
        self.logger = MetricLogger(self.config, self.folder, start)
        self.progress = Progress(self.config, self.task, total, start)
        for file in self.folder.rollouts.glob("step_*.parquet"):
            if int(file.stem.split("_")[1]) > start:
                file.unlink()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase of the step; a failure inside is reported with its name."""
        self.progress_phase(name)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def progress_phase(self, name: str) -> None:
        """Show what the run is doing now."""
        if hasattr(self, "progress"):
            self.progress.phase(name)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step with the seconds of every phase since the last call."""
        timings = {f"timing/{name}": value for name, value in self.seconds.items()}
        timings["timing/step_total"] = sum(self.seconds.values())
        self.seconds.clear()
        if step % self.config.logging_steps == 0:
            self.logger.log(step, metrics | timings)
        self.progress.update(step, metrics)
        self.folder.step(step)

    def rollouts(self, step: int, scored: ScoredTrajectories, experience: TokenBatch) -> None:
        """Everything about every sample of the step: text, tokens, owners, log-probs, advantages, weight version."""
        offsets = pa.array([0, *experience.lengths.cumsum(0).tolist()], pa.int32())
        trajectories = scored.trajectories
        columns = {
            "prompt": pa.array(scored.prompts),
            "response": pa.array(scored.responses),
            "label": pa.array(scored.labels),
            "datasource": pa.array(scored.datasources),
            "prompt_index": pa.array([t.prompt for t in trajectories]),
            "group": pa.array([t.group for t in trajectories]),
            "sample": pa.array([t.sample for t in trajectories]),
            "finish_reason": pa.array([t.finish_reason for t in trajectories]),
            "reward": pa.array(scored.rewards),
            "score": pa.array(scored.scores),
            "ids": pa.ListArray.from_arrays(offsets, pa.array(experience.ids.numpy())),
        }
        ledgers = {
            "owner": [t.owner for t in trajectories],
            "weight_version": [t.version for t in trajectories],
        }
        for name, arrays in ledgers.items():
            columns[name] = pa.array(arrays)
        for name, values in experience.tokens.items():
            columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values.numpy()))
        self.folder.rollouts.mkdir(parents=True, exist_ok=True)
        path = self.folder.rollouts / f"step_{step:06d}.parquet"
        pq.write_table(pa.table(columns), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)

    def close(self) -> None:
        if hasattr(self, "progress"):
            self.progress.close()
            self.logger.close()
