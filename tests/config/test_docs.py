"""The generated reference is fresh, and its schema knows the presets from mistakes."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from omegaconf import OmegaConf

from rlhf_suite.cli import main
from rlhf_suite.config import conf_dir
from rlhf_suite.config.declarations.runs import TASKS
from rlhf_suite.config.export import DOCS, pages
from rlhf_suite.config.schema import schema

SCHEMA = schema()
PRESETS = [file for file in conf_dir().rglob("*.yaml") if file.parent != conf_dir()]


def problems(group, content):
    """What the schema says against a preset; it has to fit at least one task."""
    found = {}
    for task in TASKS:
        part = SCHEMA["$defs"][task] if group is None else SCHEMA["$defs"][task]["properties"].get(group)
        if part is None:  # not every task has every section
            continue
        found[task] = [error.message for error in jsonschema.Draft202012Validator(part).iter_errors(content)]
    return min(found.values(), key=len)


def read(file):
    """A preset's content, and the section that it goes to (None: the root)."""
    group = None if "@package _global_" in file.read_text() else file.parent.name
    return group, OmegaConf.to_container(OmegaConf.load(file))


def test_the_reference_is_fresh():
    written = {f"flags/{file.name}": file.read_text() for file in (DOCS / "flags").glob("*.md")}
    written |= {name: (DOCS / name).read_text() for name in ("flags.md", "metrics.md")}
    assert written == pages(), "run: python -m rlhf_suite.config.export"


def test_no_text_of_the_reference_is_taken_for_html():
    lines = [line for text in pages().values() for line in text.splitlines() if line.startswith("| ")]
    (scheduler,) = [line for line in lines if line.startswith("| `actor.lr_scheduler`")]
    assert "&lt;file.py>:&lt;function>" in scheduler
    plain = [re.sub("`[^`]*`|<br>", "", line) for line in lines]
    assert [line for line in plain if "<" in line] == []


def test_the_schema_is_what_its_command_prints(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    assert main(["schema", "--to", "a.json"]) == 2
    assert capsys.readouterr().err.startswith(
        "usage: rlhf-suite schema\nrlhf-suite schema: it has no argument --to a.json"
    )


@pytest.mark.stack
def test_the_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("file", PRESETS, ids=[f"{file.parent.name}-{file.stem}" for file in PRESETS])
def test_a_preset_fits_the_schema(file):
    assert problems(*read(file)) == []


@pytest.mark.parametrize(
    "content",
    [
        {"train": {"sed": 1}},
        {"train": {"seed": "x"}},
        {"actor": {"adam": {"lr": -1}}},
        {"ds": {"zero_stage": 4}},
        {"actor": {"adam": {"betas": 0.9}}},
        {"train": {"seed": None}},
    ],
)
def test_the_schema_finds_mistakes(content):
    assert problems(None, content)


def test_the_schema_lets_interpolations_and_nulls_pass():
    assert problems(None, {"train": {"seed": "${oc.env:SEED}", "max_steps": None}}) == []
