"""The demo as a GRPO run on one GPU: in bf16, with everything on the same device and asleep in turn, stopped and
continued. On a CPU it is the same command line, where nothing has to sleep."""

from __future__ import annotations

import signal

import jobs
import numpy as np
import pytest

from rlhf_suite.run_folders.run_folder import RunFolder

pytest.importorskip("vllm", reason="bare machines with a GPU have no engines")
STEPS, STOP_AT = 16, 6
GRPO = [
    *("task=ppo", "demo=ppo", "experiment=grpo", "ds.param_dtype=bf16", f"train.max_steps={STEPS}"),
    *("train.colocate_all=true", "vllm.enable_sleep=true", "ds.enable_sleep=true", "ds.zero_stage=2"),
    *("rollout.batch_size=32", "train.batch_size=64", "train.micro_batch_size=64", "eval.steps=-1"),
]


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.proof), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def test_a_run_on_one_device_learns_and_goes_on_after_a_stop(tmp_path, device):
    folder, words = tmp_path / "run", [*GRPO, f"launch={device}"]
    job = jobs.Job(folder, words)
    job.wait_for(lambda: len(jobs.train_rows(folder)) >= STOP_AT)
    for process in job.family():
        process.send_signal(signal.SIGTERM)
    assert job.ended().code == 128 + signal.SIGTERM
    stopped_at = RunFolder(folder).status()["last_step"]
    jobs.run(folder, [*words, "ckpt.load_enable=true"])
    rows = jobs.train_rows(folder)
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)] and STOP_AT <= stopped_at < STEPS
    rewards = [row["train/reward"] for row in rows]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1
    assert max(row["mismatch/mean"] for row in rows) < 0.05
    assert all(row["sync/tensors"] > 0 for row in rows)
