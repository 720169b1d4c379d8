"""A run whose trainer and engine cannot share the memory of a GPU."""

from __future__ import annotations

import jobs
import pytest
import torch

from rlhf_suite.tracking.metrics import read_rows

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the channel works"),
]
STEPS = 2


def test_weights_go_through_the_memory_of_the_host(runs, warm):
    words = [word for word in jobs.SMALL if not word.startswith(("eval.", "launch.device"))]
    words += ["vllm.sync_backend=ipc", "train.colocate_all=true", "eval.dataset=null", "eval.steps=-1"]
    ended = jobs.run(runs / "ipc", [*words, f"train.max_steps={STEPS}", f"actor.model_name_or_path={warm}"])
    assert "weights cannot be shared through the memory of the GPU" in ended.err
    syncs = [row for row in read_rows(runs / "ipc" / "metrics.jsonl") if "sync/probe" in row]
    assert len(syncs) == STEPS and all(row["sync/read_back"] == row["sync/tensors"] for row in syncs)
