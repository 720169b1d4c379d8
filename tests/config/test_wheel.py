"""The presets are part of the wheel, inside the package, where `conf_dir` looks first."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rlhf_suite.config import conf_dir

ROOT = Path(__file__).parents[2]


def test_the_presets_are_found_and_complete():
    assert (conf_dir() / "config.yaml").is_file()
    assert conf_dir() in (ROOT / "conf", ROOT / "src" / "rlhf_suite" / "conf")


def test_the_wheel_puts_conf_into_the_package():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "conf" in wheel["include"]
    assert wheel["sources"]["conf"] == "rlhf_suite/conf"


def test_the_wheels_files():
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    files = {file.distribution_path for file in builder.recurse_included_files()}
    presets = {f"rlhf_suite/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert presets <= files
    assert not any(path.startswith(("tests/", "src/")) for path in files)
