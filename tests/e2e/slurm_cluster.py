"""A real Slurm of two nodes on this machine: no root, no systemd, no munge; up in a second, gone at the end."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from rlhf_suite.polling import poll_until

POLL_S = 0.1
NODES = ("n1", "n2")
FEATURES = ("small", "large")

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}({address})
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
KillWait=30
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_min_interval=100000,bf_interval=1,batch_sched_delay=0
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=100 PreemptMode=OFF
"""


class Slurm:
    """The controller and its nodes; the tools find them through `environment`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.configuration = folder, folder / "slurm.conf"
        self.environment = os.environ | {"SLURM_CONF": str(self.configuration)}
        host, ports = socket.gethostname().split(".")[0], free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 Features={feature}"
            for name, port, feature in zip(NODES, ports[1:], FEATURES, strict=True)
        )
        for part in ("state", "log", *(f"spool/{name}" for name in NODES)):
            (folder / part).mkdir(parents=True)
        values = {"host": host, "address": "127.0.0.1", "controller": ports[0], "user": getpass.getuser()}
        self.configuration.write_text(CONFIGURATION.format(**values, folder=folder, nodes=nodes))

    def ask(self, *command: str) -> str:
        """What a command of Slurm's prints."""
        answer = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert answer.returncode == 0, f"{command}: {answer.stderr}"
        return answer.stdout.strip()

    def start(self) -> None:
        """Start everything and wait for idle nodes."""
        self.ask("slurmctld", "-f", str(self.configuration))
        for name in NODES:
            self.ask("slurmd", "-f", str(self.configuration), "-N", name)
        wait_for(lambda: self.ask("sinfo", "--noheader", "--format=%T") == "idle", "idle nodes", 60)

    def stop(self) -> None:
        """End the jobs and the daemons."""
        subprocess.run(["scancel", "--user", getpass.getuser()], env=self.environment, check=False)
        daemons = list[psutil.Process]()
        for file in self.folder.glob("*.pid"):
            with contextlib.suppress(psutil.NoSuchProcess):
                daemons.append(psutil.Process(int(file.read_text())))
                daemons[-1].terminate()
        for daemon in psutil.wait_procs(daemons, timeout=10)[1]:  # it waits for a job that does not end
            daemon.kill()

    def lose(self, node: str, pid: int) -> None:
        """The node dies with all that runs on it, the process `pid` of a job for one; Slurm is told."""
        daemon = psutil.Process(int((self.folder / f"slurmd.{node}.pid").read_text()))
        steps = [process for process in psutil.Process(pid).parents() if process.name() == "slurmstepd"]
        daemon.kill()
        for process in [*steps, psutil.Process(pid)]:
            process.kill()
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def revive(self, node: str) -> None:
        """Start a lost node again; it registers, and is up by ReturnToService=2."""
        self.ask("slurmd", "-f", str(self.configuration), "-N", node)
        wait_for(lambda: "idle" in self.ask("sinfo", "--noheader", "--format=%T", f"--nodes={node}"), node, 60)

    def jobs(self) -> dict[str, str]:
        """Job id -> state of all jobs that are known."""
        lines = self.ask("squeue", "--noheader", "--states=all", "--format=%i %T").splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def state(self, job: str) -> str:
        return self.jobs()[job]

    def start_again_now(self, job: str) -> None:
        """Slurm makes a requeued job wait for two minutes; this one need not."""
        wait_for(lambda: self.state(job) == "PENDING", f"the requeue of {job}", 120)
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")


def wait_for(is_met: Callable[[], bool], what: str, deadline_s: float) -> None:
    assert poll_until(is_met, deadline_s, POLL_S), f"{what}: not within {deadline_s} s"


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now; all different."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def missing() -> str | None:
    """The first command of Slurm's that is not installed here."""
    return next((name for name in ("slurmctld", "slurmd", "sbatch", "squeue") if shutil.which(name) is None), None)


@contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
