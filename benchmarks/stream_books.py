"""The books of a stream of groups, as its files have them: where each group that began is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.rl.rollout_tasks import REJECTED, STATE
from rlhf_suite.rl.slots import GroupOrder
from rlhf_suite.run_folders.run_folder import RunFolder

ROWS, SIZE, STEPS = 96, 4, 10  # so many rows that no prompt comes twice
BATCHES = BatchOrder(ROWS, SIZE, Run.of("ppo").train.seed)
ORDER = GroupOrder(BATCHES, BATCHES, STEPS, is_filtered=True)


def faults(folder: Path) -> list[str]:
    """What is wrong in the books of a stream: each group is trained on once, or rejected with a reason, or
    outstanding. They are those of the newest checkpoint, and of a run that has ended those of its end."""
    index_of = {ORDER.prompt(index)[0]: index for index in range(ROWS)}
    saved, is_done = last_saved(folder), RunFolder(folder).status()["state"] == "done"
    last = STEPS if is_done else saved
    tables = [pq.read_table(folder / f"rollouts/step_{step:06d}.parquet").to_pylist() for step in range(1, last + 1)]
    trained = [index_of[row["prompt_index"]] for rows in tables for row in rows if row["sample"] == 0]
    path = folder / "rollouts" / REJECTED
    rejected = {row["group"]: row["reason"] for row in read_lines(path)} if path.exists() else {}
    found = [f"group {index} was trained on {n} times" for index, n in Counter(trained).items() if n > 1]
    found += [f"group {index} has no reason" for index, reason in rejected.items() if not reason]
    if is_done:
        listed = Counter(row["group"] for row in read_lines(path)) if path.exists() else Counter[int]()
        found += [f"group {index} was rejected {n} times" for index, n in listed.items() if n > 1]
        begun, count, outstanding = len(trained) + len(rejected), len(rejected), set[int]()
    else:
        state = {"next": 0, "num_rejected": 0, "running": [], "ready": [], "waiting": []}
        if saved:
            state = json.loads((folder / f"checkpoints/step_{saved:06d}/samples" / STATE).read_text())
        begun, count = state["next"], state["num_rejected"]
        outstanding = {index for index, _ in (*state["running"], *state["ready"])} | {*state["waiting"]}
    left = {*range(begun)} - {*trained} - outstanding
    found += [f"group {index} is lost" for index in left if index not in rejected]
    found += [f"group {index} is in two places" for index in {*trained} & ({*rejected} if is_done else outstanding)]
    if len(left) != count or begun != len(trained) + count + len(outstanding):
        found.append(f"{begun} began, {len(trained)} trained, {count} rejected, {len(outstanding)} outstanding")
    return found


def last_saved(folder: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    names = [path.name.removeprefix("step_") for path in (folder / "checkpoints").glob("step_*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
