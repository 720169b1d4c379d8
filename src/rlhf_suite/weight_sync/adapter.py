"""An adapter in a vLLM model: installed in place of the one before, under the same number, so that requests under way
go on with the new one.

Where vLLM's layers put its tensors is recorded while they are copied (`loads.py`), and read back there: fused layers,
and those that are split between workers, are checked like the weights of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from rlhf_suite.weight_sync.digests import TensorEntry
from rlhf_suite.weight_sync.loads import Loads

NUMBER = 1  # of the adapter, which is the only one of an engine
SLOT = 0  # where vLLM's layers hold it
UP, DOWN = "lora_B", "lora_A"  # y = W x + B A x; B has the scale of the adapter already


class Slots(nn.Module):
    """The matrices of vLLM's layers that hold an adapter, by the names of the layers."""

    def __init__(self, manager: Any) -> None:
        super().__init__()
        for name, layer in manager.modules.items():
            place: nn.Module = self
            for part in name.split("."):
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            for kind, matrices in ((DOWN, layer.lora_a_stacked), (UP, layer.lora_b_stacked)):
                for number, matrix in enumerate(matrices):
                    place.register_buffer(f"{kind}_{number}", matrix, persistent=False)


def install(model: nn.Module, entries: Sequence[TensorEntry], tensors: Sequence[Tensor]) -> tuple[Slots, Loads]:
    """Put an adapter into the layers of a model, where later requests find it under its number. Return the layers'
    matrices, and what was copied into them. A tensor that has no place there is known by that."""
    manager: Any = model.lora_manager
    slots = Slots(manager)
    loads = Loads(slots)
    arrived = dict(loads.watch(entries, tensors))
    named = {name_in_engine(model, name.rpartition(".")[0]): name.rpartition(".")[0] for name in arrived}
    with loads:
        for name, layer in manager.modules.items():
            parts = [named.get(part) for part in manager.packed_modules.get(name, [name])]
            pairs = [[None if part is None else arrived[f"{part}.{kind}"] for part in parts] for kind in (DOWN, UP)]
            if not any(parts):
                layer.reset_lora(SLOT)
            elif name in manager.packed_modules:
                layer.set_lora(SLOT, *pairs)
            else:
                layer.set_lora(SLOT, pairs[0][0], pairs[1][0])
    loads.finish()
    register(manager)
    return slots, loads


def name_in_engine(model: nn.Module, name: str) -> str:
    """Return the name of a module of a checkpoint in vLLM's model."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    return name if mapper is None else str(mapper.get_rename_mapper()._map_name(name))


def register(manager: Any) -> None:
    """Have vLLM know the adapter, so that it does not look for a file of it. Its layers have its matrices."""
    from vllm.lora.lora_model import LoRAModel

    manager.remove_adapter(NUMBER)
    manager._registered_adapters[NUMBER] = LoRAModel(NUMBER, manager.lora_config.max_lora_rank, {})
    manager._active_adapters[NUMBER] = None
    manager.lora_index_to_id[SLOT] = NUMBER
