"""`logger`: where metrics go besides metrics.jsonl and the console."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.declarations.conditions import is_set, is_true
from rlhf_suite.config.declarations.flags import FREE, flag, group

NAMING = is_true(".enable") | is_set("logger.tensorboard_dir", "<folder>")


@dataclass
class WandbConfig:
    """Weights & Biases; the key comes from WANDB_API_KEY, without one the run is stored offline"""

    enable: bool = flag(False, "Log to W&B", resume=FREE)
    project: str = flag("rlhf_suite", "Project of W&B", resume=FREE, when=is_true(".enable"))
    org: str | None = flag(None, "Entity of W&B", resume=FREE, when=is_true(".enable"))
    group: str | None = flag(None, resume=FREE, when=NAMING)
    """Group, and folder within that of TensorBoard; null: none, and in a sweep the name of its folder"""
    run_name: str | None = flag(None, resume=FREE, when=NAMING)
    """Name of the run, in TensorBoard too; null: the run folder's name, and in a sweep what varies: 0 train.seed=1"""


@dataclass
class LoggerConfig:
    """Metrics"""

    logging_steps: int = flag(1, "Log every so many steps", ge=1, resume=FREE)
    tensorboard_dir: str | None = flag(None, "Root folder of TensorBoard; null: off", resume=FREE)
    prometheus_port: int | None = flag(None, ge=0, le=65535, resume=FREE)
    """Port of 127.0.0.1 where Prometheus reads the newest metrics while the run goes on; 0: a free one; null: off"""
    wandb: WandbConfig = group(WandbConfig)
    report: bool = flag(True, "Write report.html, the page of the run, when a run that trains ends", resume=FREE)
    progress: bool = flag(True, "Show a progress bar and tables on the console", resume=FREE)
