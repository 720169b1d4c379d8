"""The load-balancing loss of a mixture of experts, equal for a step however it is split into micro-batches.

    E * sum_e f_e P_e        (Switch Transformer, arXiv:2101.03961, eq. 4-6, top-k routing; transformers' formula)

f_e: how often expert e is among a row's top k; P_e: its mean probability; a row is a token at one of the MoE layers.
Uniform routing gives k. The product of two means is not a mean over tokens, so each part of a step would have its own
minimum. But f has no gradient: once it is known for the whole step, the loss is the mean over rows of E * sum_e f_e
p_e.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_suite.data.batch import TokenBatch, send_together
from rlhf_suite.losses.reduce import mark_counted_sequences
from rlhf_suite.models.attention import SequenceLayout

RouterLogits = tuple[Tensor, ...]  # of each MoE layer, [rows, E]


@dataclass
class ExpertBalance:
    """The settings and the state of the load-balancing loss of one model."""

    top_k: int
    shares: Tensor | None = None  # f [E] of the current optimiser step; None: computed from each batch alone

    def loss(self, router_logits: RouterLogits, batch: TokenBatch, sequences: SequenceLayout) -> Tensor:
        """Return the mean loss over the rows of the batch that count, with weight 1."""
        logits = select_counted(router_logits, batch, sequences)
        if sequences.shard is None:
            return load_balancing_loss(logits, self.top_k, self.shares)
        shares = self.shares
        if shares is None:
            shares = expert_shares(self.counts(router_logits, batch, sequences), self.top_k)
        rows = sequences.whole(logits.new_full((), len(logits)))
        return sequences.whole(load_balancing_loss(logits, self.top_k, shares) * len(logits)) / rows.clamp(min=1)

    def counts(self, router_logits: RouterLogits, batch: TokenBatch, sequences: SequenceLayout) -> Tensor:
        """Return `expert_counts` of the batch."""
        return sequences.whole(expert_counts(select_counted(router_logits, batch, sequences), self.top_k))


def select_counted(router_logits: RouterLogits, batch: TokenBatch, sequences: SequenceLayout) -> Tensor:
    """Return the logits [N, E] of the rows that count: no padding, and no sequences without a trained token."""
    segments = torch.repeat_interleave(torch.arange(len(batch)), batch.host_lengths)
    weighs = mark_counted_sequences(batch.host_mask, segments, len(batch)).bool()[segments]  # [T], in host memory
    (tokens,) = send_together([weighs.nonzero().squeeze(1)], batch.ids.device)
    if sequences.shard is not None:
        rows = sequences.select_held(tokens)[1]
    else:
        rows = tokens if sequences.rows is None else sequences.rows[tokens]
    return torch.cat([layer[rows] for layer in router_logits]).float()


def expert_counts(logits: Tensor, top_k: int) -> Tensor:
    """Return in how many rows each expert is among the top k, [E] float64."""
    chosen = logits.softmax(-1).topk(top_k, dim=-1).indices  # [N, top_k]
    ones = torch.ones(chosen.numel(), dtype=torch.float64, device=chosen.device)
    # `bincount` would have the host wait for the largest number.
    return torch.zeros(logits.shape[-1], dtype=torch.float64, device=chosen.device).index_add_(
        0, chosen.flatten(), ones
    )


def expert_shares(counts: Tensor, top_k: int) -> Tensor:
    """Return f [E] float32 from `expert_counts`, which may be sums over micro-batches; all 0 if there are no rows."""
    return (counts * top_k / counts.sum().clamp(min=1)).float()


def load_balancing_loss(logits: Tensor, top_k: int, shares: Tensor | None = None) -> Tensor:
    """Return the mean loss over the rows of `logits` [N, E].

    `shares` is f [E] of the whole step; None means that these rows are the whole step.
    """
    if shares is None:
        shares = expert_shares(expert_counts(logits, top_k), top_k)
    probabilities = logits.softmax(-1).sum(0) / max(len(logits), 1)
    return logits.shape[-1] * (shares * probabilities).sum()
