"""Types of GPUs by name: their memory, the operations that they do and the bytes that they move each second."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from rlhf_suite.errors import UserError

MIB = 1 << 20


@dataclass(frozen=True)
class Device:
    """A type of GPU. `mark` is a part of the name that torch gives it; `memory` is in bytes, as nvidia-smi shows it;
    `flops` are dense bf16 operations per second and `bandwidth` bytes per second, by the data sheets of NVIDIA."""

    name: str
    mark: str
    memory: int
    flops: float
    bandwidth: float


# Of several whose mark is a part of a name, the first one counts.
DEVICES = (
    Device("b200", "B200", 183_359 * MIB, 2250e12, 8.0e12),
    Device("h200", "H200", 143_771 * MIB, 989.4e12, 4.8e12),
    Device("h100-pcie", "H100 PCIe", 81_559 * MIB, 756e12, 2.0e12),
    Device("h100-nvl", "H100 NVL", 95_830 * MIB, 835e12, 3.9e12),
    Device("h100-80", "H100", 81_559 * MIB, 989.4e12, 3.35e12),
    Device("a100-40", "A100-SXM4-40GB", 40_960 * MIB, 312e12, 1.555e12),
    Device("a100-80", "A100", 81_920 * MIB, 312e12, 2.0e12),
    Device("l40s", "L40S", 46_068 * MIB, 362e12, 0.864e12),
    Device("l4", "L4", 23_034 * MIB, 121e12, 0.3e12),
    Device("a10", "A10", 23_028 * MIB, 125e12, 0.6e12),
    Device("rtx-5090", "RTX 5090", 32_607 * MIB, 209.5e12, 1.792e12),
    Device("rtx-4090", "RTX 4090", 24_564 * MIB, 165.2e12, 1.008e12),
    Device("rtx-3090", "RTX 3090", 24_576 * MIB, 71e12, 0.936e12),
)


def device_named(name: str) -> Device:
    """Return the type of GPU of that name.

    Raises:
        UserError: it is not known.
    """
    names = [each.name for each in DEVICES]
    for each in DEVICES:
        if each.name == name.lower():
            return each
    near = difflib.get_close_matches(name.lower(), names, 1, cutoff=0.4)
    meant = f"Did you mean {near[0]}? " if near else ""
    raise UserError(f"--gpu {name}: this type of GPU is not known. {meant}Known are {', '.join(names)}")


def peak_flops(device: str) -> float | None:
    """Return the dense bf16 operations per second of a device by the name that torch gives it; None where it is not
    known."""
    return next((each.flops for each in DEVICES if each.mark in device), None)
