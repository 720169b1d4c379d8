"""Rollouts and evaluations as `rollouts/step_<n>.parquet` and `evaluations/step_<n>.parquet`, one row per ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlhf_suite.data.trajectory import Experience
from rlhf_suite.disk import file_aside
from rlhf_suite.rl.sample_metrics import metric_name
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.tracking.run_folder import samples_file

GREEDY = "greedy_reward"  # the column of the baseline of remax


def write_rollouts(folder: Path, step: int, scored: ScoredTrajectories, experience: Experience) -> None:
    """Write every ledger that was trained on: text, tokens, owners, log-probs, advantages, weight versions, reward."""
    offsets = pa.array(np.append(0, experience.lengths.cumsum(0).numpy()).astype(np.int32))
    per_token = {"ids": experience.ids.int(), **experience.columns("token")}
    greedy = {} if scored.greedy is None else {GREEDY: pa.array(scored.greedy)}
    lists = {name: list_column(offsets, values.numpy()) for name, values in per_token.items()}
    write_table(folder, step, text_columns(scored) | greedy | lists)


def list_column(offsets: pa.Array, values: NDArray[Any]) -> pa.ListArray:
    """Return a column with the numbers per token [T] of each ledger. None of them is missing: a file that allows for
    it takes half as long again to write."""
    number = pa.field("element", pa.from_numpy_dtype(values.dtype), nullable=False)
    return pa.ListArray.from_arrays(offsets, pa.array(values), type=pa.list_(number))


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
        # Nothing reads statistics. A dictionary pays for texts only: of ids it saves a byte each, and takes long.
        fields = [pa.field(name, each.type, not pa.types.is_list(each.type)) for name, each in columns.items()]
        table, texts = pa.table(columns, pa.schema(fields)), [each.name for each in fields if each.nullable]
        pq.write_table(table, aside, write_statistics=False, use_dictionary=texts)


def forget_after(folder: Path, step: int) -> None:
    """Remove the rollouts of steps after `step`: a resumed run makes them again."""
    for file in folder.glob("step_*.parquet"):
        if int(file.stem.split("_")[1]) > step:
            file.unlink()
