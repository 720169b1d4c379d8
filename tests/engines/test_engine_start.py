"""What an engine needs to import is there, and if it cannot start, its error names the cause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import families
from rlhf_suite import engines
from rlhf_suite.engines.build import name_cause
from rlhf_suite.engines.start import engine_env
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.environment import runtime_env

# That of engines/worker.py, which no test imports: it would offer the placeholder to the tests that follow.
PLACEHOLDERS = Path(engines.__file__).parent / "placeholders"
OF_ANOTHER_PROCESS = """\
(MainProcess pid=7) ERROR 11-26 09:39:18 [registry.py:1120] Traceback (most recent call last):
(MainProcess pid=7) ERROR 11-26 09:39:18 [registry.py:1120] subprocess.CalledProcessError: Command returned 1.
(MainProcess pid=7) ERROR 11-26 09:39:18 [registry.py:1120] RuntimeError: Error raised in subprocess:
(MainProcess pid=7) ERROR 11-26 09:39:18 [registry.py:1120] ModuleNotFoundError: No module named 'pictures'
(MainProcess pid=7) ERROR 11-26 09:39:18 [registry.py:1120]
"""
NAMES = """
import torchvision
import torchvision.transforms as T
from torchvision.io import ImageReadMode, decode_image
from torchvision.ops.boxes import batched_nms
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import pil_to_tensor
from torchvision.transforms.v2 import functional as tvF

assert InterpolationMode("bicubic") is T.InterpolationMode.BICUBIC
class Resize(T.Resize): pass
for call in (tvF.resize, T.Compose, Resize, decode_image):
    try:
        call(1, size=2)
    except RuntimeError as error:
        assert "torchvision is not installed" in str(error), error
    else:
        raise AssertionError(call)
assert not hasattr(torchvision, "models")
"""


def test_the_placeholder_of_torchvision_has_names_that_cannot_be_called():
    environment = os.environ | {"PYTHONPATH": str(PLACEHOLDERS)}
    done = subprocess.run([sys.executable, "-c", NAMES], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_error_has_the_exception_of_another_process(tmp_path):
    log = tmp_path / "engine-0.log"
    log.write_text("ValueError: of an earlier start\n")
    with pytest.raises(UserError, match=r"(?s)^cannot be inspected.*engine-0.log: ModuleNotFoundError.*pictures'$"):
        fail(UserError("cannot be inspected"), log, OF_ANOTHER_PROCESS)
    with pytest.raises(RunError, match=r"(?s)while starting: KeyError: 'x'.*ModuleNotFoundError"):
        fail(KeyError("x"), log, "\n(Worker_TP1 pid=9) ModuleNotFoundError: No module named 'pictures'\n")


def test_an_error_that_names_its_cause_stays_as_it_is(tmp_path):
    log = tmp_path / "engine-0.log"
    log.write_text("ValueError: of an earlier start\n")
    with pytest.raises(UserError, match=r"^too long$"):
        fail(UserError("too long"), log, "a line\n")
    with pytest.raises(KeyError, match=r"x"):
        fail(KeyError("x"), log, "KeyError: 'x'\n")


def fail(error, log, lines):
    with name_cause(log):
        with log.open("a") as file:
            file.write(lines)
        raise error


STARTS = """
import asyncio, os, sys
from pathlib import Path
from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.engines.actor import Engine
from rlhf_suite.engines.spec import EngineSpec

if len(sys.argv) > 3:
    os.environ["PYTHONPATH"] = sys.argv[3]  # for processes that are started from now on
spec = EngineSpec(sys.argv[1], "bfloat16", "cpu", 64, 0, VLLMConfig.of("ppo", kv_cache_mb=8))
engine = Engine(spec, Path(sys.argv[2]))
asyncio.run(engine.score([[5, 6, 7, 8]]))
print("scored")
"""


@pytest.mark.proof
@pytest.mark.parametrize("broken", [False, True])
def test_a_model_whose_file_reads_images_starts_or_names_what_is_missing(tmp_path, broken):
    """vLLM looks into the file of a model in a process of its own, which ends with the error of an import."""
    heads = {"head_dim": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    families.make_typed(tmp_path / "lm", "qwen3_5_text", **heads)
    log = tmp_path / "engine-0.log"
    environment = os.environ | runtime_env("cpu") | engine_env("cpu") | {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    (tmp_path / "einops.py").write_text("raise ImportError('no such build')")
    command = [sys.executable, "-c", STARTS, str(tmp_path / "lm"), str(log), *([str(tmp_path)] if broken else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ("scored" in log.read_text()) is not broken, done.stderr + log.read_text()
    if broken:
        error = log.read_text().partition("UserError: vLLM cannot serve")[2]
        assert "failed to be inspected" in error and f"The cause is in {log}: ImportError: no such build" in error
