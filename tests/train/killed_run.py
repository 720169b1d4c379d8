"""Small runs of supervised tasks, killed with SIGKILL again and again until they are through:
`python killed_run.py <folder> <seed> <task> ...`.

Each attempt is a process of its own, forked from this one so that the imports are paid once. `<folder>/<task>/whole` is
never killed, `<folder>/<task>/killed` is. Prints {task: the steps its attempts started from}, one line for each task.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.declarations.ckpt import CheckpointConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.models.builtin import create_tiny
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.train.checkpoint import CheckpointStore
from small_runs import run_task

THOROUGH = "sft"  # killed until it is nearly through; the others a few times
STEPS, FEW_STEPS, FEW_KILLS = 12, 5, 2
# Adapters with dropout: a resume that forgets the random state, the moments or the data order gives other weights.
LINE = """
    demo={task} actor.model_name_or_path=builtin:tiny actor.adam.lr=1e-2 actor.lr_scheduler=cosine_with_min_lr
    data.max_samples=40 train.batch_size=8 train.micro_batch_size=4 train.max_epochs=3 train.max_steps={steps}
    eval.steps=4 eval.max_samples=8 ds.lora.rank=8 ds.lora.dropout=0.2
    ckpt.save_steps=1 ckpt.max_num=2 ckpt.load_enable=true logger.progress=false launch.device=cpu
"""


def steps_of(task: str) -> int:
    return STEPS if task == THOROUGH else FEW_STEPS


def configured(task: str, root: Path) -> Run:
    words = [f"task={task}", *LINE.format(task=task, steps=steps_of(task)).split()]
    if task == "distill":  # other random weights than the student's
        create_tiny(root / "teacher", seed=1)
        words.append(f"teacher.model_name_or_path={root / 'teacher'}")
    found = preflight(parse(words))
    assert not found.problems, found.problems
    return found.runs[0]


def attempt(config: Run, folder: Path) -> int:
    """The process id of a run that goes on from the newest checkpoint."""
    pid = os.fork()
    if pid:
        return pid
    try:
        RunFolder(folder).start("killed")
        run_task(config, folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def newest(folder: Path) -> int:
    try:
        found = CheckpointStore(CheckpointConfig.of("sft"), RunFolder(folder).checkpoints).latest()
    except FileNotFoundError:  # rotated away while we looked
        return newest(folder)
    return found.step if found else 0


def run(config: Run, folder: Path, generator: random.Random | None) -> list[int]:
    """Run to the end, killed at random instants if there is a generator; the step each attempt started from."""
    starts = []
    while True:
        starts.append(newest(folder))
        pid = attempt(config, folder)
        thorough = config.task == THOROUGH
        if generator is not None and starts[-1] < steps_of(config.task) - 2 and (thorough or len(starts) <= FEW_KILLS):
            patience = generator.choice((0, 1, 2)) if thorough else 1
            while newest(folder) < starts[-1] + patience:
                assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the run ended before it was killed"
                time.sleep(0.002)
            time.sleep(generator.random() * 0.15)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            assert status == 0, status
            return starts


if __name__ == "__main__":
    root, generator = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    for task in sys.argv[3:]:
        importlib.import_module(f"rlhf_suite.tasks.{task}")  # for the forks
        config = configured(task, root)
        run(config, root / task / "whole", None)
        starts = run(config, root / task / "killed", generator)
        print(json.dumps({task: starts}), flush=True)
