"""What Slurm says of the job that this process belongs to: its nodes, and which of them this one is."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_suite.errors import RunError
from rlhf_suite.launch.processes import ask

ANSWER_S = 60.0  # of Slurm's controller


@dataclass(frozen=True)
class Allocation:
    """The rank of this task in a Slurm job of several nodes, and the name of its node. `tag` names the job and the
    number of its restart."""

    tag: str
    rank: int
    num_nodes: int
    node: str

    def file(self, folder: Path, suffix: str) -> Path:
        """Return the path of a file in the run folder by which the tasks of this job communicate."""
        return folder / f"ray_{self.tag}.{suffix}"


def allocation(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """Return the Slurm job of several nodes in which this process runs; None on a single node or outside Slurm.

    Raises:
        RunError: the job does not have exactly one task on each node.
    """
    if "SLURM_PROCID" not in environ or int(environ.get("SLURM_STEP_NUM_NODES", "1")) == 1:
        return None
    nodes, tasks = int(environ["SLURM_STEP_NUM_NODES"]), int(environ["SLURM_NTASKS"])
    if tasks != nodes:
        raise RunError(f"the Slurm job has {tasks} tasks on {nodes} nodes: set hydra.launcher.tasks_per_node=1")
    restart, node = environ.get("SLURM_RESTART_COUNT", "0"), environ.get("SLURMD_NODENAME") or socket.gethostname()
    return Allocation(f"{environ['SLURM_JOB_ID']}-{restart}", int(environ["SLURM_PROCID"]), nodes, node)


def is_first_node() -> bool:
    """Return whether this process drives the run; the others of a Slurm job lend it their nodes."""
    here = allocation()
    return here is None or here.rank == 0


def list_nodes() -> dict[str, str]:
    """Return the addresses of the nodes of this job by their names, as Slurm knows them: numbers or host names. Empty
    where `scontrol` is missing, as in some containers, or gets no answer."""
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    return read_nodes(ask(["scontrol", "--oneliner", "show", "node", nodes], ANSWER_S))


def show_job() -> dict[str, str]:
    """Return what Slurm says of this job, by name. Empty where `scontrol` is missing, or gets no answer."""
    text = ask(["scontrol", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]], ANSWER_S)
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def read_nodes(text: str) -> dict[str, str]:
    """Return the addresses of nodes by their names from what `scontrol --oneliner show node` prints."""
    lines = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in text.splitlines()]
    return {line["NodeName"]: line.get("NodeAddr", line["NodeName"]) for line in lines if "NodeName" in line}
