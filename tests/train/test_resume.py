"""A run that is killed and started again ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from killed_run import THOROUGH, steps_of

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.config.declarations.models import AdamConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import SUPERVISED
from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.config.plan.run_plan import Machine, resolve
from rlhf_suite.distributed.mesh import Rank
from rlhf_suite.launch.environment import runtime_env
from rlhf_suite.polling import poll_until
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tasks.sft import make_task
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.metrics import is_measured, read_rows
from rlhf_suite.train.supervised import SupervisedWorker, encode

pytestmark = pytest.mark.stack

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180
IMPORTS = {"PYTHONPATH": str(ROOT / "tests")}  # for what is shared by the tests


def curves(folder: Path) -> list[dict[str, float]]:
    """All metrics but the clock's."""
    return [
        {name: value for name, value in row.items() if not is_measured(name)}
        for row in read_rows(RunFolder(folder).metrics)
    ]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


OFTEN = (THOROUGH, "rm")  # the others are proofs: what is saved and read again is the same code


@pytest.fixture(scope="module")
def killed(request, tmp_path_factory):
    """Of a task the run that was never killed, the one that was, and the steps it was started from. One process runs
    the tasks whose tests are selected, in this order; the test of a task waits for its line."""
    root, starts = tmp_path_factory.mktemp("killed"), {}
    items = [item for item in request.session.items if item.path == request.path and "killed" in item.fixturenames]
    tasks = [item.callspec.params["task"] for item in items]
    command = [sys.executable, str(Path(__file__).with_name("killed_run.py")), str(root), "3", *tasks]
    with (root / "errors").open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | runtime_env("cpu") | IMPORTS
        )

    def of(task: str) -> tuple[RunFolder, RunFolder, list[int]]:
        while task not in starts:
            line = process.stdout.readline()
            assert line, (root / "errors").read_text()[-3000:]
            if line.startswith("{"):
                starts.update(json.loads(line))
        return RunFolder(root / task / "whole"), RunFolder(root / task / "killed"), starts[task]

    yield of
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    "task",
    [pytest.param(task, marks=pytest.mark.stack if task in OFTEN else pytest.mark.proof) for task in SUPERVISED],
)
def test_killed_at_random_instants(killed, task):
    """Weights bit for bit, every metric of every step, and no step left out or twice on record."""
    whole, resumed, starts = killed(task)
    steps = steps_of(task)
    assert len(set(starts)) >= (4 if task == THOROUGH else 2), starts
    assert weights(resumed.model) == weights(whole.model)
    assert curves(resumed.path) == curves(whole.path)
    evaluated = sorted([*range(1, steps + 1), *{*range(0, steps + 1, 4), steps}])
    assert [row["step"] for row in curves(whole.path)] == evaluated
    assert not list(resumed.checkpoints.glob("*.tmp"))


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
    config = Run.of(
        "sft",
        actor=replace(
            Run.of("sft").actor, model_name_or_path="builtin:tiny", num_gpus_per_node=2, adam=AdamConfig(lr=1e-2)
        ),
        data=DataConfig.of("sft", dataset="builtin:reverse", output_key="output", input_template=None, max_samples=36),
        train=TrainConfig.of("sft", batch_size=8, micro_batch_size=2, max_steps=5),
        ds=DeepSpeedConfig.of("sft", param_dtype="fp32", zero_stage=2),
        logger=LoggerConfig(progress=False),
    )
    journal = Journal(config.logger, RunFolder(folder), "sft")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    from rlhf_suite.models.load import load_tokenizer

    task = make_task(config, load_tokenizer("builtin:tiny", config.data))
    data = encode(config, make_task, task, journal)
    worker = SupervisedWorker(
        Rank(world.rank, world.mesh, address, port, "cpu"), config, resolve(config, Machine("cpu", 0)), make_task, data
    )
    losses = [worker.train_step(step)["train/gpt_loss"] for step in range(worker.steps()[0])]
    worker.export(folder / "model")
    return losses


@pytest.mark.proof
def test_two_ranks_on_ray_killed_once(ranks, tmp_path):
    run = RunFolder(tmp_path / "run")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    first = subprocess.Popen(
        command(run.path), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    is_saved = (run.checkpoints / "step_000002").exists
    assert poll_until(lambda: is_saved() or first.poll() is not None, DEADLINE_S, 0.01), "no checkpoint of step 2"
    assert first.poll() is None, first.communicate()[0]
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


@pytest.mark.proof  # docs/resume.md has all pairs
def test_a_run_of_one_rank_goes_on_on_two_at_another_zero_stage(tmp_path):
    """The rows on record stay, the others are those of the run that was not stopped: data, rates, losses."""
    whole, other = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "other")

    def started(folder: Path, **changes: str) -> None:
        flags = FLAGS | {name.replace("__", "."): value for name, value in changes.items()} | {"ckpt.max_num": "9"}
        words = [sys.executable, "run.py", "task=sft", *(f"{k}={v}" for k, v in flags.items()), f"run_dir={folder}"]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    started(whole.path, actor__num_gpus_per_node="1")
    shutil.copytree(whole.path, other.path)
    for step in (3, 4, 5):
        shutil.rmtree(other.checkpoints / f"step_{step:06d}")
    started(other.path, ds__zero_stage="3", ckpt__load_enable="true", ds__use_universal_ckpt="true")
    before, after = curves(whole.path), curves(other.path)
    assert before[:2] == after[:2] and len(before) == len(after) == 5
    for expected, found in zip(before[2:], after[2:], strict=True):
        assert {**found} == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in expected.items()}
    (resumed,) = other.status()["resumes"]
    assert {"ds.zero_stage", "actor.num_gpus_per_node"} <= {*resumed["changed"]}
