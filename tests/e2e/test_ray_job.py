"""`ray job submit` of a run to a Ray cluster that exists already: the run joins it, and leaves it as it was."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import jobs
import pytest
import slurm_cluster

from rlhf_suite.polling import poll_until
from rlhf_suite.run_folders.run_folder import RunFolder

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
REWARD = """
import os

def reward_func(queries, prompts, labels):
    return [float(len(text) % 2 + int(os.environ["BONUS"])) for text in queries]
"""
WORDS = [
    *(word for word in jobs.SMALL if not word.startswith("eval.")),
    *("eval.dataset=null", "eval.steps=-1", "train.max_steps=1", "launch.ray_address=auto", "launch.device=cpu"),
    *("reward.rule=null", "reward.remote_url=reward.py"),
]


@pytest.fixture
def cluster(tmp_path):
    """The address of the job server of a cluster of one node, and the environment of those who may use it."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # short enough for the sockets of Ray
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(secrets.token_hex(32))
    names = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")
    ports = dict(zip(names, slurm_cluster.free_ports(len(names)), strict=True))
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    command = [*RAY, "start", "--head", "--block", "--num-cpus=2", "--disable-usage-stats", f"--temp-dir={folder}"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    command += ["--node-ip-address=127.0.0.1", f"--object-store-memory={256 << 20}"]
    with (tmp_path / "ray.log").open("wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{ports['dashboard-port']}"
        token = (folder / "token").read_text()

        def answers() -> bool:
            assert head.poll() is None, (tmp_path / "ray.log").read_text()
            return lists_jobs(address, token)

        assert poll_until(answers, 300, 0.5), (tmp_path / "ray.log").read_text()
        yield address, environment
    finally:
        head.terminate()  # it ends the other processes of its node
        try:
            head.wait(60)
        except subprocess.TimeoutExpired:
            head.kill()


def lists_jobs(address: str, token: str) -> bool:
    """Whether the job server answers those who have the token, asked without a process of Ray's command line."""
    headers = {"Authorization": f"Bearer {token}"}
    try:
        return httpx.get(f"{address}/api/jobs/", headers=headers, timeout=60, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.timeout(1200)
@pytest.mark.proof
def test_a_run_is_submitted_to_a_cluster_that_exists(cluster, tmp_path, warm):
    """The folder of the job and its variables travel with it; the reward reads both."""
    address, environment = cluster
    files, folder = tmp_path / "files", tmp_path / "run"
    files.mkdir()
    (files / "reward.py").write_text(REWARD)
    variables = {"BONUS": "3", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    command = [*RAY, "job", "submit", f"--address={address}", f"--working-dir={files}"]
    command += [f"--runtime-env-json={json.dumps({'env_vars': variables})}", "--", sys.executable]
    command += [str(jobs.ROOT / "run.py"), *WORDS, f"actor.model_name_or_path={warm}", f"run_dir={folder}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert RunFolder(folder).status()["state"] == "done"
    assert {row["reward"] for row in jobs.rollout(folder, 1)} <= {3.0, 4.0}
    token = Path(environment["RAY_AUTH_TOKEN_PATH"]).read_text()
    assert lists_jobs(address, token), "the cluster is still there"
    assert not lists_jobs(address, "another token")
