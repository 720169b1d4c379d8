"""Inspect the run whose rollouts are to be trained on again (`rollout.replay`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf_suite.config.check.formatting import show_value
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RL
from rlhf_suite.run_folders.resume import load_earlier
from rlhf_suite.run_folders.run_folder import RunFolder, list_samples_files

KEY = "rollout.replay"
# What the recorded tokens belong to: log-probs at this temperature, and prompts by their numbers.
SAME = ("rollout.temperature", "data.prompt_dataset", "data.prompt_split", "data.prompt_probs", "data.max_samples")


def replay_fits(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield the reasons why a run cannot train on the rollouts of the run that it names."""
    if run.task not in RL or run.rollout.replay is None:
        return
    record = RunFolder(Path(run.rollout.replay))
    if not record.config.exists() or not list_samples_files(record.rollouts):
        problem = f"{record.path} has no rollouts with their configuration"
        yield Problem(KEY, problem, "give the folder of a run of task=ppo: that with config.yaml and rollouts/ in it")
        return
    earlier = load_earlier(record.config)
    if isinstance(earlier, Problem):
        yield Problem(KEY, earlier.what, "give the folder of another run")
    elif earlier.task not in RL:
        yield Problem(KEY, f"{record.path} is a run of task={earlier.task}", "give the folder of a run of task=ppo")
    else:
        yield from differences(run, earlier)


def differences(run: Run, earlier: Run) -> Iterator[Problem]:
    """Yield what the recorded run has otherwise than this one would need it."""
    now, before = all_values(run), all_values(earlier)
    for key in SAME:
        if now[key] != before[key]:
            problem = f"{show_value(now[key])} is not {show_value(before[key])} of the run that is replayed"
            fix = f"write {key}={show_value(before[key])}, or start from its file: --config=<config.yaml>"
            yield Problem(key, problem, fix)
    if earlier.data.image_key is not None:
        yield Problem(KEY, "its samples have images, and the rollout files do not contain images", "give another run")
    estimator, needs = run.algo.advantage, earlier.algo.advantage.needs
    if estimator.needs("greedy") and not needs("greedy"):
        problem = f"{estimator.estimator} needs a greedy response to each prompt, but the run recorded none"
        yield Problem("algo.advantage.estimator", problem, "take another estimator, or replay a run of this one")
