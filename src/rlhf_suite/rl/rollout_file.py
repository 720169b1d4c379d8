"""The rollouts of each step as `rollouts/step_<n>.parquet`, one row per sample."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.rl.scoring import ScoredTrajectories


def write_rollouts(folder: Path, step: int, scored: ScoredTrajectories, experience: TokenBatch) -> None:
    """Everything about every sample of the step: text, tokens, owners, log-probs, advantages, weight version."""
    offsets = pa.array([0, *experience.lengths.cumsum(0).tolist()], pa.int32())
    trajectories = scored.trajectories
    columns = {
        "prompt": pa.array(scored.prompts),
        "response": pa.array(scored.responses),
        "label": pa.array(scored.labels),
        "datasource": pa.array(scored.datasources),
        "prompt_index": pa.array([t.prompt for t in trajectories]),
        "group": pa.array([t.group for t in trajectories]),
        "sample": pa.array([t.sample for t in trajectories]),
        "finish_reason": pa.array([t.finish_reason for t in trajectories]),
        "reward": pa.array(scored.rewards),
        "score": pa.array(scored.scores),
        "ids": pa.ListArray.from_arrays(offsets, pa.array(experience.ids.numpy())),
    }
    ledgers = {
        "owner": [t.owner for t in trajectories],
        "weight_version": [t.version for t in trajectories],
    }
    for name, arrays in ledgers.items():
        columns[name] = pa.array(arrays)
    for name, values in experience.tokens.items():
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values.numpy()))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.parquet"
    pq.write_table(pa.table(columns), path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)



def forget_after(folder: Path, step: int) -> None:
    """Remove the rollouts of steps after `step`: a resumed run makes them again."""
    for file in folder.glob("step_*.parquet"):
        if int(file.stem.split("_")[1]) > step:
            file.unlink()
