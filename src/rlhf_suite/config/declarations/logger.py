"""`logger`: the destinations of metrics besides metrics.jsonl and the console."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.declarations.conditions import is_set, is_true
from rlhf_suite.config.declarations.flags import FREE, flag, group

NAMING = is_true(".enable") | is_set("logger.tensorboard_dir", "<folder>")


@dataclass
class WandbConfig:
    """Weights & Biases. The key comes from WANDB_API_KEY; without a key, or with WANDB_MODE=offline, the run is stored
    offline"""

    enable: bool = flag(False, "Log metrics to Weights & Biases", resume=FREE)
    project: str = flag("rlhf_suite", "Project in Weights & Biases", resume=FREE, when=is_true(".enable"))
    org: str | None = flag(None, resume=FREE, when=is_true(".enable"))
    """Entity (user or team) in Weights & Biases; null: the default entity"""
    group: str | None = flag(None, resume=FREE, when=NAMING)
    """Group of the run in Weights & Biases, and folder below logger.tensorboard_dir. null: in a sweep the name of the
    sweep's folder, otherwise no group"""
    run_name: str | None = flag(None, resume=FREE, when=NAMING)
    """Name of the run, also in TensorBoard. null: the name of the run folder; in a sweep the values that vary, such as
    0 train.seed=1"""


@dataclass
class LoggerConfig:
    """Logging of metrics"""

    logging_steps: int = flag(1, "Log metrics every N steps", ge=1, resume=FREE)
    tensorboard_dir: str | None = flag(None, "Folder for TensorBoard files; null: none are written", resume=FREE)
    prometheus_port: int | None = flag(None, ge=0, le=65535, resume=FREE)
    """Port on 127.0.0.1 at which Prometheus can read the newest metrics during the run; 0: a free port; null: off"""
    wandb: WandbConfig = group(WandbConfig)
    report: bool = flag(True, "Write report.html, the page of the run, at the end of a run that trains", resume=FREE)
    progress: bool = flag(True, "Show a progress bar and tables on the console", resume=FREE)
