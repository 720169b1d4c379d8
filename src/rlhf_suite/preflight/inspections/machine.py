"""What a run needs of this machine and would miss late: loopback, ports, shared memory, a folder for sockets, GPUs,
commands of tools."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from rlhf_suite.config.check.lacking import TOKENS, find_token_problem, make_no_gpu_problem
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.reward import is_http
from rlhf_suite.config.declarations.runs import Run, flags_of
from rlhf_suite.config.declarations.task_groups import LOOPS, RESUMABLE, RL
from rlhf_suite.config.plan.object_store import LEAST_MB, object_store_mb, samples_of_step
from rlhf_suite.config.plan.run_plan import is_on_ray, model_sections
from rlhf_suite.config.rules.agents import MCP
from rlhf_suite.config.rules.check_run import judge
from rlhf_suite.doctor.checks import OF_GPU_RUNS
from rlhf_suite.doctor.facts import Facts, read_facts
from rlhf_suite.doctor.findings import FAULT
from rlhf_suite.launch.address import split_address
from rlhf_suite.launch.environment import cluster_to_join, device_kind, gpu_count
from rlhf_suite.launch.session import root_problem
from rlhf_suite.launch.slurm import is_first_node
from rlhf_suite.preflight.inspections.network import unreachable
from rlhf_suite.preflight.inspections.routing import route_bytes

LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0  # a name server may take a few
# Listeners of Ray's daemons and of a few actors with their rendezvous stores, and as many connections between them.
PORTS = 64
SHARED_MEMORY = Path("/dev/shm")


def machine(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Return what the machine lacks that the job runs on; nothing where that machine is not known yet."""
    if folder is None or run.task not in RESUMABLE:
        return
    yield from network()
    if cluster_to_join(run.launch) is None and (is_on_ray(run) or run.task in LOOPS):
        if (problem := root_problem()) is not None:  # of the folder for temporary files, which holds the sockets of Ray
            yield Problem("TMPDIR", problem, "choose a short folder on a local disk: export TMPDIR=/tmp")
        yield from shared_memory(run)


def gpus_can_be_used(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield what keeps a run from the GPUs of this machine. A folder is known where the run itself will be."""
    if folder is None or run.task not in RESUMABLE or cluster_to_join(run.launch) is not None:
        return
    if device_kind(run.launch) != "cuda" or not gpu_count():
        return
    yield from gpu_problems(read_facts())


def flags_fit_the_device(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for each flag that needs a GPU, where launch.device=auto stands for the CPU. Rules say so where
    launch.device=cpu is written."""
    if folder is None or run.launch.device != "auto" or cluster_to_join(run.launch) is not None:
        return
    values = all_values(run) | {"launch.device": device_kind(run.launch)}
    for key, info in flags_of(run.task).items():
        for need in judge(info, values)[1]:
            yield make_no_gpu_problem(key, values[key], need, need.off or spell(info.default))


def gpu_problems(facts: Facts) -> Iterator[Problem]:
    """Yield what keeps any run from the GPUs of a machine."""
    if facts.driver is None:
        fix = "unset CUDA_VISIBLE_DEVICES, or see nvidia-smi; launch.device=cpu needs no GPU"
        yield Problem("launch.device", "cuda, but there is no NVIDIA driver here", fix)
        return
    for check in OF_GPU_RUNS:
        for finding in check(facts):
            if finding.state == FAULT:
                yield Problem("launch.device", f"cuda, but {finding.subject}: {finding.text}", finding.remedy)


def commands_of_tools_exist(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for each MCP server in agent.tools whose command this machine does not have."""
    for server in run.agent.tools if run.task in RL else ():
        try:
            command = next(iter(shlex.split(server.removeprefix(MCP))), "")
        except ValueError as error:
            yield Problem("agent.tools", f"{server!r} is not a command ({error})", "close its quotation marks")
            continue
        if not is_http(command) and shutil.which(command) is None:
            problem = f"there is no command {command!r} for {server!r} (seen from {Path.cwd()})"
            yield Problem("agent.tools", problem, "install it, or write its whole path")


def cluster_accepts(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem if nothing accepts connections at launch.ray_address. Only the node that will use it asks."""
    address = cluster_to_join(run.launch)
    place = split_address(address or "")
    if folder is None or not is_first_node() or place is None:
        return
    for reason in unreachable([place], CONNECT_S).values():
        problem = f"no Ray cluster accepts a connection at {address}: {reason}"
        fix = "start one with `ray start --head`, or remove launch.ray_address for a private cluster"
        yield Problem("launch.ray_address", problem, fix)


def server_has_its_token(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield what is wrong with the token of a server, where the server itself will be."""
    if folder is not None and run.task in TOKENS and (problem := find_token_problem(run)) is not None:
        yield problem


def network() -> Iterator[Problem]:
    """Check that processes can meet at loopback ports that the system chooses."""
    with ExitStack() as stack:
        opened = 0
        try:
            for opened in range(PORTS):
                listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))
                if not opened:
                    stack.enter_context(socket.create_connection(listener.getsockname(), timeout=1))
        except OSError as error:
            if not opened:
                problem = f"nothing can listen on {LOOPBACK} ({error.strerror or error})"
                yield Problem("loopback network", problem, "bring it up as root: ip link set lo up")
            else:
                problem = f"only {opened} TCP ports are free for listeners on {LOOPBACK}, {PORTS} are needed"
                fix = "widen the range as root: sysctl -w net.ipv4.ip_local_port_range='32768 60999'; or see ss -s"
                yield Problem("TCP ports", problem, fix)


def shared_memory(run: Run) -> Iterator[Problem]:
    """Check shared memory, which holds the object store of Ray and the weights on their way to engines."""
    needed_mb = object_store_mb(run, model_sections(run), device_kind(run.launch), route_bytes(run))
    container = "in a container give it room: docker run --shm-size=2g"
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        problem = f"{SHARED_MEMORY} is missing or cannot be written"
        yield Problem("shared memory", problem, f"mount it as root: mount -t tmpfs tmpfs {SHARED_MEMORY}; {container}")
    elif (free_mb := shutil.disk_usage(SHARED_MEMORY).free >> 20) < needed_mb:
        problem = f"{SHARED_MEMORY} has {free_mb} MiB free, but Ray's object store takes {needed_mb} MiB"
        fix = f"remove files of dead programs there; {container}"
        if run.launch.object_store_mb is None and run.task in RL:
            problem += (
                f" for the {samples_of_step(run)} samples of a step, if all have data.max_len={run.data.max_len} tokens"
            )
        if free_mb >= LEAST_MB:
            fix = f"write launch.object_store_mb={free_mb} (objects that do not fit are then written to disk); or {fix}"
        yield Problem("shared memory", problem, fix)
