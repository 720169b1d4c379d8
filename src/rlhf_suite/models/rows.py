"""Say how a model takes its batches, in the same words at the start of a run, in explain=true and in the plan."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.declarations.ds import wanted_packing
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.micro_batches import trained_micro_batches
from rlhf_suite.models.families import PACKED, Family


@dataclass(frozen=True)
class Rows:
    """How a model takes its batches, decided from the flags and the family of the model."""

    packed: bool
    attention: str
    limit: str  # of a micro-batch
    why_padded: str | None  # why the default is not packed rows

    @property
    def layout(self) -> str:
        return "packed rows" if self.packed else "padded rows"

    def __str__(self) -> str:
        why = f" ({self.why_padded})" if self.why_padded else ""
        return f"{self.layout}{why}, {self.attention} attention, micro-batches of at most {self.limit}"


def rows_of(family: Family, run: Run) -> Rows:
    """Return how a model of a family takes the batches of a run: what the defaults of ds.packing_samples,
    ds.attn_implementation and train.micro_batch_size are for it."""
    ds, limit = run.ds, trained_micro_batches(run.train)
    packed = family.packs(wanted_packing(ds), ds.attn_implementation)
    attention = ds.attn_implementation or family.attention[0]
    why = None
    if not packed and ds.packing_samples is None:
        other = (
            "ds.deepcompile=true" if ds.deepcompile else f"{attention} attention lets packed sequences see each other"
        )
        refused = family.why_not(PACKED)
        why = f"{family.title} {refused}" if refused else other
    return Rows(packed, attention, f"{limit.rows} rows" if limit.tokens is None else f"{limit.tokens} tokens", why)
