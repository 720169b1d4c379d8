"""A section has the flags and defaults of its task, and no others."""

from __future__ import annotations

import pickle
import subprocess
import sys
from copy import deepcopy
from dataclasses import fields, replace

import pytest

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.config.declarations.flags import walk
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.config.declarations.runs import TASKS, Run, flags_of, list_tasks_with
from rlhf_suite.config.declarations.sections import Section

SETTINGS = [
    (task, info.owner, field)
    for task in TASKS
    for info in walk(Run.of(task))
    for field in fields(info.owner)
    if field.metadata.get("tasks") or field.metadata.get("defaults")
]


@pytest.mark.notices(
    "a section has the flags of other tasks",
    "config/declarations/sections.py",
    """if declared["tasks"] and task not in declared["tasks"]""",
    """if declared["tasks"] == task""",
)
def test_a_flag_of_another_task_can_be_neither_read_nor_set():
    """Else a run would take the default of a flag that its command line cannot set."""
    section, reason = Run.of("sft").eval, "task=sft has no flag 'margin_key' in EvalConfig"
    for cannot in (lambda: section.margin_key, lambda: setattr(section, "margin_key", ["margin"])):
        with pytest.raises(AttributeError, match=reason):
            cannot()
    assert not hasattr(type(section), "margin_key") and "margin_key" not in {field.name for field in fields(section)}
    with pytest.raises(TypeError, match="margin_key"):
        EvalConfig.of("sft", margin_key=["margin"])
    assert EvalConfig.of("rm").margin_key is None


@pytest.mark.notices(
    "a section has the defaults of other tasks",
    "config/declarations/sections.py",
    """of_task = with_default(declared["defaults"][task], declared)""",
    "pass",
)
def test_a_section_has_the_defaults_of_its_task():
    assert (EvalConfig.of("sft").split, EvalConfig.of("dpo").split, Run.of("dpo").eval.split) == (
        "train",
        "test",
        "test",
    )
    assert EvalConfig.of("dpo", split="validation").split == "validation"


@pytest.mark.notices(
    "a section says that it has the flags of other tasks",
    "config/declarations/sections.py",
    "return any(field.name == name for field in fields(self))",
    "return True",
)
def test_a_section_says_which_flags_of_other_tasks_it_has():
    """A name that no task has is a mistake of the code, and not an absent flag."""
    assert RewardConfig.of("score").has("process") and not RewardConfig.of("generate").has("process")
    assert not hasattr(RewardConfig.of("generate"), "process")
    with pytest.raises(AssertionError, match="no task has 'proces'"):
        RewardConfig.of("score").has("proces")


def test_a_run_has_the_sections_of_its_task():
    """From Python too, a section that a task does not have can be neither read nor set, and the task is named."""
    run, reason = Run.of("sft"), "task=sft has no section 'rollout' in Run"
    for cannot in (lambda: run.rollout, lambda: setattr(run, "rollout", Run.of("ppo").rollout)):
        with pytest.raises(AttributeError, match=reason):
            cannot()
    with pytest.raises(TypeError, match="rollout"):
        Run.of("sft", rollout=Run.of("ppo").rollout)
    assert not run.has("rollout") and Run.of("ppo").has("rollout") and run.task == "sft"


@pytest.mark.notices(
    "a flag has the bounds of other tasks",
    "config/declarations/sections.py",
    """dataclasses.replace(declared["meta"], **changes)""",
    """declared["meta"]""",
)
def test_a_flag_has_the_bounds_and_the_help_of_its_task():
    """Training divides by the temperature, so that of task=ppo is above 0."""
    ppo, generate = (flags_of(task)["rollout.temperature"].meta for task in ("ppo", "generate"))
    assert (ppo.ge, generate.ge, ppo.le, generate.le) == (0.01, 0, 2, 2)
    assert "training log-probs" in ppo.help and "most likely token" in generate.help


def test_a_section_that_differs_between_tasks_is_made_for_one():
    with pytest.raises(TypeError, match=r"make it with EvalConfig.of\(<task>\)"):
        EvalConfig()


@pytest.mark.notices(
    "a flag without a value is null where a task never has null",
    "config/declarations/sections.py",
    """if task in field.metadata.get("never_null", ()):""",
    "if False:",
)
def test_a_flag_may_be_null_in_some_tasks_alone():
    types = {task: flags_of(task)["data.chosen_key"] for task in ("dpo", "kto")}
    assert [info.type.optional for info in types.values()] == [False, True]
    assert [info.default for info in types.values()] == ["chosen", None]
    assert [flags_of(task)["ds.param_dtype"].type.optional for task in ("sft", "score")] == [False, True]
    assert DataConfig.of("dpo").column("chosen_key") == "chosen"
    with pytest.raises(AssertionError, match=r"task=kto declares that data\.chosen_key may be null"):
        DataConfig.of("kto").column("chosen_key")


def test_a_condition_that_always_holds_is_not_one():
    """A pair of task=dpo always has a better answer, that of task=kto only if it is named."""
    assert flags_of("dpo")["data.rejected_key"].meta.when == ()
    assert [when.flag for when in flags_of("kto")["data.rejected_key"].meta.when] == ["data.chosen_key"]


@pytest.mark.notices(
    "a stage does not take over the flags that it has in common with its loop",
    "config/declarations/sections.py",
    "section: Self = cls(**shared | changes)",
    "section: Self = cls(**changes)",
)
def test_a_section_becomes_that_of_another_task():
    asked = DataConfig.of("conditional_sft", prompt_dataset="rows", max_len=64, reward_template="{prompt} {reward}")
    trained = asked.as_of("sft", dataset="answers")
    assert (trained.dataset, trained.max_len, trained.reward_template) == ("answers", 64, "{prompt} {reward}")
    assert trained.input_template == asked.input_template and type(trained) is type(DataConfig.of("sft"))
    assert trained.as_of("sft") == trained and asked.as_of("generate").prompt_dataset == "rows"
    with pytest.raises(TypeError, match="prompt_dataset"):
        asked.as_of("sft", prompt_dataset="rows")


def test_a_section_can_be_copied_and_compared():
    run = Run.of("dpo", eval=EvalConfig.of("dpo", dataset="rows", prompt_key=["question"]))
    assert deepcopy(run) == run and isinstance(run.eval, EvalConfig)
    changed = replace(run.eval, steps=3)
    assert (changed.steps, changed.prompt_key, type(changed)) == (3, ["question"], type(run.eval))
    assert changed != run.eval and EvalConfig.of("rm") != EvalConfig.of("dpo")


@pytest.mark.parametrize("library", ["pickle", "cloudpickle"])
def test_a_run_arrives_whole_in_another_process(library):
    """Workers get the run from the driver; the class of its section has no name in a module."""
    run = Run.of("dpo", eval=EvalConfig.of("dpo", dataset="rows", prompt_key=["question"]))
    program = (
        f"import sys, {library}; run = {library}.load(sys.stdin.buffer)\n"
        "print(run.eval.dataset, run.eval.split, run.eval.prompt_key, hasattr(run.eval, 'margin_key'))"
    )
    dumps = pickle.dumps if library == "pickle" else pytest.importorskip("cloudpickle").dumps
    done = subprocess.run([sys.executable, "-c", program], input=dumps(run), capture_output=True, check=True)
    assert done.stdout.decode() == "rows test ['question'] False\n"


def test_flags_that_differ_between_tasks_are_declared_in_sections_and_name_tasks_that_exist():
    assert SETTINGS
    for task, owner, field in SETTINGS:
        assert issubclass(owner, Section | Run), (task, owner, field.name)
        assert {*field.metadata["tasks"], *field.metadata.get("defaults", ())} <= {*TASKS}, (owner, field.name)
        assert not field.metadata["tasks"] or {*field.metadata.get("defaults", ())} <= {*field.metadata["tasks"]}


def test_the_tasks_of_a_flag_are_known_without_their_runs():
    for key in flags_of(None):
        assert list_tasks_with(key) == [task for task in TASKS if key in flags_of(task)], key
    of_tables = [key for key, info in flags_of(None).items() if info.type.base is dict]
    assert "reward.sources" in of_tables
    for key in of_tables:
        assert list_tasks_with(f"{key}.one.more") == list_tasks_with(key)
    for key in ("", "actor", "actor.adam", "actor.adam.lr.more", "nothing", "train.nothing", "nothing.seed"):
        assert list_tasks_with(key) == []
