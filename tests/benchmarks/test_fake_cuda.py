"""The code for GPUs on torch's build for CUDA, without a GPU; docs/fake_gpu.md says how to make the environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "FAKE_CUDA_PYTHON"


@pytest.mark.proof
@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python with torch's build for CUDA")
def test_every_path_stays_on_the_device_and_waits_for_it_as_often_as_declared():
    command = [os.environ[VARIABLE], str(ROOT / "benchmarks" / "fake_cuda.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('"problems": []') > 30
