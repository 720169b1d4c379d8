"""Use the devices for a moment, in a process of its own: `python -m rlhf_suite.doctor.trial <name of a trial>`.

A line of its output is the findings as JSON. A trial that hangs or dies is a finding too: `rlhf-suite doctor`
ends it after a time.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

from rlhf_suite.doctor.findings import FAULT, GOOD, MARK, NOTE, Finding

LOOPBACK = "127.0.0.1"
SIZE = 256  # rows and columns of a matrix
BF16_ERROR = 0.02  # relative, of a product of such matrices
MESSAGE = 1 << 20  # bytes that processes exchange
ANSWER_S = 60.0
LINE = 300  # characters of an error


def try_computing() -> Iterator[Finding]:
    """Multiply matrices in bf16 on each device, and compare with the product in fp64."""
    import torch

    if torch.version.cuda is not None and not torch.cuda.is_available():
        state = NOTE if not Path("/dev/nvidiactl").exists() else FAULT
        yield Finding(state, "CUDA", "torch cannot use a GPU here", "compare the driver with torch.version.cuda")
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    left, right = torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = left.double() @ right.double()
    for device in devices:
        product = (left.to(device) @ right.to(device)).double().cpu()
        error = float((product - exact).norm() / exact.norm())
        fits = error < BF16_ERROR
        text = f"a product of matrices in bf16 has a relative error of {error:.4f}"
        yield Finding(GOOD if fits else FAULT, device, text, "" if fits else "do not use this device")


def try_sharing() -> Iterator[Finding]:
    """Let another process on the same GPU read a bucket of weights, as the weight sync of a shared GPU does."""
    import torch
    from torch import multiprocessing

    from rlhf_suite.weight_sync.cuda_ipc import export_handle

    if not torch.cuda.is_available():
        return
    bucket = torch.full((MESSAGE,), 7, dtype=torch.uint8, device="cuda:0")
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=read_bucket, args=(theirs,))
    reader.start()
    ours.send(export_handle([], bucket))
    answer = ours.recv() if ours.poll(ANSWER_S) else f"no answer in {ANSWER_S:.0f} s"
    reader.join(ANSWER_S)
    if answer == 7 * MESSAGE:
        yield Finding(GOOD, "CUDA IPC", "another process on the GPU reads the memory of this one")
        return
    remedy = "in a container: --ipc=host --cap-add=SYS_PTRACE; unset PYTORCH_CUDA_ALLOC_CONF; or vllm.sync_backend=shm"
    yield Finding(FAULT, "CUDA IPC", f"another process cannot read memory of the GPU: {answer}", remedy)


def read_bucket(pipe: Connection) -> None:
    """Answer with the sum of the bytes of a bucket, or with what went wrong."""
    from rlhf_suite.weight_sync.cuda_ipc import open_handle

    try:
        _, bucket = open_handle(pipe.recv(), 0)
        pipe.send(int(bucket.long().sum()))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}"[:LINE])


def try_meeting() -> Iterator[Finding]:
    """Add numbers up over processes: one per GPU by NCCL, or two by gloo."""
    import torch
    from torch import multiprocessing

    gpus = torch.cuda.device_count()
    if gpus == 1:
        return
    backend, ranks = ("nccl", gpus) if gpus else ("gloo", 2)
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    multiprocessing.spawn(meet, (backend, ranks, port), nprocs=ranks)
    yield Finding(GOOD, backend, f"{ranks} processes on this machine add up their numbers")


def meet(rank: int, backend: str, ranks: int, port: int) -> None:
    """Take part in one all-reduce."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore(LOOPBACK, port, ranks, is_master=rank == 0)  # whatever the environment says of others
    dist.init_process_group(backend, store=store, world_size=ranks, rank=rank)
    numbers = torch.full((SIZE,), rank + 1.0, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
    dist.all_reduce(numbers)
    dist.destroy_process_group()
    expected = ranks * (ranks + 1) / 2
    if not bool((numbers == expected).all()):
        raise RuntimeError(f"rank {rank} has {float(numbers[0])} in place of {expected}")


def try_importing() -> Iterator[Finding]:
    """Import vLLM with its kernels, and transformers."""
    import transformers

    from rlhf_suite.engines.build import load_kernels

    if load_kernels():
        yield Finding(GOOD, "imports", f"vLLM with its kernels, and transformers {transformers.__version__}")
    else:
        yield Finding(FAULT, "vLLM", "its kernels cannot be loaded", "install the build for this device and torch")


TRIALS: dict[str, Callable[[], Iterator[Finding]]] = {
    "computing": try_computing,
    "CUDA IPC": try_sharing,
    "processes that meet": try_meeting,
    "imports": try_importing,
}


def main(name: str) -> None:
    """Run a trial and print its findings, in a line of their own whatever libraries print."""
    sys.stdout.write(f"\n{MARK}{json.dumps([asdict(finding) for finding in TRIALS[name]()])}\n")


if __name__ == "__main__":
    main(sys.argv[1])
