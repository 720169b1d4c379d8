"""What a command line composes to: presets, precedence, the default job, sweeps."""

from __future__ import annotations

import pytest
from preset_keys import keys_set

from rlhf_suite.composition.presets import preset_names
from rlhf_suite.config import conf_dir
from rlhf_suite.config.declarations.runs import TASKS, flags_of

pytestmark = pytest.mark.stack

USER_MODEL = (
    "actor.model_name_or_path=org/model data.prompt_dataset=org/data data.label_key=label reward.rule=math "
    "rollout.n_samples_per_prompt=8"
)


def only_run(found):
    assert not found.problems, found.problems
    (run,) = found.runs
    return run


@pytest.mark.parametrize("task", ["sft", "ppo"])
def test_a_task_without_a_model_takes_its_demo(checked, task):
    found = checked(f"task={task}")
    assert found.demo == task
    assert only_run(found).actor.model_name_or_path == "builtin:tiny"


def test_a_named_model_or_demo_keeps_the_demo_away(checked):
    assert checked("task=ppo " + USER_MODEL).demo is None
    assert checked("task=ppo demo=ppo").demo is None
    assert checked("task=ppo actor=tiny data.prompt_dataset=x/y data.label_key=l reward.rule=math").demo is None


ESTIMATORS = {
    "ppo": "gae",
    "reinforce": "reinforce",
    "reinforce_baseline": "reinforce_baseline",
    "rloo": "rloo",
    "grpo": "group_norm",
    "dr_grpo": "dr_grpo",
    "gspo": "group_norm",
    "cispo": "group_norm",
    "sapo": "group_norm",
    "dppo": "group_norm",
    "clip_cov": "group_norm",
    "kl_cov": "group_norm",
    "dapo": "group_norm",
    "flash_reinforce": "flash_reinforce",
    "opo": "opo",
    "remax": "remax",
    "maxrl": "maxrl",
    "pkpo": "pkpo",
    "on_policy_distill": "on_policy_distill",
}


@pytest.mark.parametrize("experiment", preset_names("experiment"))
def test_an_experiment_chooses_its_estimator_for_the_demo_and_for_a_model_of_the_users(checked, experiment):
    demo = only_run(checked(f"experiment={experiment}"))
    teacher = "teacher.model_name_or_path=org/teacher" if experiment == "on_policy_distill" else ""
    users = only_run(checked(f"experiment={experiment} {USER_MODEL} {teacher}"))
    assert demo.task == "ppo"
    assert users.task == "ppo"
    assert demo.algo.advantage == users.algo.advantage
    assert demo.algo.advantage.estimator == ESTIMATORS[experiment]
    assert users.actor.model_name_or_path == "org/model"


def test_a_teacher_stands_in_for_a_reward(checked):
    words = USER_MODEL.replace("reward.rule=math", "").replace("data.label_key=label", "")
    found = checked(f"experiment=on_policy_distill {words} teacher.model_name_or_path=org/teacher")
    assert only_run(found).reward.rule is None


@pytest.mark.parametrize("demo", preset_names("demo"))
def test_a_demo_makes_a_task_complete(checked, demo):
    """The task of its name, or else the first one that has all of its flags."""
    fitting = (task for task in TASKS if keys_set("demo", demo) <= flags_of(task).keys())
    task = demo if demo in TASKS else next(fitting)
    assert not checked(f"task={task} demo={demo}").problems


def test_a_process_reward_model_replaces_the_rule_of_the_demo(checked):
    reward = only_run(checked("task=ppo reward=prm")).reward
    assert (reward.rule, reward.process.enable, reward.process.model_name_or_path) == (None, True, "builtin:tiny")


@pytest.mark.parametrize("actor", preset_names("actor"))
def test_an_actor_preset_names_a_model(checked, actor):
    assert only_run(checked(f"task=sft actor={actor} data.dataset=builtin:reverse")).actor.model_name_or_path


def test_the_command_line_wins_over_experiment_and_experiment_over_demo(checked):
    assert only_run(checked("task=ppo")).algo.kl.use_loss is False
    assert only_run(checked("experiment=grpo")).algo.kl.use_loss is True
    assert only_run(checked("experiment=grpo algo.kl.use_loss=false")).algo.kl.use_loss is False
    assert only_run(checked("algo.kl.use_loss=false experiment=grpo")).algo.kl.use_loss is False


def test_presets_of_ones_own_are_found(checked, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  seed: 7\n")
    assert only_run(checked(f"task=sft experiment=mine --config-dir {tmp_path}")).train.seed == 7


def test_a_typo_in_a_preset_is_told(checked, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  sed: 7\n")
    (problem,) = checked(f"task=sft experiment=mine --config-dir {tmp_path}").problems
    assert problem.key == "experiment"
    assert "'sed' not in 'TrainConfig'" in problem.what


def test_a_section_can_be_given_as_a_whole(checked):
    run = only_run(checked("task=ppo 'algo.kl={init_coef:0.5,estimator:k2}'"))
    assert (run.algo.kl.init_coef, run.algo.kl.estimator) == (0.5, "k2")


def test_a_real_new_line_in_a_template_is_kept(checked):
    run = only_run(checked("task=sft 'data.input_template=\"Q: {}\nA: \"'"))
    assert run.data.input_template == "Q: {}\nA: "


def test_a_sweep_has_a_run_for_each_job(checked):
    found = checked("-m task=ppo experiment=grpo,rloo actor.adam.lr=1e-6,1e-5,1e-4")
    assert not found.problems
    assert [(run.algo.advantage.estimator, run.actor.adam.lr) for run in found.runs] == [
        (estimator, rate) for estimator in ("group_norm", "rloo") for rate in (1e-6, 1e-5, 1e-4)
    ]


def test_a_sweep_may_set_a_flag_that_only_some_jobs_read(checked):
    assert not checked("-m task=ppo algo.advantage.estimator=gae,rloo critic.adam.lr=1e-4").problems


def test_a_sweep_over_tasks_gives_each_its_own_demo(checked):
    runs = checked("-m task=sft,ppo actor.adam.lr=1e-4").runs
    assert [run.task for run in runs] == ["sft", "ppo"]
    assert {run.actor.model_name_or_path for run in runs} == {"builtin:tiny"}


def test_presets_hold_no_interpolation_targets_and_no_defaults_of_flags(checked):
    texts = [file.read_text() for file in conf_dir().rglob("*.yaml")]
    assert texts
    assert not any("_target_" in text for text in texts)
