"""The flags of what trains call by call: those that the calls say are constants, which nobody can set."""

from __future__ import annotations

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.composition.config_file import with_config_file
from rlhf_suite.config.check.names import constants_of
from rlhf_suite.config.declarations.calls import SERVED, UNREAD_BY_CLIENTS, WITHOUT
from rlhf_suite.config.declarations.flags import all_values, walk_section
from rlhf_suite.config.declarations.runs import Run, flags_of
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.run_folders.record import load, save

SERVER = "task=serve_train actor.model_name_or_path=builtin:tiny"


def test_every_name_is_one_of_a_flag_or_a_section():
    flags = {*flags_of("ppo")}
    named = [*UNREAD_BY_CLIENTS, *WITHOUT, *(f"{section}.{name}" for section in SERVED for name in SERVED[section])]
    sections = {section for flag in flags for section in (flag, flag.rpartition(".")[0])}
    assert {*named, *SERVED} <= sections | {flag.partition(".")[0] for flag in flags}


def test_no_flag_waits_for_a_constant():
    """A condition on a constant that is not met would make a flag one that does nothing."""
    run, flags = Run.of("serve_train"), flags_of("serve_train")
    values, constants = all_values(run), constants_of("serve_train")
    for info in walk_section(run, ""):
        for condition in info.meta.when if info.key in flags else ():
            assert condition.flag not in constants or condition.holds(values), info.key


@pytest.mark.notices(
    "a server accepts flags that only task=ppo reads",
    "config/declarations/calls.py",
    'if task != "serve_train" or not name:',
    "if True:",
)
def test_a_constant_is_a_problem_on_the_command_line_and_in_a_file(tmp_path):
    (tmp_path / "flags.yaml").write_text("rollout: {batch_size: 8}")
    for words in (["rollout.batch_size=8"], ["--config", str(tmp_path / "flags.yaml")]):
        (problem,) = preflight(with_file([*SERVER.split(), *words])).problems
        assert problem.key == "rollout.batch_size" and "it belongs to task=ppo" in problem.what


def test_the_flags_of_an_earlier_server_start_another_one(tmp_path):
    (run,) = preflight(parse([*SERVER.split(), "train.seed=7"])).runs
    save(run, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == run
    checked = preflight(with_file(["--config", str(tmp_path / "config.yaml")]))
    assert not checked.problems and checked.runs == [run]


def with_file(words):
    """Return the command line with the words of its file."""
    return with_config_file(parse(words))
