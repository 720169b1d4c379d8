"""Output rows of offline jobs: new columns beside those of the input, best samples, and pairs of samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlhf_suite.data.response_groups import RENAMED

# Columns in which the samples of a prompt differ, beside the response itself.
SAMPLE_COLUMNS = ("sample", "finish_reason", "num_tokens", "score", "reward_query")


def with_columns(
    given: Mapping[str, Any], made: Mapping[str, Any], replaced: Collection[str | None] = ()
) -> dict[str, Any]:
    """Return a row with the columns of the input and the new ones.

    A column of the input that has the name of a new one is renamed to `input_<name>`, and so is one that has this name
    already. Columns in `replaced` are dropped, because the new ones hold their contents.
    """
    kept = {name: value for name, value in given.items() if name not in replaced}

    def is_taken(name: str) -> bool:
        before = name.removeprefix(RENAMED)
        return name in made or (before != name and before in kept and is_taken(before))

    return {f"{RENAMED}{name}" if is_taken(name) else name: value for name, value in kept.items()} | dict(made)


def best(scores: Sequence[float]) -> int:
    """Return the index of the largest score, the first one if several are equal."""
    return max(range(len(scores)), key=lambda index: (scores[index], -index))


def pair(rows: Sequence[Mapping[str, Any]], scores: Sequence[float], response_key: str) -> dict[str, Any] | None:
    """Return a row with the best and the worst response of a prompt as `chosen` and `rejected`, with their scores.

    The row also has the columns that all samples share. Return None if all scores are equal.
    """
    chosen = best(scores)
    rejected = best([-score for score in scores])
    if scores[chosen] == scores[rejected]:
        return None
    common = {k: v for k, v in rows[chosen].items() if k != response_key and k not in SAMPLE_COLUMNS}
    made = {
        "chosen": rows[chosen][response_key],
        "rejected": rows[rejected][response_key],
        "chosen_score": scores[chosen],
        "rejected_score": scores[rejected],
    }
    return with_columns(common, made)
