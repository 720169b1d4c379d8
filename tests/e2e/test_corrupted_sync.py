"""One changed bit on the way from trainer to engine stops the run, and the tensor is named."""

from __future__ import annotations

import json
from pathlib import Path

import corrupting_run
import jobs


def test_a_changed_byte_stops_the_run_and_names_the_tensor(runs, warm):
    folder = runs / "corrupted"
    words = [*jobs.SMALL, f"actor.model_name_or_path={warm}", "algo.advantage.estimator=rloo", "algo.kl.init_coef=0"]
    job = jobs.Job(folder, words, script=Path(corrupting_run.__file__))
    ended = job.ended()
    assert ended.code == 1, ended.err
    assert f"weights 2: tensor {corrupting_run.TENSOR} [256, 64] float32 arrived changed" in ended.err
    assert "Traceback" not in ended.err
    assert [row["step"] for row in jobs.train_rows(folder)] == [1]  # the step whose sync failed is not on record
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "failed"
    assert corrupting_run.TENSOR in status["error"]
    assert not (folder / "model").exists()
