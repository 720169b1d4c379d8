"""The address of a node that the others reach, whatever its own name stands for."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

import pytest
from ray._common.network_utils import parse_address

from rlhf_suite.errors import RunError
from rlhf_suite.launch import address
from rlhf_suite.launch.address import (
    choose_address,
    find_interface,
    find_source,
    is_loopback,
    join_address,
    split_address,
    use_interface_to,
)
from rlhf_suite.launch.ray_cluster import check_addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.1.1"])
def test_what_is_on_this_machine_is_reached_from_the_loopback_address(host):
    assert find_source(host) == "127.0.0.1"
    assert find_interface("127.0.0.1") == "lo"


def test_there_is_no_way_to_a_host_that_nobody_knows():
    assert find_source("no-such-host.invalid") is None
    assert find_interface("192.0.2.77") is None


@pytest.mark.notices(
    "the address of a host of IPv6 is one that nothing can read",
    "launch/address.py",
    'return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"',
    'return f"{host}:{port}"',
)
@pytest.mark.parametrize("host", ["10.0.0.1", "node-a", "fd00::1", "::1"])
def test_an_address_of_a_host_and_a_port_is_read_by_ray_torch_and_http(host):
    address = join_address(host, 6379)
    assert split_address(address) == (host, 6379)
    assert parse_address(address) == (host, "6379")
    for scheme in ("tcp", "http"):
        parts = urlsplit(f"{scheme}://{address}?node=x")
        assert (parts.hostname, parts.port) == (host, 6379)


@pytest.mark.parametrize("address", ["auto", "", "node-a", "node-a:", ":6379", "node-a:²", "node-a:-1", "ray://a:1"])
def test_what_is_not_a_host_and_a_port_is_not_taken_apart(address):
    assert split_address(address) is None


@pytest.mark.parametrize(
    ("number", "local"), [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("fe80::1", False), ("name", False)]
)
def test_loopback_addresses_are_known(number, local):
    assert is_loopback(number) is local


@pytest.mark.notices(
    "a node of Debian's tells the others the loopback address of its own name",
    "launch/address.py",
    "if name != here}",
    "if name == here}",
)
def test_the_way_to_another_node_decides_and_not_the_own_name(monkeypatch):
    ways = {"10.0.0.2": "10.0.0.1", "127.0.1.1": "127.0.0.1"}
    monkeypatch.setattr(address, "find_source", ways.get)
    assert choose_address("a", {"a": "127.0.1.1", "b": "10.0.0.2"}) == "10.0.0.1"
    assert choose_address("a", {"a": "127.0.1.1", "c": "unknown", "b": "10.0.0.2"}) == "10.0.0.1"


def test_nodes_that_are_all_on_this_machine_meet_at_the_loopback_address():
    assert choose_address("n1", {"n1": "127.0.0.1", "n2": "127.0.0.1"}) == "127.0.0.1"


def test_a_node_without_a_way_to_the_others_is_refused_in_one_sentence():
    with pytest.raises(RunError, match=r"^a has no route to the other nodes of the job, b \(nowhere\.invalid\): add"):
        choose_address("a", {"a": "127.0.0.1", "b": "nowhere.invalid"})


@pytest.mark.notices(
    "a loopback address is told to other nodes",
    "launch/address.py",
    "if source is None or is_loopback(source):",
    "if source is None:",
)
def test_a_loopback_address_is_refused_where_slurm_does_not_say_who_the_others_are(monkeypatch):
    monkeypatch.setattr(address, "find_source", {socket.gethostname(): "127.0.1.1"}.get)
    with pytest.raises(RunError, match=r"^the only address that a knows of itself is 127\.0\.1\.1, which other nodes"):
        choose_address("a", {})
    monkeypatch.setattr(address, "find_source", {address.ELSEWHERE: "10.0.0.1"}.get)
    assert choose_address("a", {}) == "10.0.0.1"


def test_gloo_and_nccl_use_the_interface_to_the_others_unless_the_user_names_one(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    use_interface_to("no-such-host.invalid")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    use_interface_to("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    monkeypatch.setattr(address, "find_source", lambda host: "10.0.0.1")
    monkeypatch.setattr(address, "find_interface", lambda number: "ib0")
    use_interface_to("10.0.0.2")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=ib0")


def ray_node(host, number, lives=True):
    return {"NodeManagerHostname": host, "NodeManagerAddress": number, "Alive": lives}


def test_a_cluster_of_several_hosts_with_a_loopback_address_is_refused():
    check_addresses([ray_node("a", "127.0.0.1"), ray_node("a", "127.0.0.1")])
    check_addresses([ray_node("a", "10.0.0.1"), ray_node("b", "10.0.0.2"), ray_node("c", "127.0.1.1", lives=False)])
    with pytest.raises(RunError, match=r"^Ray knows the node b by the address 127\.0\.1\.1, .* --node-ip-address="):
        check_addresses([ray_node("a", "10.0.0.1"), ray_node("b", "127.0.1.1")])
