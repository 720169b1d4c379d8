"""What the benchmark of the jail says of a run: its commands, and how many sessions are under way."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from agents import commands  # noqa: E402
from sandbox import SESSIONS, TEACH, TRAIN, changed, open_sessions  # noqa: E402


def test_the_job_is_the_example_but_for_the_named_values():
    _, teach, train = commands("fences")
    found = [*changed(teach, TEACH, Path("/x")), *changed(train, TRAIN, Path("/x"))]
    assert {f"{name}={value}" for name, value in (TEACH | TRAIN).items()} <= {*found}
    assert "actor.model_name_or_path=/x/fences/sft/model" in found and not any("/tmp/" in word for word in found)
    given = [word.replace("/tmp/", "/x/") for line in (teach, train) for word in line.split()[1:]]
    other = [a.partition("=")[0] for a, b in zip(given, found, strict=True) if a != b]
    assert other == [*TEACH, *TRAIN]
    values = dict(word.split("=", 1) for word in found if "=" in word)
    assert int(values["rollout.batch_size"]) * int(values["rollout.n_samples_per_prompt"]) == SESSIONS


@pytest.mark.stack
def test_sessions_of_a_process_are_counted():
    from rlhf_suite.sandbox.jail import choose_jail, templates
    from rlhf_suite.sandbox.session import Session

    template, before = templates.get(choose_jail(True, "")), open_sessions(os.getpid())
    with Session(template) as one, Session(template) as two:
        for each in (one, two):
            assert each.run("1 + 1").value == "2"
        assert open_sessions(os.getpid()) == before + 2
    assert open_sessions(os.getpid()) == before
