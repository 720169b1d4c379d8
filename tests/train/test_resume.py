"""A run that is killed and started again ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_suite.config.actor import SFTActorConfig
from rlhf_suite.config.data import SFTDataConfig
from rlhf_suite.config.ds import DeepSpeedConfig
from rlhf_suite.config.logger import LoggerConfig
from rlhf_suite.config.optim import AdamConfig
from rlhf_suite.config.runs import SFTRun
from rlhf_suite.config.train import TrainConfig
from rlhf_suite.launch.environment import runtime_env
from rlhf_suite.tasks.sft import make_task
from rlhf_suite.train.journal import Journal
from rlhf_suite.train.metrics import read_rows
from rlhf_suite.train.run_folder import RunFolder
from rlhf_suite.train.supervised import SupervisedWorker, encode

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180


def curves(folder: Path) -> list[dict[str, float]]:
    """All metrics but the clock's."""
    return [
        {name: value for name, value in row.items() if name != "time" and not name.startswith("timing/")}
        for row in read_rows(RunFolder(folder).metrics)
    ]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_killed_at_random_instants(tmp_path):
    """Weights bit for bit, every metric of every step, and no step left out or twice on record."""
    command = [sys.executable, str(Path(__file__).with_name("killed_run.py")), str(tmp_path), "3"]
    environment = os.environ | runtime_env("cpu")
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    starts = json.loads(done.stdout.splitlines()[-1])
    assert len(set(starts)) >= 4, starts
    whole, killed = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "killed")
    assert weights(killed.model) == weights(whole.model)
    assert curves(killed.path) == curves(whole.path)
    assert [row["step"] for row in curves(whole.path)] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12, 12]
    assert not list(killed.checkpoints.glob("*.tmp"))


FLAGS = {
    "actor.model_name_or_path": "builtin:tiny",
    "actor.num_gpus_per_node": "2",
    "actor.adam.lr": "1e-2",
    "data.dataset": "builtin:reverse",
    "data.output_key": "output",
    "data.input_template": "null",
    "data.max_samples": "36",
    "train.batch_size": "8",
    "train.micro_batch_size": "2",
    "train.max_steps": "5",
    "ds.param_dtype": "fp32",
    "ds.zero_stage": "2",
    "ckpt.save_steps": "1",
    "logger.progress": "false",
    "launch.device": "cpu",
}


def command(folder: Path, *more: str) -> list[str]:
    flags = [f"{name}={value}" for name, value in FLAGS.items()]
    return [sys.executable, "run.py", "task=sft", *flags, f"hydra.run.dir={folder}", *more]


def never_killed(world, folder):
    """The same run on two ranks without Ray: the losses and the model."""
    config = SFTRun(
        actor=SFTActorConfig(model_name_or_path="builtin:tiny", num_gpus_per_node=2, adam=AdamConfig(lr=1e-2)),
        data=SFTDataConfig(dataset="builtin:reverse", output_key="output", input_template=None, max_samples=36),
        train=TrainConfig(batch_size=8, micro_batch_size=2, max_steps=5),
        ds=DeepSpeedConfig(param_dtype="fp32", zero_stage=2),
        logger=LoggerConfig(progress=False),
    )
    journal = Journal(config.logger, RunFolder(folder), "sft")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    from rlhf_suite.models.load import load_tokenizer

    data = encode(config, make_task(config, load_tokenizer("builtin:tiny", config.data)), journal)
    worker = SupervisedWorker(world.rank, world.size, address, port, "cpu", config, make_task, data)
    losses = [worker.train_step(step)["train/gpt_loss"] for step in range(worker.steps()[0])]
    worker.export(folder / "model")
    return losses


@pytest.mark.e2e
def test_two_ranks_on_ray_killed_once(ranks, tmp_path):
    run = RunFolder(tmp_path / "run")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    first = subprocess.Popen(
        command(run.path), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + DEADLINE_S
    while not (run.checkpoints / "step_000002").exists():
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < deadline, "no checkpoint of step 2"
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert run.status()["state"] == "running", "a killed run cannot say so"
    second = subprocess.run(
        command(run.path, "ckpt.load_enable=true"),
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert second.returncode == 0, second.stdout + second.stderr
    losses = ranks(2).call(never_killed, tmp_path / "whole")[0]
    assert [row["train/gpt_loss"] for row in curves(run.path)] == losses
    assert len(losses) == 5
    assert weights(run.model) == weights(tmp_path / "whole" / "model")
    assert run.status()["state"] == "done"
