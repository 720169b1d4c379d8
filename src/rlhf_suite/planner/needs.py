"""What a run needs, in numbers: bytes of each device, of the host, of /dev/shm and of the disk, and seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlhf_suite.config.plan.run_plan import Machine
from rlhf_suite.planner import memory
from rlhf_suite.planner.devices import Device
from rlhf_suite.planner.memory import EngineMemory, Memory
from rlhf_suite.planner.trace import Tokens

RESERVE = 0.05  # of a device that stays free: what torch cannot use because free memory is in pieces
SEQUENCES_OF_AN_ENGINE = 8  # that the KV cache of a proposal holds whole, if the run has as many


@dataclass(frozen=True)
class Target:
    """The devices that a run is planned for; `device` is None for processes on CPUs. Bytes that are free on disk and
    in /dev/shm are known of this machine alone."""

    device: Device | None
    memory: int  # bytes: of one GPU, or of the machine
    flops: float | None  # operations per second that training achieves on a device; None: not known
    disk: int | None = None
    shared_memory: int | None = None

    @property
    def usable(self) -> int:
        return round(self.memory * (1 - RESERVE))

    @property
    def machine(self) -> Machine:
        return Machine("cpu", 0) if self.device is None else Machine("cuda", None)


@dataclass(frozen=True)
class Process:
    """One kind of process of a run: `count` of them, each of which has `devices`."""

    name: str
    count: int
    memory: Memory
    devices: int = 1


@dataclass(frozen=True)
class DeviceUse:
    """The processes that share a device, and the most bytes that they take at one time."""

    count: int
    processes: tuple[Process, ...]

    @property
    def peak(self) -> int:
        """Return the largest sum of one process at its peak and the others at rest."""
        resting = sum(process.memory.resting for process in self.processes)
        return max(resting + process.memory.peak - process.memory.resting for process in self.processes)

    def lacking(self, usable: int) -> int:
        """Return by how many bytes the moments of all processes together exceed what is usable."""
        resting = sum(process.memory.resting for process in self.processes)
        lacking = 0
        for process in self.processes:
            others = resting - process.memory.resting
            rest = others + sum(process.memory.always.values())
            lacking += sum(max(0, rest + size - usable) for size in process.memory.moments.values())
        return lacking


def peak_of(target: Target, devices: Iterable[DeviceUse], host: Mapping[str, int]) -> int:
    """Return the bytes of the fullest device; of the machine where all processes are on CPUs."""
    return sum(host.values()) if target.device is None else max(device.peak for device in devices)


@dataclass(frozen=True)
class Estimate:
    """What a run needs, in bytes and seconds."""

    target: Target
    devices: tuple[DeviceUse, ...]
    host: dict[str, int]
    shared_memory: dict[str, int]
    disk: dict[str, int]
    times: dict[str, float]
    silences: dict[str, float]  # seconds between two signs of life at most, by what a process does
    timeout_s: float  # launch.timeout_s, within which there must be one
    tokens: Tokens  # the longest micro-batch of a rank
    engine: EngineMemory | None
    longest: int  # data.max_len
    at_once: float  # sequences that an engine would run at one time, if its KV cache had the room
    rows: str  # how the actor takes its batches
    judge: EngineMemory | None  # of its engines; None: the run has none
    judge_longest: int  # reward.judge.max_len
    checkpointing: dict[str, bool]  # of models whose run leaves that to the plan: whether they recompute activations
    budget: int | None  # tokens of a micro-batch; None: the run says so itself, or has no GPU

    @property
    def num_devices(self) -> int:
        """Return how many GPUs, or processes on CPUs, the run takes."""
        return sum(use.count for use in self.devices)

    @property
    def peak(self) -> int:
        return peak_of(self.target, self.devices, self.host)

    @property
    def problems(self) -> list[str]:
        """Return why it cannot run; empty if it can."""
        problems = []
        if self.peak > self.target.usable:
            kind = self.target.device.name if self.target.device else "this machine"
            problems.append(f"{gib(self.peak)} do not fit into {gib(self.target.usable)} of {kind}")
        engines = (
            ("an engine", self.engine, "data.max_len", self.longest),
            ("an engine of the judge", self.judge, "reward.judge.max_len", self.judge_longest),
        )
        for whose, engine, flag, longest in engines:
            if engine is not None and engine.kv_tokens < longest:
                problem = f"the KV cache of {whose} has {engine.kv_tokens} tokens"
                problems.append(f"{problem}, fewer than {flag}={longest}")
        places = (("disk", self.disk, self.target.disk), ("/dev/shm", self.shared_memory, self.target.shared_memory))
        for name, terms, free in places:
            if free is not None and (needed := sum(terms.values())) > free:
                problems.append(f"{gib(needed)} do not fit into {gib(free)} that are free on {name}")
        return problems

    @property
    def is_late(self) -> bool:
        """Whether a process shows no sign of life for longer than the deadline of all waits."""
        return max(self.silences.values(), default=0.0) >= self.timeout_s

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def lacking(self) -> int:
        """Return how many bytes are missing everywhere together; 0: it fits, and an engine has room for several whole
        sequences, without which it would generate them one by one."""
        if self.target.device is None:
            lacking = max(0, self.peak - self.target.usable)
        else:
            lacking = sum(use.lacking(self.target.usable) for use in self.devices)
        if self.engine is not None:
            tokens = round(self.longest * min(self.at_once, SEQUENCES_OF_AN_ENGINE))
            lacking += max(0, tokens - self.engine.kv_tokens) * self.engine.kv_bytes
        for terms, free in ((self.disk, self.target.disk), (self.shared_memory, self.target.shared_memory)):
            lacking += max(0, sum(terms.values()) - free) if free is not None else 0
        return lacking


def gib(size: float) -> str:
    """Return a number of bytes for people."""
    return f"{size / memory.GIB:.1f} GiB" if size >= memory.GIB / 10 else f"{size / memory.MIB:.0f} MiB"
