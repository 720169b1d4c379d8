"""The command line as a process: exit codes, nothing heavy imported, help, completion, explain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "datasets")
# Runs main() for each line of words in a list, and reports of each its exit code, what is imported by then, whether
# Hydra is too, and what was printed.
PROBE = f"""
import contextlib, io, json, sys
from rlhf_suite.cli import main
said = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    said.append([code, heavy, "hydra" in sys.modules, out.getvalue(), err.getvalue()])
print(json.dumps(said))
"""
MISTAKES = [
    ([], "task: none is chosen"),
    (["task=ppo", "algo.advantage.lambda=0.9", "actor.num_nodes=1e0"], "2 problems in the configuration"),
    (["task=sft", "train.seed=1,2"], "a sweep needs -m"),
    (["task=sft", "--cfg", "job", "ds.zero_stage=9"], "ds.zero_stage"),
    (["-m", "task=sft", "ds.zero_stage=1,9"], "ds.zero_stage"),
    (["task=sft", "hydra/launcher=nope"], "hydra/launcher"),
    (["task=sft", "explain=true", "data.max_len=x"], "data.max_len"),
]


def run_lines(lines, **environment):
    """Exit code, heavy modules, whether Hydra was imported, stdout and stderr of command lines, all in one process."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(lines)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def run(*words, **environment):
    """The same of one command line."""
    (found,) = run_lines([words], **environment)
    return found


@pytest.mark.stack
def test_a_mistake_ends_with_2_without_a_traceback_and_without_heavy_imports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run_lines([words for words, _ in MISTAKES])
    for (words, said), (code, heavy, _, out, err) in zip(MISTAKES, found, strict=True):
        assert (code, heavy, out) == (2, [], ""), words
        assert said in err, words
        assert "Traceback" not in err, words
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@pytest.mark.stack
def test_cfg_job_prints_the_configuration_and_imports_nothing_heavy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, heavy, _, out, err = run("task=ppo", "--cfg", "job", "actor.adam.lr=2e-6", "experiment=grpo")
    assert (code, heavy) == (0, [])
    assert "lr: 2.0e-06" in out
    assert "taking demo=ppo" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.stack
def test_info_lists_the_presets_in_the_order_of_their_composition(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, heavy, _, out, _ = run("--info", "defaults", "experiment=rloo", "ds=zero3", "algo/advantage=group_norm")
    assert (code, heavy) == (0, [])
    places = [out.index(name) for name in ("demo/ppo", "experiment/rloo", "algo/advantage/group_norm", "ds/zero3")]
    assert places == sorted(places)


@pytest.mark.stack
def test_what_is_shown_is_what_hydra_composes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (
        "task=ppo",
        "experiment=grpo",
        "ds=zero3",
        "train.seed=3",
        "reward.rule=null",
        "reward.sources={a: {rule: length}}",
    )
    _, _, _, ours, _ = run("--cfg", "job", *words)
    _, _, _, theirs, _ = run("--cfg", "job", "--package", "_global_", *words)
    assert "zero_stage: 3" in ours
    assert ours == theirs


@pytest.mark.stack
def test_explain_shows_arithmetic_placement_and_origins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = "rollout.batch_size=6 rollout.n_samples_per_prompt=8 train.batch_size=24 train.micro_batch_size=4"
    words = ["experiment=rloo", "explain=true", "train.seed=3", "actor.num_nodes=2", "ref.num_nodes=2", *sizes.split()]
    code, heavy, _, out, _ = run(*words, COLUMNS="200")
    assert (code, heavy) == (0, [])
    rows = {
        cells[0]: cells[1:] for line in out.splitlines() if len(cells := [c.strip() for c in line.split("│")[1:-1]]) > 2
    }
    assert rows["samples per RL step"][-1] == "48"
    assert rows["optimiser steps per RL step"][-1] == "2"
    assert rows["micro-batches per rank and optimiser step"][-1] == "3"
    assert rows["actor ranks"][-1] == "2"
    assert rows["train.seed"] == ["3", "42", "command line"]
    assert rows["algo.advantage.estimator"][-1] == "experiment/rloo.yaml"
    assert rows["actor.model_name_or_path"][-1] == "demo/ppo.yaml"
    assert "1 engine" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.stack
def test_help_needs_not_even_hydra():
    code, heavy, has_hydra, out, _ = run("--help", "task=ppo", "algo.kl")
    assert (code, heavy, has_hydra) == (0, [], False)
    assert "algo.kl.init_coef = 0.01" in out
    assert "(float >= 0)" in out
    assert "algo.advantage" not in out


@pytest.mark.stack
def test_help_without_a_task_lists_tasks_and_presets():
    code, _, _, out, _ = run("--help")
    assert code == 0
    assert "task=sft" in out
    assert "experiment=<" in out and "flash_reinforce | grpo |" in out


@pytest.mark.stack
def test_help_for_what_does_not_exist_offers_the_nearest():
    code, _, _, _, err = run("--help", "task=ppo", "algo.kll")
    assert code == 2
    assert "did you mean algo.kl" in err


@pytest.mark.parametrize(
    ("line", "offered", "absent"),
    [
        ("rlhf-suite task=sft ", "actor.", "vllm."),
        ("rlhf-suite task=ppo vllm.num", "vllm.num_engines=", "vllm.sync_check="),
        ("rlhf-suite task=ppo algo.kl.estimator=", "algo.kl.estimator=k3", "algo.kl.estimator=null"),
        ("rlhf-suite -m task=ppo algo.kl.estimator=k1,", "algo.kl.estimator=k1,k2", "k2"),
        ("rlhf-suite task=ppo algo.kl.target=", "algo.kl.target=null", "algo.kl.target=true"),
        ("rlhf-suite task=ppo ds.packing_samples=t", "ds.packing_samples=true", "ds.packing_samples=false"),
        ("rlhf-suite exp", "experiment=", "task="),
        ("rlhf-suite experiment=r", "experiment=rloo", "experiment=grpo"),
        ("rlhf-suite -m task=ppo ds=zero2,zero3", "ds=zero2,zero3_offload", "ds=cpu"),
        ("rlhf-suite algo/advantage=r", "algo/advantage=rloo", "algo/advantage=gae"),
        ("rlhf-suite --c", "--cfg", "--info"),
        ("rlhf-suite s", "sweep", "schema="),
        ("rlhf-suite task=score s", "score.", "sweep"),
    ],
)
def test_completion_offers_what_fits(line, offered, absent):
    from rlhf_suite.cli.complete import candidates

    assert offered in candidates(line)
    assert absent not in candidates(line)


@pytest.mark.stack
def test_completion_needs_not_even_hydra():
    code, heavy, has_hydra, out, _ = run("-sc", "query=bash", COMP_LINE="rlhf-suite task=ppo algo.kl.", COMP_POINT="29")
    assert (code, heavy, has_hydra) == (0, [], False)
    assert "algo.kl.horizon=" in out.split()


def test_an_interpreter_without_the_package_says_how_to_get_one_that_has_it():
    run_py = Path(__file__).parents[2] / "run.py"
    done = subprocess.run(
        [sys.executable, "-S", run_py, "task=sft"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr and "source .venv/bin/activate" in done.stderr
