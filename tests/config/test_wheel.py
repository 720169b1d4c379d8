"""Presets and examples are part of the wheel, inside the package, where `shipped_folder` looks first."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from rlhf_suite.cli.app import main
from rlhf_suite.config import conf_dir, name_program

ROOT = Path(__file__).parents[2]


def test_the_presets_are_found_and_complete():
    assert (conf_dir() / "config.yaml").is_file()
    assert conf_dir() in (ROOT / "conf", ROOT / "src" / "rlhf_suite" / "conf")


@pytest.mark.parametrize("folder", ["conf", "experiments"])
def test_the_wheel_puts_a_folder_into_the_package(folder):
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert folder in wheel["include"]
    assert wheel["sources"][folder] == f"rlhf_suite/{folder}"


def files_of(kind: str) -> set[str]:
    """Return the paths in the `wheel` or the `sdist`."""
    module = pytest.importorskip(f"hatchling.builders.{kind}")
    builder = getattr(module, {"wheel": "WheelBuilder", "sdist": "SdistBuilder"}[kind])(str(ROOT))
    return {file.distribution_path for file in builder.recurse_included_files()}


def files_below(folder: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.*") if "__pycache__" not in path.parts}


def test_the_wheel_has_sources_presets_and_examples_and_nothing_else():
    sources = {path.removeprefix("src/") for path in files_below("src") if path.startswith("src/rlhf_suite/")}
    shipped = {f"rlhf_suite/{path}" for folder in ("conf", "experiments") for path in files_below(folder)}
    assert files_of("wheel") == sources | shipped


def test_the_sdist_has_what_its_tests_and_pages_need():
    files = files_of("sdist")
    folders = ("src/rlhf_suite", "conf", "experiments", "benchmarks", "tests", "docs", "docker")
    assert {path for folder in folders for path in files_below(folder)} <= files
    assert {"run.py", "noxfile.py", "mkdocs.yml", "README.md", "constraints-cpu.txt"} <= files
    assert not any(path.startswith((".venv", "outputs", "dist")) for path in files)


def test_an_editable_installation_is_the_folder_src(tmp_path):
    module = pytest.importorskip("hatchling.builders.wheel")
    (file,) = module.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["editable"])
    with ZipFile(file) as wheel:
        (path,) = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert wheel.read(path).decode().split() == [str(ROOT / "src")]


def test_the_changelog_begins_with_the_version_of_the_wheel():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == version


def test_the_gallery_is_copied_once(tmp_path, capsys):
    assert main(["gallery", str(tmp_path)]) == 0
    copied = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert copied == files_below("experiments")
    assert capsys.readouterr().out == f"{tmp_path / 'experiments' / 'README.md'} lists the examples\n"
    assert main(["gallery", str(tmp_path)]) == 2
    assert f"{tmp_path / 'experiments'} exists already; name another folder" in capsys.readouterr().err


def test_commands_that_are_shown_are_those_of_this_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert name_program() == "python run.py"
    monkeypatch.chdir(tmp_path)
    assert name_program() == "rlhf-suite"
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("rlhf-suite task=<task>")
