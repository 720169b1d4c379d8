"""Log-probs and entropies of given tokens without a [T, V] matrix of logits.

The language-model head processes the rows in chunks; the backward pass computes the logits of each chunk again. With z
= l / temperature, p = softmax(z), one row, target y:

    l = scale (h W^T + b), or with a cap  cap tanh(scale (h W^T + b) / cap)
    log_prob = z_y - logsumexp(z)                d log_prob / dz_j = [j = y] - p_j
    entropy  = logsumexp(z) - sum_j p_j z_j      d entropy  / dz_j = -p_j (log p_j + entropy)

The derivative of l is scale, with a cap times 1 - (l / cap)^2. N rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf_suite.data.generation import NEVER
from rlhf_suite.models.families import Head

Rows = slice | Tensor  # some of N rows
Read = Callable[[Tensor, Rows], Tensor]  # (logits [n, V], their rows among all N) -> one value per row, [n, ...]

CHUNK_ROWS = 1024  # enough for a GPU's matrix unit; with V = 150k the logits of a chunk take 0.6 GB in fp32
CHUNK_ELEMENTS = 2**22  # small vocabularies take more rows at a time


def chunk_rows(vocabulary: int) -> int:
    """Return how many rows the head processes at a time."""
    return max(CHUNK_ROWS, CHUNK_ELEMENTS // vocabulary)


class LogitRule(NamedTuple):
    """What a head makes of the product of hidden states and its matrix."""

    scale: float = 1.0
    cap: float | None = None
    never: Tensor | None = None  # [V] added to the logits: tokens that are never sampled

    @property
    def is_linear(self) -> bool:
        """Return whether logits are the product itself, but for tokens that are never sampled."""
        return self.scale == 1.0 and self.cap is None

    def slope(self, logits: Tensor, temperature: float) -> Tensor | float:
        """Return the derivative of logits, which were divided by `temperature`, with respect to the product."""
        if self.cap is None:
            return self.scale
        capped = logits * temperature if self.never is None else logits * temperature - self.never
        return (1 - (capped / self.cap).square_()).mul_(self.scale)


class DeferredLogits(NamedTuple):
    """The logits of N tokens, computed on request by a head that does not change until then. They carry no gradients.

    Under ZeRO-3 this object keeps the whole matrix of the head in memory.
    """

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    rule: LogitRule = LogitRule()
    places: Tensor | None = None  # [N] where each row is in `hidden`, if this rank holds only some of them

    def logits(self, rows: Rows) -> Tensor:
        """Return the logits of these rows, [rows, V], in fp32 or more."""
        hidden = self.hidden[rows if self.places is None else self.places[rows]]
        return _logits(hidden, self.weight, self.bias, self.rule)


class HeadSettings(NamedTuple):
    """The settings of one chunked computation."""

    temperature: float
    entropy: bool
    chunk_rows: int
    rule: LogitRule = LogitRule()


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
        temperature, with_entropy, rows, rule = settings
        log_probs, normalisers, entropies = [], [], []
        for start in range(0, len(hidden), rows):
            logits = _logits(hidden[start : start + rows], weight, bias, rule, temperature)
            normaliser = logits.logsumexp(-1)
            chosen = logits.gather(-1, targets[start : start + rows, None]).squeeze(-1)
            log_probs.append(chosen - normaliser)
            normalisers.append(normaliser)
            if with_entropy:
                probabilities = (logits - normaliser[:, None]).exp_()
                entropies.append(normaliser - (probabilities * logits).sum(-1))
        empty = _logits(hidden[:0], weight, bias, rule, temperature).sum(-1)  # for a batch that needs no row at all
        entropy = torch.cat([*entropies, empty]) if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat([*normalisers, empty]), entropy)
        ctx.temperature, ctx.rows, ctx.rule = temperature, rows, rule
        ctx.set_materialize_grads(False)
        return torch.cat([*log_probs, empty]), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        hidden_gradient = torch.empty_like(hidden) if need_hidden else None
        # Sums over chunks are kept in fp32, also if the weights are bf16.
        weight_gradient = torch.zeros_like(weight, dtype=wide) if need_weight and not len(hidden) else None
        bias_gradient = torch.zeros_like(bias, dtype=wide) if need_bias else None
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            chunk = hidden[part]
            logits = _logits(chunk, weight, bias, ctx.rule, ctx.temperature)
            slope = None if ctx.rule.is_linear else ctx.rule.slope(logits, ctx.temperature)
            logits_gradient = _logits_gradient(
                logits.sub_(normaliser[part, None]),
                targets[part],
                gradients[0][part] if gradients[0] is not None else None,
                gradients[1][part] if gradients[1] is not None else None,
                entropy[part] if entropy is not None else None,
            )
            logits_gradient = logits_gradient.div_(ctx.temperature)
            logits_gradient = (logits_gradient if slope is None else logits_gradient.mul_(slope)).to(weight.dtype)
            if hidden_gradient is not None:
                hidden_gradient[part] = logits_gradient @ weight
            if need_weight:
                weight_gradient = add_product(weight_gradient, logits_gradient.T, chunk, wide)
            if bias_gradient is not None:
                bias_gradient += logits_gradient.sum(0)
        return (
            hidden_gradient,
            weight_gradient.to(weight.dtype) if weight_gradient is not None else None,
            bias_gradient.to(weight.dtype) if bias_gradient is not None else None,
            None,
            None,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, rule: LogitRule, temperature: float = 1.0) -> Tensor:
    """Return the argument of softmax, [rows, V], in fp32 or more."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if rule.scale != 1.0:
        logits = logits * rule.scale
    if rule.cap is not None:
        logits = rule.cap * torch.tanh(logits / rule.cap)
    if rule.never is not None:
        logits = logits + rule.never
    return logits.div_(temperature)


def _logits_gradient(
    log_p: Tensor, targets: Tensor, of_log_prob: Tensor | None, of_entropy: Tensor | None, entropy: Tensor | None
) -> Tensor:
    """Return the gradient with respect to z, [rows, V]. This overwrites `log_p`."""
    if of_entropy is not None:
        assert entropy is not None
        p = log_p.exp()
        result = log_p.add_(entropy[:, None]).mul_(p).mul_(-of_entropy[:, None])
        if of_log_prob is not None:
            result.addcmul_(p, -of_log_prob[:, None])
    else:
        result = log_p.exp_().mul_(0.0 if of_log_prob is None else -of_log_prob[:, None])
    if of_log_prob is not None:
        result.scatter_add_(1, targets[:, None], of_log_prob[:, None])
    return result


def add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `total`, which may be changed, plus the product of two matrices, in `dtype`: without a matrix for the
    product where all have one precision."""
    if total is None:
        return (left @ right).to(dtype)
    return total.addmm_(left, right) if left.dtype == dtype else total.add_(left @ right)


class ScoringHead(nn.Linear):
    """A language-model head that can also compute the log-probs of given tokens.

    The chunked computation is in this module's own forward, because ZeRO-3 has the whole weight only there: its hooks
    gather the parameters of a module around its forward and backward pass, and at no other time.
    """

    never: Tensor | None  # [V] added to the logits; None: nothing is

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: str | None = None) -> None:
        super().__init__(in_features, out_features, bias, device)
        self.register_buffer("never", None, persistent=False)
        self.fixed = LogitRule()

    @classmethod
    def of(cls, linear: nn.Linear, fixed: LogitRule) -> ScoringHead:
        """Return a head that shares the parameters of `linear`, with the scale and the cap that its family has."""
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight, head.bias, head.fixed = linear.weight, linear.bias, fixed
        return head

    def never_sample(self, tokens: Sequence[int]) -> None:
        """Give these tokens no probability, as an engine does that is told never to sample them."""
        penalty = torch.zeros(self.out_features, dtype=self.weight.dtype, device=self.weight.device)
        self.never = penalty.index_fill_(0, torch.tensor(tokens, device=penalty.device), NEVER)

    def rule(self, hidden: Tensor) -> LogitRule:
        """Return what becomes of the product with `hidden`."""
        return self.fixed if self.never is None else self.fixed._replace(never=self.never.to(hidden.device))

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        read: Read | None = None,
        later: bool = False,
    ) -> Any:
        """Return the logits of `hidden`, before a scale and a cap: the model of transformers applies these itself.

        With `targets` [N], return (log_probs [N], entropy [N] | None) instead; with `read`, its values for the logits,
        which are computed again in the backward pass; with `later`, the logits as `DeferredLogits`.
        """
        if later:
            bias = None if self.bias is None else self.bias.detach()
            return DeferredLogits(hidden, self.weight.detach(), bias, self.rule(hidden))
        if read is not None:
            return self.read(hidden, read)
        if targets is None:
            return super().forward(hidden)
        settings = HeadSettings(temperature, entropy, chunk_rows(self.out_features), self.rule(hidden))
        return ChunkedLogProbs.apply(hidden, self.weight, self.bias, targets, settings)

    def read(self, hidden: Tensor, read: Read) -> Tensor:
        """Return the values of `read`, computed one chunk of rows at a time."""

        def of_chunk(part: slice) -> Tensor:
            return read(_logits(hidden[part], self.weight, self.bias, self.rule(hidden)), part)

        rows = chunk_rows(self.out_features)
        parts = [slice(start, start + rows) for start in range(0, max(len(hidden), 1), rows)]
        return torch.cat([checkpoint(of_chunk, part, use_reentrant=False) for part in parts])


def logit_rule(config: Any, head: Head) -> LogitRule:
    """Return what a head makes of its product, by the settings of a model that its family declares."""
    scale = float(getattr(config, head.multiplier)) if head.multiplier else 1.0
    if head.divisor:
        scale /= float(getattr(config, head.divisor))
    return LogitRule(scale, getattr(config, head.cap) if head.cap else None)
