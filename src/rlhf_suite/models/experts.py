"""The load-balancing loss of a mixture of experts: the same for a step however it is split into micro-batches.

    E * sum_e f_e P_e        (Switch Transformer, arXiv:2101.03961, eq. 4-6, top-k routing; transformers' formula)

f_e: how often expert e is among a row's top k; P_e: its mean probability; a row is a token at one of the MoE layers.
Uniform routing gives k. The product of two means is not a mean over tokens, so each half of a step would have its own
minimum; but f has no gradient. Once it is known for the whole step, the loss is the mean over rows of
E * sum_e f_e p_e.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.losses.reduce import counted_sequences
from rlhf_suite.models.attention import SequenceLayout

RouterLogits = tuple[Tensor, ...]  # of each MoE layer, [rows, E]


@dataclass
class ExpertBalance:
    """What a model needs to say how evenly it uses its experts."""

    top_k: int
    shares: Tensor | None = None  # f [E] of the optimiser step that is under way; null: of each batch alone

    def loss(self, router_logits: RouterLogits, batch: TokenBatch, sequences: SequenceLayout) -> Tensor:
        """The mean over the rows of the batch that count, weight 1."""
        return load_balancing_loss(counted_logits(router_logits, batch, sequences), self.top_k, self.shares)

    def counts(self, router_logits: RouterLogits, batch: TokenBatch, sequences: SequenceLayout) -> Tensor:
        """`expert_counts` of the batch."""
        return expert_counts(counted_logits(router_logits, batch, sequences), self.top_k)


def counted_logits(router_logits: RouterLogits, batch: TokenBatch, sequences: SequenceLayout) -> Tensor:
    """Logits [N, E] of the rows that count: no padding, and no sequences without a trained token."""
    weighs = counted_sequences(batch.mask, batch.segments, len(batch)).bool()[batch.segments]  # [T]
    rows = (torch.arange(len(weighs), device=weighs.device) if sequences.packed else sequences.slots)[weighs]
    return torch.cat([layer[rows] for layer in router_logits]).float()


def expert_counts(logits: Tensor, top_k: int) -> Tensor:
    """How many rows each expert is among the top k of, [E] float64."""
    chosen = logits.softmax(-1).topk(top_k, dim=-1).indices  # [N, top_k]
    return chosen.flatten().bincount(minlength=logits.shape[-1]).double()


def expert_shares(counts: Tensor, top_k: int) -> Tensor:
    """f [E] float32 of `expert_counts`, which may be sums over micro-batches; all 0 without rows."""
    return (counts * top_k / counts.sum().clamp(min=1)).float()


def load_balancing_loss(logits: Tensor, top_k: int, shares: Tensor | None = None) -> Tensor:
    """The mean over the rows of `logits` [N, E]; `shares` f [E] of the whole step (null: these rows are all)."""
    if shares is None:
        shares = expert_shares(expert_counts(logits, top_k), top_k)
    probabilities = logits.softmax(-1).sum(0) / max(len(logits), 1)
    return logits.shape[-1] * (shares * probabilities).sum()
