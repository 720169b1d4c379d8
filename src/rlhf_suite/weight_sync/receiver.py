"""The engine's side of a weight sync: transfer backends for vLLM, fixes that its CPU build needs, and the verification.

vLLM's own sequence of calls is used (start, update, finish); these backends differ in how bytes arrive. Each tensor is
compared with the trainer's digest when it arrives, and again after loading where the model keeps it: in parameters, in
slices of fused ones, and, on the CPU, in the packed matrices of the kernels. Each worker of a split engine receives
whole tensors, and checks after loading what its own loaders took of them.

Importing this module registers the backends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor import model_loader
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from rlhf_suite.weight_sync.adapter import Slots, install
from rlhf_suite.weight_sync.buckets import Bucket, join_parts
from rlhf_suite.weight_sync.cuda_ipc import answer_proof, copy_buckets
from rlhf_suite.weight_sync.digests import (
    Attested,
    Part,
    TensorEntry,
    WeightSyncError,
    as_digests,
    difference,
    digest_sums,
    entries_from_plain,
)
from rlhf_suite.weight_sync.loads import Loads, Target
from rlhf_suite.weight_sync.read_back import read_back
from rlhf_suite.weight_sync.sender import header_key, make_group, prove_channel
from rlhf_suite.weight_sync.stream import receive_buckets

TOWER = re.compile(r"\bvision_tower\.(?!vision_model\.)")
STORE_TIMEOUT = timedelta(hours=1)  # the driver's own deadline is shorter; this one only ends an orphaned process


@dataclass
class StreamInfo(WeightTransferInitInfo):
    """The address of the trainer's store, and the place of this engine in the group."""

    host: str
    port: int
    first_rank: int
    world_size: int
    meeting: int  # the number of the group: a new one is made when an engine was started again


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One weight sync; see Manifest.as_update_info."""

    version: int
    path: str | None
    part: str
    entries: list[dict[str, Any]]


class WeightReceiver(WeightTransferEngine[StreamInfo, UpdateInfo]):
    """The common part of all backends. A backend implements `batches`, which yields tensors as they arrive."""

    init_info_cls = StreamInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loads: Loads | None = None  # of the last update of the model's weights; None before the first
        self.adapter: tuple[Slots, Loads] | None = None  # the adapter's, and where it lies
        self._direct: list[tuple[Target, torch.Tensor]] = []

    def init_transfer_engine(self, init_info: StreamInfo) -> None:
        """Connect to the trainer; backends that need no connection do not implement this."""
        raise NotImplementedError(f"{type(self).__name__} needs no connection")

    def start_weight_update(self) -> None:
        """Prepare the model for new weights."""
        if self.device.type == "cpu":
            drop_moe_kernels(self.model)
        initialize_layerwise_reload(self.model)
        self.loads = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive all tensors, compare them with their digests, and load them.

        Raises:
            WeightSyncError: a tensor differs from what the trainer sent.
        """
        self.receive(update_info, self.load)

    def receive_adapter(self, update_info: UpdateInfo) -> None:
        """Do as `receive_weights` does with the tensors of an adapter, which take the place of the one before."""
        entries, tensors = list[TensorEntry](), list[torch.Tensor]()

        def collect(more: Sequence[TensorEntry], arrived: Sequence[torch.Tensor]) -> None:
            entries.extend(more)
            tensors.extend(arrived)

        self.adapter = None
        self.receive(update_info, collect)
        self.adapter = install(self.model, entries, tensors)

    def receive(
        self, update_info: UpdateInfo, take: Callable[[Sequence[TensorEntry], list[torch.Tensor]], object]
    ) -> None:
        """Receive all tensors, compare them with their digests, and hand them to `take`."""
        wrong = list[str]()
        for entries, tensors in self.batches(update_info):
            # All batches are received even after a wrong one, since the sender would wait forever otherwise.
            checked = [(entry, tensor) for entry, tensor in zip(entries, tensors, strict=True) if entry.digest]
            proofs = as_digests([digest_sums(tensor) for _, tensor in checked])
            problems = [difference("arrived changed", e, p) for (e, _), p in zip(checked, proofs, strict=True)]
            wrong += [message for message in problems if message]
            if not wrong:
                take(entries, tensors)
        if wrong:
            raise WeightSyncError(f"weights {update_info.version}: {wrong[0]}")

    def load(self, entries: Sequence[TensorEntry], tensors: Sequence[torch.Tensor]) -> None:
        """Load tensors into the model, and record where they go."""
        self.loads = self.loads or Loads(self.model, self._keep_direct)
        with self.loads:
            self.model.load_weights(name_towers(self.model, self.loads.watch(entries, tensors)))
            load_direct(self._direct)

    def _keep_direct(self, target: Target, source: torch.Tensor) -> None:
        """Keep what a model has copied into a parameter by itself, and not by the loader of the parameter."""
        info = get_layerwise_info(target.module)
        if info.can_load() and target.leaf not in {name for name, _ in info.loaded_weights}:
            self._direct.append((target, source))

    def finish_weight_update(self) -> None:
        """Complete the model from the loaded tensors."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.loads is not None:
            self.loads.finish()
        if self.device.type == "cpu":
            repack_heads(self.model)

    def batches(self, update: UpdateInfo) -> Iterator[tuple[Sequence[TensorEntry], list[torch.Tensor]]]:
        """Yield tensors as they arrive. They must stay alive until the layer that they belong to is complete."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""


class ShmReceiver(WeightReceiver):
    """Receives through a file in shared memory, which is mapped and not copied."""

    def batches(self, update: UpdateInfo) -> Iterator[tuple[Sequence[TensorEntry], list[torch.Tensor]]]:
        if update.path is None or not Path(update.path).exists():
            raise WeightSyncError(
                f"weights {update.version}: {update.path} is not on this engine's node; for engines on other nodes "
                "than the actor's set vllm.sync_backend=gloo (cpu) or nccl (cuda)"
            )
        entries = entries_from_plain(update.entries)
        size = entries[-1].offset + entries[-1].nbytes
        flat = torch.from_file(update.path, shared=True, size=size, dtype=torch.uint8)
        yield entries, [entry.view(flat) for entry in entries]


class StreamReceiver(WeightReceiver):
    """Receives by broadcast from the trainer, bucket by bucket."""

    backend = "gloo"

    def init_transfer_engine(self, init_info: StreamInfo) -> None:
        self._store = dist.TCPStore(init_info.host, init_info.port, is_master=False, timeout=STORE_TIMEOUT)
        rank = init_info.first_rank + self.parallel_config.rank
        size, meeting = init_info.world_size, init_info.meeting
        self._group = make_group(self.backend, self._store, rank, size, STORE_TIMEOUT, meeting)
        prove_channel(self._group, self.backend, self.device, is_sender=False)
        self._meeting = meeting

    def batches(self, update: UpdateInfo) -> Iterator[tuple[Sequence[TensorEntry], list[torch.Tensor]]]:
        return join_parts(self.buckets(update))

    def buckets(self, update: UpdateInfo) -> Iterator[Bucket]:
        """Yield buckets as they arrive."""
        key = partial(header_key, self._meeting, update.version, update.part)
        return receive_buckets(self._group, self._store, key, self.device)


class NcclReceiver(StreamReceiver):
    """Receives by NCCL broadcast from the trainer's GPU."""

    backend = "nccl"


class IpcReceiver(ShmReceiver):
    """Receives through the memory of the GPU that trainer and engine share, or, where that cannot be, as its base class
    does."""

    def init_transfer_engine(self, init_info: StreamInfo) -> None:
        self._store = dist.TCPStore(init_info.host, init_info.port, is_master=False, timeout=STORE_TIMEOUT)
        worker = init_info.first_rank + self.parallel_config.rank
        answer_proof(self._store, init_info.meeting, worker, self.device.index)

    def batches(self, update: UpdateInfo) -> Iterator[tuple[Sequence[TensorEntry], list[torch.Tensor]]]:
        if update.path is not None:
            return super().batches(update)
        return join_parts(copy_buckets(self._store, update.version, self.device.index))


def name_towers(
    model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights by the names that a model of vLLM 0.32 knows: the tower of some has a module around it that is no
    longer in checkpoints of transformers 5."""
    is_inside = hasattr(getattr(model, "vision_tower", None), "vision_model")
    for name, tensor in weights:
        yield TOWER.sub("vision_tower.vision_model.", name) if is_inside else name, tensor


class UnloadedModel(DummyModelLoader):
    """Makes the model of an engine before its first sync. vLLM 0.32 would fill with random numbers also what a model
    has computed and no checkpoint holds, such as the mean and the width of pixels, and no sync would bring it."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        computed = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_meta}
        super().load_weights(model, model_config)
        for name, buffer in model.named_buffers():
            if name in computed and buffer.shape == computed[name].shape and not buffer.is_meta:
                buffer.copy_(computed[name])


def receive_adapter(worker: Any, update_info: dict[str, Any]) -> None:
    """Receive an adapter and install it in a worker's model."""
    worker.weight_transfer_engine.receive_adapter(UpdateInfo(**update_info))


def attest(worker: Any) -> Attested:
    """Compare the weights in a worker's model with the last sync of weights that it received.

    A difference is returned and not raised: vLLM would turn the error of a worker process into another one.
    """
    transfer = worker.weight_transfer_engine
    return compare_loads(transfer.model, transfer.loads)


def attest_adapter(worker: Any) -> Attested:
    """Compare the adapter in a worker's model with the last one that it received, as `attest` does."""
    slots, loads = worker.weight_transfer_engine.adapter
    return replace(compare_loads(slots, loads), needs_all=True)


def compare_loads(model: torch.nn.Module, loads: Loads | None) -> Attested:
    """Compare what a model holds at the places of `loads` with what arrived."""
    if loads is None:
        return Attested({}, is_checked=False)
    if missing := loads.without_place():
        return Attested({}, wrong=missing)
    read = dict[int, tuple[str, int]]()  # of each place: its tensor, and how many numbers of it
    places, sums = list[tuple[TensorEntry, str]](), list[torch.Tensor]()
    for part in read_back(model, loads) if loads.is_checked else ():
        places.append((part.place.entry, part.where))
        sums.append(digest_sums(part.values))
        read[id(part.place)] = part.place.entry.name, part.values.numel()
    for (entry, where), proof in zip(places, as_digests(sums), strict=True):
        if wrong := difference(f"differs in {where} after loading", entry, proof):
            return Attested({}, wrong=wrong)
    counts = Counter[str]()
    for name, count in read.values():
        counts[name] += count
    placed = loads.placed
    parts = {name: Part(size, placed[name], counts[name] == placed[name]) for name, size in loads.sizes.items()}
    return Attested(parts, loads.is_checked)


def drop_moe_kernels(model: torch.nn.Module) -> None:
    """Remove the CPU expert kernels, so that they are built from the new weights: vLLM 0.32 packs them only if there
    are none."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def load_direct(copies: list[tuple[Target, torch.Tensor]]) -> None:
    """Load what a model has copied into its parameters by itself, and empty the list. In a reload of vLLM 0.32
    parameters have no memory until their own loaders have been called, so these copies are lost (sinks and experts of
    gpt-oss)."""
    while copies:
        target, source = copies.pop(0)
        parameter = getattr(target.module, target.leaf)
        parameter.weight_loader = default_weight_loader
        make_online_process_loader(target.module, target.leaf)(parameter, source)


def repack_heads(model: torch.nn.Module) -> None:
    """Pack matrices for the CPU kernels again; the packed copy in a tied head would otherwise keep the
    old embedding."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def backend_name(sync_backend: str) -> str:
    """Return the name that a backend is registered under; vLLM has its own `nccl` and `ipc`."""
    return f"rlhf_{sync_backend}"


for _name, _transfer in (("shm", ShmReceiver), ("gloo", StreamReceiver), ("nccl", NcclReceiver), ("ipc", IpcReceiver)):
    WeightTransferEngineFactory.register_engine(backend_name(_name), _transfer)
model_loader._LOAD_FORMAT_TO_MODEL_LOADER["dummy"] = UnloadedModel  # its public function warns about this
