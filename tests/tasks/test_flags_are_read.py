"""Every flag of a supervised task that is not idle is read by a run: what it promises at least reaches the code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import flag_reads
from rlhf_suite.config.declarations.task_groups import SUPERVISED
from rlhf_suite.models.builtin import create_tiny

DEADLINE_S = 500
FEW = (
    "train.max_steps=2 eval.max_samples=8 data.max_samples=24 train.batch_size=8 train.micro_batch_size=4 "
    "logger.progress=false launch.device=cpu data.cache_enable=false"  # rows from the cache are not encoded
)
# What is read only where it is switched on; resumed once.
MORE = (
    "task=sft demo=sft ckpt.save_steps=1 ckpt.load_enable=true ds.zero_stage=3 ds.lora.rank=4 "
    "train.dynamic_batch_enable=true train.max_tokens_per_gpu=600 actor.lr_scheduler=cosine_with_min_lr "
    f"actor.gradient_checkpointing_enable=true {FEW} data.cache_enable=true"
)
IMAGES = f"task=sft demo=sft_images actor.freeze_visual_encoder=true {FEW}".replace("data.cache_enable=false", "")
READ_ELSEWHERE = {
    "ds.use_universal_ckpt": "a run with a record of its flags, tests/config/test_continued_runs.py",
    "explain": "the command line shows the plan instead of running",
    "launch.num_cpus": "a run on Ray, tests/e2e/test_flags_of_rl_are_read.py",
    "launch.object_store_mb": "as launch.num_cpus",
    "launch.timeout_s": "as launch.num_cpus",
    "launch.trust_remote_code": "the command line passes it on, tests/e2e/test_code_of_models.py",
    "launch.umask": "the command line takes it over before the task begins, tests/launch/test_environment.py",
    "logger.report": "the command line writes the page of a run, tests/report",
    "plan": "as explain",
    "own_code": "the run writes it itself; tests/config/test_own_code.py",
    "run_dir": "the command line names the folder of the run",
}


@pytest.mark.stack
def test_every_active_flag_is_read_by_a_run(tmp_path):
    create_tiny(tmp_path / "teacher", seed=1)
    lines = [f"task={task} demo={task} {FEW}" for task in SUPERVISED]
    lines = [f"{line} teacher.model_name_or_path={tmp_path}/teacher" if "distill" in line else line for line in lines]
    lines += [MORE, MORE, IMAGES]
    command = [sys.executable, str(flag_reads.RECORDING / "recorded_runs.py"), str(tmp_path), *lines]
    environment = os.environ | flag_reads.environment(os.devnull)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    files = [tmp_path / f"{number}.reads" for number in range(len(lines))]
    assert flag_reads.unread([line.split() for line in lines], files) == set(READ_ELSEWHERE)


def test_a_flag_that_nothing_reads_is_found(tmp_path):
    line = f"task=sft demo=sft {FEW}"
    (tmp_path / "reads").write_text("AdamConfig lr\n")
    missing = flag_reads.unread([line.split()], [tmp_path / "reads"])
    assert "actor.adam.lr" not in missing and {"actor.adam.eps", "train.batch_size", "data.max_len"} <= missing
    assert "ds.lora.alpha" not in missing, "idle without ds.lora.rank"
