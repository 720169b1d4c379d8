"""Where metrics go: always to `metrics.jsonl`, and to TensorBoard, Weights & Biases and Prometheus if requested. Each
gets every row.

A row of metrics.jsonl is `{"step": 12, "time": <unix seconds>, "train/gpt_loss": 1.7, ...}`. A step may have
further rows: its evaluation, and what was measured while the next step trained. A value that is not finite is null
there, and its name is in the row's "nonfinite".
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rlhf_suite.config.declarations.logger import LoggerConfig, WandbConfig
from rlhf_suite.disk import name_disk_errors, write_text
from rlhf_suite.errors import UserError
from rlhf_suite.foreign_files import Position, has_type, json_lines, parquet
from rlhf_suite.foreign_text import printable
from rlhf_suite.run_folders.record import load
from rlhf_suite.run_folders.run_folder import RunFolder, samples_file
from rlhf_suite.tracking.console import show_line

CLOSING_S = 5.0  # for the server of Prometheus to end
SAMPLES, SAMPLE_LIMIT = 32, 10_000  # of an evaluation in W&B and TensorBoard, and the characters of each text
SAMPLE_COLUMNS = ("prompt", "response", "label", "reward")


class Sink(Protocol):
    """A destination of metrics. Values may be infinite or NaN."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Service(Sink, Protocol):
    """A destination that also shows samples."""

    def log_samples(self, step: int, rows: list[list[str]]) -> None:
        """Show rows of SAMPLE_COLUMNS."""


class MetricLogger:
    """All sinks of one run that continues after step `start`. What they hold of later steps is dropped."""

    def __init__(self, config: LoggerConfig, folder: RunFolder, start: int) -> None:
        self._folder = folder
        self._services = list[Service]()
        if config.tensorboard_dir is not None:
            name = (config.wandb.run_name or folder.path.name).replace("/", "_")
            path = Path(config.tensorboard_dir) / (config.wandb.group or "") / name
            self._services.append(TensorBoard(path, start, folder.config))
        if config.wandb.enable:
            self._services.append(Wandb(config.wandb, folder))
        self._sinks: list[Sink] = [JsonLines(folder.metrics, start), *self._services]
        if config.prometheus_port is not None:
            self._sinks.append(Prometheus(config.prometheus_port, folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step to every sink."""
        for sink in self._sinks:
            sink.log(step, metrics)

    def log_samples(self, step: int) -> None:
        """Show the first samples of the evaluation after a step, if it wrote any, to the services."""
        if self._services and (rows := read_evaluated_samples(samples_file(self._folder.evaluations, step))):
            for service in self._services:
                service.log_samples(step, rows)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


class JsonLines:
    """The file metrics.jsonl, one row per call. A row is passed to the operating system at once, so a killed process
    loses none."""

    def __init__(self, path: Path, start: int) -> None:
        kept = [row for row in read_rows(path) if start > 0 and row["step"] <= start]
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._path, self._file = path, path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        wrong = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        row |= {name: None if name in wrong else value for name, value in metrics.items()}
        line = (json.dumps(row | ({"nonfinite": wrong} if wrong else {})) + "\n").encode()
        with name_disk_errors(self._path):
            size = self._path.stat().st_size
            if self._file.write(line) != len(line):
                self._file.truncate(size)  # a row is whole or not there
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard event files below `path`, with the run's resolved configuration. Events of steps after `start` are
    hidden."""

    def __init__(self, path: Path, start: int, config: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(path), purge_step=start + 1 if start > 0 else None)
        self._writer.add_text("configuration", f"```yaml\n{config.read_text(encoding='utf-8')}\n```", start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, rows: list[list[str]]) -> None:
        lines = [list(SAMPLE_COLUMNS), ["---"] * len(SAMPLE_COLUMNS), *([*map(one_line, row)] for row in rows)]
        self._writer.add_text("eval/samples", "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def close(self) -> None:
        self._writer.close()


class Prometheus:
    """The newest value of each metric at http://127.0.0.1:<port>/metrics, for Prometheus, until the run ends. The names
    of metrics are values of a label, since Prometheus allows no slash in a name."""

    def __init__(self, port: int, folder: RunFolder) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, start_http_server
        except ImportError:
            raise UserError("logger.prometheus_port needs prometheus_client: pip install prometheus_client") from None
        registry, self._run = CollectorRegistry(), folder.path.resolve().name
        self._values = Gauge("rlhf_suite_metric", "Newest value of a metric", ["run", "metric"], registry=registry)
        self._step = Gauge("rlhf_suite_step", "The step of the newest metrics", ["run"], registry=registry)
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        except OSError as error:
            raise UserError(
                f"logger.prometheus_port={port}: {error.strerror}. Choose another port, or 0 for a free one"
            ) from None
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"
        show_line(f"Prometheus reads {self.url}", to_stderr=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step.labels(self._run).set(step)
        for name, value in metrics.items():
            self._values.labels(self._run, name).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSING_S)


class Wandb:
    """Weights & Biases with the run's resolved configuration: as WANDB_MODE says, else online with WANDB_API_KEY and
    offline without.

    An offline run is stored in `<run folder>/wandb`, for `wandb sync`. The run's id is derived from the run folder, so
    a resumed run continues the same curves.
    """

    def __init__(self, config: WandbConfig, folder: RunFolder) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        try:
            self._run = self.begin(config, folder, mode)
        except (wandb.Error, ValueError) as error:
            reason = " ".join(str(error).split())[:500]
            fix = "Correct WANDB_API_KEY or WANDB_MODE, or set WANDB_MODE=offline and upload the run by wandb sync"
            raise UserError(f"logger.wandb.enable: Weights & Biases cannot be used: {reason}. {fix}") from error
        self._run.define_metric("*", step_metric="step")

    @staticmethod
    def begin(config: WandbConfig, folder: RunFolder, mode: Any) -> Any:
        """Return a run of Weights & Biases that has begun, or continues the one of this folder."""
        import wandb

        return wandb.init(
            project=config.project,
            entity=config.org,
            group=config.group,
            name=config.run_name or folder.path.name,
            config=asdict(load(folder.config)),
            id=hashlib.sha256(str(folder.path.resolve()).encode()).hexdigest()[:12],
            resume="allow" if mode == "online" else None,
            dir=str(folder.path),
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_samples(self, step: int, rows: list[list[str]]) -> None:
        import wandb

        self._run.log({"step": step, "eval/samples": wandb.Table(columns=[*SAMPLE_COLUMNS], data=rows)})

    def close(self) -> None:
        self._run.finish()


def read_evaluated_samples(path: Path) -> list[list[str]]:
    """Return the first sample of the first prompts in the file of an evaluation; none if there is no such file."""
    if not path.exists():
        return []
    import pyarrow.compute as pc

    with parquet(path) as file:
        table = file.read(columns=[*SAMPLE_COLUMNS, "sample"]).filter(pc.field("sample") == 0)
    rows = table.slice(0, SAMPLES).to_pylist()
    return [[printable(str(row[name]), SAMPLE_LIMIT, keep_lines=True) for name in SAMPLE_COLUMNS] for row in rows]


def one_line(text: str) -> str:
    """Return a text as a cell of a table in Markdown."""
    return text.replace("|", "\\|").replace("\n", " ")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, without a last line cut off by a kill and without damaged lines
    (`find_damaged_lines`)."""
    return [row for _, row in read_numbered_rows(path) if row is not None]


def find_damaged_lines(path: Path) -> list[int]:
    """Return the numbers of the lines that are not rows of metrics."""
    return [number for number, row in read_numbered_rows(path) if row is None]


def read_numbered_rows(path: Path, position: Position | None = None) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (line number, row) of each complete line, or of those after a position, which goes on with them; the row
    is None if it cannot be read."""
    for number, row in json_lines(path, position) if path.exists() else ():
        yield number, row if has_type(row, dict[str, Any]) and has_type(row.get("step"), int) else None


def last_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the last value of every metric in rows of metrics.jsonl, for a continued run."""
    values = {name: value for row in rows for name, value in row.items() if isinstance(value, float)}
    return {name: value for name, value in values.items() if not is_measured(name)}


def is_measured(name: str) -> bool:
    """Return whether a value of metrics.jsonl is a time or a speed, in which equal runs may differ."""
    return name == "time" or name.startswith(("timing/", "perf/"))
