"""A model folder with code of its own: refused, and nothing of it run, unless launch.trust_remote_code says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_suite.models.builtin import create_tiny

ROOT = Path(__file__).parents[2]
CONFIG_CODE = """
from transformers import Qwen3Config


class OwnConfig(Qwen3Config):
    model_type = "own"
"""
CODE = """
from pathlib import Path

from transformers import Qwen3ForCausalLM

from .own_config import OwnConfig

Path({marker!r}).touch()


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""
SFT = (
    "task=sft data.dataset=builtin:reverse data.output_key=label data.apply_chat_template=false train.max_steps=1 "
    "data.max_samples=8 train.batch_size=8 data.cache_enable=false ds.zero_stage=null launch.device=cpu"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model whose classes are in two files of its folder. That of the model leaves a mark when it is run."""
    folder = tmp_path_factory.mktemp("own") / "model"
    create_tiny(folder)
    (folder / "own.py").write_text(CODE.format(marker=str(folder.parent / "mark")))
    (folder / "own_config.py").write_text(CONFIG_CODE)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own_config.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ran(folder: Path, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command line with the model; what earlier runs have copied of its code is not seen."""
    command = [sys.executable, str(ROOT / "run.py"), *SFT.split(), f"actor.model_name_or_path={folder}", *words]
    env = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    return subprocess.run([*command, f"run_dir={tmp_path}/run"], capture_output=True, text=True, env=env, check=False)


def test_code_of_a_model_is_not_run_by_default(folder, tmp_path):
    done = ran(folder, tmp_path)
    assert done.returncode == 2 and "add launch.trust_remote_code=true" in done.stderr
    assert not (folder.parent / "mark").exists()


def test_a_trusted_model_trains_and_takes_its_code_along(folder, tmp_path):
    done = ran(folder, tmp_path, "launch.trust_remote_code=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nanobind" not in done.stdout + done.stderr, "a library complains about the end of the process"
    assert (folder.parent / "mark").exists()
    saved = tmp_path / "run" / "model"
    for name in ("own.py", "own_config.py"):
        assert (saved / name).read_text() == (folder / name).read_text()
    config = json.loads((saved / "config.json").read_text())
    assert (config["model_type"], config["auto_map"]["AutoModelForCausalLM"]) == ("own", "own.OwnForCausalLM")
