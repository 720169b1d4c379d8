"""Weights go from process to process through the memory of one GPU, whatever memory the trainer's allocator uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from ipc_process import LIMIT, SHAPES, VERSIONS

from rlhf_suite.distributed.world import open_store

SCRIPT = Path(__file__).with_name("ipc_process.py")


@pytest.mark.gpu
@pytest.mark.parametrize("lender", ["", "expandable_segments:True"])
@pytest.mark.parametrize("borrower", ["", "expandable_segments:True"])
def test_every_tensor_arrives_as_it_was_sent(lender, borrower):
    """Twice, so that a bucket has the address of one before."""
    store = open_store("127.0.0.1", timedelta(seconds=60))
    sides = {"send": lender, "receive": borrower}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), side, str(store.port)],
            env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for side, settings in sides.items()
    ]
    try:
        results = [process.communicate(timeout=LIMIT.total_seconds()) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], results
    sent, received = ([json.loads(line) for line in output.splitlines()] for output, _ in results)
    assert sent == received and len(sent) == len(VERSIONS)
    assert {*sent[0]} == {*SHAPES}
    assert all(sent[0][name] != sent[1][name] for name in SHAPES)


def test_the_tensors_of_the_process_are_larger_and_smaller_than_a_bucket():
    from ipc_process import BUCKET

    sizes = [2 * torch.Size(shape).numel() for shape in SHAPES.values()]  # in bf16
    assert max(sizes) > BUCKET and BUCKET in sizes and min(sizes) < 64
