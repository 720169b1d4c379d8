"""The benchmarks run, and each prints one JSON line with what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_suite.config.declarations.task_groups import SUPERVISED

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def line(*words: str) -> dict:
    command = [sys.executable, str(BENCHMARKS / words[0]), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


@pytest.mark.stack
def test_what_trains_nothing_imports_nothing_heavy():
    found = line("startup.py", "--quick")
    assert [found[name]["imported"] for name in ("help", "cfg", "mistake")] == [[], [], []]
    assert found["help"]["wall_s"] > 0 and found["versions"]["torch"]


@pytest.mark.parametrize(
    "task", [pytest.param("sft", marks=pytest.mark.e2e), pytest.param("dpo", marks=pytest.mark.proof)]
)
def test_supervised_prints_rates_memory_and_phases(task):
    tiny = ["--model", "builtin:tiny", "--steps", "6", "--lengths", "20", "60"]
    found = line("supervised.py", "--task", task, *tiny, *(["--cached"] if task == "dpo" else []))
    assert found["tokens_per_cpu_s"] > 0 and found["tokens_per_s"] > 0 and found["samples_per_s"] > 0
    assert 0 < found["peak_pss_mb"] <= found["peak_rss_mb"] and found["startup_s"] > 0
    assert sum(found["phase_share"].values()) == pytest.approx(1, abs=0.01)
    assert found["command"].startswith("python benchmarks/supervised.py") and found["date"]
    counted = 4 * (8 if task == "dpo" else 16)  # rows of the steps after the warm-up
    assert 20 * counted < found["config"]["tokens"] < 60 * 2 * counted


def test_every_supervised_task_has_a_workload():
    sys.path.insert(0, str(BENCHMARKS))
    from supervised import TASKS as WORKLOADS

    assert set(WORKLOADS) == {*SUPERVISED}


def test_every_demo_that_trains_has_its_errors_on_the_pages():
    sys.path.insert(0, str(BENCHMARKS))
    from demos import DEMOS, worst

    for name, demo in DEMOS.items():
        found = [worst("gradient_equality", demo.losses), worst("oracles", demo.references)]
        assert (found == ["", ""]) == (name in ("generate", "score")), name
        assert all(float(error) < 1e-5 for error in found if error), name
    with pytest.raises(ValueError, match="nothing"):
        worst("oracles", "nothing like this")


@pytest.mark.proof
def test_driver_prints_what_each_part_of_a_step_took():
    found = line("driver.py", "--responses", "64", "--longest", "200", "--median", "30", "--estimators", "gae", "opo")
    assert found["texts_us_per_token"] > 0
    assert found["steps"].keys() == {"gae", "opo"} and 64 * 8 < found["tokens"] < 64 * 400
    for step in found["steps"].values():
        assert {"sample_metrics", "experience", "credit", "update", "rollout_file"} <= step["parts"].keys()
        assert all(row.keys() == {"s", "cpu_s", "peak_mb"} for row in step["parts"].values())
        assert step["us_per_token"] > 0


@pytest.mark.proof
def test_ppo_prints_the_phases_of_a_step_and_who_used_the_cpu():
    found = line("ppo.py", "--model", "builtin:tiny", "--steps", "6", "--warmup", "1", "--new-tokens", "16")
    assert {"generation", "make_experience", "ppo_train", "weight_sync"} <= found["phase_s"].keys()
    assert "Engine" in found["cpu_s_per_step_of"] and found["peak_processes"] > 3
    assert found["tokens_per_cpu_s"] > 0 and found["mismatch"] < 1e-4
