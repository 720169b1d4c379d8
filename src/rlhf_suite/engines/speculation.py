"""Speculative decoding: what vLLM is told of it, and how many guesses are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def speculation_args(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs for these settings. The weights of the policy may be random until the
    first sync; those of the model that guesses are read from its folder."""
    if not config:
        return {}
    own = {"draft_load_config": {"load_format": "auto"}} if "model" in config else {}
    return {"speculative_config": own | dict(config), "per_request_spec_decode_metrics": "summary"}


def repeat_for_guesses(
    output: Tensor, values: Tensor, ends: Tensor, replaced: float, by: float, MAX_NUM_TOKENS: int | None = None
) -> None:
    """Write each of the B `values` into `output` [N] for the tokens of its request, which end at `ends` [B]; `by` where
    it equals `replaced`. The last argument is that of vLLM's kernel."""
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    output.copy_(values.where(values != replaced, by).repeat_interleave(counts))


class Guesses:
    """How many tokens speculative decoding proposed for finished requests, and how many of them were kept. The thread
    of the engine alone uses it."""

    guessed = accepted = 0

    def count(self, metrics: Any) -> None:
        """Add those of a request, as vLLM counts them; None without speculative decoding."""
        if metrics is not None:
            self.guessed += metrics.num_draft_tokens
            self.accepted += sum(kept * steps for kept, steps in enumerate(metrics.histogram))

    def take(self) -> tuple[int, int]:
        """Return both numbers, and begin again at 0."""
        taken, self.guessed, self.accepted = (self.guessed, self.accepted), 0, 0
        return taken
