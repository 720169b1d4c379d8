"""Token sequences laid end to end: the one batch layout of the project.

Nothing is padded here. A batch of B sequences with T tokens in all has `ids` [T] and `lengths` [B] (sum = T), and two
dicts that say themselves how their tensors are indexed:

    tokens   {name: [T, ...]}   one entry per token:    mask, log_probs, values, advantages ...
    rows     {name: [B, ...]}   one entry per sequence: reward, label, group ...

A per-token quantity stands at the token it describes: `log_probs[t] = log p(ids[t] | earlier tokens of its sequence)`,
`mask[t] = 1` if token t is trained on. The first token of a sequence has log-prob 0 and mask 0.
A batch on the CPU pickles, so it crosses processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """One encoded sequence: token ids, which of them are trained on (0/1 per token), numbers of its own and of each
    token, its origin."""

    ids: list[int]
    mask: list[int]
    where: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    truncated: bool = False  # its end was cut off at data.max_len
    token_numbers: dict[str, list[float]] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)  # how it is not as its row says; for the log, not kept

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Group:
    """Sequences that stay in one micro-batch, in order: the two answers of a pair, or examples packed into one row."""

    examples: tuple[Example, ...]

    def __len__(self) -> int:
        """Tokens of all of them."""
        return sum(map(len, self.examples))

    @property
    def where(self) -> str:
        """That of each sequence, once: the answers of a pair are of one row, packed examples of many."""
        return ", ".join(dict.fromkeys(example.where for example in self.examples))

    @property
    def truncated(self) -> bool:
        return any(example.truncated for example in self.examples)

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of all sequences."""
        return tuple(note for example in self.examples for note in example.notes)


Item = Example | Group  # what one row of data becomes


def sequences(item: Item) -> tuple[Example, ...]:
    """The sequences of an item."""
    return item.examples if isinstance(item, Group) else (item,)


@dataclass(frozen=True)
class TokenBatch:
    """B sequences of T tokens in all; `len(batch)` is B."""

    ids: Tensor  # [T] int64
    lengths: Tensor  # [B] int64
    tokens: dict[str, Tensor] = field(default_factory=dict)  # each [T, ...]
    rows: dict[str, Tensor] = field(default_factory=dict)  # each [B, ...]

    def __post_init__(self) -> None:
        assert self.ids.ndim == 1 and self.lengths.ndim == 1, "ids is [T], lengths is [B]"
        for name, value in self.tokens.items():
            assert len(value) == self.num_tokens, (
                f"tokens[{name!r}] has {len(value)} entries for {self.num_tokens} tokens"
            )
        for name, value in self.rows.items():
            assert len(value) == len(self), f"rows[{name!r}] has {len(value)} entries for {len(self)} sequences"

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.ids)

    @property
    def starts(self) -> Tensor:
        """Index of each sequence's first token, [B]."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def segments(self) -> Tensor:
        """Index of the sequence each token belongs to, [T]."""
        rows = torch.arange(len(self), device=self.lengths.device)
        return torch.repeat_interleave(rows, self.lengths, output_size=self.num_tokens)

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on another device."""
        return TokenBatch(
            self.ids.to(device),
            self.lengths.to(device),
            {name: value.to(device) for name, value in self.tokens.items()},
            {name: value.to(device) for name, value in self.rows.items()},
        )


def collate(examples: Sequence[Example]) -> TokenBatch:
    """Lay examples end to end. `tokens["mask"]` is float32 [T]; each of `numbers` becomes float32 `rows[name]` [B], and
    each of `token_numbers` float32 `tokens[name]` [T]."""
    lengths = torch.tensor([len(example) for example in examples], dtype=torch.int64)
    total = int(lengths.sum())
    ids = np.fromiter(chain.from_iterable(example.ids for example in examples), dtype=np.int64, count=total)
    mask = np.fromiter(chain.from_iterable(example.mask for example in examples), dtype=np.float32, count=total)
    names = list(examples[0].numbers) if examples else []
    rows = {name: torch.tensor([example.numbers[name] for example in examples]).float() for name in names}
    per_token = {
        name: torch.tensor([value for example in examples for value in example.token_numbers[name]])
        for name in (examples[0].token_numbers if examples else {})
    }
    return TokenBatch(torch.from_numpy(ids), lengths, {"mask": torch.from_numpy(mask), **per_token}, rows)


def take(batch: TokenBatch, indices: Sequence[int] | Tensor) -> TokenBatch:
    """The sequences `indices` [N], in that order; an index may come twice."""
    chosen = torch.as_tensor(indices, dtype=torch.int64, device=batch.lengths.device)  # [N]
    lengths = batch.lengths[chosen]  # [N]
    new_starts = lengths.cumsum(0) - lengths  # [N]
    shift = torch.repeat_interleave(batch.starts[chosen] - new_starts, lengths)  # [T']
    source = torch.arange(len(shift), device=shift.device) + shift  # [T']
    return TokenBatch(
        batch.ids[source],
        lengths,
        {name: value[source] for name, value in batch.tokens.items()},
        {name: value[chosen] for name, value in batch.rows.items()},
    )
