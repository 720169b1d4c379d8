"""Runs whose engines quantise the weights of every sync."""

from __future__ import annotations

import jobs
import pytest

from rlhf_suite.tracking.metrics import read_rows

pytestmark = pytest.mark.proof
STEPS = 3
WORDS = [
    *(word for word in jobs.SMALL if not word.startswith("eval.")),
    *("vllm.quantization=fp8_per_channel", "ds.param_dtype=bf16", "correction=tis", "algo.mismatch_max=0.3"),
    *("eval.dataset=null", "eval.steps=-1", f"train.max_steps={STEPS}"),
]


@pytest.mark.parametrize(("words", "unread"), [([], 2 * 7), (["ds.lora.rank=8"], 0)], ids=["full", "adapters"])
def test_quantised_engines_write_what_a_corrected_run_trains_on(runs, warm, words, unread):
    """Adapters are not quantised, so they are read back as always; of whole weights all but the matrices are."""
    folder = runs / f"quantised_{len(words)}"
    jobs.run(folder, [*WORDS, *words, f"actor.model_name_or_path={warm}"])
    syncs = [row for row in read_rows(folder / "metrics.jsonl") if "sync/probe" in row]
    assert len(syncs) == STEPS
    assert {row["sync/tensors"] - row["sync/read_back"] for row in syncs} == {unread}
    for row in jobs.train_rows(folder):
        assert 1e-3 < row["mismatch/mean"] < 0.3 and row["correction/ess"] > 0.5
