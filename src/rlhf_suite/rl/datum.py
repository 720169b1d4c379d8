"""What a client is given and what it returns: sequences of tokens with the numbers that a loss reads of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from rlhf_suite.config.check.formatting import number_of
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.data.trajectory import Experience, Trajectory
from rlhf_suite.errors import UserError

Tokens = Sequence[int]
NEEDED = ("advantages", "old_log_probs")  # by every policy loss


@dataclass(frozen=True)
class Datum:
    """A sequence of T tokens, with a number for each of them wherever [T] stands. A token's number stands at the token
    itself: `old_log_probs[t]` is log p(tokens[t] | tokens[:t]).

    Cross-entropy reads the weights alone; every policy loss reads the advantages and old log-probs too.
    """

    tokens: Sequence[int]  # [T] ids
    # [T] of each token's loss, at least 0; 0 where a token is not trained on. None: 1 for all tokens but the first
    weights: ArrayLike | None = None
    advantages: ArrayLike | None = None  # [T] in units of the reward, or one number for all tokens
    old_log_probs: ArrayLike | None = None  # [T] nats, by the policy before the update
    ref_log_probs: ArrayLike | None = None  # [T] nats, by the reference; for algo.kl.use_loss

    @classmethod
    def of(
        cls,
        ledger: Trajectory,
        advantages: ArrayLike,
        old_log_probs: ArrayLike | None = None,
        ref_log_probs: ArrayLike | None = None,
    ) -> Datum:
        """Return a sampled ledger with weight 1 for the tokens that the model wrote. Its old log-probs are those of the
        engine that wrote them, unless others are given."""
        old = ledger.engine_log_probs if old_log_probs is None else old_log_probs
        return cls(ledger.ids.tolist(), ledger.model_mask.astype(np.float32), advantages, old, ref_log_probs)

    def mask(self, where: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return which tokens are trained on, and the weight of each, [T] both."""
        if self.weights is None:
            weights = np.ones(len(self.tokens), np.float32)
            weights[:1] = 0
            return weights, weights
        weights = per_token(self.weights, len(self.tokens), f"{where}: weights")
        if (weights < 0).any():
            raise UserError(f"{where}: weights has {weights.min():g}. A weight is at least 0")
        if weights[0] != 0:
            raise UserError(
                f"{where}: weights begins with {weights[0]:g}. The first token has no log-prob: write 0 there"
            )
        return (weights > 0).astype(np.float32), weights


def per_token(values: ArrayLike, count: int, name: str) -> NDArray[np.float32]:
    """Return one number for each of `count` tokens, [T] float32; a single number is that of all tokens.

    Raises:
        UserError: there are more or fewer, or one is not finite.
    """
    if isinstance(values, torch.Tensor):  # as a model has it: on a GPU, in bf16, with a gradient
        values = values.detach().float().cpu().numpy()
    try:
        array = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError):
        raise UserError(f"{name} is {values!r:.80}. Give a number for each token, or a single one") from None
    if array.ndim == 0:
        array = np.full(count, array, np.float32)
    if array.shape != (count,):
        shown = number_of(len(array), "number") if array.ndim == 1 else f"the shape {array.shape}"
        raise UserError(f"{name} has {shown} for {count} tokens. Give a number for each token, or a single one")
    if not np.isfinite(array).all():
        raise UserError(f"{name} has {array[~np.isfinite(array)][0]} at token {int(np.argmin(np.isfinite(array)))}")
    return array


def token_ids(tokens: Sequence[int], where: str, vocabulary: int, max_len: int) -> NDArray[np.int64]:
    """Return the ids of a sequence, [T].

    Raises:
        UserError: they are not ids of the vocabulary, too many, or none.
    """
    try:
        ids = np.asarray(tokens.cpu() if isinstance(tokens, torch.Tensor) else tokens)
        is_whole = ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer)
    except ValueError:
        ids, is_whole = np.array(0), False
    if ids.shape == (0,):
        raise UserError(f"{where} has no tokens. Give at least one")
    if not is_whole:
        raise UserError(f"{where}: tokens is {tokens!r:.80}. Give a list of token ids")
    if len(ids) > max_len:
        raise UserError(f"{where}: {len(ids)} tokens, but a sequence has at most data.max_len={max_len}. Raise it, or cut the sequence")  # fmt: skip  # noqa: E501
    wrong = (ids < 0) | (ids >= vocabulary)
    if wrong.any():
        raise UserError(
            f"{where}: the token id {ids[wrong][0]} is not in the vocabulary, which has 0 to {vocabulary - 1}"
        )
    return ids.astype(np.int64)


def name_data(data: Sequence[Datum]) -> list[str]:
    """Return what errors call each of the data.

    Raises:
        UserError: it is not a list of data, or has none.
    """
    if isinstance(data, Datum):
        raise UserError("data is one rs.Datum. Give a list of rs.Datum")
    if not len(data):
        raise UserError("there are no sequences. Give a list with at least one rs.Datum")
    names = [f"datum {number}" for number in range(len(data))]
    for name, datum in zip(names, data, strict=True):
        if not isinstance(datum, Datum):
            raise UserError(f"{name} is a {type(datum).__name__}. Give a list of rs.Datum")
    return names


def to_experience(data: Sequence[Datum], vocabulary: int, max_len: int, needed: Sequence[str] = ()) -> Experience:
    """Return data laid end to end. The weights become the mask, and `correction` where they are not 0 and 1.

    Raises:
        UserError: a sequence has wrong tokens or numbers, or lacks one of the `needed` numbers.
    """
    names = name_data(data)
    ids = [token_ids(datum.tokens, name, vocabulary, max_len) for name, datum in zip(names, data, strict=True)]
    for name, datum in zip(names, data, strict=True):
        for column in needed:
            if getattr(datum, column) is None:
                raise UserError(f"{name} has no {column}, which this loss reads. Give a number for each token")
    masks, weights = zip(*(datum.mask(name) for name, datum in zip(names, data, strict=True)), strict=True)
    if not any(mask.any() for mask in masks):
        raise UserError("no token has a weight above 0, so there is nothing to train on. Give weights")
    columns: dict[str, Any] = {
        column: join([
            per_token(getattr(datum, column), len(own), f"{name}: {column}")
            for name, datum, own in zip(names, data, ids, strict=True)
        ])
        for column in needed
    }  # fmt: skip
    are_marks = all(np.array_equal(mask, weight) for mask, weight in zip(masks, weights, strict=True))
    return Experience(
        ids=torch.from_numpy(np.concatenate(ids)),
        lengths=torch.tensor([len(own) for own in ids]),
        mask=join(masks),
        index=torch.arange(len(data)),
        correction=None if are_marks else join(weights),
        **columns,
    )


def join(parts: Sequence[NDArray[np.float32]]) -> torch.Tensor:
    """Return parts laid end to end, [T]."""
    return torch.from_numpy(np.concatenate(parts))


@dataclass(frozen=True)
class Adam:
    """What an optimiser step does otherwise than the flags `actor.adam` and actor.max_norm say; None: as they say."""

    lr: float | None = None  # in place of the rate of the schedule (actor.lr_scheduler)
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    max_norm: float | None = None  # of the gradient, to which it is clipped; 0: it is not

    def __post_init__(self) -> None:
        betas = (None, None) if self.betas is None else self.betas
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise UserError(f"rs.Adam: betas={betas!r:.80}. Give two numbers, such as (0.9, 0.95)")
        least = {"lr": self.lr, "eps": self.eps, "weight_decay": self.weight_decay, "max_norm": self.max_norm}
        for name, value in (*least.items(), ("betas", betas[0]), ("betas", betas[1])):
            is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 <= value < (1 if name == "betas" else np.inf)):
                limit = "from 0 to below 1" if name == "betas" else "of at least 0"
                raise UserError(f"rs.Adam: {name} has {value!r:.80}. Give a number {limit}")


@dataclass(frozen=True)
class LossOutput:
    """What a pass over data came to."""

    metrics: dict[str, float]  # docs/metrics.md
    log_probs: list[NDArray[np.float32]]  # of each datum [T], in nats; 0 where the weight is 0
    loss_sum: float  # of the losses of all tokens or sequences, not divided by their count


def as_datum(sequence: Datum | Trajectory | Tokens) -> Datum:
    """Return a sequence as data, with a weight for each token whose log-prob is asked for."""
    if isinstance(sequence, Trajectory):
        return Datum(sequence.ids.tolist(), sequence.model_mask.astype(np.float32))
    return sequence if isinstance(sequence, Datum) else Datum(sequence)


def split(batch: TokenBatch, values: torch.Tensor) -> list[NDArray[np.float32]]:
    """Return numbers per token [T] as those of each sequence."""
    return [part.numpy().copy() for part in torch.split(values.float(), batch.lengths.tolist())]
