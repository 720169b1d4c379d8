"""Rollouts and evaluations as `rollouts/step_<n>.parquet` and `evaluations/step_<n>.parquet`, one row per ledger."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_suite.data.trajectory import Experience
from rlhf_suite.disk import file_aside
from rlhf_suite.rl.sample_metrics import metric_name
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.tracking.run_folder import samples_file

GREEDY = "greedy_reward"  # the column of the baseline of remax


def write_rollouts(folder: Path, step: int, scored: ScoredTrajectories, experience: Experience) -> None:
    """Write every ledger that was trained on: text, tokens, owners, log-probs, advantages, weight versions, reward."""
    offsets = pa.array(np.append(0, experience.lengths.cumsum(0).numpy()).astype(np.int32))
    per_token = {
        "ids": experience.ids.numpy(),
        "owner": np.concatenate([t.owner for t in scored.trajectories]),
        "weight_version": np.concatenate([t.version for t in scored.trajectories]),
        **{name: values.numpy() for name, values in experience.columns("token").items()},
    }
    greedy = {} if scored.greedy is None else {GREEDY: pa.array(scored.greedy)}
    lists = {name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in per_token.items()}
    write_table(folder, step, text_columns(scored) | greedy | lists)


def write_evaluation(folder: Path, step: int, scored: ScoredTrajectories) -> None:
    """Write every ledger of an evaluation: prompt, response, label and reward."""
    write_table(folder, step, text_columns(scored))


def text_columns(scored: ScoredTrajectories) -> dict[str, pa.Array]:
    """Return what a person reads of each ledger. `reward_query` is the whole text as rewards saw it; the metric
    `reward/<name>` is the mean of the column of that name."""
    trajectories = scored.trajectories
    retries = {} if scored.retries is None else {"reward_retries": pa.array(scored.retries)}
    names = sorted({name for extra in scored.extra for name in extra})
    extra = {metric_name(name): pa.array([each.get(name) for each in scored.extra], pa.float64()) for name in names}
    return {
        "prompt": pa.array(scored.prompts),
        "response": pa.array(scored.responses),
        "label": pa.array(scored.labels),
        "datasource": pa.array(scored.datasources),
        "reward_query": pa.array(scored.queries),
        "prompt_index": pa.array([t.prompt for t in trajectories]),
        "group": pa.array([t.group for t in trajectories]),
        "sample": pa.array([t.sample for t in trajectories]),
        "ledger": pa.array([t.fork for t in trajectories]),
        "finish_reason": pa.array([t.finish_reason for t in trajectories]),
        "reward": pa.array(scored.rewards),
        "score": pa.array(scored.scores),
        **retries,
        **extra,
    }


def write_table(folder: Path, step: int, columns: dict[str, pa.Array]) -> None:
    """Write `<folder>/step_<n>.parquet`, whole or not at all."""
    with file_aside(samples_file(folder, step), durable=False) as aside:
        # Nothing reads statistics. Of numbers per token only ids come back often enough for a dictionary to pay.
        in_dictionary = ["ids.list.element", *(name for name in columns if not pa.types.is_list(columns[name].type))]
        pq.write_table(pa.table(columns), aside, write_statistics=False, use_dictionary=in_dictionary)


def forget_after(folder: Path, step: int) -> None:
    """Remove the rollouts of steps after `step`: a resumed run makes them again."""
    for file in folder.glob("step_*.parquet"):
        if int(file.stem.split("_")[1]) > step:
            file.unlink()
