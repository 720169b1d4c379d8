"""The ways to compute one and the same optimiser step: micro-batches, layout, ranks, ZeRO stage, adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

A, B = TypeVar("A"), TypeVar("B")


@dataclass(frozen=True)
class Split:
    """One way to compute the step. `rows`: which of the step's rows take part, all by default."""

    name: str
    ranks: int = 1
    zero: int | None = 0  # None: without DeepSpeed
    micro: int = 4
    budget: bool = False  # micro-batches by number of tokens; how many is up to the batch
    packed: bool = True
    lora: bool = False
    checkpointing: str = ""  # "plain" or "re-entrant"
    max_norm: float = 0.0
    aux: float = 0.0  # weight of the load-balancing loss of a mixture of experts
    freeze: tuple[str, ...] = ()
    attention: str = "varlen"
    rows: tuple[int, ...] | None = None
    sequence: int = 1  # ranks that split the tokens of each batch
    mode: str = "gather"  # in which their attention meets
    tensor: int = 1  # ranks that split the matrices of each layer

    def chosen(self, count: int) -> list[int]:
        """The rows out of `count` that take part."""
        return list(range(count) if self.rows is None else self.rows)


SPLITS = [
    Split("one micro-batch", micro=99),
    *(Split(f"micro {size}", micro=size) for size in (4, 2, 1)),
    Split("token budget", budget=True),
    Split("padded, one micro-batch", micro=99, packed=False),
    Split("padded, micro 4", packed=False),
    Split("checkpointing", checkpointing="plain"),
    Split("re-entrant checkpointing", checkpointing="re-entrant"),
    *(Split(f"ZeRO-{stage}", zero=stage) for stage in (1, 2, 3)),
    *(Split(f"2 ranks, ZeRO-{stage}, micro 2", ranks=2, zero=stage, micro=2) for stage in (0, 1, 3)),
    Split("2 ranks, ZeRO-2, micro 1", ranks=2, zero=2, micro=1),
    Split("2 ranks, ZeRO-2, padded", ranks=2, zero=2, packed=False),
    Split("2 ranks, ZeRO-3, token budget", ranks=2, zero=3, budget=True),
    *(Split(f"1 row on 2 ranks, ZeRO-{stage}", ranks=2, zero=stage, rows=(4,)) for stage in (2, 3)),
    Split("LoRA", lora=True),
    Split("LoRA, padded, ZeRO-2", lora=True, packed=False, zero=2),
    Split("LoRA, ZeRO-3, re-entrant checkpointing", lora=True, zero=3, checkpointing="re-entrant"),
    Split("LoRA, 2 ranks, ZeRO-2, micro 2", ranks=2, zero=2, micro=2, lora=True),
    Split("LoRA, 2 ranks, ZeRO-3, token budget", ranks=2, zero=3, budget=True, lora=True),
]
MODES = ("gather", "ring", "ulysses")
# Ranks that split the tokens of each batch.
SEQUENCE_SPLITS = [
    *(Split(f"sequence 2, {mode}", ranks=2, sequence=2, mode=mode) for mode in MODES),
    Split("sequence 2, gather, ZeRO-3, checkpointing", ranks=2, sequence=2, zero=3, checkpointing="plain"),
    Split("sequence 2, ring, ZeRO-2, re-entrant", ranks=2, sequence=2, mode="ring", zero=2, checkpointing="re-entrant"),
    Split("sequence 2, ulysses, ZeRO-1, token budget", ranks=2, sequence=2, mode="ulysses", zero=1, budget=True),
    Split("sequence 2, ulysses, ZeRO-2, LoRA", ranks=2, sequence=2, mode="ulysses", zero=2, lora=True),
    Split("1 row, sequence 2, ring, ZeRO-3", ranks=2, sequence=2, mode="ring", zero=3, rows=(4,)),
    *(Split(f"sequence 4, {mode}, ZeRO-2", ranks=4, sequence=4, mode=mode, zero=2) for mode in MODES),
    *(
        Split(f"2 x sequence 2, {mode}, ZeRO-{stage}, micro 2", ranks=4, sequence=2, mode=mode, zero=stage, micro=2)
        for mode, stage in (("gather", 0), ("ring", 3), ("ulysses", 2), ("gather", 3))
    ),
]


# Ranks that split the matrices of each layer.
TENSOR_SPLITS = [
    *(Split(f"tensor 2, ZeRO-{stage}", ranks=2, tensor=2, zero=stage) for stage in (0, 1, 2, 3)),
    Split("tensor 2, padded, micro 2, ZeRO-2", ranks=2, tensor=2, zero=2, micro=2, packed=False),
    Split("tensor 2, checkpointing, ZeRO-1", ranks=2, tensor=2, zero=1, checkpointing="plain"),
    Split("tensor 2, re-entrant, token budget", ranks=2, tensor=2, zero=3, checkpointing="re-entrant", budget=True),
    *(Split(f"2 x tensor 2, ZeRO-{stage}, micro 2", ranks=4, tensor=2, zero=stage, micro=2) for stage in (0, 1, 2, 3)),
    *(
        Split(f"sequence 2 x tensor 2, {mode}, ZeRO-{stage}", ranks=4, sequence=2, tensor=2, mode=mode, zero=stage)
        for mode, stage in (("gather", 2), ("ring", 0), ("gather", 3))
    ),
]


def sampled(first: Sequence[A], second: Sequence[B]) -> list[tuple[A, B]]:
    """As few pairs as have every element of both at least once."""
    return [(first[i % len(first)], second[i % len(second)]) for i in range(max(len(first), len(second)))]
