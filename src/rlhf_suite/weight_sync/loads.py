"""Where a vLLM model puts the tensors of a checkpoint: what its own loaders copy is recorded while they load.

So nothing is assumed about layouts: fused, transposed, reordered or split between workers, each copy says which numbers
must be at which place of which parameter afterwards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_suite.weight_sync.digests import CONSEQUENCE, TensorEntry, digest, dtype_name

Key = tuple[str, str]  # the name of a module, and of its parameter or buffer
HEADS = ("lm_head.weight", "embed_out.weight")  # their names in checkpoints
UNTIED = "Where an adapter has untied embedding and head, leave both out of ds.lora.target_modules"
NOTHING = TensorEntry("", (0,), "float32", 0, 0, ""), torch.empty(0)


@dataclass(frozen=True)
class Place:
    """A view of a parameter, by its size, stride and offset, and what was copied into it: all of a tensor of the
    checkpoint or a part of it, described by `entry`."""

    entry: TensorEntry
    stride: tuple[int, ...]
    offset: int

    def of(self, values: Tensor) -> Tensor:
        """Return this place of a whole parameter, whose memory must be contiguous."""
        return values.as_strided(self.entry.shape, self.stride, values.storage_offset() + self.offset)


@dataclass
class Target:
    """A parameter or buffer that loaders copy into."""

    path: str  # the name of its module
    module: nn.Module
    leaf: str  # its name in the module
    like: Tensor  # as loaders see it; vLLM gives it no memory until its layer is complete
    places: dict[tuple[Any, ...], Place] = field(default_factory=dict)  # by size, stride and offset
    is_computed: bool = False  # its loader changes what it has copied, so that nothing can be compared


class Loads(TorchDispatchMode):
    """Records the copies of a model's loaders, where this is a context around them.

    It is made when vLLM has begun a reload, so that parameters are as checkpoints have them. `filled` is called for
    each copy that fills a parameter without memory.
    """

    def __init__(
        self, model: nn.Module, filled: Callable[[Target, Tensor], object] = lambda target, source: None
    ) -> None:
        super().__init__()
        self._filled = filled
        self.is_checked = False  # whether the tensors came with digests
        self.sizes: dict[str, int] = {}  # of each tensor that has arrived, in numbers
        self.placed: dict[str, int] = {}  # how many numbers of it were copied
        self._model = model
        self._targets: dict[Key, Target] = {}
        self._by_storage: dict[int, Target] = {}
        self._memory: list[Tensor] = []  # of parameters whose loaders compute, while they load
        self._let_go()
        self._learn()

    def watch(self, entries: Sequence[TensorEntry], tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for the model's loader, and know from then on what it copies."""
        self._arrived = sorted(zip(entries, tensors, strict=True), key=lambda pair: pair[1].data_ptr())
        self._addresses = [tensor.data_ptr() for _, tensor in self._arrived]
        for entry, tensor in zip(entries, tensors, strict=True):
            self._newest = entry, tensor
            self.is_checked = bool(entry.digest)
            self.sizes[entry.name] = tensor.numel()
            self.placed.setdefault(entry.name, 0)
            yield entry.name, tensor

    def targets(self) -> list[Target]:
        """Return the parameters that something of the checkpoint was copied into."""
        return [target for target in self._targets.values() if target.places]

    def finish(self) -> None:
        """Give the model again what its loader has made for a tensor and vLLM's reload has removed, since it was not
        there before (a bias of the head). Keep no tensor that has arrived."""
        for target in self.targets():
            if getattr(target.module, target.leaf, None) is None and not target.like.is_meta:
                setattr(target.module, target.leaf, target.like)
        self._let_go()

    def without_place(self) -> str | None:
        """Return a sentence that names a tensor that the model needs and has no place for: a head of its own, where
        vLLM's is tied to the embedding, or a part of a layer of which it has others, such as a bias. Return None if
        there is none."""
        taken = {name.rpartition(".")[0]: name for name, count in self.placed.items() if count}
        for name in (name for name, count in self.placed.items() if not count):
            if (other := taken.get(name.rpartition(".")[0])) is not None:
                return f"{self._no_place(name)}, which has {other} of the same layer: {CONSEQUENCE}"
            if name.endswith(HEADS):
                return f"{self._no_place(name)}, whose head is its embedding: {CONSEQUENCE}. {UNTIED}"
        # Two tensors in one place are refused while they are equal, too: training makes them different.
        first: dict[tuple[Any, ...], str] = {}
        for target in self.targets():
            parameter = id(getattr(target.module, target.leaf, None))
            for key, place in target.places.items():
                there = first.setdefault((parameter, key), place.entry.name)
                if there != place.entry.name:
                    return f"{self._no_place(place.entry.name)}, which has {there} there: {CONSEQUENCE}. {UNTIED}"
        return None

    def _no_place(self, name: str) -> str:
        return f"tensor {name} has no place in vLLM's {type(self._model).__name__}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it if it changes a parameter."""
        target = args[0] if args else None
        if isinstance(target, Tensor) and func._schema.is_mutable and not target.is_sparse:
            if func is torch.ops.aten.copy_.default:
                self._record(target, args[1])
            elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor):
                if target.numel() == self._newest[1].numel() == 1:  # vLLM's loader of a single number
                    self._record(target, self._newest[1])
            elif (place := self._by_storage.get(_storage(target))) is not None:
                place.is_computed = True
        return func(*args, **(kwargs or {}))

    def _record(self, target: Tensor, source: Tensor) -> None:
        """Record that `source` is copied into `target`, if that is a part of a parameter."""
        storage = _storage(target)
        if storage not in self._by_storage and not target.is_meta:
            self._learn_computed()
            if not self.placed.get(self._newest[0].name):
                self._learn()
        place = self._by_storage.get(storage)
        if place is None or _storage(source) == storage or self._newest is NOTHING:
            return  # not a parameter, or one that is copied onto itself, or nothing of the checkpoint
        if source.is_meta:
            place.is_computed = True
            return
        key = (tuple(target.shape), tuple(target.stride()), int(target.storage_offset()))
        entry, whole = self._origin(source, place.places.get(key))
        if key not in place.places:
            self.placed[entry.name] += target.numel()
        place.places[key] = Place(_copy_entry(entry, whole, target, source), *key[1:])
        if target.numel() == place.like.numel():
            if target.is_meta:
                self._filled(place, source)
            else:  # the last copy of it is what it holds
                place.is_computed = False

    def _let_go(self) -> None:
        self._memory.clear()
        self._newest = NOTHING
        self._arrived, self._addresses = [NOTHING], [0]

    def _origin(self, source: Tensor, earlier: Place | None) -> tuple[TensorEntry, Tensor]:
        """Return the tensor of the checkpoint that is copied. What a loader has made of a tensor has other memory; then
        it is the newest one, or that which was copied to this place before: vLLM loads a bias when it arrives, and
        once more when its layer is complete."""
        address = source.data_ptr()
        entry, tensor = self._arrived[bisect_right(self._addresses, address) - 1]
        if 0 <= address - tensor.data_ptr() < tensor.nbytes:
            return entry, tensor
        return (earlier.entry if earlier else self._newest[0]), self._newest[1]

    def _learn_computed(self) -> None:
        """Find the memory of parameters whose loaders compute: what they compute is known once they have some."""
        for target in self._targets.values():
            if target.is_computed and target.like.is_meta:
                tensor = getattr(target.module, target.leaf, None)
                if tensor is not None and not tensor.is_meta:
                    self._by_storage[_storage(tensor)] = target
                    self._memory.append(tensor)  # other tensors would get its address

    def _learn(self) -> None:
        """Find the parameters of the model. Those without memory are known from the start; others may be made while
        weights are loaded, such as a bias that only some checkpoints have."""
        for path, module in self._model.named_modules():
            for leaf, tensor in (module._parameters | module._buffers).items():
                known = self._targets.get((path, leaf))
                if tensor is None or (known is not None and (known.like is tensor or known.like.is_meta)):
                    continue
                target = self._targets[path, leaf] = Target(path, module, leaf, tensor)
                self._by_storage[_storage(tensor)] = target


def _copy_entry(entry: TensorEntry, whole: Tensor, target: Tensor, source: Tensor) -> TensorEntry:
    """Return the entry of what is copied of a tensor. The digest of all of it is known already."""
    shape = tuple(target.shape)
    is_whole = source.data_ptr() == whole.data_ptr() and source.shape == whole.shape
    if not entry.digest or (is_whole and source.is_contiguous() and target.dtype == whole.dtype):
        return replace(entry, shape=shape)
    values = source.reshape(()) if source.numel() == 1 else source
    proof = digest(values.expand(shape).to(target.dtype))
    return replace(entry, shape=shape, dtype=dtype_name(target.dtype), digest=proof)


def _storage(tensor: Tensor) -> int:
    """Return what is the same for all views of one memory, even of one that does not exist."""
    return int(tensor.untyped_storage()._cdata)


def holders(model: nn.Module) -> Mapping[int, list[tuple[str, nn.Module, str]]]:
    """Return where each parameter is, by its id: (name of the module, module, name in it). A tied one is at several
    places, each of which may have a packed copy of its own."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for leaf, tensor in (module._parameters | module._buffers).items():
            if tensor is not None:
                places.setdefault(id(tensor), []).append((path, module, leaf))
    return places
