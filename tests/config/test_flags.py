"""The declarations themselves: every flag has a type, a help text, and a default that it would accept."""

from __future__ import annotations

import pytest

from rlhf_suite.config.flags import walk
from rlhf_suite.config.kinds import kind
from rlhf_suite.config.names import MOVED, RENAMED, keys, renamed
from rlhf_suite.config.runs import TASKS
from rlhf_suite.config.validate import value_problems

FLAGS = [pytest.param(info, id=f"{task}-{info.key}") for task, root in TASKS.items() for info in walk(root)]


@pytest.mark.parametrize("info", FLAGS)
def test_a_flag_accepts_its_own_default(info):
    expected = kind(info.type)
    assert expected.base in (bool, int, float, str, list)
    assert info.default is not None or expected.optional
    assert info.default is None or isinstance(info.default, expected.base)
    assert [*value_problems(info, info.default)] == []


@pytest.mark.parametrize("info", FLAGS)
def test_a_flag_has_one_line_of_help(info):
    assert info.meta.help
    assert "\n" not in info.meta.help
    assert not info.meta.help.endswith(".")


def test_no_flag_bears_a_name_that_was_renamed_away():
    known = {key for task in TASKS for key in keys(task)}
    assert not known & set(RENAMED)
    assert not any(key.startswith(MOVED) for key in known)


def test_every_new_name_exists():
    known = {key for task in TASKS for key in keys(task)}
    assert set(RENAMED.values()) <= known
    assert all(renamed(old, known) == new for old, new in RENAMED.items())
