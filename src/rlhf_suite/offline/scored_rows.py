"""Output rows of batch jobs: new columns beside those of the input, and what is chosen of a prompt's samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

# What differs between the samples of a prompt, beside the response itself.
OF_A_SAMPLE = ("sample", "finish_reason", "num_tokens", "score", "reward_query")


def with_columns(
    given: Mapping[str, Any], made: Mapping[str, Any], replaced: Collection[str | None] = ()
) -> dict[str, Any]:
    """A row with all given columns and the made ones. A given column that has the name of a made one becomes
    `input_<name>`, unless it is one of `replaced`, whose content the made one has."""
    kept = {f"input_{name}" if name in made else name: value for name, value in given.items() if name not in replaced}
    return kept | dict(made)


def best(scores: Sequence[float]) -> int:
    """Index of the largest score, the first of equals."""
    return max(range(len(scores)), key=lambda index: (scores[index], -index))


def pair(rows: Sequence[Mapping[str, Any]], scores: Sequence[float], response_key: str) -> dict[str, Any] | None:
    """The best and the worst response of a prompt as `chosen` and `rejected` with their scores, beside what its rows
    have in common; None where all scores are equal."""
    chosen = best(scores)
    rejected = best([-score for score in scores])
    if scores[chosen] == scores[rejected]:
        return None
    common = {k: v for k, v in rows[chosen].items() if k != response_key and k not in OF_A_SAMPLE}
    made = {
        "chosen": rows[chosen][response_key],
        "rejected": rows[rejected][response_key],
        "chosen_score": scores[chosen],
        "rejected_score": scores[rejected],
    }
    return with_columns(common, made)
