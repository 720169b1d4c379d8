"""Nodes that a run has lost: a failure whose cause is a node says nothing against the run, which can go on later."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlhf_suite.background import in_background
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.waits import waiting

ANSWER_S = 5.0  # for a node that lives
ASK_S = 30.0  # for Ray to say how its nodes are


class NodeLost(RunError):
    """A run cannot go on for want of a node. It is stopped, not failed: the scheduler may queue it again."""


@contextmanager
def name_lost_nodes() -> Iterator[None]:
    """Turn an error of the block into NodeLost if a node on which the run has actors does not live any more.

    The cause may show itself by an actor that died, a peer whose connection broke, or an answer that is late, and
    before Ray itself notices: it asks a silent node for a minute.
    """
    try:
        yield
    except (NodeLost, UserError):
        raise
    except Exception as error:
        lost = find_lost_nodes()
        if not lost:
            raise
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise NodeLost(f"{' and '.join(lost)} was lost. {first}") from error


def has_lost_its_node(actor_id: str) -> bool:
    """Return whether the node of an actor of this run does not live, or does not answer. Ray's record of an actor names
    its node also after the death of both."""
    return bool(actor_id and find_lost_nodes(actor_id))


def find_lost_nodes(actor_id: str = "") -> list[str]:
    """Return the nodes, described, that have actors of this run, or this one, and do not live, or do not answer."""
    with waiting("Ray's account of its nodes", limit_s=ASK_S):
        asked = in_background("nodes of Ray", lambda: read_nodes(actor_id))
        try:
            nodes = asked.result(ASK_S)
        except Exception:  # Ray's head is gone too, or hangs: nothing is known
            return []
    return [describe_node(node) for node in nodes if not node["Alive"] or not answers(node)]


def read_nodes(actor_id: str = "") -> list[Mapping[str, Any]]:
    """Return Ray's entries of the nodes on which this run has or had actors, or this one."""
    import ray
    from ray._private.state import actors

    job = ray.get_runtime_context().get_job_id()
    ours = [actors(actor_id)] if actor_id else [actor for actor in actors().values() if actor["JobID"] == job]
    used = {actor["Address"]["NodeID"] for actor in ours if actor}
    return [node for node in ray.nodes() if node["NodeID"] in used]


def describe_node(node: Mapping[str, Any]) -> str:
    """Return the name and the address of a node: `node b (10.0.0.2)`."""
    return f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def answers(node: Mapping[str, Any]) -> bool:
    """Return whether the daemon of Ray on a node accepts connections."""
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=ANSWER_S):
            return True
    except OSError:
        return False
