"""Digests and the trainer's side of a weight sync, without an engine."""

from __future__ import annotations

import fcntl
import inspect
import os
import subprocess
import sys
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_suite.distributed.world import open_store
from rlhf_suite.errors import UserError
from rlhf_suite.weight_sync import buckets, digests
from rlhf_suite.weight_sync import sender as weight_sender
from rlhf_suite.weight_sync.cuda_ipc import handle_from_json, handle_to_json
from rlhf_suite.weight_sync.digests import (
    ADAPTER,
    BASE,
    WHOLE,
    Attested,
    Part,
    TensorEntry,
    WeightSyncError,
    combine_reports,
    digest,
    entries_from_plain,
)
from rlhf_suite.weight_sync.sender import SHM_FOLDER, SHM_PREFIX, ShmSender, StreamSender, make_group
from rlhf_suite.weight_sync.stream import broadcast, receive_buckets


def test_digest_of_known_bits():
    # Patterns 1, 2, 3 at places 1, 2, 3: the sum is 6, the weighted sum 1 + 4 + 9 = 14.
    assert digest(torch.tensor([1, 2, 3])) == f"{6:016x}{14:016x}"


def test_digest_wraps_negative_numbers():
    assert digest(torch.tensor([-1])) == "f" * 32


def test_digest_sees_a_swap_a_shift_and_a_bit():
    values = torch.arange(12, dtype=torch.float32).view(4, 3)
    changed = values.clone()
    changed.view(torch.int32)[3, 2] ^= 1
    others = [values[[1, 0, 2, 3]], values.roll(1), changed]
    assert len({digest(tensor) for tensor in [values, *others]}) == 4


def test_digest_does_not_depend_on_memory_layout():
    values = torch.randn(5, 7)
    assert digest(values) == digest(values.t().contiguous().t())


def test_digest_has_one_zero():
    tiny = torch.tensor([0.0, -0.0, 1e-42])
    assert digest(tiny) == digest(torch.zeros(3))


@pytest.mark.notices(
    "two parts of a large tensor may change places",
    "weight_sync/digests.py",
    ".sum() + (begin + start) * total",
    ".sum()",
)
def test_digest_continues_over_chunks(monkeypatch):
    values = torch.randn(100)
    whole = digest(values)
    monkeypatch.setitem(digests._CHUNK, "cpu", 7)
    assert digest(values) == whole


@pytest.mark.notices(
    "an engine that has loaded half of a tensor has it",
    "weight_sync/digests.py",
    "if 0 < placed < whole.numbers:",
    "if placed > whole.numbers:",
)
def test_workers_must_have_all_of_a_tensor_together():
    halves = [Attested({"a": Part(12, 6, True)}), Attested({"a": Part(12, 6, True)})]
    assert (combine_reports(halves).received, combine_reports(halves).read_back) == (1, 1)
    with pytest.raises(WeightSyncError, match=r"tensor a has 12 numbers, and vLLM's model has a place for 6: it would"):
        combine_reports([*halves[:1], Attested({"a": Part(12, 0, True)})])


@pytest.mark.notices(
    "a tensor counts as read back if one of the workers has read it",
    "weight_sync/digests.py",
    "all(part.is_read for part in parts)",
    "any(part.is_read for part in parts)",
)
def test_a_tensor_counts_as_read_if_all_workers_that_have_it_have_read_it():
    def report(*parts: Part):
        return combine_reports([Attested({"a": part}) for part in parts])

    assert report(Part(12, 12, True), Part(12, 0, False)).not_readable == ()
    assert report(Part(12, 12, True), Part(12, 12, False)).not_readable == ("a",)
    assert report(Part(12, 0, False), Part(12, 0, False)).not_readable == ("a",), "no worker has it"


def test_a_difference_that_one_worker_found_is_an_error_of_the_engine():
    with pytest.raises(WeightSyncError, match="tensor a differs"):
        combine_reports([Attested({"a": Part(12, 12, True)}), Attested({}, wrong="tensor a differs")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shm_file_holds_every_tensor_in_the_engines_type(dtype):
    weights = {"a.weight": torch.randn(3, 5), "b": torch.randn(()), "ids": torch.arange(7), "c": torch.randn(4, 2).t()}
    sender = ShmSender(dtype, check=True)
    manifest = sender.send(4, weights.items())
    assert Path(manifest.path).stat().st_mode & 0o777 == 0o600
    flat = torch.from_file(manifest.path, size=Path(manifest.path).stat().st_size, dtype=torch.uint8)
    assert [entry.name for entry in manifest.entries] == list(weights)
    for entry in manifest.entries:
        sent = weights[entry.name] if entry.name == "ids" else weights[entry.name].to(dtype)
        assert torch.equal(entry.view(flat), sent)
        assert entry.digest == digest(sent)
    sender.release()
    assert not Path(manifest.path).exists()


def test_manifest_survives_plain_values():
    entry = TensorEntry("a", (2, 3), "float32", 64, 24, "00")
    assert entries_from_plain([{**vars(entry), "shape": [2, 3]}]) == [entry]


def test_an_unchecked_sync_has_no_digests():
    sender = ShmSender(torch.float32, check=False)
    assert sender.send(1, [("a", torch.ones(2))]).entries[0].digest == ""
    sender.release()


def test_a_failed_sync_leaves_no_file():
    def weights():
        yield "a", torch.ones(2)
        raise OSError(28, "No space left on device")

    before = set(SHM_FOLDER.glob(f"{SHM_PREFIX}*"))
    with pytest.raises(UserError, match="--shm-size"):
        ShmSender(torch.float32, check=True).send(1, weights())
    assert set(SHM_FOLDER.glob(f"{SHM_PREFIX}*")) == before


def test_files_of_killed_senders_are_removed_and_others_are_not():
    code = (
        "import torch, os; from rlhf_suite.weight_sync.sender import ShmSender; "
        "print(ShmSender(torch.float32, True).send(1, [('a', torch.ones(2))]).path, flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    left = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    assert Path(left).exists()
    alive = ShmSender(torch.float32, check=True)
    path = alive.send(1, [("a", torch.ones(2))]).path
    ShmSender(torch.float32, check=True)
    assert not Path(left).exists()
    assert Path(path).exists()
    alive.release()


def test_weights_that_are_kept_have_no_name_and_last_until_the_next_are_sent():
    before = set(SHM_FOLDER.glob(f"{SHM_PREFIX}*"))
    sender = ShmSender(torch.float32, check=True, keep=True)
    manifest = sender.send(1, [("a", torch.ones(2))])
    assert set(SHM_FOLDER.glob(f"{SHM_PREFIX}*")) == before, "a process that is killed leaves nothing behind"
    sender.release()
    assert manifest.path is not None
    flat = torch.from_file(manifest.path, size=8, dtype=torch.uint8)
    assert manifest.entries[0].view(flat).tolist() == [1, 1]
    sender.close()
    assert not Path(manifest.path).exists()


def test_stream_sends_tensors_larger_and_smaller_than_a_bucket(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 256)
    weights = {"small": torch.randn(3), "large": torch.randn(200), "last": torch.randn(2, 2)}
    sender = StreamSender("gloo", torch.float32, True, "127.0.0.1", 30)
    received: dict[str, torch.Tensor] = {}
    sizes = list[int]()

    def receive() -> None:
        store = dist.TCPStore("127.0.0.1", sender.port, is_master=False)
        group = make_group("gloo", store, 1, 2, timedelta(seconds=30))
        weight_sender.prove_channel(group, "gloo", torch.device("cpu"), is_sender=False)

        def arriving():
            key = partial(weight_sender.header_key, 0, 3, WHOLE)
            for entries, flat in receive_buckets(group, store, key, torch.device("cpu")):
                sizes.append(len(flat))
                yield entries, flat

        for entries, tensors in buckets.join_parts(arriving()):
            received.update({entry.name: tensor for entry, tensor in zip(entries, tensors, strict=True)})

    thread = threading.Thread(target=receive)
    thread.start()
    sender.connect(2, 0)
    manifest = sender.send(3, weights.items())
    thread.join(timeout=30)
    assert [entry.name for entry in manifest.entries] == list(weights)
    assert {name: digest(tensor) for name, tensor in received.items()} == {e.name: e.digest for e in manifest.entries}
    assert {name: tensor.tolist() for name, tensor in received.items()} == {n: t.tolist() for n, t in weights.items()}
    assert manifest.nbytes == 4 * (3 + 200 + 4)
    assert sizes == [64, 256, 256, 256, 128], "the small one, 800 bytes in full buckets, the rest"


def exchange(monkeypatch, make, load, begin=lambda: None):
    """Send what `make` yields in buckets of one tensor each to a thread, which calls `begin` before it receives, and
    `load` with the number of each bucket that has arrived."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 64)
    sender = StreamSender("gloo", torch.float32, True, "127.0.0.1", 30)

    def receive() -> None:
        store = dist.TCPStore("127.0.0.1", sender.port, is_master=False)
        group = make_group("gloo", store, 1, 2, timedelta(seconds=30))
        weight_sender.prove_channel(group, "gloo", torch.device("cpu"), is_sender=False)
        begin()
        key = partial(weight_sender.header_key, 0, 1, WHOLE)
        for number, _ in enumerate(receive_buckets(group, store, key, torch.device("cpu"))):
            load(number)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    sender.connect(2, 0)
    sender.send(1, make())
    thread.join(timeout=30)
    assert not thread.is_alive()


@pytest.mark.notices(
    "the next bucket is made when the last one has arrived",
    "weight_sync/stream.py",
    "under_way = start_broadcast(group, placed)",
    "under_way = start_broadcast(group, placed)\n        under_way.wait()",
)
def test_the_next_bucket_is_made_before_the_last_one_has_arrived(monkeypatch):
    begun, was_begun, loads = threading.Event(), list[bool](), list[int]()

    def make():
        for number in range(4):
            if number == 2:  # bucket 0 is on its way, and has the first tensor alone
                begun.set()
            yield f"w{number}", torch.full((16,), float(number))

    exchange(monkeypatch, make, loads.append, lambda: was_begun.append(begun.wait(timeout=10)))
    assert was_begun == [True]
    assert loads == [0, 1, 2, 3]


@pytest.mark.notices(
    "a bucket is loaded when the next one is announced",
    "weight_sync/stream.py",
    "begin(number) if is_announced else None",
    "begin(number)",
)
def test_a_bucket_is_loaded_while_the_next_one_is_made(monkeypatch):
    """The last tensor is not made before bucket 1 has been loaded."""
    loaded = threading.Event()

    def make():
        for number in range(4):
            if number == 3:
                assert loaded.wait(timeout=10), "nothing is loaded before all is sent"
            yield f"w{number}", torch.full((16,), float(number))

    def load(number: int) -> None:
        if number == 1:
            loaded.set()

    exchange(monkeypatch, make, load)


@pytest.mark.notices(
    "a tensor larger than a bucket travels whole",
    "weight_sync/buckets.py",
    "size = BUCKET_BYTES // kind.itemsize",
    "size = max(1, flat.numel())",
)
@pytest.mark.notices(
    "the digest of a tensor in parts forgets where a part begins",
    "weight_sync/buckets.py",
    "digest_sums(part, begin // part.element_size())",
    "digest_sums(part)",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bucket_is_larger_than_its_limit_and_tensors_come_together_again(monkeypatch, dtype):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1 << 10)
    shapes = {"embedding": (300, 7), "full": (256,), "a": (3,), "none": (0,), "b": (9, 9), "turned": (40, 30)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()} | {"ids": torch.arange(1000)}
    weights["turned"] = weights["turned"].t()
    packed = list(buckets.pack_buckets(weights.items(), dtype, True, torch.device("cpu")))
    assert max(len(flat) for _, flat in packed) == 1 << 10
    arrived = [pair for group in buckets.join_parts(packed) for pair in zip(*group, strict=True)]
    assert [entry.name for entry, _ in arrived] == list(weights)
    for entry, tensor in arrived:
        sent = weights[entry.name] if entry.name == "ids" else weights[entry.name].to(dtype)
        assert torch.equal(tensor, sent) and tensor.dtype == sent.dtype
        assert entry.digest == digest(sent)
        assert entry.nbytes == sent.nbytes
    assert sum(entry.nbytes for entry, _ in arrived) == sum(e.nbytes for entries, _ in packed for e in entries)


class LargestTensor(TorchDispatchMode):
    """Measures the largest memory that an operation gives to a tensor."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not (args and made.untyped_storage()._cdata in storages(args)):
            self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return made


def storages(values) -> set[int]:
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("backend", ["shm", "stream"])
def test_sending_a_large_tensor_takes_no_memory_of_its_size(monkeypatch, backend):
    """The embedding has 32 buckets. Digests are computed in chunks whose numbers have eight bytes."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1 << 17)
    weights = [("embedding", torch.randn(1 << 10, 1 << 10, dtype=torch.float32))]
    with LargestTensor() as largest:
        if backend == "shm":
            sender = ShmSender(torch.bfloat16, check=True)
            sender.send(1, weights)
            sender.release()
        else:
            for _ in buckets.pack_buckets(weights, torch.bfloat16, True, torch.device("cpu")):
                pass
    assert (1 << 17) <= largest.nbytes <= 8 * digests._CHUNK["cpu"]


def test_the_host_reads_the_digests_of_a_bucket_at_once():
    """A mixture of experts has ten thousand tensors: a read of each would stop the device as often."""
    weights = [(f"experts.{number}", torch.randn(4, 4)) for number in range(50)]
    with CountReads() as reads:
        packed = list(buckets.pack_buckets(weights, torch.float32, True, torch.device("cpu")))
    assert len(packed) == 1 and len(packed[0][0]) == 50
    assert reads.count == 0, "numbers of one element are read by item()"
    assert [entry.digest for entry in packed[0][0]] == [digest(tensor) for _, tensor in weights]


class CountReads(TorchDispatchMode):
    """Counts what makes the host wait for one number of a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.notices(
    "a channel that brings other bytes is taken for one that works",
    "weight_sync/sender.py",
    "works, reason = torch.equal(arrived, known), ",
    "works, reason = True, ",
)
def test_a_channel_that_does_not_work_is_named_before_weights_are_sent():
    store = open_store("127.0.0.1", timedelta(seconds=30))
    said = list[str]()

    def receive() -> None:
        other = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        group = make_group("gloo", other, 1, 2, timedelta(seconds=30))
        with pytest.raises(WeightSyncError) as caught:
            weight_sender.prove_channel(group, "gloo", torch.device("cpu"), is_sender=False)
        said.append(str(caught.value))

    thread = threading.Thread(target=receive)
    thread.start()
    group = make_group("gloo", store, 0, 2, timedelta(seconds=30))
    broadcast(group, torch.zeros(weight_sender.CHANNEL_BYTES, dtype=torch.uint8))
    thread.join(timeout=30)
    assert "cannot exchange weights by gloo: other bytes arrived" in said[0] and "GLOO_SOCKET_IFNAME" in said[0]


@pytest.mark.notices(
    "weights that are sent again have the descriptions of those that were sent before",
    "weight_sync/sender.py",
    'return f"header/{meeting}/{version}/{part}/{bucket}"',
    'return f"header/{version}/{part}/{bucket}"',
)
def test_weights_that_are_sent_again_have_descriptions_of_their_own():
    """An engine may ask for the first one before the sender deletes those of the sending before."""
    sender = StreamSender("gloo", torch.float32, True, "127.0.0.1", 30, keep=True)
    store = dist.TCPStore("127.0.0.1", sender.port, is_master=False)
    sender.connect(1, 1)
    sender.send(3, {"a": torch.ones(2)}.items())
    sender.connect(1, 2)
    asked = [weight_sender.header_key(meeting, 3, WHOLE, 0) for meeting in (1, 2)]
    assert [store.check([key]) for key in asked] == [True, False]
    sender.send_again(3)
    assert [store.check([key]) for key in asked] == [False, True]


@pytest.mark.notices(
    "an adapter has the descriptions of the model that was sent before it",
    "weight_sync/sender.py",
    'return f"header/{meeting}/{version}/{part}/{bucket}"',
    'return f"header/{meeting}/{version}/{bucket}"',
)
def test_an_adapter_that_is_sent_after_its_model_has_descriptions_of_its_own():
    """An engine may ask for the first one before the sender deletes those of the model. The model is not kept."""
    sender = StreamSender("gloo", torch.float32, True, "127.0.0.1", 30, keep=True)
    store = dist.TCPStore("127.0.0.1", sender.port, is_master=False)
    sender.connect(1, 1)
    sender.send(3, {"a": torch.ones(2)}.items(), BASE)
    asked = [weight_sender.header_key(1, 3, part, 0) for part in (BASE, ADAPTER)]
    assert [store.check([key]) for key in asked] == [True, False]
    assert sender.send_again(3, BASE) is None
    sender.send(3, {"a.lora_A": torch.ones(2)}.items(), ADAPTER)
    assert [store.check([key]) for key in asked] == [False, True]
    sender.send(3, {"a": torch.ones(2)}.items(), BASE)
    again = sender.send_again(3, ADAPTER)
    assert again is not None and [entry.name for entry in again.entries] == ["a.lora_A"]


def test_an_ipc_handle_is_text_and_takes_the_receivers_index_of_the_gpu():
    """The order of arguments is torch's own: a release that changes it fails here."""
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    storage = torch.storage.TypedStorage
    values = (torch.Tensor, torch.Size([7]), (1,), 3, storage, torch.uint8, 5)
    values += (b"\x00handle", 4096, 512, False, b"counter", 2, b"event", True)
    entries = [TensorEntry("a.weight", (7,), "uint8", 0, 7, "")]
    found, arguments = handle_from_json(handle_to_json(entries, values), device=0)
    assert found == entries
    lender, borrower = dict(zip(names, values, strict=True)), dict(zip(names, arguments, strict=True))
    assert borrower == lender | {"storage_device": 0}


def test_a_pipe_of_another_user_is_not_waited_for():
    path = SHM_FOLDER / f"{SHM_PREFIX}pipe-{os.getpid()}"
    os.mkfifo(path)
    try:
        cleaning = threading.Thread(target=ShmSender, args=(torch.float32, True), daemon=True)
        cleaning.start()
        cleaning.join(300)
        assert not cleaning.is_alive()
        assert path.exists()
    finally:
        path.unlink()


@pytest.mark.notices(
    "weights are written into a file that another run has removed",
    "weight_sync/sender.py",
    "if path.exists():  # else",
    "if file:  # else",
)
def test_a_file_that_another_run_removes_before_it_is_locked_is_made_again(monkeypatch):
    lock, others = fcntl.flock, [weight_sender._remove_orphans]

    def lock_late(file, how):
        if how == fcntl.LOCK_EX and others:
            others.pop()()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    sender = ShmSender(torch.float32, check=True)
    path = sender.send(1, [("a", torch.ones(2))]).path
    assert others == [] and Path(path).exists()
    sender.release()


def test_a_locked_file_belongs_to_another_process():
    path = SHM_FOLDER / f"{SHM_PREFIX}test-{os.getpid()}"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ShmSender(torch.float32, check=True)
        assert path.exists()
    path.unlink()
