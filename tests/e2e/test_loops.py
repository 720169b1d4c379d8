"""Loops that are killed with -9 in a stage: the stage dies with them, and the same command ends with the same model."""

from __future__ import annotations

import json
import shutil

import jobs
import psutil
import pytest

GONE_S = 30.0
SIZES = [
    "data.max_samples=64",
    "rollout.n_samples_per_prompt=4",
    "train.batch_size=8",
    "train.micro_batch_size=8",
    "train.max_steps=60",  # seconds, on a quick machine too: the kill has to come in the middle
    "train.max_epochs=30",
    "eval.dataset=null",
    "loop.num_iterations=1",
    "ckpt.save_steps=1",
    "launch.timeout_s=300",
]


def words(task, model, *more):
    return [f"task={task}", f"demo={task}", f"actor.model_name_or_path={model}", *SIZES, *more]


@pytest.fixture(scope="module")
def sampled(runs, warm):
    """A loop that nothing stopped: generate, select, tune."""
    jobs.run(runs / "sampled", words("rejection_sampling", warm))
    return runs / "sampled"


def killed_in(folder, words, sign):
    """Kill the loop's process alone as soon as a file like `sign` is there; its stage has to follow by itself."""
    job = jobs.Job(folder, words)
    job.wait_for(lambda: any(folder.glob(sign)))
    stages = [each for each in job.family() if "rlhf_suite.cli.execute" in " ".join(each.cmdline())]
    assert len(stages) == 1
    job.kill()
    assert psutil.wait_procs(stages, timeout=GONE_S)[1] == []


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_loop_trains_on_the_right_answers_of_its_model(sampled):
    answers = rows(sampled / "iter_0/generate/generations.jsonl")
    right = {row["input"] for row in answers if row["score"] == 1}
    chosen = rows(sampled / "iter_0/rows.jsonl")
    assert {row["input"] for row in chosen} == right
    assert all(row["output"] == row["input"].split()[1][::-1] for row in chosen)
    state = json.loads((sampled / "loop.json").read_text())
    assert state["metrics"][0]["loop/rows"] == len(right)
    assert state["metrics"][0]["loop/dropped"] == 64 - len(right)
    assert not (sampled / "iter_0/sft/checkpoints").exists()
    assert (sampled / "curves.png").exists()


@pytest.mark.proof
def test_rejection_sampling_killed_in_two_stages_ends_with_the_same_model(runs, warm, sampled):
    folder, again = runs / "sampled_killed", words("rejection_sampling", warm, "ckpt.load_enable=true")
    killed_in(folder, again, "iter_0/generate/logs/engine-0.log")
    killed_in(folder, again, "iter_0/sft/checkpoints/step_*")
    done = (folder / "iter_0/generate/status.json").read_bytes()
    jobs.run(folder, again)
    assert jobs.digest(folder) == jobs.digest(sampled)
    for name in ("iter_0/generate/generations.jsonl", "iter_0/rows.jsonl"):
        assert (folder / name).read_bytes() == (sampled / name).read_bytes()
    assert (folder / "iter_0/generate/status.json").read_bytes() == done


def iterative_dpo(folder, warm, sampled):
    """The words of a loop whose answers are those of the other loop: its stage is the same, and done."""
    shutil.copytree(sampled / "iter_0/generate", folder / "iter_0/generate")
    return words("iterative_dpo", warm, "ckpt.load_enable=true")


@pytest.fixture(scope="module")
def preferred(runs, warm, sampled):
    jobs.run(runs / "preferred", iterative_dpo(runs / "preferred", warm, sampled))
    return runs / "preferred"


def test_iterative_dpo_prefers_the_right_answers_of_its_model(preferred, sampled):
    pairs = rows(preferred / "iter_0/rows.jsonl")
    assert pairs
    assert all(row["chosen"] == row["input"].split()[1][::-1] != row["rejected"] for row in pairs)
    assert jobs.digest(preferred) != jobs.digest(sampled)


@pytest.mark.proof
def test_a_callback_that_stops_ends_a_training_and_the_loop_goes_on(runs, warm, sampled, tmp_path):
    (tmp_path / "own.py").write_text(
        "import rlhf_suite as rs\n\nclass Stops:\n    def on_step(self, step, metrics, samples):\n"
        "        return rs.Stop('enough') if step == 2 else None\n"
    )
    folder = runs / "stopped"
    jobs.run(folder, [*iterative_dpo(folder, warm, sampled), f"train.callbacks=[{tmp_path / 'own.py'}:Stops]"])
    loop, training = (json.loads((part / "status.json").read_text()) for part in (folder, folder / "iter_0/dpo"))
    assert (training["state"], training["last_step"]) == ("done", 2)
    assert training["ended_early"] == "A callback ended the run after step 2: enough"
    assert (loop["state"], loop.get("ended_early")) == ("done", None) and (folder / "model").exists()


@pytest.mark.proof
def test_iterative_dpo_killed_while_it_trains_ends_with_the_same_model(runs, warm, sampled, preferred):
    folder = runs / "preferred_killed"
    again = iterative_dpo(folder, warm, sampled)
    killed_in(folder, again, "iter_0/dpo/checkpoints/step_*")
    jobs.run(folder, again)
    assert jobs.digest(folder) == jobs.digest(preferred)
