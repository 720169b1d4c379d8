"""Types of GPUs by name, what they do each second, and how many operations a trained token takes.

A multiplication with a matrix of N weights takes 2N operations per token in the forward pass, 2N for the gradient of
its input, and 2N for that of its weights: 6N for a weight that is trained (Kaplan et al., arXiv:2001.08361, section
2.1), 4N for one that only passes gradients on, as under adapters, and 2N for one of a model that only runs forward.
Attention multiplies queries with keys and probabilities with values: 4 H D operations per layer and attended token in
the forward pass, with H heads of size D, and twice that in the backward pass (Chowdhery et al., arXiv:2204.02311,
appendix B). A token of a causal sequence of length T attends to (T + 1) / 2 tokens on average; the appendix counts
all T. What gradient checkpointing computes again is not counted, as there.
"""

from __future__ import annotations

import difflib
import re
import time
from dataclasses import dataclass

from rlhf_suite.errors import UserError

MIB = 1 << 20


@dataclass(frozen=True)
class Device:
    """A type of GPU. `mark` is in the name that torch and NVML give it; `memory` is in bytes, as nvidia-smi shows it;
    `flops` are dense bf16 operations per second and `bandwidth` bytes per second, by the data sheets of NVIDIA."""

    name: str
    mark: str
    memory: int
    flops: float
    bandwidth: float


SLOWER = re.compile(r"\b(?:MIG|Laptop|Max-Q|D)\b")
# Of several whose mark is in a name, the first one counts.
DEVICES = (
    Device("b200", "B200", 183_359 * MIB, 2250e12, 8.0e12),
    Device("h200", "H200", 143_771 * MIB, 989.4e12, 4.8e12),
    Device("h20", "H20", 97_871 * MIB, 148e12, 4.0e12),
    Device("h800", "H800", 81_559 * MIB, 989.4e12, 3.35e12),
    Device("h100-pcie", "H100 PCIe", 81_559 * MIB, 756e12, 2.0e12),
    Device("h100-nvl", "H100 NVL", 95_830 * MIB, 835e12, 3.9e12),
    Device("h100-80", "H100", 81_559 * MIB, 989.4e12, 3.35e12),
    Device("a100-40", "A100-SXM4-40GB", 40_960 * MIB, 312e12, 1.555e12),
    Device("a100-80", "A100", 81_920 * MIB, 312e12, 2.0e12),
    Device("l40s", "L40S", 46_068 * MIB, 362e12, 0.864e12),
    Device("l4", "L4", 23_034 * MIB, 121e12, 0.3e12),
    Device("l40", "L40", 46_068 * MIB, 181e12, 0.864e12),
    Device("a10", "A10", 23_028 * MIB, 125e12, 0.6e12),
    Device("a10g", "A10G", 23_028 * MIB, 70e12, 0.6e12),
    Device("rtx-5090", "RTX 5090", 32_607 * MIB, 209.5e12, 1.792e12),
    Device("rtx-4090", "RTX 4090", 24_564 * MIB, 165.2e12, 1.008e12),
    Device("rtx-3090", "RTX 3090", 24_576 * MIB, 71e12, 0.936e12),
)


def find_device(name: str) -> Device:
    """Return the type of GPU of that name.

    Raises:
        UserError: it is not known.
    """
    names = [device.name for device in DEVICES]
    for device in DEVICES:
        if device.name == name.lower():
            return device
    longer = [known for known in names if known.startswith(name.lower())]  # h100 is three types
    near = longer or difflib.get_close_matches(name.lower(), names, 1, cutoff=0.4)
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    raise UserError(f"--gpu {name}: this type of GPU is not known. {meant}Known are {', '.join(names)}")


def find_kind(name: str) -> Device | None:
    """Return the type of a GPU by the name that torch or NVML gives it; None where it is not known. The mark is a whole
    word of the name (an L40 is not an L4), or follows the G of a Grace Hopper or Grace Blackwell. Partitions of MIG and
    the GPUs of laptops bear the name of a GPU that is faster."""
    if SLOWER.search(name):
        return None
    return next((kind for kind in DEVICES if re.search(rf"\bG?{re.escape(kind.mark)}\b", name)), None)


def peak_flops(device: str) -> float | None:
    """Return the dense bf16 operations per second of a device by the name that torch gives it; None where it is not
    known."""
    kind = find_kind(device)
    return None if kind is None else kind.flops


def cpu_flops(dtype: str) -> float:
    """Return the operations per second of one core of this machine in products of matrices of `dtype` (fp32 or bf16),
    the best of five measurements of some hundredths of a second each. They are CPU seconds, so that the core counts as
    the run's own whatever else works on it now. The matrices have 1024 rows, or fewer where a core is slow: without
    instructions for bf16 such a product would take seconds."""
    import torch

    size, threads = 256, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        while size < 1024 and product_s(size, dtype, 2) < 0.01:
            size *= 2
        return 2 * size**3 / product_s(size, dtype, 5)
    finally:
        torch.set_num_threads(threads)


def product_s(size: int, dtype: str, times: int) -> float:
    """Return the CPU seconds of this thread for a product of two matrices of `size` rows and columns, the least of so
    many."""
    import torch

    matrix = torch.ones(size, size, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16)
    seconds = []
    for _ in range(times):
        begin = time.thread_time()
        matrix @ matrix
        seconds.append(time.thread_time() - begin)
    return min(seconds)


@dataclass(frozen=True)
class Model:
    """The matrices that a token is multiplied with, the head included but not the look-up of embeddings; and the heads
    of all layers together times their size."""

    trained: int
    frozen: int
    attention: int

    def forward_flops(self, length: int) -> float:
        """Return the operations per token of a forward pass over causal sequences of `length` tokens."""
        return 2 * (self.trained + self.frozen) + 4 * self.attention * (length + 1) / 2


def flops_per_token(model: Model, length: int, reference: Model | None = None) -> float:
    """Return the operations per token of a step over causal sequences of `length` tokens. A `reference` runs forward
    alone, over the same tokens."""
    attended = (length + 1) / 2
    step = 6 * model.trained + 4 * model.frozen + 3 * 4 * model.attention * attended
    if reference is None:
        return step
    return step + reference.forward_flops(length)
