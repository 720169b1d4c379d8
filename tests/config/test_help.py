"""What the help of a task and docs/flags.md say about flags."""

from __future__ import annotations

import re

import pytest

from rlhf_suite.cli.help import CORE, print_help
from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.declarations.runs import TASKS, flags_of
from rlhf_suite.config.export import pages

REFERENCE = "".join(pages().values())


def shown(words, capsys):
    """The flags that help begins with, and those in its sections."""
    assert print_help(parse(["--help", *words])) == 0
    out = capsys.readouterr().out
    core, _, rest = out.partition("\n\n") if out.startswith("The flags that most runs set") else ("", "", out)
    return [re.findall(r"^  (\w[\w.]*) = ", text, re.MULTILINE) for text in (core, rest)]


@pytest.mark.notices(
    "help begins with flags that no run of the task reads",
    "cli/help.py",
    "if key in infos and all(condition.may_hold(values) for condition in infos[key].meta.when)",
    "if key in infos",
)
@pytest.mark.parametrize("task", TASKS)
def test_the_help_of_a_task_begins_with_what_most_runs_set(task, capsys):
    core, rest = shown([f"task={task}"], capsys)
    assert 3 <= len(core) <= 17 and sorted(rest) == sorted(flags_of(task)), core
    assert core == [key for key in CORE if key in core]
    assert task != "ppo" or "teacher.model_name_or_path" not in core


@pytest.mark.parametrize("task", TASKS)
def test_headings_of_sections_are_written_for_who_sets_flags(task):
    headings = {info.owner.__doc__ for info in flags_of(task).values()}
    assert "The run itself" in headings
    assert not [text for text in headings if not text or "`" in text or "\n\n" in text or ".py:" in text], headings


def test_the_help_below_a_prefix_has_the_flags_below_it_alone(capsys):
    first, rest = shown(["task=ppo", "algo.kl"], capsys)
    assert first == [] and {*rest} == {key for key in flags_of("ppo") if key.startswith("algo.kl.")}


def test_every_flag_that_help_begins_with_is_one():
    assert {*CORE} <= {*flags_of(None)} and len({*CORE}) == len(CORE)


def test_the_reference_has_each_flag_once():
    rows = [re.split(r"(?<!\\)\|", line) for line in REFERENCE.splitlines() if line.startswith("| `")]
    names = [row[1].strip(" `") for row in rows]
    assert sorted(name for name in names if name in flags_of(None)) == sorted(flags_of(None).keys() - {"task"})


@pytest.mark.notices(
    "the reference has the default of one task for all of them",
    "config/export.py",
    "first, *others = sorted(tasks, key=lambda text: -len(tasks[text]))",
    "first, *others = sorted(tasks, key=lambda text: -len(tasks[text]))[:1]",
)
def test_the_reference_names_the_tasks_in_which_a_flag_differs():
    row = next(line for line in REFERENCE.splitlines() if line.startswith("| `train.max_epochs`"))
    assert "| `1`<br>*sft, loops*: `2` | int >= 1 |" in row and "<br>**Tasks**: supervised, ppo, loops |" in row
    row = next(line for line in REFERENCE.splitlines() if line.startswith("| `explain`"))
    assert "| `false` | bool |" in row and "<br>*supervised, ppo, serve_train*: read when plan=false<br>" in row
