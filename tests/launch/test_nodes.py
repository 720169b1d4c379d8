"""What the first node of a Slurm job says of nodes that are missing, and what it takes for a lost node."""

from __future__ import annotations

import os
import socket

import pytest

from rlhf_suite.config.declarations.launch import LaunchConfig
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch import lost_nodes
from rlhf_suite.launch.lost_nodes import NodeLost, answers, describe_node, name_lost_nodes
from rlhf_suite.launch.nodes import JOINS, WAITS, Report, _node, _wait_for_start, describe_missing
from rlhf_suite.launch.slurm import Allocation, read_nodes
from rlhf_suite.launch.wait import ActorDied
from rlhf_suite.sweeps.slurm_jobs import Command, count_traces, has_lost_a_task

SCONTROL = """\
NodeName=a Arch=x86_64 CoresPerSocket=1 NodeAddr=10.0.0.1 NodeHostName=a Version=22.05.8 OS=Linux 6.1
NodeName=b Arch=x86_64 CoresPerSocket=1 NodeHostName=b
"""
NODES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3", "d": "10.0.0.4"}


@pytest.mark.notices(
    "Ray ends on a node, and nobody learns why",
    "launch/nodes.py",
    "stdout=log, stderr=subprocess.STDOUT",
    "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL",
)
def test_what_ray_said_before_it_ended_is_the_reason_of_the_error(tmp_path):
    here, config = Allocation("7-0", 0, 2, "a"), LaunchConfig.of("ppo", device="cpu", num_cpus=1, object_store_mb=80)
    with _node(here, tmp_path, config, ["--address=nowhere"]) as daemons:
        with pytest.raises(RunError, match=r"^Ray ended before its head listened, with exit code \d+; ") as ended:
            _wait_for_start(lambda: False, daemons)
        log = tmp_path / "logs" / "ray-a.log"
        assert f"the end of {log}:" in str(ended.value)
        assert "ValueError: Invalid address format: nowhere" in str(ended.value)


def test_nodes_are_read_from_what_scontrol_prints():
    assert read_nodes(SCONTROL) == {"a": "10.0.0.1", "b": "b"}
    assert read_nodes("slurm_load_node error: Unable to contact slurm controller\n") == {}


@pytest.mark.notices(
    "the first node does not name the nodes from which nothing was heard",
    "launch/nodes.py",
    "sorted({*nodes} - {here, *(one.node for one in reports)})",
    "sorted({*()})",
)
def test_missing_nodes_are_named_with_what_is_known_of_them():
    reports = [Report("b", WAITS), Report("c", JOINS, "10.0.0.3"), Report("e", JOINS, "10.0.0.5")]
    said = [*describe_missing("a", NODES, reports, {"10.0.0.1", "10.0.0.3"})]
    assert said == [
        "Nothing was heard of d (10.0.0.4): its task has not started, or does not see the run folder",
        "The task on b waits for the first node: does it see the same run folder?",
        "e (10.0.0.5) has started Ray, which does not reach the head",
    ]


@pytest.mark.notices(
    "a run that has lost a node fails",
    "launch/lost_nodes.py",
    "        if not lost:\n            raise",
    "        if True:\n            raise",
)
def test_an_error_is_that_of_a_lost_node_if_one_is_lost(monkeypatch):
    lost = ["node b (10.0.0.2)"]
    monkeypatch.setattr(lost_nodes, "find_lost_nodes", lambda: lost)
    for error in (ActorDied("actor-1 died\nits log", "actor-1"), RunError("no answer within 60 s"), OSError("reset")):
        with pytest.raises(NodeLost, match=r"^node b \(10\.0\.0\.2\) was lost\. ") as end, name_lost_nodes():
            raise error
        assert str(error).splitlines()[0] in str(end.value)
        assert end.value.__cause__ is error
    with pytest.raises(UserError, match="a typo"), name_lost_nodes():
        raise UserError("a typo")
    lost.clear()
    with pytest.raises(ActorDied, match="actor-1 died"), name_lost_nodes():
        raise ActorDied("actor-1 died", "actor-1")


def test_a_node_answers_while_its_port_is_open():
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": server.getsockname()[1]}
        assert answers(node)
    assert not answers(node)
    assert describe_node(node | {"NodeManagerHostname": "b"}) == "node b (127.0.0.1)"


@pytest.mark.notices(
    "a job is queued again without an end as its nodes are lost",
    "sweeps/slurm_jobs.py",
    "if has_lost_a_node and restarts >= self.retries:",
    "if has_lost_a_node and restarts < 0:",
)
def test_a_job_that_lost_a_node_is_queued_again_as_often_as_the_launcher_may(monkeypatch):
    raised = []
    monkeypatch.setattr("signal.raise_signal", raised.append)
    for restarts, queued in (("0", 1), ("1", 2), ("2", 2)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        with pytest.raises(SystemExit) as end:  # the handler of submitit would not return
            Command(["task=sft"], lambda words: os.EX_TEMPFAIL, 2)()
        assert (end.value.code, len(raised)) == (os.EX_TEMPFAIL, queued)


@pytest.mark.parametrize(
    ("fields", "begun", "failed", "is_lost"),
    [
        ({"NumNodes": "2", "JobState": "RUNNING", "PreemptTime": "None"}, 2, 0, True),
        ({"NumNodes": "2", "JobState": "RUNNING"}, 2, 1, False),  # it has ended by an error
        ({"NumNodes": "2", "JobState": "RUNNING"}, 1, 0, False),  # it has never begun
        ({"NumNodes": "1", "JobState": "RUNNING"}, 0, 0, False),  # SIGTERM of somebody
        ({"NumNodes": "2", "JobState": "CANCELLED"}, 2, 0, False),
        ({"NumNodes": "2", "JobState": "RUNNING", "PreemptTime": "2026-11-26T17:26:10"}, 2, 0, False),
        ({}, 0, 0, False),
    ],
)
def test_srun_ends_a_job_that_goes_on_for_want_of_a_task(fields, begun, failed, is_lost):
    assert has_lost_a_task(fields, begun, failed) is is_lost


def test_tasks_of_a_job_leave_traces_of_this_start(monkeypatch, tmp_path):
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    for name, value in (job | {"SUBMITIT_FOLDER": str(tmp_path / "7")}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        Command(["task=sft"], lambda words: 2, 2)()
    assert end.value.code == 2
    assert (count_traces("begun"), count_traces("failed")) == (1, 1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert (count_traces("begun"), count_traces("failed")) == (0, 0)
