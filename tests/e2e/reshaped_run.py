"""A run of reinforcement learning that is saved in one shape and goes on in another."""

from __future__ import annotations

import shutil
from pathlib import Path

import jobs

from rlhf_suite.run_folders.run_folder import RunFolder

DEADLINE_S = 900.0
SAVED, STEPS = 3, 5  # the step of the checkpoint, and the last one
RANKS = ("actor.num_gpus_per_node=2", "critic.num_gpus_per_node=2", "ref.num_gpus_per_node=2")
SHAPES = {
    "plain": ("ds.zero_stage=2",),
    "two ranks": (*RANKS[:2], "ds.zero_stage=3"),
    "split": (*RANKS, "ds.ring_attn_size=2", "ds.zero_stage=3", "vllm.num_engines=2"),
    "shared": (*RANKS, "train.colocate_all=true", "ds.zero_stage=1", "vllm.num_engines=2", "train.micro_batch_size=2"),
    "torch": ("ds.zero_stage=null",),
}


def run(folder: Path, words: list[str]) -> None:
    """Make a whole run, with time for a busy machine to start many processes."""
    jobs.run(folder, [*words, f"launch.timeout_s={DEADLINE_S:g}"], deadline_s=2 * DEADLINE_S)


def go_on(whole: Path, folder: Path, words: list[str]) -> range:
    """Continue a copy of a finished run as if it had been killed after step SAVED, with the flags `words`, and return
    the steps that were made again."""
    shutil.copytree(whole, folder)
    later = (folder / "checkpoints" / f"step_{step:06d}" for step in range(SAVED + 1, STEPS + 1))
    for written in (*later, *folder.glob("model*")):
        shutil.rmtree(written)
    run(folder, [*words, "ckpt.load_enable=true", "ds.use_universal_ckpt=true"])
    assert RunFolder(folder).status()["resumes"][-1]["step"] == SAVED
    return range(SAVED + 1, STEPS + 1)
