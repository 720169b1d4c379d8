"""Token sequences laid end to end: the one batch layout of the project.

Nothing is padded here. A batch of B sequences with T tokens in all has `ids` [T] and `lengths` [B] (sum = T). Its other
fields are columns: tensors with one entry per token, [T, ...], or one per sequence, [B, ...]. `TokenBatch` has those
that every use needs; a use with further columns declares them as fields of a subclass, of type `PerToken` or `PerRow`
(`train.task.SupervisedBatch`, `data.trajectory.Experience`). All functions here act on the columns that
are there, whatever the class.

A per-token quantity stands at the token it describes: `log_probs[t] = log p(ids[t] | earlier tokens of its sequence)`,
`mask[t] = 1` if token t is trained on. The first token of a sequence has log-prob 0 and mask 0.
A batch on the CPU crosses processes as numpy arrays, which pickle about four times as fast as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, chain
from typing import Annotated, Any, Literal, Self, TypeVar, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from rlhf_suite.data.images import Image


@dataclass(frozen=True)
class Example:
    """One encoded sequence: its token ids, which of them are trained on (0 or 1 per token), and where it comes from.

    `numbers` and `token_numbers` become the columns of these names when examples are collated.
    """

    ids: list[int]
    mask: list[int]
    where: str = ""
    numbers: dict[str, float] = field(default_factory=dict)  # one per name
    truncated: bool = False  # its end was cut off at data.max_len
    token_numbers: dict[str, list[float]] = field(default_factory=dict)  # one per name and token
    notes: tuple[str, ...] = field(default=(), compare=False)  # differences from its row; for the log, not stored
    images: tuple[Image, ...] | None = None  # in the order of their tokens; None: its data has no images

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Group:
    """Sequences that stay in one micro-batch, in order: the two answers of a pair, or examples packed into one row."""

    examples: tuple[Example, ...]

    def __len__(self) -> int:
        """Return the number of tokens of all its sequences."""
        return sum(map(len, self.examples))

    @property
    def where(self) -> str:
        """The origin of each sequence, named once: the answers of a pair share a row, packed examples do not."""
        return ", ".join(dict.fromkeys(example.where for example in self.examples))

    @property
    def truncated(self) -> bool:
        return any(example.truncated for example in self.examples)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of all its sequences."""
        return tuple(note for example in self.examples for note in example.notes)


Item = Example | Group  # what one row of data becomes


def sequences(item: Item) -> tuple[Example, ...]:
    """Return the sequences of an item."""
    return item.examples if isinstance(item, Group) else (item,)


Unit = Literal["token", "row"]  # what a column has one entry of


# The types of columns that a batch may lack.
PerToken = Annotated[Tensor | None, "token"]  # [T, ...]
PerRow = Annotated[Tensor | None, "row"]  # [B, ...]


@dataclass(frozen=True)
class HostCopy:
    """What the host keeps of a batch that it sent to a device, so that it need not wait for the device to ask it."""

    lengths: Tensor  # [B]
    mask: Tensor  # [T]
    ids: Tensor  # [T]
    sent: tuple[Tensor, Tensor, Tensor]  # the three on the device


@dataclass(frozen=True)
class TokenBatch:
    """B sequences laid end to end, T tokens in all; `len(batch)` is B."""

    ids: Tensor  # [T] int64, the tokens
    lengths: Tensor  # [B] int64, the number of tokens of each sequence; their sum is T
    mask: Annotated[Tensor, "token"]  # [T] float32, 1 where a token is trained on or asked about
    index: PerRow = None  # [B] int64, the number of each sequence among those that it was taken from
    # [T, M, K] the K experts to which each of M layers sends each token, -1 where it decides itself; None: everywhere
    routes: PerToken = None
    # [B] the image files of each sequence, in the order of their tokens; None: the run has no images
    images: tuple[tuple[bytes, ...], ...] | None = None
    host_copy: HostCopy | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.images is None or len(self.images) == len(self), "an entry of images per sequence"
        assert self.ids.ndim == 1 and self.lengths.ndim == 1, "ids is [T], lengths is [B]"
        for name, value in self.columns("token").items():
            assert len(value) == self.num_tokens, f"{name} has {len(value)} entries for {self.num_tokens} tokens"
        for name, value in self.columns("row").items():
            assert len(value) == len(self), f"{name} has {len(value)} entries for {len(self)} sequences"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Arrays from Ray's store cannot be written to, and keep their memory there: the batch gets its own.
        own = {name: torch.from_numpy(value.copy()) for name, value in state.items() if isinstance(value, np.ndarray)}
        vars(self).update(state | own)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.ids)

    @property
    def host_lengths(self) -> Tensor:
        """`lengths` in host memory, [B]."""
        known = self.host_copy
        return known.lengths if known is not None and known.sent[0] is self.lengths else self.lengths.cpu()

    @property
    def host_mask(self) -> Tensor:
        """`mask` in host memory, [T]."""
        known = self.host_copy
        return known.mask if known is not None and known.sent[1] is self.mask else self.mask.cpu()

    @property
    def host_ids(self) -> Tensor:
        """`ids` in host memory, [T]."""
        known = self.host_copy
        return known.ids if known is not None and known.sent[2] is self.ids else self.ids.cpu()

    @property
    def masked(self) -> Tensor:
        """The tokens in the mask, [N]. Their number is counted in host memory, so that nothing waits for the device."""
        return torch.nonzero_static(self.mask, size=int(self.host_mask.count_nonzero())).squeeze(1)

    @property
    def starts(self) -> Tensor:
        """Index of each sequence's first token, [B]."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def segments(self) -> Tensor:
        """Index of the sequence each token belongs to, [T]."""
        rows = torch.arange(len(self), device=self.lengths.device)
        return torch.repeat_interleave(rows, self.lengths, output_size=self.num_tokens)

    def columns(self, unit: Unit) -> dict[str, Tensor]:
        """Return the columns of a unit that the batch has, by name, in the order of their declaration."""
        kind: type = type(self)  # for mypy a class with __eq__ and no __hash__ cannot be hashed itself
        columns = {name: getattr(self, name) for name, its in column_units(kind).items() if its == unit}
        return {name: value for name, value in columns.items() if value is not None}

    def map_columns(
        self,
        of_tokens: Callable[[Tensor], Tensor],
        of_rows: Callable[[Tensor], Tensor],
        images: tuple[tuple[bytes, ...], ...] | None,
    ) -> Self:
        """Return the batch with `of_tokens` of its ids and token columns, `of_rows` of its lengths and row columns, and
        these images."""
        changed: dict[str, Any] = {name: of_tokens(value) for name, value in self.columns("token").items()}
        changed |= {name: of_rows(value) for name, value in self.columns("row").items()}
        return replace(self, ids=of_tokens(self.ids), lengths=of_rows(self.lengths), images=images, **changed)

    def to(self, device: torch.device | str | None) -> Self:
        """Return the same batch on another device; nothing waits until it is there. None: on the one that it is on."""
        if device is None or self.ids.device == torch.device(device):
            return self
        columns = [self.ids, self.lengths, *self.columns("token").values(), *self.columns("row").values()]
        sent = dict(zip(map(id, columns), send_together(columns, device), strict=True))
        moved = self.map_columns(lambda value: sent[id(value)], lambda value: sent[id(value)], self.images)
        return moved.keep(self.host_lengths, self.host_mask, self.host_ids)

    def keep(self, lengths: Tensor, mask: Tensor, ids: Tensor) -> Self:
        """Return the batch with what the host keeps of it."""
        return replace(self, host_copy=HostCopy(lengths, mask, ids, (self.lengths, self.mask, self.ids)))


B = TypeVar("B", bound=TokenBatch)
ALIGNED = 16  # bytes; views of any dtype need aligned offsets


def send_together(values: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return the values on another device, by one copy out of pinned memory that nothing waits for."""
    *starts, size = accumulate((-(-value.nbytes // ALIGNED) * ALIGNED for value in values), initial=0)
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
    places = [slice(start, start + value.nbytes) for start, value in zip(starts, values, strict=True)]
    for place, value in zip(places, values, strict=True):
        packed[place].view(value.dtype).view(value.shape).copy_(value)
    sent = packed.to(device, non_blocking=True)
    return [sent[place].view(value.dtype).view(value.shape) for place, value in zip(places, values, strict=True)]


@cache
def column_units(kind: type) -> dict[str, Unit]:
    """Return the unit of every column that a class of batches declares, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


def require_column(column: Tensor | None, name: str) -> Tensor:
    """Return a column that its reader cannot do without."""
    assert column is not None, f"this batch has no column {name!r}, which is needed here"
    return column


def collate(examples: Sequence[Example], kind: type[B]) -> B:
    """Lay examples end to end. `mask`, `numbers` and `token_numbers` become float32 columns of `kind`."""
    lengths = torch.tensor([len(example) for example in examples], dtype=torch.int64)
    total = int(lengths.sum())
    ids = np.fromiter(chain.from_iterable(example.ids for example in examples), dtype=np.int64, count=total)
    mask = np.fromiter(chain.from_iterable(example.mask for example in examples), dtype=np.float32, count=total)
    names = list(examples[0].numbers) if examples else []
    rows: dict[str, Any] = {
        name: torch.tensor([example.numbers[name] for example in examples]).float() for name in names
    }
    per_token: dict[str, Any] = {
        name: torch.tensor([value for example in examples for value in example.token_numbers[name]])
        for name in (examples[0].token_numbers if examples else {})
    }
    images = [example.images for example in examples if example.images is not None]
    assert len(images) in (0, len(examples)), "images of some sequences, and for others not even an empty list"
    files = tuple(tuple(image.data for image in row_images) for row_images in images) if images else None
    return kind(torch.from_numpy(ids), lengths, torch.from_numpy(mask), images=files, **per_token, **rows)


def token_places(lengths: Tensor, chosen: Tensor) -> Tensor:
    """Return where the tokens of the sequences `chosen` [N] stand among those of all sequences, [T'] int32, or int64 if
    there are too many."""
    starts, taken = (lengths.cumsum(0) - lengths)[chosen], lengths[chosen]  # [N]
    shift = starts - (taken.cumsum(0) - taken)
    num_tokens = int(lengths.sum()) + int(taken.sum())
    dtype = np.int32 if num_tokens < 2**31 else np.int64
    places = np.repeat(shift.cpu().numpy().astype(dtype), taken.cpu().numpy())  # [T']
    places += np.arange(len(places), dtype=dtype)
    return torch.from_numpy(places).to(lengths.device)


def take(batch: B, indices: Sequence[int] | Tensor) -> B:
    """Return the sequences `indices` [N], in that order; an index may come twice. Nothing waits for the device of a
    batch that `to` has sent."""
    chosen = torch.as_tensor(indices, dtype=torch.int64, device="cpu")  # [N]
    places = token_places(batch.host_lengths, chosen)  # [T']
    images = None if batch.images is None else tuple(batch.images[row] for row in chosen.tolist())
    device = batch.ids.device
    rows, tokens = (chosen, places) if device.type == "cpu" else send_together([chosen, places], device)
    taken = batch.map_columns(lambda value: value.index_select(0, tokens), lambda value: value[rows], images)
    if batch.host_copy is None:
        return taken
    return taken.keep(batch.host_lengths[chosen], batch.host_mask[places], batch.host_ids[places])


def weightless(batch: B) -> B:
    """Return a copy that no loss counts: its mask is zero."""
    return replace(batch, mask=torch.zeros_like(batch.mask))


def kind_of(batch: TokenBatch) -> str:
    """Return which modules of a model a batch passes through: batches of one class do alike, with images or without."""
    return f"{type(batch).__name__} {'without' if batch.images is None else 'with'} images"
