"""The declarations themselves: every flag has a type, a help text, and a default that it would accept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhf_suite import config
from rlhf_suite.config.check.names import MOVED, RENAMED, rename, unread
from rlhf_suite.config.check.problems import RULES
from rlhf_suite.config.check.validate import value_problems
from rlhf_suite.config.declarations.flag_types import literal
from rlhf_suite.config.declarations.flags import all_values, flag, walk, walk_section
from rlhf_suite.config.declarations.runs import TASKS, Run, flags_of

FLAGS = [(f"task={task} {info.key}", info) for task in TASKS for info in walk(Run.of(task))]


@pytest.mark.notices(
    "a bound that is included is refused", "config/check/formatting.py", "value >= bound", "value > bound"
)
def test_every_flag_accepts_its_own_default():
    for name, info in FLAGS:
        expected = info.type
        assert expected.base in (bool, int, float, str, list, dict), name
        assert info.default is not None or expected.optional, name
        assert info.default is None or isinstance(info.default, expected.base), name
        assert [*value_problems(info, info.default)] == [], name


def test_every_flag_has_one_line_of_help():
    for name, info in FLAGS:
        assert info.meaning, name
        assert "\n" not in info.meaning, name
        assert not info.meaning.endswith("."), name


@dataclass
class Small:
    size: int = flag(1)
    """How small it is"""


@dataclass
class Large(Small):
    size: int = flag(9)
    """How large it is"""


def test_a_flag_that_a_class_declares_again_has_the_help_of_this_declaration():
    assert [info.meaning for section in (Small, Large) for info in walk(section)] == [
        "How small it is",
        "How large it is",
    ]


def test_every_condition_depends_on_a_flag_that_exists():
    known = flags_of(None)
    infos = [info for task in TASKS for info in walk_section(Run.of(task), "")]
    conditions = {each for info in infos for each in info.meta.when}
    conditions |= {need.condition for info in infos for need in info.meta.needs}
    assert {each.flag for condition in conditions for each in condition.choices} <= set(known)


NEEDS = [
    (f"task={task} {info.key}", info, need) for task in TASKS for info in walk(Run.of(task)) for need in info.meta.needs
]


def test_what_a_remedy_of_a_need_says_to_write_removes_the_problem():
    assert len(NEEDS) > 100
    for name, info, need in NEEDS:
        off = literal(need.off) if need.off else info.default
        assert need.fix or not need.concerns(off, info.default), name
        for condition in need.condition.choices:
            value = condition.remedy.partition(" or ")[0].partition(",")[0]
            assert not value or "<" in value or condition.is_met(literal(value)), (name, value)


def test_the_defaults_of_a_task_have_what_they_need():
    """But for what depends on the machine: launch.device is auto."""
    for task in TASKS:
        values = all_values(Run.of(task))
        for name, info, need in NEEDS:
            if name.startswith(f"task={task} ") and need.concerns(info.default, info.default):
                assert need.condition.holds(values), (name, need.condition.demand)


def test_help_says_what_a_flag_needs():
    flags = flags_of("ppo")
    assert flags["ds.zpg"].help.endswith("Needs ds.zero_stage=3, ds.tensor_parallel_size=1")
    assert flags["actor.optim"].help.startswith(
        "The optimiser. With optim=muon it needs actor.max_norm=0, ds.lora.rank=0"
    )
    gamma = flags["algo.advantage.gamma"].help
    assert gamma.count("algo.advantage.estimator") == 1, "a condition that is a need too is said once"


def test_help_says_when_a_flag_is_read():
    flags = flags_of("ppo")
    assert flags["actor.muon.lr"].help.endswith("Muon group. Read when actor.optim=muon")
    assert flags["actor.eps_clip"].help.endswith(
        "Read when actor.policy_loss_type is ppo, gspo, cispo or clip_cov and actor.eps_clip_low_high is null"
    )
    assert flags["logger.wandb.group"].help.endswith(
        "Read when logger.wandb.enable=true or logger.tensorboard_dir is set"
    )
    assert "prompt_key" not in flags_of("sft")["data.turn_markers"].help, "task=sft has no data.prompt_key"


def test_a_run_does_not_read_the_flags_of_models_that_it_lacks():
    """In a task with an entry for each dataset too: `reward.sources.<name>.rule`."""
    models = {key for key in flags_of("ppo") if key.startswith(("critic.", "teacher."))}
    assert models <= unread("ppo", {"algo.advantage.estimator": "rloo"})
    with_critic = unread("ppo", {"algo.advantage.estimator": "gae"})
    assert "critic.adam.lr" not in with_critic and "teacher.model_name_or_path" in with_critic
    assert "teacher.model_name_or_path" not in unread("ppo", {"algo.distill.coef": 0.5})
    boxed = "reward.rules.math_boxed"
    assert boxed in unread("ppo", {}) and boxed not in unread("ppo", {"reward.sources.sums.rule": "math"})


def test_flags_count_as_read_where_a_value_has_a_wrong_type():
    assert "ds.lora.alpha" in unread("sft", {"ds.lora.rank": 0})
    assert "ds.lora.alpha" not in unread("sft", {"ds.lora.rank": ["many"]})


def test_no_flag_bears_a_name_that_was_renamed_away():
    known = flags_of(None)
    assert not set(known) & set(RENAMED)
    assert not any(key.startswith(MOVED) for key in known)


def test_every_new_name_exists():
    known = flags_of(None)
    for old, given in RENAMED.items():
        news = [given] if isinstance(given, str) else [*given]
        assert set(news) <= set(known)
        assert [rename(old, [new]) for new in news] == news


def test_defaults_that_openrlhf_has_under_the_same_names():
    """docs/openrlhf_flags.md names those that differ."""
    expected = {
        "train.max_epochs": {"sft": 2, "rm": 1, "dpo": 1, "kto": 1, "prm": 1, "distill": 1, "ppo": 1},
        "train.micro_batch_size": dict.fromkeys(("sft", "rm", "dpo", "kto", "prm", "distill", "ppo")),
        "data.max_len": {"sft": 2048, "rm": 512, "dpo": 512, "kto": 2048, "prm": 2048, "distill": 2048, "ppo": 2048},
        "eval.split": dict.fromkeys(("sft", "rm", "ppo"), "train")
        | dict.fromkeys(("dpo", "kto", "prm", "distill"), "test"),
        "data.input_template": dict.fromkeys(("sft", "kto", "distill"), "User: {}\nAssistant: ")
        | dict.fromkeys(("rm", "dpo", "prm", "ppo")),
    }
    for key, by_task in expected.items():
        for task, value in by_task.items():
            defaults = {info.key: info.default for info in walk(Run.of(task))}
            assert defaults[key] == value, (task, key)


def test_every_rule_is_found_and_is_for_tasks_that_exist():
    declared_rules = sum(file.read_text().count("\n@rule(") for file in Path(config.__file__).parent.rglob("*.py"))
    assert len(RULES) == declared_rules
    for function, tasks in RULES.items():
        assert {*tasks} <= {*TASKS} and len({*tasks}) == len(tasks), function.__name__
