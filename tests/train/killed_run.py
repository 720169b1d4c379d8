"""A small SFT run, killed with SIGKILL again and again until it is through: `python killed_run.py <folder> <seed>`.

Each attempt is a process of its own, forked from this one so that the imports are paid once. Prints, as JSON, the step
each attempt started from.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from rlhf_suite.config.actor import SFTActorConfig
from rlhf_suite.config.ckpt import CheckpointConfig
from rlhf_suite.config.data import SFTDataConfig
from rlhf_suite.config.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.eval import EvalConfig
from rlhf_suite.config.logger import LoggerConfig
from rlhf_suite.config.optim import AdamConfig
from rlhf_suite.config.runs import SFTRun
from rlhf_suite.config.train import TrainConfig
from rlhf_suite.train.checkpoint import CheckpointStore
from rlhf_suite.train.run_folder import RunFolder

STEPS = 12
# Adapters with dropout: a resume that forgets the random state, the moments or the data order gives other weights.
CONFIG = SFTRun(
    actor=SFTActorConfig(model_name_or_path="builtin:tiny", adam=AdamConfig(lr=1e-2)),
    data=SFTDataConfig(dataset="builtin:reverse", output_key="output", input_template=None, max_samples=40),
    train=TrainConfig(batch_size=8, micro_batch_size=4, max_epochs=3, max_steps=STEPS),
    eval=EvalConfig(dataset="builtin:reverse_eval", steps=4, max_samples=8),
    ds=DeepSpeedConfig(param_dtype="fp32", packing_samples=True, lora=LoRAConfig(rank=8, dropout=0.2)),
    ckpt=CheckpointConfig(save_steps=1, max_num=2, load_enable=True),
    logger=LoggerConfig(progress=False),
)


def attempt(folder: Path) -> int:
    """The process id of a run that goes on from the newest checkpoint."""
    pid = os.fork()
    if pid:
        return pid
    try:
        from rlhf_suite.tasks import sft

        RunFolder(folder).start("killed")
        sft.run(CONFIG, folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def newest(folder: Path) -> int:
    try:
        found = CheckpointStore(CheckpointConfig(), RunFolder(folder).checkpoints).latest()
    except FileNotFoundError:  # rotated away while we looked
        return newest(folder)
    return found.step if found else 0


def run(folder: Path, generator: random.Random | None) -> list[int]:
    """Run to the end, killed at random instants if there is a generator; the step each attempt started from."""
    starts = []
    while True:
        starts.append(newest(folder))
        pid = attempt(folder)
        if generator is not None and starts[-1] < STEPS - 2:
            patience = generator.choice((0, 1, 2))
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
    import rlhf_suite.tasks.sft  # noqa: F401 - for the forks

    root, seed = Path(sys.argv[1]), int(sys.argv[2])
    run(root / "whole", None)
    print(json.dumps(run(root / "killed", random.Random(seed))))
