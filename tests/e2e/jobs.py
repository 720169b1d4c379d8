"""Whole runs as processes: started as a user starts them, watched, killed, and looked for when they should be gone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq

import flag_reads
from actor_processes import process_of
from rlhf_suite.polling import poll_until
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.metrics import is_measured, read_rows

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0
REWARD_MEAN, REWARD_STD = 0.25, 0.5  # in the config of the reward model of `conftest.py`

# 4 prompts x 4 samples a step, two optimiser steps of 8: the demo's task at a size that takes half a second a step.
SMALL = [
    "task=ppo",
    "demo=ppo",
    "rollout.batch_size=4",
    "rollout.n_samples_per_prompt=4",
    "train.batch_size=8",
    "train.micro_batch_size=4",
    "rollout.micro_batch_size=4",
    "data.max_samples=64",
    "eval.max_samples=8",
    "eval.n_samples_per_prompt=1",
    "eval.temperature=0",
    "launch.timeout_s=120",
]
# `gae` with a KL and an entropy that are steered, a critic that warms up, a corrected loss, an average of the weights,
# and filtering that samples more than a step needs: all that has state, and a checkpoint at every step.
ACTOR_CRITIC = [
    *SMALL,
    "algo.advantage.estimator=gae",
    "algo.kl.init_coef=0.05",
    "algo.kl.target=0.02",
    "algo.kl.horizon=100",
    "actor.entropy_coef=0",
    "actor.entropy_target=10",
    "critic.save_value_network=true",
    "critic.freezing_steps=1",
    "correction=tis",
    "train.enable_ema=true",
    "train.ema_beta=0.5",
    "algo.dynamic_filtering_enable=true",
    "rollout.vllm_generate_batch_size=12",
    "train.max_steps=5",
    "eval.steps=2",
    "ckpt.save_steps=1",
]


# Asynchronous training of a model with random weights. It ends a response with one token of about 261, so responses
# have very different lengths and many are still being written when the weights change. A checkpoint of each step keeps
# its weights.
ASYNC_STEPS = 5
ASYNC_BOUND = 2  # steps between the weights that wrote a token and those that it trains
ASYNC = [
    *(word for word in SMALL if not word.startswith("eval.")),
    "eval.dataset=null",
    "eval.steps=-1",
    "data.max_len=480",
    "rollout.max_new_tokens=448",
    "reward.rule=length",
    "reward.rules.length_limit=300",
    "actor.adam.lr=0.01",
    "correction=tis",
    "train.async_enable=true",
    f"train.async_queue_size={ASYNC_BOUND}",
    f"train.max_steps={ASYNC_STEPS}",
    "ckpt.save_steps=1",
    "ckpt.save_hf=true",
    f"ckpt.max_num={ASYNC_STEPS}",
]
STREAM = ["train.partial_rollout_enable=true", "train.async_run_ahead=2"]


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    out: str
    err: str


class Job:
    """`python run.py <words>` in a folder, as a process of its own; `recorded`: which flags it reads is in `reads`."""

    def __init__(self, folder: Path, words: list[str], script: Path = ROOT / "run.py", recorded: bool = False) -> None:
        self.folder = RunFolder(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.said = [folder.with_name(f"{folder.name}.{stream}") for stream in ("out", "err")]
        self.began = time.monotonic()
        with self.said[0].open("wb") as out, self.said[1].open("wb") as err:
            command = [sys.executable, str(script), *words, f"hydra.run.dir={folder}"]
            environment = os.environ | (flag_reads.environment(reads(folder)) if recorded else {})
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, env=environment)

    def ended(self, deadline_s: float = DEADLINE_S) -> Ended:
        """Wait for the end, at most `deadline_s`."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {deadline_s} s: {self.text()}") from None
        return Ended(code, *(path.read_text() for path in self.said))

    def text(self) -> str:
        """What the run has said so far."""
        return "\n".join(path.read_text() for path in self.said)

    def wait_for_step(self, step: int, deadline_s: float = DEADLINE_S) -> None:
        """Until training step `step` is on record, or the run has ended well before we looked."""
        self.wait_for(lambda: any(row["step"] >= step for row in train_rows(self.folder.path)), deadline_s)

    def wait_for(self, is_met: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Until `is_met`, or the run has ended well before we looked."""
        in_time = poll_until(lambda: is_met() or self.process.poll() is not None, deadline_s)
        assert in_time, f"not so far after {deadline_s} s: {self.text()}"
        assert self.process.poll() in (None, 0), self.text()

    def family(self) -> set[psutil.Process]:
        """The run's process and everything below it: Ray's daemons, actors, reward workers."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            return {parent, *parent.children(recursive=True)}
        return set()

    def actor(self, name: str) -> psutil.Process:
        """The process of an actor, known by the log that its output goes to."""
        return process_of(self.folder.logs / f"{name}.log", self.family())

    def kill(self) -> set[psutil.Process]:
        """kill -9 of the driver alone; returns who was there."""
        family = self.family()
        self.process.kill()
        self.process.wait()
        return family


def reads(folder: Path) -> Path:
    """Which flags the recorded run in this folder read."""
    return folder.with_name(f"{folder.name}.reads")


def run(
    folder: Path, words: list[str], expect: int = 0, recorded: bool = False, deadline_s: float = DEADLINE_S
) -> Ended:
    """A whole run; its exit code must be `expect`."""
    ended = Job(folder, words, recorded=recorded).ended(deadline_s)
    assert ended.code == expect, f"exit code {ended.code}\n{ended.out}\n{ended.err}"
    return ended


def survivors(family: set[psutil.Process], within_s: float) -> list[str]:
    """Who of the family is still there after `within_s` seconds at most."""
    _, alive = psutil.wait_procs(list(family), timeout=within_s)
    return [" ".join(process.cmdline())[:200] for process in alive if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def digest(folder: Path, model: str = "model") -> str:
    """SHA-256 of the weights that a run has exported."""
    return hashlib.sha256((folder / model / "model.safetensors").read_bytes()).hexdigest()


def train_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that training steps wrote."""
    return [row for row in read_rows(RunFolder(folder).metrics) if "train/reward" in row]


def eval_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that evaluations wrote."""
    return [row for row in read_rows(RunFolder(folder).metrics) if "eval/reward" in row]


def rollout(folder: Path, step: int) -> list[dict[str, Any]]:
    """The samples of a training step."""
    return pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def column(rows: list[dict[str, Any]], name: str, dtype: type = np.float64) -> np.ndarray:
    """A column with one number per token, all samples end to end."""
    return np.concatenate([np.asarray(row[name], dtype) for row in rows])


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of metrics without what clocks wrote."""
    return [{name: value for name, value in row.items() if not is_measured(name)} for row in rows]
