"""Each command on the pages of experiments/ that starts a run passes all checks, with a small model in the place of the
one that the command before it trains."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.composition.config_file import with_config_file
from rlhf_suite.preflight.jobs import preflight

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from examples import EXAMPLES, commands_of, files_of  # noqa: E402

FILES = [file for example in EXAMPLES for file in files_of(example) if commands_of(file)]
RUNS = [file for file in FILES if file.suffix == ".py" and file.parent.name != "grpo_client"]
NEEDED = ("mlflow", "swanlab", "trackio")


@pytest.mark.parametrize("file", RUNS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_the_commands_of_an_example_pass_all_checks(file, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for package in NEEDED:
        if package in file.stem:
            pytest.importorskip(package)
    if file.parent.name == "harnesses" and not (ROOT / "harnesses/node_modules/.bin/codex").exists():
        pytest.skip("Codex is not installed; the page of the example says how")
    for command in commands_of(file):
        words = shlex.split(command.replace("/tmp/", f"{tmp_path}/"))
        if words[1] != "run.py":
            subprocess.run([sys.executable, *words[1:]], check=True)
            continue
        words = ["actor.model_name_or_path=builtin:tiny" if word.endswith("/sft/model") else word for word in words[2:]]
        assert preflight(with_config_file(parse(words))).problems == []


def test_every_example_has_a_page_that_its_list_leads_to():
    listed = {example.folder for example in EXAMPLES} | {"real_data"}
    folders = {path.parent for path in (ROOT / "experiments").rglob("*.py")}
    names = {str(folder.relative_to(ROOT / "experiments")) for folder in folders}
    assert names - {".", "recipes"} | {"notebooks"} == listed
    assert all((ROOT / "experiments" / name / "README.md").exists() for name in listed)
