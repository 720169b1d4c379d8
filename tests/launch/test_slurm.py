"""Ray over the nodes of a Slurm job: reading the allocation, and a head and a second node as two processes here."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlhf_suite.errors import RunError
from rlhf_suite.launch.slurm import allocation

JOB = {"SLURM_JOB_ID": "81", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "2"}

TASK = """
import sys
from pathlib import Path
import ray
from rlhf_suite.config.declarations.launch import LaunchConfig
from rlhf_suite.launch.nodes import join_node, lead_nodes
from rlhf_suite.launch.ray_cluster import ray_cluster
folder, config = Path(sys.argv[1]), LaunchConfig.of("ppo", device="cpu", num_cpus=1, object_store_mb=80, timeout_s=120)
if not join_node(folder, config):
    with lead_nodes(folder, config), ray_cluster(config, folder, slots=1):
        print(sum(node["Alive"] for node in ray.nodes()), "nodes", ray.cluster_resources()["CPU"], "CPUs", flush=True)
        raise ValueError("the run fails")
"""


@pytest.mark.notices(
    "a restarted Slurm job finds the address of its first run",
    "launch/slurm.py",
    "{environ['SLURM_JOB_ID']}-{restart}",
    "{environ['SLURM_JOB_ID']}-0",
)
def test_the_allocation_is_read_from_the_environment():
    found = allocation(JOB | {"SLURM_PROCID": "1", "SLURM_RESTART_COUNT": "3"})
    assert found is not None
    assert (found.tag, found.rank, found.num_nodes) == ("81-3", 1, 2)
    assert found.file(Path("run"), "json") == Path("run/ray_81-3.json")


@pytest.mark.parametrize(
    "environ",
    [{}, {"SLURM_JOB_ID": "81", "SLURM_PROCID": "0"}, JOB | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "1"}],
)
def test_outside_slurm_and_on_one_node_there_is_none(environ):
    assert allocation(environ) is None


def test_several_tasks_per_node_are_an_error_that_names_the_setting():
    with pytest.raises(RunError, match=r"8 tasks on 2 nodes: set hydra\.launcher\.tasks_per_node=1"):
        allocation(JOB | {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"})


@pytest.mark.e2e
def test_two_nodes_become_one_cluster_and_a_failure_ends_both(tmp_path):
    root = tempfile.mkdtemp(dir="/tmp")  # of these processes alone, with a path that is short enough for Ray
    job = os.environ | JOB | {"SLURM_JOB_ID": str(os.getpid()), "TMPDIR": root}
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", TASK, str(tmp_path)],
            env=job | {"SLURM_PROCID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [task.communicate(timeout=200)[0] for task in tasks]
    assert said[0] == "2 nodes 2.0 CPUs\n"
    assert [task.returncode for task in tasks] == [1, 0]
    assert not list(tmp_path.glob("*.token"))
    assert not list(Path(root).glob("rs-*"))
