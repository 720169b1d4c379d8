"""The reference of a run with adapters: the policy without them, on the policy's ranks."""

from __future__ import annotations

from itertools import chain

import pyarrow.parquet as pq
import pytest
from plain_run import run, small

from rlhf_suite.models.builtin import create_tiny
from rlhf_suite.tracking.metrics import read_rows

pytestmark = pytest.mark.stack
FLAGS = {"train__num_episodes": 2, "ds__lora__rank": 4, "actor__adam__lr": 0.02, "train__max_epochs": 2}


def numbers(folder):
    """What the steps of a run measured, and the samples that it trained on."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "train/reward" in row]
    kept = [{name: value for name, value in row.items() if name.startswith("train/")} for row in rows]
    samples = [pq.read_table(path).to_pylist() for path in sorted((folder / "rollouts").iterdir())]
    return kept, [[sample[name] for name in ("response", "ref_log_probs")] for sample in chain(*samples)]


@pytest.mark.notices(
    "the reference of a run with adapters has them",
    "rl/roles.py",
    "self.compute_log_probs(WithoutAdapters(self.model), batch",
    "self.compute_log_probs(self.model, batch",
)
@pytest.mark.parametrize(
    "loss", [{}, {"algo__kl__use_loss": True, "algo__kl__estimator": "k2"}], ids=["reward", "loss"]
)
def test_the_reference_is_that_of_a_second_copy_to_the_last_bit(ranks, tmp_path, loss):
    """Though the adapters move from step to step."""
    create_tiny(tmp_path / "tiny")
    own, copied = small(**FLAGS, **loss), small(**FLAGS, **loss, ref__model_name_or_path=str(tmp_path / "tiny"))
    for folder, config in (("own", own), ("copied", copied)):
        ranks(1).call(run, tmp_path / folder, config)
    assert numbers(tmp_path / "own") == numbers(tmp_path / "copied")
    steps, samples = numbers(tmp_path / "own")
    assert abs(steps[-1]["train/kl"]) > 1e-3
    assert len({tuple(reference) for _, reference in samples}) > 8
