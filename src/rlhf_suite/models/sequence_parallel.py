"""Sequence parallelism: the ranks of a group split the tokens of a packed row, and only their attention meets.

The row is cut into 2n chunks of equal length, and rank r holds chunks r and 2n-1-r. So each rank has early and late
tokens, and the causal attention of each takes about the same time (zigzag). All other layers work on a rank's own
tokens. A query attends to the keys of its own sequence at and before it, which other ranks may hold:

    gather   every rank collects all keys and values of a layer (Llama 3, arXiv:2407.21783, section 3.3.2)
    ring     keys and values go from rank to rank (arXiv:2310.01889)
    ulysses  tokens are exchanged for heads: every rank has all tokens of some heads (arXiv:2309.14509)

`gather` and `ring` add attention up block by block (`attention_blocks.py`): the causal attention within a chunk, and
the attention of the first tokens of a chunk to the earlier tokens of their sequence. They keep only a rank's own keys
and values for the backward pass, and collect those of the others again.

n ranks, T tokens of the padded row, t = T / n tokens of a rank, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from rlhf_suite.errors import UserError
from rlhf_suite.models.attention_blocks import Attended, Block, States
from rlhf_suite.models.families import heads_can_be_split

GATHER, RING, ULYSSES = "gather", "ring", "ulysses"
Whole = Callable[[Tensor, Tensor, Tensor], Tensor]  # attention over a whole row: [1, H|K, T, D] -> [1, T, H, D]


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that split the tokens of each batch among them; this one is number `index` of `size`."""

    ranks: dist.ProcessGroup
    index: int
    size: int
    mode: str  # of attention

    def check_heads(self, config: Any) -> None:
        """Raise UserError if the heads of a model cannot be split over the ranks, for `ulysses`."""
        heads = config.num_attention_heads
        pairs = getattr(config, "num_key_value_heads", None) or heads
        # The preflight reads config.json of a folder; a name of the hub is known once it is fetched.
        if self.mode == ULYSSES and not heads_can_be_split(heads, pairs, self.size):
            raise UserError(
                f"ds.ring_attn_mode=ulysses: {heads} query and {pairs} key/value heads cannot be split over "
                f"ds.ring_attn_size={self.size} ranks. Set ds.ring_attn_mode=gather"
            )

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks. Every rank goes on with the same computation, so the gradient of the sum is
        whole on each, and it is that of the rank's own summand."""
        total: Tensor = _Sum.apply(values, self.ranks)
        return total

    def all_gather(self, values: Tensor) -> Tensor:
        """Return the values [...] of all ranks, [n, ...]. No gradient."""
        everyones = values.new_empty(self.size, *values.shape)
        dist.all_gather_single(everyones.flatten(0, 1), values.contiguous(), group=self.ranks)
        return everyones

    def sum_of_own(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks of `values` [n, ...] at this rank's place, [...]. No gradient."""
        own = values.new_empty(values.shape[1:])
        dist.reduce_scatter_single(own, values.flatten(0, 1).contiguous(), group=self.ranks)
        return own

    def from_previous(self, values: Tensor) -> Tensor:
        """Send `values` to the next rank, and return those of the previous one. No gradient."""
        following, previous = (dist.get_global_rank(self.ranks, (self.index + by) % self.size) for by in (1, -1))
        values, received = values.contiguous(), torch.empty_like(values, memory_format=torch.contiguous_format)
        exchange = [
            dist.P2POp(dist.isend, values, following, self.ranks),
            dist.P2POp(dist.irecv, received, previous, self.ranks),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        return received

    def exchange(self, parts: Tensor) -> Tensor:
        """Return what every rank has for this one, [n, ...], where each has `parts` [n, ...] for all."""
        received: Tensor = all_to_all_single_autograd(parts.contiguous(), None, None, self.ranks)
        return received


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: dist.ProcessGroup) -> Tensor:
        total = values.detach().clone()
        dist.all_reduce(total, group=ranks)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


@dataclass(frozen=True)
class Shard:
    """The tokens of a packed row that one rank holds, and what their queries attend to."""

    group: SequenceGroup
    chunk: int  # tokens of a chunk
    borders: tuple[int, ...]  # 0, and where each sequence ends; the last one may be padding
    tokens: Tensor  # [t] the place of each of the rank's tokens in the row
    everyones: Tensor  # [T] the same of the tokens of all ranks, rank by rank
    natural: Tensor  # [T] the place of each token of the row among `everyones`

    @staticmethod
    def of(lengths: Sequence[int], group: SequenceGroup, device: torch.device) -> Shard:
        """Return the shard of this rank in a row of sequences of `lengths` [B], whose sum is a multiple of 2n."""
        borders = (0, *accumulate(lengths))
        chunk = borders[-1] // (2 * group.size)
        assert borders[-1] == 2 * group.size * chunk, "the row is padded to whole chunks"
        chunks = torch.arange(borders[-1], device=device).view(2 * group.size, chunk)
        order = [number for rank in range(group.size) for number in chunk_numbers(rank, group.size)]
        everyones = torch.cat([chunks[number] for number in order])
        own = everyones.view(group.size, 2 * chunk)[group.index]
        return Shard(group, chunk, borders, own, everyones, everyones.argsort())

    def intervals(self, rank: int) -> list[tuple[int, int]]:
        """Return where the chunks of a rank begin and end in the row."""
        return [(number * self.chunk, (number + 1) * self.chunk) for number in chunk_numbers(rank, self.group.size)]

    @cached_property
    def rounds(self) -> list[list[Block]]:
        """The blocks of each round of communication: one round of `gather`, n of `ring`."""
        if self.group.mode == GATHER:
            return [self._blocks([(0, self.borders[-1])])]
        size, index = self.group.size, self.group.index
        return [self._blocks(self.intervals((index - step) % size)) for step in range(size)]

    def _blocks(self, held: list[tuple[int, int]]) -> list[Block]:
        """Return the blocks of this rank's queries with the keys of the intervals `held` of the row, end to end."""
        blocks, device = [], self.tokens.device
        for number, (start, end) in enumerate(self.intervals(self.group.index)):
            first, last = next(
                (a, b) for a, b in pairwise(self.borders) if a <= start < b
            )  # of the chunk's first token
            row, offset = number * self.chunk, 0
            for held_start, held_end in held:
                low, high = max(held_start, first), min(held_end, start)
                if low < high:
                    keys = slice(offset + low - held_start, offset + high - held_start)
                    blocks.append(Block(slice(row, row + min(last, end) - start), keys, device))
                if held_start <= start < held_end:
                    keys = slice(offset + start - held_start, offset + end - held_start)
                    cuts = [max(start, min(end, border)) for border in self.borders]
                    lengths = tuple(b - a for a, b in pairwise(cuts) if b > a)
                    blocks.append(Block(slice(row, row + self.chunk), keys, device, lengths))
                offset += held_end - held_start
        return blocks

    def collect(self, states: Tensor) -> Iterator[Tensor]:
        """Yield keys and values [2, K, held, D] of every round; `states` [2, K, t, D] are this rank's own."""
        if self.group.mode == GATHER:
            everyones = self.group.all_gather(states).movedim(0, 2).flatten(2, 3)  # [2, K, T, D]
            yield everyones.index_select(2, self.natural)
            return
        yield states
        for _ in range(self.group.size - 1):
            states = self.group.from_previous(states)
            yield states

    def return_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of this rank's own keys and values, [2, K, t, D], from that of the last round."""
        if self.group.mode == RING:
            return self.group.from_previous(gradient)
        parts = gradient.index_select(2, self.everyones).unflatten(2, (self.group.size, -1))  # [2, K, n, t, D]
        return self.group.sum_of_own(parts.movedim(2, 0))

    def attention(self, states: States, scale: float | None, whole: Whole) -> Tensor:
        """Return causal attention within sequences, [1, t, H, D], of states [1, H|K, t, D]. `whole` computes it for a
        whole row."""
        if self.group.mode == ULYSSES:
            return self._by_heads(states, whole)
        query, key, value = (state[0] for state in states)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        output: Tensor = _BlockAttention.apply(query, torch.stack([key, value]), self, scale)
        return output.transpose(0, 1)[None]

    def _by_heads(self, states: States, whole: Whole) -> Tensor:
        """Exchange tokens for heads, attend, and exchange back. Fewer key/value heads than ranks are repeated."""
        size, copies = self.group.size, max(self.group.size // states.key.shape[1], 1)
        heads = (states.query, *(state.repeat_interleave(copies, 1) for state in states[1:]))
        output = whole(*(self._all_tokens(head[0])[None] for head in heads))[0]  # [T, H/n, D]
        parts = output.index_select(0, self.everyones).unflatten(0, (size, -1))  # [n, t, H/n, D]
        received = self.group.exchange(parts)  # the same tokens, n parts of the heads
        return received.movedim(0, 1).flatten(1, 2)[None]

    def _all_tokens(self, states: Tensor) -> Tensor:
        """Return all tokens of this rank's part of the heads, [H/n, T, D], from all heads of its tokens, [H, t, D]."""
        received = self.group.exchange(states.unflatten(0, (self.group.size, -1)))  # [n, H/n, t, D]: n parts of the row
        return received.movedim(0, 1).flatten(1, 2).index_select(1, self.natural)


def chunk_numbers(rank: int, size: int) -> tuple[int, int]:
    """Return the numbers of the chunks of a rank among 2 * size."""
    return rank, 2 * size - 1 - rank


class _BlockAttention(torch.autograd.Function):
    """(query [H, t, D], own keys and values [2, K, t, D]) -> [H, t, D], by the blocks of a shard."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, states: Tensor, shard: Shard, scale: float) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        total = Attended(
            query.new_zeros(query.shape, dtype=wide), query.new_full(query.shape[:2], -torch.inf, dtype=wide)
        )
        for blocks, (keys, values) in zip(shard.rounds, shard.collect(states), strict=True):
            for block in blocks:
                rows, columns = block.queries, block.keys
                part = block.forward(States(query[:, rows], keys[:, columns], values[:, columns]), scale)
                merged = Attended(*(values[:, rows] for values in total)).merge(part)
                for whole, own in zip(total, merged, strict=True):
                    whole[:, rows] = own
        output = total.output.to(query.dtype)
        ctx.save_for_backward(query, states, output, total.normaliser)
        ctx.shard, ctx.scale = shard, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        query, states, output, normaliser = ctx.saved_tensors
        shard: Shard = ctx.shard
        query_gradient = torch.zeros_like(query, dtype=normaliser.dtype)
        states_gradient: Tensor | None = None  # of the keys and values of a round, with which it travels
        for blocks, held in zip(shard.rounds, shard.collect(states), strict=True):
            if states_gradient is None:
                states_gradient = torch.zeros_like(held, dtype=normaliser.dtype)
            else:
                states_gradient = shard.group.from_previous(states_gradient)
            for block in blocks:
                rows, columns = block.queries, block.keys
                inputs = States(query[:, rows], *held[:, :, columns])
                whole = Attended(output[:, rows], normaliser[:, rows])
                part = block.backward(gradients[0][:, rows], inputs, whole, ctx.scale)
                query_gradient[:, rows] += part.query
                states_gradient[:, :, columns] += torch.stack([part.key, part.value])
        assert states_gradient is not None
        return query_gradient.to(query.dtype), shard.return_gradient(states_gradient).to(states.dtype), None, None
