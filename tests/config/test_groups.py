"""Groups of presets: in a plain run, beside an experiment, in a sweep, from a user's folder and from a file."""

from __future__ import annotations

import pytest
from preset_keys import keys_set

from rlhf_suite.composition.arguments import parse
from rlhf_suite.composition.config_file import with_config_file
from rlhf_suite.composition.presets import CHOICES, group_names, preset_names
from rlhf_suite.config.declarations.runs import TASKS, flags_of
from rlhf_suite.preflight.jobs import preflight

pytestmark = pytest.mark.stack

SECTIONS = [group for group in group_names() if group not in ("task", "demo", "scale", "experiment")]
PRESETS = [(group, name) for group in SECTIONS for name in preset_names(group)]


def only_run(found):
    assert not found.problems, found.problems
    (run,) = found.runs
    return run


def value(run, key):
    for name in key.split("."):
        run = getattr(run, name)
    return run


@pytest.fixture
def own(tmp_path):
    """A folder of the user's presets: `write("ds/mine", text)` puts one there."""

    def write(name, text):
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path

    return write


def test_the_design_cards_groups_have_presets():
    card = "actor critic algo/advantage vllm ds rollout ckpt ref reward data eval logger launch correction experiment"
    assert {*card.split()} <= {*group_names()}
    assert all(preset_names(group) for group in card.split())


def rounds():
    """Yield command lines that together have every preset, as many in each as fit together: a task, and its presets."""
    left = dict.fromkeys(PRESETS)
    for task in ("ppo", *TASKS):
        fitting = [each for each in left if keys_set(*each) <= flags_of(task).keys()]
        while fitting:
            chosen = dict(reversed(fitting))  # one of each group
            yield task, chosen
            left = {each: None for each in left if each not in chosen.items()}
            fitting = [each for each in fitting if each not in chosen.items()]
    assert not left, "no task has the flags of these presets"


def test_every_preset_composes_and_sets_flags_of_a_task(checked):
    assert all(keys_set(group, name) for group, name in PRESETS)
    for task, chosen in rounds():
        found = checked(f"task={task} {' '.join(f'{group}={name}' for group, name in chosen.items())}")
        assert not [problem for problem in found.problems if problem.key in chosen], found.problems
        assert {f"{group}={name}" for group, name in chosen.items()} <= {*found.composed_of}


@pytest.mark.notices(
    "an experiment wins over a preset of the command line",
    "composition/presets.py",
    "if group in chosen and group not in BEFORE_EXPERIMENT]",
    "if group in BEFORE_EXPERIMENT]",
)
def test_presets_of_several_groups_compose_with_an_experiment(checked):
    run = only_run(
        checked("experiment=rloo ds=zero3_offload rollout=group8 ckpt=often logger=tensorboard critic=same_as_actor")
    )
    assert (run.algo.advantage.estimator, run.rollout.n_samples_per_prompt) == ("rloo", 8)
    assert (run.ds.zero_stage, run.ds.adam_offload, run.ds.param_dtype) == (3, True, "fp32")  # the last is the demo's
    assert (run.ckpt.save_steps, run.logger.tensorboard_dir) == (10, "tensorboard")
    assert run.critic.model_name_or_path == run.actor.model_name_or_path


def test_same_as_actor_follows_the_actor_of_the_command_line(checked):
    run = only_run(checked("task=ppo critic=same_as_actor actor.num_gpus_per_node=2 train.batch_size=256"))
    assert run.critic.num_gpus_per_node == 2


@pytest.mark.parametrize("line", ["ds=zero2 ds.zero_stage=3", "ds.zero_stage=3 ds=zero2"])
def test_a_value_wins_over_a_preset_whatever_the_order(checked, line):
    assert only_run(checked(f"task=sft {line}")).ds.zero_stage == 3


def test_a_preset_of_the_command_line_wins_over_the_experiment(checked):
    assert only_run(checked("experiment=grpo algo/advantage=rloo")).algo.advantage.estimator == "rloo"
    assert only_run(checked("algo/advantage=rloo experiment=grpo")).algo.advantage.estimator == "rloo"


def test_an_experiment_wins_over_the_presets_that_it_chooses(checked, own):
    choices = "defaults:\n  - override /task: sft\n  - override /ds: zero3_offload\n  - _self_\n"
    folder = own("experiment/mine", f"# @package _global_\n{choices}ds:\n  adam_offload: false\n")
    line = f"experiment=mine --config-dir {folder}"
    run = only_run(checked(line))
    assert (run.ds.zero_stage, run.ds.adam_offload) == (3, False)
    run = only_run(checked(f"{line} ds=zero3_offload"))
    assert (run.ds.zero_stage, run.ds.adam_offload) == (3, True)
    assert only_run(checked(f"{line} ds=zero1")).ds.zero_stage == 1


def test_a_group_is_swept_with_others_and_each_job_has_its_own(checked):
    found = checked("-m task=ppo ds=zero2,zero3 algo/advantage=rloo,group_norm")
    assert not found.problems
    assert [(run.ds.zero_stage, run.algo.advantage.estimator) for run in found.runs] == [
        (stage, estimator) for stage in (2, 3) for estimator in ("rloo", "group_norm")
    ]
    assert "ds=zero2" in found.composed_of, "explain=true shows the first job"


def test_a_preset_of_ones_own_is_found_builds_upon_another_and_is_swept(checked, own):
    folder = own("ds/mine", "defaults:\n  - zero3_offload\n  - _self_\npacking_samples: true\n")
    run = only_run(checked(f"task=sft ds=mine --config-dir {folder}"))
    assert (run.ds.zero_stage, run.ds.adam_offload, run.ds.packing_samples) == (3, True, True)
    found = checked(f"-m task=sft ds=zero1,mine --config-dir {folder}")
    assert not found.problems
    assert [run.ds.zero_stage for run in found.runs] == [1, 3]
    assert keys_set("ds", "mine", folder) == {"ds.zero_stage", "ds.adam_offload", "ds.packing_samples"}


@pytest.mark.parametrize(
    ("group", "name", "text"), [("ds", "zero2", "zero_stage: 1"), ("reward", "math", "rule: math")]
)
def test_a_preset_of_ones_own_may_not_hide_behind_one_of_the_suite(checked, own, group, name, text):
    folder = own(f"{group}/{name}", text)
    problem = checked(f"task=ppo {group}={name} --config-dir {folder}").problems[0]
    assert (problem.key, problem.what) == (group, f"{folder}/{group}/{name}.yaml has the name of a preset of the suite")


def test_several_presets_of_a_group_compose(checked):
    run = only_run(checked("task=sft ds=[zero3,lora]"))
    assert (run.ds.zero_stage, run.ds.lora.rank) == (3, 16)
    assert checked("task=sft actor=[tiny]").demo is None  # it names a model


@pytest.mark.notices(
    "a file of flags wins over a preset of the command line",
    "composition/config_file.py",
    "given |= presets_keys(line, [choice for choice in choices if choice not in scales], content)",
    "given |= set()",
)
def test_a_file_chooses_presets_and_gives_way_to_those_of_the_command_line(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("task: ppo\nds: zero1\nalgo/advantage: rloo\nckpt:\n  save_steps: 7\n")

    def run(*words):
        return only_run(preflight(with_config_file(parse([f"--config={file}", *words]))))

    assert (run().ds.zero_stage, run().algo.advantage.estimator, run().ckpt.save_steps) == (1, "rloo", 7)
    again = run("ds=zero3", "ckpt=often", "algo/advantage=gae")
    assert (again.ds.zero_stage, again.algo.advantage.estimator, again.ckpt.save_steps) == (3, "gae", 10)


def test_every_choice_of_a_flag_is_a_preset_of_its_group():
    for group, (key, _, _) in CHOICES.items():
        assert {*map(str, flags_of(None)[key].meta.choices)} <= {*preset_names(group)}


def test_a_rule_takes_the_place_of_the_other_sources_of_reward(checked):
    reward = only_run(checked("task=ppo reward=math")).reward
    assert (reward.rule, reward.remote_url, reward.model_name_or_path) == ("math", None, None)


def test_presets_that_set_values_of_several_sections_come_before_those_of_one():
    """So that data=mine wins over what rollout=long says of data."""
    for group, name in PRESETS:
        sections = {key.partition(".")[0] for key in keys_set(group, name)}
        others = [other for other in SECTIONS if other.partition("/")[0] in sections and other != group]
        if group != "correction":  # its flags are no other preset's
            assert all(SECTIONS.index(other) > SECTIONS.index(group) for other in others if "/" not in group), (
                group,
                name,
            )


@pytest.mark.parametrize(
    ("line", "key", "said"),
    [
        ("task=sft critic=same_as_actor", "critic", "task=sft has no section critic"),
        ("task=sft critic=same_as_actor", "critic", "remove critic=same_as_actor; the section belongs to task=ppo"),
        ("task=generate ds=zero2", "ds", "it sets zero_stage, and ds of task=generate has no such flag"),
        ("task=sft ds=3", "ds", "did you mean ds.zero_stage=3?"),
        ("task=sft ds=zero4", "ds", "did you mean ds=zero"),
        ("task=sft ds.zero=3", "ds.zero", "did you mean ds.zero_stage?"),
        ("task=sft ds=[zero2,loro]", "ds", "there is no preset ds/loro"),
        ("task=sft ds=null", "ds", "a preset cannot be null"),
        ("task=ppo ref=Qwen/Qwen3-0.6B", "ref", "for a model write ref.model_name_or_path=Qwen/Qwen3-0.6B"),
        ("task=ppo data=org/prompts", "data", "for a data set write data.prompt_dataset=org/prompts"),
        ("task=ppo ds=zero2,zero3", "ds", "a sweep needs -m"),
        ("zero2", "zero2", "write ds=zero2"),
        ("task=sft hydra.job.chdir=true", "hydra.job.chdir", "run_dir=<folder> says where"),
    ],
)
def test_a_choice_that_cannot_be_is_one_problem(checked, line, key, said):
    problem = next(each for each in checked(line).problems if each.key == key)
    assert said in f"{problem.what}; {problem.fix}"
    if key != "zero2":
        assert len(checked(line).problems) == 1
