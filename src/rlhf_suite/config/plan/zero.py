"""What the flags of DeepSpeed come to: the ZeRO stage of a run, and how its ranks reduce and hold what they share."""

from __future__ import annotations

from rlhf_suite.config.declarations.ds import DeepSpeedConfig

PERSISTENT = 100_000  # as DeepSpeed has it
FAST_DEVICES = ("cuda",)  # where gradients are scattered, and beside the backward pass, unless a flag says otherwise


def decide_zero_stage(ds: DeepSpeedConfig, ranks: int, *, by_muon: bool) -> int | None:
    """Return the ZeRO stage of a run whose largest model has so many `ranks`; None: torch trains without DeepSpeed.
    `by_muon`: it trains a model by Muon, which is that of DeepSpeed."""
    if ds.zero_stage is not None:
        return ds.zero_stage
    sleeps = ds.has("enable_sleep") and ds.enable_sleep
    return 2 if ranks > 1 or by_muon or ds.adam_offload or ds.overlap_comm or ds.deepcompile or sleeps else None


def overlaps_reduction(ds: DeepSpeedConfig, device: str) -> bool:
    """Return whether gradients are reduced while the backward pass still runs."""
    if ds.overlap_comm is not None:
        return ds.overlap_comm
    return device in FAST_DEVICES and ds.zero_stage in (2, 3) and not ds.deepcompile


def persistent_size(ds: DeepSpeedConfig, device: str) -> int:
    """Return up to how many numbers a parameter of ZeRO-3 has that stays whole on each rank between passes."""
    if ds.persistence_threshold is not None:
        return ds.persistence_threshold
    return PERSISTENT if device in FAST_DEVICES and not ds.deepcompile else 0


def scatters_gradients(ds: DeepSpeedConfig, device: str) -> bool:
    """Return whether a rank of ZeRO-3 gets its part of the gradients alone. On a CPU all ranks get all of them, whose
    sums have another order: numbers of earlier runs stay what they are. DeepCompile, which runs on GPUs alone, always
    scatters them, by operations of its own."""
    return device in FAST_DEVICES and ds.zero_stage == 3
