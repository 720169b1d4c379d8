"""The roots that tasks build on: what every task has, what those have that resume, and those that train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlhf_suite.config.ckpt import CheckpointConfig, ResumeConfig
from rlhf_suite.config.ds import DeepSpeedConfig
from rlhf_suite.config.flags import FREE, flag, group
from rlhf_suite.config.launch import LaunchConfig
from rlhf_suite.config.logger import LoggerConfig


@dataclass
class Run:
    """What every task has"""

    MODEL: ClassVar[str] = "actor.model_name_or_path"  # the flag without which there is nothing to run
    HAS_DEMO: ClassVar[bool] = True  # whether conf/demo has a preset that names one

    task: str = flag("", "The task; chosen with task=<name>")
    explain: bool = flag(
        False, "Print the batch arithmetic, the placement and where each value comes from; run nothing", resume=FREE
    )
    run_dir: str | None = flag(
        None, "Folder of this run, or with -m of the whole sweep; null: a new one, outputs/<task>/<time>", resume=FREE
    )
    own_code: list[str] = flag(
        [], "The files of the user's own functions and their SHA-256, as the run found them; it writes them itself"
    )
    launch: LaunchConfig = group(LaunchConfig)


@dataclass
class ResumableRun(Run):
    """What every task has that can go on where it was stopped"""

    ckpt: ResumeConfig = group(ResumeConfig)


@dataclass
class TrainedRun(ResumableRun):
    """What every task that trains a model has"""

    ds: DeepSpeedConfig = group(DeepSpeedConfig)
    ckpt: CheckpointConfig = group(CheckpointConfig)
    logger: LoggerConfig = group(LoggerConfig)
