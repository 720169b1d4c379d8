"""Reinforcement learning about images, on Ray, vLLM and DeepSpeed: the engine and the trainer agree at every step."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jobs
import pytest

from image_families import make_seeing
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.metrics import read_rows

SMALL = [
    "task=ppo",
    "demo=ppo_images",
    "rollout.batch_size=8",
    "rollout.n_samples_per_prompt=4",
    "train.batch_size=16",
    "train.micro_batch_size=8",
    "rollout.micro_batch_size=8",
    "data.max_samples=64",
    "eval.dataset=null",
    "eval.steps=-1",
    "train.max_steps=3",
    "launch.timeout_s=300",
]
CROPS = """
from rlhf_suite.agents.base import Start, Step
from rlhf_suite.data.images import open_image

class Environment:
    async def reset(self, task):
        self.image, self.label, self.turns = open_image(task.images[0].data), task.label, 0
        return Start()

    async def step(self, turn):
        self.turns += 1
        if self.turns == 2:
            return Step(reward=float(turn.content.strip() == self.label), done=True)
        crop = self.image.crop((0, 0, 28, 56))
        content = [{"type": "image", "image": crop}, {"type": "text", "text": "closer"}]
        return Step(({"role": "user", "content": content},), reward=0.0)

    async def close(self): ...
"""


def column(folder, name: str) -> list[float]:
    return [row[name] for row in read_rows(RunFolder(folder).metrics) if name in row]


@pytest.fixture(scope="module")
def start(runs):
    """A model that was trained on a few rows, so that its folder is that of a user."""
    folder = runs / "images_start"
    if not (folder / "model" / "config.json").exists():
        words = ["task=sft", "demo=sft_images", "train.max_steps=30", "eval.dataset=null", "eval.steps=-1"]
        jobs.run(folder, words)
    return folder / "model"


def check_agreement(folder):
    """The engine and the trainer had the same weights and read the same images at every step."""
    gaps = column(folder, "mismatch/max")
    assert len(gaps) == 3 and max(gaps) <= 5e-6
    received, proved = column(folder, "sync/tensors"), column(folder, "sync/read_back")
    assert min(received) > 50 and min(proved) >= min(received) - 3, "the tower's tensors too"


@pytest.mark.proof
def test_responses_to_images_are_trained(runs, start):
    folder = runs / "images"
    jobs.run(folder, [*SMALL, f"actor.model_name_or_path={start}"])
    check_agreement(folder)


@pytest.mark.proof
def test_ranks_that_partition_a_model_train_responses_to_images(runs, start):
    """The samples and rewards are those of one rank, and so are the losses."""
    whole, folder = runs / "images", runs / "images_zero3"
    if not whole.exists():
        jobs.run(whole, [*SMALL, f"actor.model_name_or_path={start}"])
    ranks = ["actor.num_gpus_per_node=2", "ref.num_gpus_per_node=2", "ds.zero_stage=3"]
    jobs.run(folder, [*SMALL, f"actor.model_name_or_path={start}", *ranks])
    check_agreement(folder)
    for step in (1, 2, 3):
        ours, theirs = jobs.rollout(folder, step), jobs.rollout(whole, step)
        assert [(row["ids"], row["reward"]) for row in ours] == [(row["ids"], row["reward"]) for row in theirs]
    for name in ("train/policy_loss", "train/actor_grad_norm", "train/kl"):
        assert column(folder, name) == pytest.approx(column(whole, name), rel=1e-3, abs=1e-5)


@pytest.mark.proof
def test_a_critic_and_a_reward_model_read_images(runs, start):
    """The reward model is trained on pairs of answers about images; the critic begins as a copy of it."""
    judge, folder = runs / "images_judge", runs / "images_critic"
    jobs.run(judge, ["task=rm", "demo=dpo_images", "train.max_steps=4", "eval.dataset=null", "eval.steps=-1"])
    words = ["algo.advantage.estimator=gae", "reward.rule=null", f"reward.model_name_or_path={judge / 'model'}"]
    jobs.run(folder, [*SMALL, f"actor.model_name_or_path={start}", *words])
    check_agreement(folder)
    assert len(column(folder, "train/critic_loss")) == 3
    rows = jobs.rollout(folder, 1)
    assert len({row["reward"] for row in rows}) > len(rows) // 4


@pytest.fixture(scope="module")
def turns(runs, start):
    """Returns the folder of a run whose environment answers with images, in so many processes beside the driver."""
    code = runs / "crops.py"
    code.write_text(CROPS)
    words = [
        *SMALL,
        f"actor.model_name_or_path={start}",
        "agent.kind=environment",
        f"train.agent_func_path={code}",
        "reward.rule=null",
        "data.max_images_per_prompt=2",
        "data.max_len=128",
        "rollout.max_new_tokens=64",
        "actor.freeze_visual_encoder=true",
    ]

    @cache
    def folder(workers: int) -> Path:
        path = runs / f"images_turns_{workers}"
        jobs.run(path, [*words, f"agent.num_workers={workers}"])
        return path

    return folder


@pytest.mark.proof
def test_an_environment_that_answers_with_images_is_trained(turns):
    check_agreement(turns(0))
    counts = {
        sum(1 for a, b in zip([0, *row["owner"]], row["owner"], strict=False) if (a, b) in ((0, 1), (2, 1)))
        for row in jobs.rollout(turns(0), 1)
    }
    assert 2 in counts, "some episodes have a second turn, after the second image"


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "internvl", "glm4v"])
def test_other_families_are_trained_on_turns_with_images_and_a_critic(runs, kind):
    make_seeing(model := runs / f"{kind}_model", kind)
    code = runs / f"{kind}.py"
    code.write_text(CROPS)
    words = [f"train.agent_func_path={code}", "agent.kind=environment", "reward.rule=null", "data.max_len=192"]
    words += ["data.max_images_per_prompt=2", "rollout.max_new_tokens=64", "algo.advantage.estimator=gae"]
    folder = runs / f"{kind}_turns"
    jobs.run(folder, [*SMALL, f"actor.model_name_or_path={model}", *words])
    check_agreement(folder)
    assert any((2, 1) in zip(row["owner"], row["owner"][1:], strict=False) for row in jobs.rollout(folder, 1))


@pytest.mark.proof
def test_workers_send_images_as_the_driver_does(turns):
    assert (turns(2) / "logs" / "episode-worker-1.log").exists()
    check_agreement(turns(2))
    for step in (1, 2, 3):
        assert jobs.rollout(turns(2), step) == jobs.rollout(turns(0), step)
    assert jobs.digest(turns(2)) == jobs.digest(turns(0))
