"""Attention over sequences that are laid end to end, registered in transformers as "varlen".

Every sequence attends only to itself, causally. On CUDA in bf16 or fp16 a flash kernel computes it (`flash.py`).
Anywhere else torch's SDPA runs on views of the packed tokens, one call for each run of neighbouring sequences of the
same length, so nothing is padded or copied. (Padded blocks of similar lengths take 1.4 times as long on a CPU.) Neither
builds a T x T mask. Attention sinks and soft caps are computed by the second way on every device; a soft cap needs the
L x L scores of a run in memory. With sequence parallelism a rank has a `Shard` of the tokens. T tokens, B sequences, L
longest length, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from rlhf_suite.errors import UserError
from rlhf_suite.models.attention_blocks import States
from rlhf_suite.models.flash import Ends, FlashCall, attend_flash, takes_ends
from rlhf_suite.models.prefixes import SharedPrefixes
from rlhf_suite.models.sequence_parallel import GATHER, RING, SequenceGroup, Shard

NAME = "varlen"
HALF = (torch.bfloat16, torch.float16)
REFUSED = ("position_bias",)  # arguments that change the scores, and that these kernels ignore
LARGEST_MASK = (
    2**22
)  # entries, queries times keys: where a mask would be larger, a part of the queries is taken at a time
ALIGNED = 8  # kernels of GPUs want head sizes that are multiples of this


@dataclass(frozen=True)
class SequenceLayout:
    """The place of each sequence in a batch; computed once per forward pass and passed to every layer."""

    packed: bool
    cu_lengths: Tensor  # [B+1] int32: 0 and the running sum of lengths
    max_length: int
    positions: Tensor  # [T] position of each token in its sequence
    slots: Tensor  # [T] index of each token in the flattened [B, L]
    runs: tuple[tuple[int, int], ...]  # (count, length) of neighbouring sequences of equal length
    shard: Shard | None = None  # which tokens this rank holds, if the ranks of a group split them
    images: Tensor | None = None  # [T] the image of each token, from 1, and 0 for text; those of an image see all of it
    prefixes: SharedPrefixes | None = None  # the tokens that are not computed, since others have the same states

    @staticmethod
    def of(
        lengths: Tensor, packed: bool, group: SequenceGroup | None = None, host_lengths: Tensor | None = None
    ) -> SequenceLayout:
        """Return the layout of sequences with `lengths` [B], which may also be in host memory: then nothing waits for
        the device. If a group splits the tokens, the layout may end with one more sequence, of padding, which makes the
        parts equal."""
        known: list[int] = (lengths if host_lengths is None else host_lengths).tolist()
        padding = 0 if group is None else -sum(known) % (2 * group.size)
        if padding > 0:
            lengths, known = torch.cat([lengths, lengths.new_full((1,), padding)]), [*known, padding]
        starts = lengths.cumsum(0) - lengths  # [B]
        total, longest = sum(known), max(known)
        rows = torch.arange(len(lengths), device=lengths.device)
        segments = torch.repeat_interleave(rows, lengths, output_size=total)  # [T]
        positions = torch.arange(total, device=lengths.device) - starts[segments]  # [T]
        cu_lengths = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        runs = tuple((len(list(equal)), length) for length, equal in groupby(known))
        shard = None if group is None else Shard.of(known, group, lengths.device)
        return SequenceLayout(packed, cu_lengths, longest, positions, segments * longest + positions, runs, shard)

    @property
    def rows(self) -> Tensor | None:
        """Where what a model returns for each token stands among its rows, [T]; None: each at its own place."""
        if not self.packed:
            return self.slots
        return None if self.prefixes is None else self.prefixes.places

    def select_held(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the `tokens` [N] this rank holds, [n] indices into them, and their places among all that it
        holds, [n]."""
        if self.shard is None:
            return torch.arange(len(tokens), device=tokens.device), tokens
        own = self.shard.tokens
        numbers = torch.arange(len(own), device=own.device)
        places = torch.full_like(self.positions, -1).index_copy_(0, own, numbers)[tokens]  # [N]
        which = (places >= 0).nonzero().squeeze(1)
        return which, places[which]

    def lay_out(self, values: Tensor) -> Tensor:
        """Return `values` [T] in one row, [1, T], or in right-padded rows, [B, L], with zeros as padding."""
        if self.packed:
            return values[None]
        rows, longest = len(self.cu_lengths) - 1, self.max_length
        return values.new_zeros(rows * longest).index_copy_(0, self.slots, values).view(rows, longest)

    def whole(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over the ranks that split the tokens."""
        return values if self.shard is None else self.shard.group.sum(values)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sequences: SequenceLayout | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention as an attention function of transformers.

    `query` is [1, H, T, D] packed or [B, H, L, D] padded; the output is [1, T, H, D] or [B, L, H, D]. A token sees
    itself and at most `sliding_window - 1` tokens before it in its own sequence.

    Raises:
        UserError: the model needs something that these kernels do not compute.
    """
    refused = [name for name in REFUSED if settings.get(name) is not None]
    if settings.get("softcap") is not None and settings.get("s_aux") is not None:
        refused = ["softcap with s_aux"]
    if refused or sequences is None or not getattr(module, "is_causal", True):
        reason = f"uses {', '.join(refused)}" if refused else "does not pass the sequence borders to its attention"
        raise UserError(
            f"ds.attn_implementation=varlen: {type(module).__name__} {reason}. Set ds.attn_implementation=eager "
            "and ds.packing_samples=false"
        )
    call = _Call(
        settings.get("scaling"),
        settings.get("sliding_window"),
        settings.get("dropout") or 0.0,
        settings.get("softcap"),
        settings.get("s_aux"),
    )
    if not sequences.packed:
        images = None if sequences.images is None else sequences.lay_out(sequences.images)
        return call.attend_padded(query, key, value, images).transpose(1, 2), None

    if sequences.shard is None:
        return attend_packed(query, key, value, sequences, call), None
    states, group = States(query, key, value), sequences.shard.group
    if group.mode in (GATHER, RING):
        check_blocks(states, sequences, call)
    elif call.sinks is not None:
        call = replace(call, sinks=call.sinks.unflatten(0, (group.size, -1))[group.index])

    def whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_packed(query, key, value, sequences, call)

    return sequences.shard.attention(states, call.scaling, whole), None


def check_blocks(states: States, sequences: SequenceLayout, call: _Call) -> None:
    """Raise UserError for an attention that blocks of queries and keys do not compute."""
    reasons = {
        f"a sliding window of {call.window} tokens": call.window is not None and call.window < sequences.max_length,
        "dropout of its attention": call.dropout > 0,
        "a soft cap of its attention": call.cap is not None,
        "attention sinks": call.sinks is not None,
        "values and keys of different sizes": states.query.shape[-1] != states.value.shape[-1],
        "fp32 attention on a GPU": states.query.is_cuda and states.query.dtype not in HALF,
    }
    unsupported = [reason for reason, holds in reasons.items() if holds]
    if unsupported:
        raise UserError(
            f"ds.ring_attn_mode=gather and ring: this model has {unsupported[0]}, which they do not compute. Set "
            "ds.ring_attn_mode=ulysses"
        )


def attend_packed(query: Tensor, key: Tensor, value: Tensor, sequences: SequenceLayout, call: _Call) -> Tensor:
    """Return the attention of a whole packed row, [1, T, H, D]; `query` is [1, H, T, D]. Where sequences share
    prefixes, of the tokens that are computed."""
    states, prefixes = [part[0] for part in (query, key, value)], sequences.prefixes  # [H|K, T, D]
    if prefixes is not None:
        states[1:] = [prefixes.expand(part.transpose(0, 1)).transpose(0, 1) for part in states[1:]]
    is_plain = call.is_plain and sequences.images is None
    if query.is_cuda and query.dtype in HALF and query.shape[-1] == value.shape[-1] and is_plain:
        ends = None if prefixes is None else Ends(prefixes.cu_lengths, prefixes.longest)
        flash = FlashCall(sequences.cu_lengths, sequences.max_length, call.scaling, call.window, call.dropout, ends)
        tokens = [part.transpose(0, 1) for part in states]  # [T, H|K, D]
        if ends is None or takes_ends(tokens, flash):
            return attend_flash(tokens, flash)[None]
    runs = [(count, length, length) for count, length in sequences.runs] if prefixes is None else prefixes.runs
    sizes = [[count * length for count, length, _ in runs], *2 * [[count * length for count, _, length in runs]]]
    parts = zip(*(part.split(size, dim=1) for part, size in zip(states, sizes, strict=True)), strict=True)
    images: Sequence[Tensor | None] = (
        [None] * len(runs) if sequences.images is None else sequences.images.split(sizes[0])
    )
    outputs = []
    for (count, _, length), run, pictures in zip(runs, parts, images, strict=True):
        q, k, v = (part.unflatten(1, (count, -1)).transpose(0, 1) for part in run)  # [count, H|K, length, D], views
        rows = None if pictures is None else pictures.unflatten(0, (count, length))
        outputs.append(call.attend_padded(q, k, v, rows).transpose(1, 2).flatten(0, 1))  # [count * length, H, D]
    return torch.cat(outputs)[None]


@dataclass(frozen=True)
class _Call:
    """The attention settings of one layer."""

    scaling: float | None
    window: int | None
    dropout: float
    cap: float | None = None  # scores become cap * tanh(scores / cap)
    sinks: Tensor | None = None  # [H]: for each head the score of one more key, whose value is 0

    @property
    def is_plain(self) -> bool:
        """Return whether a flash kernel computes it."""
        return self.cap is None and self.sinks is None

    def attend_padded(self, query: Tensor, key: Tensor, value: Tensor, images: Tensor | None = None) -> Tensor:
        """Return causal attention of right-padded rows, [B, H, L, D]. Padding comes last, so no real query sees it.
        Fewer queries than keys are those of the last tokens. `images` [B, L]: as in `SequenceLayout`."""
        count, length = query.shape[2], key.shape[2]
        if count < length and count * length > max(length, LARGEST_MASK):
            step = max(1, LARGEST_MASK // length)
            parts = [slice(first, min(first + step, count)) for first in range(0, count, step)]
            ends = [length - count + part.stop for part in parts]
            states = zip(parts, ends, strict=True)
            return torch.cat(
                [self.attend_padded(query[:, :, part], key[:, :, :end], value[:, :, :end]) for part, end in states], 2
            )
        if self.sinks is not None:
            assert images is None, "no family has both"
            return self._attend_with_sinks(query, key, value, self.sinks)
        return self._attend(query, key, value, images=images)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, sees_first: bool = False, images: Tensor | None = None
    ) -> Tensor:
        """Return causal attention; `sees_first`: the first token is within the window of every query."""
        length, mask = key.shape[2], None
        is_limited = self.window is not None and length > self.window + sees_first
        if is_limited or images is not None or query.shape[2] < length:
            keys = torch.arange(length, device=query.device)
            queries = keys[length - query.shape[2] :, None]
            mask = keys <= queries  # [queries, keys]
            if is_limited and self.window is not None:
                mask &= keys > queries - self.window
            mask[:, 0] |= sees_first
        if mask is not None and images is not None:
            mask = mask | ((images[:, :, None] == images[:, None]) & (images > 0)[:, None])[:, None]  # [B, 1, L, L]
        if self.cap is not None:
            return self._attend_capped(query, key, value, mask, self.cap)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=mask is None,
            scale=self.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _attend_with_sinks(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        """Return attention whose softmax has one more term for each head, exp(sink), that adds nothing to the output.

        Any kernel computes it of rows that begin with one more token: its value is 0, and its key has a 1 in a feature
        that no other key has. Queries have sink / scaling there. The further zeros align the head size.
        """
        size, width = query.shape[-1], value.shape[-1]
        scaling = size**-0.5 if self.scaling is None else self.scaling
        score = (sinks.to(query.dtype) / scaling)[None, :, None, None].expand(*query.shape[:3], 1)
        more = ALIGNED - size % ALIGNED
        query = F.pad(torch.cat([query, score], dim=-1), (0, more - 1, 1, 0))
        key, value = (F.pad(states, (0, more, 1, 0)) for states in (key, value))
        key[:, :, 0, size] = 1
        call = replace(self, scaling=scaling, sinks=None)
        return call._attend(query, key, value, sees_first=True)[:, :, 1:, :width]

    def _attend_capped(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cap: float) -> Tensor:
        """Return attention with capped scores by its formula: torch has no kernel for it."""
        length, groups = key.shape[2], query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if self.scaling is None else self.scaling)
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        scores = (cap * torch.tanh(scores / cap)).masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
        return F.dropout(weights, self.dropout) @ value


# Of an attention that has no function for masks, transformers makes none, and does not wait for the device to know
# whether positions restart. The sequence borders replace the mask.
AttentionInterface.register(NAME, varlen_attention)
