"""README's recipe for a supervised task, followed in a copy of the sources: a dataclass, a file, and a module."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack

ROOT = Path(__file__).parents[2]
FLAGS = "task=own run_dir=run train.max_steps=2 train.batch_size=4 train.micro_batch_size=4 logger.progress=false"
DATA = "actor.model_name_or_path=builtin:tiny data.dataset=builtin:reverse data.output_key=output data.max_len=64"
DATACLASS = '''

@dataclass
class OwnRun(SFTRun):
    """A task of one's own"""

    task: str = flag("own", "The task; chosen with task=<name>")


SamplingRun ='''


def test_a_task_is_a_dataclass_a_preset_and_a_module(tmp_path):
    for folder in ("src", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    package = tmp_path / "src" / "rlhf_suite"
    runs = (package / "config" / "runs.py").read_text()
    assert runs.count("\n\nSamplingRun =") == 1
    (package / "config" / "runs.py").write_text(runs.replace("\n\nSamplingRun =", DATACLASS))
    preset = (tmp_path / "conf" / "task" / "sft.yaml").read_text()
    (tmp_path / "conf" / "task" / "own.yaml").write_text(preset.replace("sft", "own"))
    module = (package / "tasks" / "sft.py").read_text()
    (package / "tasks" / "own.py").write_text(module.replace("SFT(", "Own(").replace("SFTRun", "OwnRun"))
    words = [*FLAGS.split(), *DATA.split(), "ds.zero_stage=null", "ds.param_dtype=fp32"]
    command = [sys.executable, "-m", "rlhf_suite.cli", *words]
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "config.json").exists()
