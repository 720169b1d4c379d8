"""The page of the learning curves says what its lines hold; jobs that are the same run once."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import curves
import curves_page


def row(task, name, last):
    points = [[0, 0.25, 0.02], [10, last, 0.03]]
    return {
        **{"task": task, "name": name, "command_line": f"{task} {name}", "points": points},
        **{"best": last, "cpu_s": 80.0, "seconds": 60.0, "machine": {"load_average": 2.4}},
        **{"mismatch": 2e-7, "bytes_of_a_sync": 1000.0},
    }


def test_a_preset_that_only_names_its_estimator_is_the_estimators_run_and_others_are_not():
    (rloo,) = [job for job in curves.ESTIMATOR_JOBS if job.name == "rloo"]
    same = [job for job in curves.ALGORITHM_JOBS if job.name in ("rloo", "dr_grpo") and job.task != "addition"]
    found = {(job.task, job.name): curves.configuration(job) == curves.configuration(rloo) for job in same}
    assert found == {
        **{("reverse", "rloo"): True, ("reverse", "dr_grpo"): False},
        **{("sort", "rloo"): False, ("sort", "dr_grpo"): False},
    }


def test_the_default_job_passes_the_preflight_with_every_estimator_and_model():
    assert all(map(curves.configuration, (*curves.ESTIMATOR_JOBS, *curves.MODEL_JOBS)))


def test_a_run_that_is_missing_is_an_empty_cell_and_no_line(tmp_path):
    labels = {"ppo": "PPO", "grpo": "GRPO"}
    panels = {"reverse": {"ppo": row("reverse", "ppo", 0.75), "grpo": row("reverse", "grpo", 0.875)}, "sort": {}}
    tasks, estimators = {"reverse": [], "sort": ["data.prompt_dataset=x"]}, [row("x", "gae", 0.5)]
    page = curves_page.page(panels, labels, tasks, estimators, {"tiny, LoRA": row("y", "lora", 0.5)})
    assert "| PPO, `ppo` | 0.250 ± 0.020 → 0.750 ± 0.030 |  | 80, - |" in page
    assert "| `gae` | 0.250 ± 0.020 | 0.500 ± 0.030 | 0.500 | 80 | 60 | 2 |" in page
    assert "- sort: `data.prompt_dataset=x`" in page and "4 whole runs" in page
    assert "| tiny, LoRA | `y lora` | 0.250 ± 0.020 | 0.500 ± 0.030 | 0.500 | 2.0e-07 | 1,000 |" in page
    curves_page.draw(panels, labels, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
