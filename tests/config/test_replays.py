"""Which runs can train on the rollouts of which others, and what such a run is made of."""

from __future__ import annotations

import shlex

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.plan.run_plan import Machine, resolve
from rlhf_suite.preflight.inspections.replay import replay_fits
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.run_folders.record import save
from rlhf_suite.run_folders.run_folder import RunFolder, samples_file


@pytest.fixture
def recorded(checked, tmp_path):
    """Make the folder of a run of these words, with an empty file of rollouts."""

    def make(words="task=ppo demo=ppo"):
        (run,) = checked(words).runs
        folder = RunFolder(tmp_path / "earlier")
        folder.rollouts.mkdir(parents=True)
        samples_file(folder.rollouts, 1).touch()
        save(run, folder.config)
        return folder.path

    return make


def problems(words):
    found = preflight(parse(shlex.split(words)))
    assert not found.problems, found.problems
    (run,) = found.runs
    return [(each.key, each.what) for each in replay_fits(run, None)]


def test_a_run_replays_one_with_the_same_prompts(recorded):
    folder = recorded()
    assert problems(f"task=ppo demo=ppo rollout.replay={folder} algo.advantage.estimator=rloo") == []


@pytest.mark.notices(
    "a replay reads log-probs at another temperature", "preflight/inspections/replay.py", '"rollout.temperature", ', ""
)
@pytest.mark.parametrize(
    ("earlier", "now", "key", "what"),
    [
        ("task=ppo demo=ppo", "rollout.temperature=0.5", "rollout.temperature", "0.5 is not 1.0 of the run"),
        ("task=ppo demo=ppo", "data.max_samples=8", "data.max_samples", "8 is not null of the run"),
        (
            "task=ppo demo=ppo",
            "algo.advantage.estimator=remax",
            "algo.advantage.estimator",
            "remax needs a greedy response to each prompt",
        ),
        ("task=ppo demo=ppo_images", "data.image_key=null", "rollout.replay", "its samples have images"),
        ("task=sft demo=sft", "", "rollout.replay", "is a run of task=sft"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(recorded, earlier, now, key, what):
    found = dict(problems(f"task=ppo demo=ppo rollout.replay={recorded(earlier)} {now}"))
    assert what in found[key]


def test_a_folder_without_rollouts_is_refused(tmp_path):
    ((key, what),) = problems(f"task=ppo demo=ppo rollout.replay={tmp_path}")
    assert (key, what) == ("rollout.replay", f"{tmp_path} has no rollouts with their configuration")


def test_nothing_samples_and_nothing_scores(checked, recorded):
    """Also where the flags of the recorded run name engines and a reward model."""
    words = f"task=ppo demo=ppo rollout.replay={recorded()} train.async_enable=true correction=tis"
    (run,) = checked(words).runs
    plan = resolve(run, Machine("cpu", 0))
    assert [role.name for pool in plan.placement.pools for role in pool.roles] == ["actor", "critic", "ref"]
    assert plan.rollouts_ahead == 0


@pytest.mark.parametrize("words", ["vllm.num_engines=2", "reward.rule=length", "eval.steps=5", "rollout.stop=[x]"])
def test_a_flag_that_a_replay_does_not_read_is_refused(checked, recorded, words):
    (problem,) = checked(f"task=ppo demo=ppo rollout.replay={recorded()} {words}").problems
    assert "has no effect with rollout.replay=" in problem.what
    assert "rollout.replay=null" in problem.fix
