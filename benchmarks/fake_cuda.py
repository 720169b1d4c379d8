"""The code for GPUs, walked without a GPU: on torch's build for CUDA, with fake tensors on a device that is not there.

Whole optimiser steps, forward passes, attention and the buckets of a weight sync run as they would on `cuda:0`: torch
chooses its kernels for CUDA and its engine computes gradients, but no kernel is launched. `fake_cuda.c` answers what
torch asks the driver. The command prints a line for each path and fails if one raises an error, returns a tensor that
is not on the device, does not run the kernels or has another number of reads than fake_paths.py declares, or makes the
host wait for a copy to the device. docs/fake_gpu.md says how to make the environment for it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from fake_device import FakeDevice, fake_device  # noqa: E402 - it is found by the line above
from fake_paths import DEVICE, Route, routes  # noqa: E402

PAGE = ROOT / "docs" / "fake_gpu.md"
DRIVER = "libcuda.so.1"  # the name by which torch loads the driver
PRELOAD = "LD_PRELOAD"
# Threads that load weights would not know of the fake device.
SETTINGS = {"HF_DEACTIVATE_ASYNC_LOAD": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
Line = dict[str, Any]

HEAD = """# The code for GPUs, without a GPU

`benchmarks/fake_cuda.py` writes this page. It walks paths through the code on torch's build for CUDA with fake tensors
(shapes, types and devices without numbers) on `cuda:0`: torch chooses its kernels for an H100, its engine computes
gradients, and nothing is launched. A small C file stands in for the driver. The command fails if a path raises an
error, returns a tensor that is not on the device, does not run the kernels that it should, reads the device another
number of times than below, or waits for a copy to it.

A read makes the host wait for all work of the device. A step reads it as often whatever its number of micro-batches.
Numbers are not checked, and kernels of Triton, DeepSpeed, NCCL and vLLM do not run: [gpu.md](gpu.md) is about GPUs.

The environment needs 4 GB, a C compiler and no GPU. Everything but torch comes from the suite's own environment:

```bash
python3.11 -m venv /tmp/cuda  # the version of Python that the suite's environment has
/tmp/cuda/bin/pip install 'torch===2.13.0' 'nvidia-cuda-crt==13.0.*'  # PyPI's build, which is for CUDA, and headers
realpath .venv/lib/python3.11/site-packages > /tmp/cuda/lib/python3.11/site-packages/suite.pth
/tmp/cuda/bin/python benchmarks/fake_cuda.py --write
FAKE_CUDA_PYTHON=/tmp/cuda/bin/python pytest -m proof tests/benchmarks/test_fake_cuda.py
```

"""


def main() -> None:
    """Walk all paths, print a line for each, and fail if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/fake_gpu.md")
    is_to_write = parser.parse_args().write
    if torch.version.cuda is None:
        sys.exit(f"torch {torch.__version__} is not built for CUDA: docs/fake_gpu.md says how to install one that is")
    with tempfile.TemporaryDirectory(prefix="rlhf-suite-fake-cuda-") as folder:
        if DRIVER not in os.environ.get(PRELOAD, ""):
            environment = os.environ | SETTINGS | {PRELOAD: str(build_driver(Path(folder)))}
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)
        lines = []
        with fake_device() as device:
            for route in routes(Path(folder)):
                lines.append(line_of(device, route))
                print(json.dumps(lines[-1]), flush=True)
    if any(line["problems"] for line in lines):
        sys.exit(1)
    if is_to_write:
        PAGE.write_text(page_of(lines))


def build_driver(folder: Path) -> Path:
    """Compile fake_cuda.c with the headers that come with torch, and return the library."""
    library = folder / DRIVER
    headers = Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "include"
    command = ["cc", "-shared", "-fPIC", f"-I{headers}", f"-Wl,-soname,{DRIVER}", "-o", str(library)]
    subprocess.run([*command, str(Path(__file__).with_suffix(".c"))], check=True)
    return library


def line_of(device: FakeDevice, route: Route) -> Line:
    """Walk a path, and return what it did and what is wrong with it."""
    device.count()
    problems = []
    try:
        elsewhere = {str(output.device) for output in route.walk() if output.device != DEVICE}
        problems += [f"an output is on {name}" for name in sorted(elsewhere)]
    except Exception as error:  # the other paths may be right
        problems.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    if device.reads != route.reads:
        problems.append(f"the host reads the device {device.reads} times, and not {route.reads}")
    if device.sends:
        problems.append(f"the host waits for {device.sends} copies to the device")
    problems += [f"{name} does not run" for name in route.kernels if not device.kernels[name]]
    own = [name for name in device.kernels if name.startswith(("_flash", "_varlen", "_scaled_dot", "_fused"))]
    return {
        "path": route.name,
        "reads": device.reads,
        "sends": device.sends,
        "operations": device.kernels.total(),
        "kernels": [name for name in own if not name.endswith("_backward")],
        "problems": problems,
    }


def page_of(lines: list[Line]) -> str:
    """Return docs/fake_gpu.md."""
    rows = [
        f"| {line['path']} | {line['reads']} | {line['operations']} | {', '.join(f'`{k}`' for k in line['kernels'])} |"
        for line in lines
    ]
    head = "| path | reads of the device | operations on it | kernels of attention and optimiser |\n|---|---|---|---|"
    return HEAD + "\n".join([f"torch {torch.__version__}:\n", head, *rows]) + "\n"


if __name__ == "__main__":
    main()
