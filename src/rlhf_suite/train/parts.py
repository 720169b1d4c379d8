"""The state of a trained model on disk, by the names of its parameters: every rank writes the parts that it holds, and
reads from the files of all ranks the parts that it needs. So neither the number of ranks nor the ZeRO stage of a
checkpoint matters to who loads it.

A part is a stretch of a flattened parameter. Its file has, for each name, where the part starts, its tensors under keys
(the weight in fp32, the moments of the optimiser), and values of the whole parameter, such as the count of updates.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_suite.errors import UserError
from rlhf_suite.train.checkpoint_files import Entries, digest_new_file
from rlhf_suite.train.torch_engine import MasterWeights

WEIGHT = "weight"
STEP = "step"  # the count of updates


@dataclass(frozen=True)
class Held:
    """What the optimiser of this rank holds of a parameter: `weight`, the elements from `start` on of the flattened
    parameter in fp32. It is a view of the tensor `owner`, from `offset` on, which the optimiser's state belongs to."""

    name: str
    start: int
    weight: Tensor
    owner: Tensor
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the elements of this part in a tensor of the optimiser's state."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.weight.numel()]


def list_held_parts(module: nn.Module, optimizer: Any) -> Iterator[Held]:
    """Yield what `optimizer` of this rank holds of the trained parameters: torch's own, or one around it."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    if isinstance(optimizer, MasterWeights):
        held = optimizer.masters.items()
        yield from (Held(names[parameter], 0, master.detach().view(-1), master, 0) for parameter, master in held)
    elif isinstance(optimizer, torch.optim.Optimizer):
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        yield from (Held(names[parameter], 0, parameter.detach().view(-1), parameter, 0) for parameter in updated)
    elif hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            yield from _divide_each(names, group, flat)
    elif hasattr(optimizer, "bf16_groups"):  # ZeRO-1 in bf16
        for group, flat in zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True):
            yield from _divide_row(names, group, flat)
    else:
        for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
            yield from _divide_row(names, group, flat)


def _divide_each(names: Mapping[Any, str], group: Iterable[Any], flat: Tensor) -> Iterator[Held]:
    """Yield the parts in a group of which every rank has the same share of each parameter; the last one is padded."""
    offset = 0
    for parameter in group:
        size = parameter.partition_numel()
        start = size * number_among_owners(parameter)
        count = min(size, parameter.ds_numel - start)
        if count > 0:
            yield Held(names[parameter], start, flat.detach()[offset : offset + count], flat, offset)
        offset += size


def _divide_row(names: Mapping[Any, str], group: Iterable[Any], flat: Tensor) -> Iterator[Held]:
    """Yield the parts in a group whose parameters lie in a row that is cut into one stretch for each rank."""
    for parameter in group:
        if (place := parameter._hp_mapping) is not None:
            start, offset = place.lp_fragment_address.start, place.hp_fragment_address.start
            yield Held(names[parameter], start, place.hp_fragment.detach(), flat, offset)


def local_part(parameter: Any) -> tuple[int, Tensor]:
    """Return what this rank has of a model's parameter, flattened, and where it starts: a part under ZeRO-3, else
    all."""
    if not hasattr(parameter, "ds_tensor"):
        return 0, parameter.detach().view(-1)
    size = parameter.partition_numel()
    start = min(size * number_among_owners(parameter), parameter.ds_numel)
    return start, parameter.ds_tensor.detach()[: min(size, parameter.ds_numel - start)]


def number_among_owners(parameter: Any) -> int:
    """Return the number of this rank among those over which ZeRO-3 divides a parameter: all ranks or, if tensor
    parallelism has split it, those that have the same part of it."""
    return torch.distributed.get_rank(group=parameter.ds_process_group)


def state_of(held: Held, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what an optimiser knows about a part: tensors as long as the part, and values of the whole parameter."""
    state = base_state(optimizer).get(held.owner, {})
    # of a parameter without axes the count has the shape of the moments
    tensors = {key: held.of(value) for key, value in state.items() if key != STEP and is_like(value, held.owner)}
    return tensors, {key: value for key, value in state.items() if key not in tensors}


def base_state(optimizer: Any) -> Any:
    """Return the state of torch's optimiser, by the tensors that it updates."""
    return optimizer.state if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer.state


def convert_for_optimizer(value: Any, optimizer: Any, device: torch.device) -> Any:
    """Return a saved value of a whole parameter as this optimiser keeps it: torch counts updates in tensors,
    DeepSpeedCPUAdam in integers."""
    base = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
    if hasattr(base, "ds_opt_adam"):
        return int(value)
    if isinstance(base, torch.optim.AdamW):
        return torch.as_tensor(value, dtype=torch.float32).to(device, copy=True)
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


def is_like(value: Any, owner: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == owner.shape


def write_parts(path: Path, parts: Mapping[str, tuple[int, Mapping[str, Tensor], Mapping[str, Any]]]) -> Entries:
    """Write for each name where its part starts, the tensors of the part, and values of the whole parameter."""
    return write_tensors(path, {name: list(part) for name, part in parts.items()})


def write_tensors(path: Path, content: Any) -> Entries:
    """Write a file for `load_tensors`. Return what the manifest of a checkpoint says of it, by its name."""
    with digest_new_file(path) as file:
        torch.save(content, file)  # type: ignore[arg-type]  # it writes to any object with `write` and `flush`
    return {path.name: file.entry}


class SavedParts:
    """The parts of a model in the files `<kind>_<...>.pt` of a folder. Tensors are read when they are asked for.

    Of the parameters in `split`, which tensor parallelism has split, each rank of the tensor axis has another part of
    the matrix: only the files that begin with `own` count. All others are read from the files of all ranks.

    Raises:
        UserError: a file holds something else than tensors and plain values.
    """

    def __init__(self, folder: Path, kind: str, own: str, split: Collection[str]) -> None:
        self.folder = folder
        self.parts: dict[str, dict[int, tuple[dict[str, Tensor], dict[str, Any]]]] = {}
        for file in sorted(folder.glob(f"{kind}_*.pt")):
            is_own = file.name.startswith(f"{own}_")
            for name, (start, tensors, values) in load_tensors(file, "cpu", lazily=True).items():
                if is_own or name not in split:
                    self.parts.setdefault(name, {}).setdefault(start, (tensors, values))

    def keys(self, name: str) -> Collection[str]:
        """Return the keys of the tensors of a parameter, except its weight."""
        tensors, _ = next(iter(self.parts[name].values()))
        return [key for key in tensors if key != WEIGHT]

    def values(self, name: str, start: int) -> dict[str, Any]:
        """Return the values that belong to a whole parameter, as the rank had them whose part begins at `start`."""
        parts = self.parts[name]
        return parts.get(start, next(iter(parts.values())))[1]

    def check_names(self, names: Collection[str]) -> None:
        """Raise UserError unless the files have exactly these parameters."""
        if different := sorted(self.parts.keys() ^ {*names}):
            named = ", ".join(different[:3]) + (" ..." if len(different) > 3 else "")
            raise UserError(
                f"{self.folder} is a checkpoint of another model, or of one in which other parameters are trained: "
                f"{named}. Resume with the flags and the model of the run that wrote it"
            )

    def check_moments(self, moments: Mapping[str, Collection[str]]) -> None:
        """Raise UserError where the files have other moments of a parameter than these, by its name. One that was not
        yet updated has none."""
        for name, keys in moments.items():
            if (saved := {*self.keys(name)}) and saved != {*keys}:
                raise UserError(
                    f"{self.folder} has {' and '.join(sorted(saved))} of {name}, which another optimiser has trained: "
                    f"the one of this run keeps {' and '.join(sorted(keys))}. Resume with the version of rlhf_suite "
                    "that wrote the checkpoint, or add ckpt.reset_optimizer=true to continue from its weights with "
                    "new optimiser moments"
                )

    @torch.no_grad()
    def read(self, name: str, key: str, start: int, into: Tensor) -> None:
        """Fill `into`, a flat tensor, with the elements of a parameter from `start` on."""
        missing = end = into.numel()
        for begin, (tensors, _) in self.parts[name].items():
            part = tensors[key]
            first, last = max(begin - start, 0), min(begin + part.numel() - start, end)
            if first < last:
                into[first:last].copy_(part[first + start - begin : last + start - begin])
                missing -= last - first
        assert missing == 0, f"{self.folder} has {missing} elements too few or too many of {key} of {name}"


def load_tensors(path: Path, map_location: Any = None, *, lazily: bool = False) -> Any:
    """Load a file of `torch.save` that holds tensors and plain values. Anything else in it is refused, not run.
    `lazily`: read a tensor from the disk when it is used."""
    try:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=lazily)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it asks for {asked[1]}" if asked else "torch cannot read it"
        raise UserError(
            f"{path} is not a file of tensors and plain values ({reason}). It could run code, so nothing of it was "
            "loaded. Delete the checkpoint that it is part of, and resume from another one"
        ) from None
