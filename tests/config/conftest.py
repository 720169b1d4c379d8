"""Command lines checked in this process, as `main` checks them, and folders of models."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

import pytest
from inspected_lines import CONFIG, LANGUAGE, write_weights

from rlhf_suite.composition.arguments import parse
from rlhf_suite.preflight.jobs import Preflight, preflight


@pytest.fixture(scope="session")
def checked() -> Callable[[str], Preflight]:
    """Check one command line, written as in a shell."""
    return lambda line: preflight(parse(shlex.split(line)))


@pytest.fixture
def model(tmp_path):
    """Makes a model folder, with other settings or files than those of a language model."""

    def make(name="model", shapes=LANGUAGE, without=(), tokenizer=None, **settings):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG | settings))
        write_weights(folder / "model.safetensors", shapes)
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer or {}))
        for file in without:
            (folder / file).unlink()
        return folder

    return make
