"""Hosts made of Linux namespaces on this machine, with a network between them, and a real Slurm over them.

Each host has its own network, processes, host name, /tmp, /dev/shm, /run and /etc/hosts. One folder is common, as on a
cluster's file system. Needs root, iproute2 and Slurm (Debian: `iproute2 slurm-wlm`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from slurm_cluster import CONFIGURATION, wait_for

NAMES = ("a", "b", "c")
SWITCH = "sw"
PREFIX = f"rs{os.getpid()}"  # of the names of the network namespaces
NETWORK = "10.99.0"
TOOLS = ("ip", "ss", "nsenter", "unshare", "slurmctld", "slurmd", "sbatch", "squeue")
# What a host does first: its own /tmp, /dev/shm and /run, its own list of hosts and its own name.
BOOT = """
set -e
mount --make-rprivate /
for place in /tmp /dev/shm /run; do mount -t tmpfs -o mode=1777 none $place; done
mount --bind {folder}/hosts.{host} /etc/hosts
mkdir /run/spool
hostname node{host}
touch {folder}/up.{host}
exec bash -c 'trap : TERM INT; while :; do sleep 3600 & wait; done'
"""


def missing() -> str | None:
    """What these hosts need and this machine lacks; None if it lacks nothing."""
    if os.geteuid() != 0:
        return "only root can make hosts of namespaces"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{', '.join(absent)} not installed (Debian: iproute2 slurm-wlm)" if absent else None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


class Hosts:
    """The hosts `a`, `b` and `c`; `folder` is the one that they share. Slurm runs on `a` and `b`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids: dict[str, int] = {}  # of the first process of each host
        for host in NAMES:
            self.write_names(host)
        self.configuration = folder / "slurm.conf"
        self.environment = {"SLURM_CONF": str(self.configuration), "HOME": str(folder), "LANG": "C.UTF-8"}
        self.environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "PATH": os.environ["PATH"]}

    def address(self, host: str) -> str:
        return f"{NETWORK}.{NAMES.index(host) + 1}"

    def write_names(self, host: str, as_debian: bool = False) -> None:
        """Write the /etc/hosts of a host; Debian's installer gives it an address of its own for its own name."""
        own = "127.0.1.1" if as_debian else self.address(host)
        lines = ["127.0.0.1 localhost", f"{own} node{host}"]
        lines += [f"{self.address(other)} node{other}" for other in NAMES if other != host]
        (self.folder / f"hosts.{host}").write_text("\n".join([*lines, ""]))

    def up(self) -> None:
        """Lay the network and boot all hosts."""
        ip("netns", "add", f"{PREFIX}-{SWITCH}")
        ip("-n", f"{PREFIX}-{SWITCH}", "link", "add", "br0", "type", "bridge")
        ip("-n", f"{PREFIX}-{SWITCH}", "link", "set", "br0", "up")
        for host in NAMES:
            own = f"{PREFIX}-{host}"
            ip("netns", "add", own)
            link = ("type", "veth", "peer", "name", "eth0", "netns", own)
            ip("-n", f"{PREFIX}-{SWITCH}", "link", "add", f"v{host}", *link)
            ip("-n", own, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", own, "link", "set", device, "up")
            ip("-n", own, "route", "add", "default", "via", f"{NETWORK}.254")
            self.heal(host)
            self.boot(host)

    def boot(self, host: str) -> None:
        """Start a host, or start it again after `kill`."""
        (self.folder / f"up.{host}").unlink(missing_ok=True)
        script = BOOT.format(folder=self.folder, host=host)
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--ipc", "--mount"]
        # Not by `ip netns exec`: it mounts another /sys, without the control groups that slurmd asks for.
        words = ["nsenter", f"--net=/run/netns/{PREFIX}-{host}", *apart, "bash", "-c", script]
        with (self.folder / f"boot.{host}").open("wb") as said:
            outer = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        wait_for((self.folder / f"up.{host}").exists, f"the boot of {host}", 30)
        (self.pids[host],) = [child.pid for child in psutil.Process(outer.pid).children()]

    def kill(self, host: str) -> None:
        """Switch a host off: all of its processes are gone at once."""
        os.kill(self.pids.pop(host), signal.SIGKILL)

    def partition(self, host: str) -> None:
        """Cut a host off the network, silently."""
        ip("-n", f"{PREFIX}-{SWITCH}", "link", "set", f"v{host}", "nomaster")

    def heal(self, host: str) -> None:
        """Connect a host with the network."""
        ip("-n", f"{PREFIX}-{SWITCH}", "link", "set", f"v{host}", "master", "br0", "up")

    def limit_packets(self, size: int) -> None:
        """Set the largest packet of the network."""
        for host in NAMES:
            ip("-n", f"{PREFIX}-{host}", "link", "set", "eth0", "mtu", str(size))
            ip("-n", f"{PREFIX}-{SWITCH}", "link", "set", f"v{host}", "mtu", str(size))

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """The command that runs `words` on a host."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return ["nsenter", "-t", str(self.pids[host]), "-a", "--", "env", "-i", *variables, *words]

    def ask(self, host: str, *words: str, limit_s: float = 60) -> str:
        """What a command on a host prints."""
        command = self.command(host, words)
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL
        )
        assert answer.returncode == 0, f"{words}: {answer.stdout}{answer.stderr}"
        return answer.stdout.strip()

    def down(self) -> None:
        """Switch all hosts off and remove the network."""
        for host in [*self.pids]:
            self.kill(host)
        for name in (*NAMES, SWITCH):
            subprocess.run(["ip", "netns", "del", f"{PREFIX}-{name}"], check=False, capture_output=True)

    def start_slurm(self, timeout_s: int = 300) -> None:
        """Start Slurm on `a` and `b`. `timeout_s`: after it a node that does not answer is down (SlurmdTimeout); 300 is
        Slurm's default."""
        (self.folder / "state").mkdir(exist_ok=True)
        nodes = [f"NodeName=node{host} NodeAddr=node{host} Port=6818 CPUs=2 State=UNKNOWN" for host in "ab"]
        values = {"host": "nodea", "address": self.address("a"), "user": "root", "controller": 6817}
        text = CONFIGURATION.format(**values, folder=self.folder, nodes="\n".join(nodes))
        text = text.replace(f"SlurmdSpoolDir={self.folder}/spool/%n", "SlurmdSpoolDir=/run/spool")
        self.configuration.write_text(f"{text}\nSlurmdTimeout={timeout_s}\n")
        (self.folder / "log").mkdir(exist_ok=True)
        self.ask("a", "slurmctld", "-c", "-f", str(self.configuration))
        for host in "ab":
            self.start_slurmd(host)
        wait_for(lambda: self.ask("a", "sinfo", "--noheader", "--format=%T") == "idle", "idle nodes", 60)

    def start_slurmd(self, host: str) -> None:
        """Start Slurm's daemon on a host."""
        self.ask(host, "slurmd", "-f", str(self.configuration), "-N", f"node{host}")

    def jobs(self) -> dict[str, str]:
        """The states of all jobs that Slurm knows, by their ids."""
        lines = self.ask("a", "squeue", "--noheader", "--states=all", "--format=%i %T").splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def set_slurm_timeout(self, seconds: int) -> None:
        """Change SlurmdTimeout."""
        text = re.sub(r"SlurmdTimeout=\d+", f"SlurmdTimeout={seconds}", self.configuration.read_text())
        self.configuration.write_text(text)
        self.ask("a", "scontrol", "reconfigure")

    def listeners(self, host: str) -> list[int]:
        """The TCP ports of a host at which something listens that others reach."""
        lines = self.ask(host, "ss", "--tcp", "--listening", "--numeric", "--no-header").splitlines()
        places = [line.split()[3].rpartition(":") for line in lines]
        return sorted({int(port) for address, _, port in places if not address.startswith(("127.", "[::1]"))})

    def nodes(self) -> list[str]:
        """The names of Slurm's nodes with their states, as `nodea idle`."""
        return self.ask("a", "sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T").splitlines()


@contextmanager
def running_hosts() -> Iterator[Hosts]:
    """Make the hosts for the block. Their folder is outside of /tmp, which each of them has for itself."""
    with tempfile.TemporaryDirectory(prefix="rs-hosts-", dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        hosts = Hosts(Path(folder))
        try:
            hosts.up()
            yield hosts
        finally:
            hosts.down()
