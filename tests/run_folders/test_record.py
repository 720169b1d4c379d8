"""A configuration on disk, and which differences make another run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from omegaconf.errors import ConfigKeyError

from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.run_folders.record import fingerprint, load, save

# What a judge may cost and where it runs, not what it says.
JUDGE = ("reward.judge.max_calls", "reward.judge.max_tokens", "reward.judge.num_engines")


@pytest.mark.parametrize("task", ["sft", "ppo"])
def test_a_saved_run_is_read_back_as_it_was(task, tmp_path):
    run = Run.of(task)
    run.actor.adam.lr = 1e-7
    run.actor.adam.betas = [0.8, 0.99]
    run.data.input_template = "Q: {}\nA: "
    save(run, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == run


def test_a_file_with_an_unknown_key_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("task: sft\ntrain:\n  sed: 1\n")
    with pytest.raises(ConfigKeyError):
        load(tmp_path / "config.yaml")


@pytest.mark.notices(
    "a run with another logger is another run",
    "config/declarations/runs.py",
    "return flags[key].meta.resume",
    "return NAMED",
)
def test_a_continuation_has_the_fingerprint_of_its_run():
    run, later = Run.of("sft"), Run.of("sft", explain=True)
    later.ckpt.load_enable = True
    later.logger.wandb.enable = True
    later.launch.timeout_s = 5.0
    assert fingerprint(later) == fingerprint(run)


def test_another_value_is_another_run():
    other = Run.of("sft")
    other.train = replace(other.train, seed=43)
    assert fingerprint(other) != fingerprint(Run.of("sft"))
    assert fingerprint(Run.of("sft")) != fingerprint(Run.of("ppo"))


@pytest.mark.notices(
    "a run with another learning rate is the same run",
    "run_folders/record.py",
    "resume_of(key, run.task) != FREE",
    "resume_of(key, run.task) == FIXED",
)
@pytest.mark.parametrize("task", ["sft", "ppo"])
def test_every_flag_that_a_continuation_may_not_change_is_part_of_the_fingerprint(task):
    """What is trained, on what and how, is; where it runs, what is kept of it and how a checkpoint is read is not."""
    flags = {key: value for key, value in all_values(Run.of(task)).items() if key != "task"}
    unchanged = fingerprint(Run.of(task))
    free = {key for key, value in flags.items() if fingerprint(changed(Run.of(task), key, value)) == unchanged}
    sections = {key.partition(".")[0] for key in free - {"ds.use_universal_ckpt", *JUDGE}}
    assert {"launch", "logger"} <= sections
    assert not sections & {"actor", "algo", "critic", "ds", "eval", "ref", "reward", "rollout", "teacher", "train"}


def changed(run, key, value):
    section = run
    *path, name = key.split(".")
    for part in path:
        section = getattr(section, part)
    setattr(section, name, f"not {value}")
    return run
