"""The page about groups and presets: its table is complete, and what its command lines refer to reaches the run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.composition.presets import CHOICES, group_names, preset_names
from rlhf_suite.preflight.jobs import preflight

pytestmark = pytest.mark.stack

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
LINES = [line.removeprefix("python run.py ") for line in PAGE.splitlines() if line.startswith("python run.py ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that the page shows, each under the path in its first line."""
    folder = tmp_path_factory.mktemp("page")
    for path, text in re.findall(r"```yaml\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def test_the_table_of_the_page_has_every_group_and_every_preset():
    rows = dict(re.findall(r"^\| `([a-z/]+)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert {*rows} == {*group_names()} - {"task", "demo", "experiment"}
    files = {group: preset_names(group) for group in rows if group not in CHOICES}
    assert {group: sorted(re.findall(r"`([\w-]+)`", rows[group])) for group in files} == files


def test_interpolations_reach_the_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    dates, home, jobs = (line for line in LINES if "${" in line)
    (run,) = preflight(parse(shlex.split(dates))).runs
    assert run.critic.adam.lr == run.actor.adam.lr
    found = preflight(parse(shlex.split(home)))
    assert found.folder == Path("outputs/seed-42")
    runs = preflight(parse(shlex.split(jobs))).runs
    assert [run.logger.tensorboard_dir for run in runs] == ["tensorboard/0", "tensorboard/1"]
