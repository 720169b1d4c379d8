"""Log-probs and entropies of given tokens without a [T, V] matrix of logits.

The language-model head processes the rows in chunks; the backward pass computes the logits of each chunk again. With z
= (h W^T + b) / temperature, p = softmax(z), one row, target y:

    log_prob = z_y - logsumexp(z)                d log_prob / dz_j = [j = y] - p_j
    entropy  = logsumexp(z) - sum_j p_j z_j      d entropy  / dz_j = -p_j (log p_j + entropy)

N rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf_suite.data.generation import NEVER
from rlhf_suite.errors import UserError

Rows = slice | Tensor  # some of N rows
Read = Callable[[Tensor, Rows], Tensor]  # (logits [n, V], their rows among all N) -> one value per row, [n, ...]

CHUNK_ROWS = 1024  # enough for a GPU's matrix unit; with V = 150k the logits of a chunk take 0.6 GB in fp32
CHUNK_ELEMENTS = 2**22  # small vocabularies take more rows at a time
# Configuration keys of heads that do more than a matrix product, each with the value that switches it off.
UNUSUAL_HEADS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0, "lm_head_multiplier": 1.0}


def chunk_rows(vocabulary: int) -> int:
    """Return how many rows the head processes at a time."""
    return max(CHUNK_ROWS, CHUNK_ELEMENTS // vocabulary)


class DeferredLogits(NamedTuple):
    """The logits of N tokens, computed on request by a head that does not change until then. They carry no gradients.

    Under ZeRO-3 this object keeps the whole matrix of the head in memory.
    """

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    places: Tensor | None = None  # [N] where each row is in `hidden`, if this rank holds only some of them

    def logits(self, rows: Rows) -> Tensor:
        """Return the logits of these rows, [rows, V], in fp32 or more."""
        hidden = self.hidden[rows if self.places is None else self.places[rows]]
        return _logits(hidden, self.weight, self.bias, 1.0)


class HeadSettings(NamedTuple):
    """The settings of one chunked computation."""

    temperature: float
    entropy: bool
    chunk_rows: int


class ChunkedLogProbs(torch.autograd.Function):
    """(hidden [N, H], weight [V, H], bias [V] | None, targets [N]) -> log_probs [N], entropy [N] | None; both fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: HeadSettings,
    ) -> tuple[Tensor, Tensor | None]:
        temperature, with_entropy, rows = settings
        log_probs, normalisers, entropies = [], [], []
        for start in range(0, len(hidden), rows):
            logits = _logits(hidden[start : start + rows], weight, bias, temperature)
            normaliser = logits.logsumexp(-1)
            chosen = logits.gather(-1, targets[start : start + rows, None]).squeeze(-1)
            log_probs.append(chosen - normaliser)
            normalisers.append(normaliser)
            if with_entropy:
                probabilities = (logits - normaliser[:, None]).exp_()
                entropies.append(normaliser - (probabilities * logits).sum(-1))
        empty = _logits(hidden[:0], weight, bias, temperature).sum(-1)  # for a batch that needs no row at all
        entropy = torch.cat([*entropies, empty]) if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat([*normalisers, empty]), entropy)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)
        return torch.cat([*log_probs, empty]), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        hidden_gradient = torch.empty_like(hidden) if need_hidden else None
        # Sums over chunks are kept in fp32, also if the weights are bf16.
        weight_gradient = torch.zeros_like(weight, dtype=wide) if need_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=wide) if need_bias else None
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            chunk = hidden[part]
            log_p = _logits(chunk, weight, bias, ctx.temperature).sub_(normaliser[part, None])
            logits_gradient = _logits_gradient(
                log_p,
                targets[part],
                gradients[0][part] if gradients[0] is not None else None,
                gradients[1][part] if gradients[1] is not None else None,
                entropy[part] if entropy is not None else None,
            )
            logits_gradient = logits_gradient.div_(ctx.temperature).to(weight.dtype)
            if hidden_gradient is not None:
                hidden_gradient[part] = logits_gradient @ weight
            if weight_gradient is not None:
                weight_gradient += logits_gradient.T @ chunk
            if bias_gradient is not None:
                bias_gradient += logits_gradient.sum(0)
        return (
            hidden_gradient,
            weight_gradient.to(weight.dtype) if weight_gradient is not None else None,
            bias_gradient.to(weight.dtype) if bias_gradient is not None else None,
            None,
            None,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return the argument of softmax, [rows, V], in fp32 or more."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.div_(temperature)


def _logits_gradient(
    log_p: Tensor, targets: Tensor, of_log_prob: Tensor | None, of_entropy: Tensor | None, entropy: Tensor | None
) -> Tensor:
    """Return the gradient with respect to z, [rows, V]. This overwrites `log_p`."""
    p = log_p.exp()
    if of_entropy is not None:
        assert entropy is not None
        result = log_p.add_(entropy[:, None]).mul_(p).mul_(-of_entropy[:, None])
    else:
        result = log_p.zero_()
    if of_log_prob is not None:
        result.addcmul_(p, -of_log_prob[:, None])
        result.scatter_add_(1, targets[:, None], of_log_prob[:, None])
    return result


class ScoringHead(nn.Linear):
    """A language-model head that can also compute the log-probs of given tokens.

    The chunked computation is in this module's own forward, because ZeRO-3 has the whole weight only there: its hooks
    gather the parameters of a module around its forward and backward pass, and at no other time.
    """

    never: Tensor | None  # [V] added to the logits; None: nothing is

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: str | None = None) -> None:
        super().__init__(in_features, out_features, bias, device)
        self.register_buffer("never", None, persistent=False)

    @classmethod
    def of(cls, linear: nn.Linear) -> ScoringHead:
        """Return a head that shares the parameters of `linear`."""
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight, head.bias = linear.weight, linear.bias
        return head

    def never_sample(self, tokens: Sequence[int]) -> None:
        """Give these tokens no probability, as an engine does that is told never to sample them."""
        penalty = torch.zeros(self.out_features, dtype=self.weight.dtype, device=self.weight.device)
        self.never = penalty.index_fill_(0, torch.tensor(tokens, device=penalty.device), NEVER)

    def offset(self, hidden: Tensor) -> Tensor | None:
        """Return what is added to the logits of `hidden`, [V], or None."""
        if self.never is None:
            return self.bias
        never = self.never.to(hidden.device)
        return never if self.bias is None else self.bias + never

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        read: Read | None = None,
        later: bool = False,
    ) -> Any:
        """Return the logits of `hidden`.

        With `targets` [N], return (log_probs [N], entropy [N] | None) instead; with `read`, its values for the logits,
        which are computed again in the backward pass; with `later`, the logits as `DeferredLogits`.
        """
        if later:
            offset = self.offset(hidden)
            return DeferredLogits(hidden, self.weight.detach(), None if offset is None else offset.detach())
        if read is not None:
            return self.read(hidden, read)
        if targets is None:
            return super().forward(hidden)
        settings = HeadSettings(temperature, entropy, chunk_rows(self.out_features))
        return ChunkedLogProbs.apply(hidden, self.weight, self.offset(hidden), targets, settings)

    def read(self, hidden: Tensor, read: Read) -> Tensor:
        """Return the values of `read`, computed one chunk of rows at a time."""

        def of_chunk(part: slice) -> Tensor:
            return read(_logits(hidden[part], self.weight, self.offset(hidden), 1.0), part)

        rows = chunk_rows(self.out_features)
        parts = [slice(start, start + rows) for start in range(0, max(len(hidden), 1), rows)]
        return torch.cat([checkpoint(of_chunk, part, use_reentrant=False) for part in parts])


def check_head(config: Any, flag: str, path: str) -> None:
    """Raise UserError for a head that scales or caps its logits, which the chunked head does not reproduce."""
    for key, neutral in UNUSUAL_HEADS.items():
        value = getattr(config, key, neutral)
        if value not in (None, neutral):
            raise UserError(
                f"{flag}={path}: models whose head has {key} ({value}) are not supported. Choose another model"
            )
