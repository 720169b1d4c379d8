"""The files of docker/ as far as they can be tested without a daemon: what they copy, install and mount."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
SESSIONS = re.findall(r"@nox\.session\ndef (\w+)", (ROOT / "noxfile.py").read_text())
KEPT = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]


def instructions(file: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments, continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def copied(file: Path) -> list[str]:
    """What an image takes of the project."""
    words = [shlex.split(said) for name, said in instructions(file) if name == "COPY"]
    return [source for each in words for source in [word for word in each if not word.startswith("--")][:-1]]


def test_there_is_an_image_for_each_device():
    assert [file.name for file in FILES] == ["cpu.Dockerfile", "gpu.Dockerfile"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_copies_files_that_exist_and_are_sent_to_the_daemon(file):
    constraints = f"constraints-{file.stem}.txt"  # as noxfile.py reads it
    assert {"src", "conf", "run.py", "noxfile.py", "pyproject.toml", constraints} <= set(copied(file))
    assert [name for name in copied(file) if not (ROOT / name).exists() or name not in KEPT] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_installs_for_its_device_and_runs_a_task(file):
    said = instructions(file)
    assert said[0][0] == "FROM"
    (install,) = [text for name, text in said if name == "RUN" and "noxfile.py" in text]
    assert f"RLHF_SUITE_DEVICE={file.stem}" in install
    assert re.search(r"noxfile\.py -s (\w+)", install)[1] in SESSIONS
    entry, arguments = (json.loads(text) for name, text in said if name in ("ENTRYPOINT", "CMD"))
    assert [*entry, *arguments] == ["/suite/.venv/bin/python", "run.py", "task=ppo"]
    assert ("USER", "suite") in said and ("WORKDIR", "/suite") in said


def test_compose_builds_these_images_and_mounts_where_runs_write():
    content = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    assert list(content["services"]) == ["cpu", "gpu"]
    for name, service in content["services"].items():
        assert ROOT / service["build"]["dockerfile"] == ROOT / "docker" / f"{name}.Dockerfile"
        assert service["image"] == f"rlhf_suite:{name}"
        assert "../outputs:/suite/outputs" in service["volumes"]


def test_the_commands_of_the_page_name_these_files():
    page = (ROOT / "docker" / "README.md").read_text()
    assert {Path(name).name for name in re.findall(r"docker build -f (\S+)", page)} == {file.name for file in FILES}
