"""What .github/ names exists: sessions of noxfile.py, commands of the suite, files, metrics and messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rlhf_suite.cli.commands import COMMANDS
from rlhf_suite.config.declarations.metrics import METRICS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github").rglob("*.yml"))
WORKFLOWS = [file for file in FILES if file.parent.name == "workflows"]
SESSIONS = set(re.findall(r"@nox\.session(?:\(.*\))?\ndef (\w+)", (ROOT / "noxfile.py").read_text()))


def sessions_in(text: str) -> set[str]:
    """The sessions that commands of a text run."""
    return {name for names in re.findall(r"noxfile\.py -s ([\w ]+)", text) for name in names.split()}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_commands_of_a_file_exist(file):
    text = file.read_text()
    assert sessions_in(text) <= SESSIONS
    assert set(re.findall(r"`rlhf-suite (\w+)", text)) <= set(COMMANDS)


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.parent.name == "workflows"], ids=lambda file: file.name
)
def test_a_workflow_runs_sessions_and_caches_by_a_file_that_exists(file):
    (job,) = yaml.safe_load(file.read_text())["jobs"].values()
    assert any(sessions_in(step.get("run", "")) for step in job["steps"])
    cached = [step["with"]["cache-dependency-path"] for step in job["steps"] if "cache" in step.get("with", {})]
    assert cached and all((ROOT / name).is_file() for name in cached)


def test_the_form_of_gpus_asks_for_what_a_run_says():
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "gpu.yml").read_text()
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    (said,), (metric,) = re.findall(r'begin with "([^"]+)"', text), re.findall(r"\bmismatch/\w+", text)
    assert f'"{said} ' in source and metric in METRICS
