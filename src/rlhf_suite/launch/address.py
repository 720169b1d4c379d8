"""Which address of this node other nodes reach, and which network interface has it.

The host's own name does not say: the installers of Debian and Ubuntu write `127.0.1.1 <own name>` to /etc/hosts. What
the kernel says of the way to another node does.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from rlhf_suite.errors import RunError

LOOPBACK = "127.0.0.1"
ELSEWHERE = "192.0.2.1"  # an address for documentation, which no host has: the way there is that to most others
DISCARD = 9  # a port; nothing is sent there


def join_address(host: str, port: int) -> str:
    """Return `host:port`. The number of a host of IPv6 gets brackets, since it has colons itself."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int] | None:
    """Return the host, without brackets, and the port of `host:port`; None if an address has another form."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and "://" not in host and port.isdecimal() else None


def find_source(host: str) -> str | None:
    """Return the address from which this node sends to `host`, or None if it knows no way there. Nothing is sent."""
    with suppress(OSError):
        family, kind, number, _, place = socket.getaddrinfo(host, DISCARD, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    return None


def is_loopback(address: str) -> bool:
    """Return whether an address, given as a number, is one that only the machine itself can reach."""
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def choose_address(here: str, nodes: Mapping[str, str]) -> str:
    """Return the address at which the other nodes of a job reach this one.

    Args:
        here: the name of this node.
        nodes: the address or host name of each node by its name, as Slurm knows them; empty if Slurm does not say.

    Raises:
        RunError: only a loopback address is known, or no way to the other nodes.
    """
    others = {name: address for name, address in nodes.items() if name != here}
    for address in others.values():
        if (source := find_source(address)) is not None:
            return source  # even 127.0.0.1, if the kernel says that the others are on this machine
    if others:
        names = ", ".join(f"{name} ({address})" for name, address in others.items())
        raise RunError(
            f"{here} has no route to the other nodes of the job, {names}: add their names to DNS or to /etc/hosts of "
            f"{here}, or set NodeAddr in slurm.conf"
        )
    source = find_source(ELSEWHERE) or find_source(socket.gethostname())
    if source is None or is_loopback(source):
        raise RunError(
            f"the only address that {here} knows of itself is {source or 'none'}, which other nodes cannot reach: make "
            "`scontrol` available to the run, or write the network address of this name into /etc/hosts"
        )
    return source


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that has an address, or None."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def use_interface_to(host: str) -> None:
    """Have gloo and NCCL use the network interface that reaches `host`, in this process, unless the user names another
    one. gloo would look up the host's own name. What meets on this machine stays on it."""
    source = find_source(host)
    if source is not None and is_loopback(source):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif source is not None and (name := find_interface(source)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # this one alone, not all whose names begin so
