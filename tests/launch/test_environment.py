"""Device detection and the environment of the run's processes."""

import os
import subprocess
import sys

import pytest

from rlhf_suite.config.declarations.launch import LaunchConfig
from rlhf_suite.config.plan.run_plan import Machine
from rlhf_suite.launch.environment import device_kind, gpu_count, limit_rights, runtime_env
from rlhf_suite.launch.processes import ask
from rlhf_suite.launch.ray_cluster import machine
from rlhf_suite.machine_limits import cpu_count


@pytest.mark.notices("a GPU that is hidden is counted", "launch/environment.py", '("", "-1", "NoDevFiles")', '("",)')
@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,2,5", 3), ("GPU-a,GPU-b", 2)])
def test_visible_devices_decide_how_many_gpus_there_are(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == count


@pytest.mark.notices(
    "a driver of GPUs that does not answer ends a run in a traceback",
    "launch/processes.py",
    "with suppress(OSError, subprocess.TimeoutExpired):\n        answer",
    "with suppress(OSError):\n        answer",
)
@pytest.mark.parametrize(
    ("program", "said"),
    [("echo GPU 0; echo GPU 1", "GPU 0\nGPU 1\n"), ("exec sleep 3600", ""), ("printf '\\377'; exit 3", "\ufffd")],
)
def test_a_command_of_the_system_that_fails_or_hangs_says_nothing(tmp_path, monkeypatch, program, said):
    limit_s = 0.2 if "sleep" in program else 300
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ask(["nvidia-smi", "-L"], limit_s) == ""  # it cannot be executed
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert ask(["nvidia-smi", "-L"], limit_s) == said
    assert ask(["no-such-command"], limit_s) == ""


def test_auto_takes_the_gpu_when_there_is_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert device_kind(LaunchConfig.of("ppo")) == "cuda"
    assert device_kind(LaunchConfig.of("ppo", device="cpu")) == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_kind(LaunchConfig.of("ppo")) == "cpu"


@pytest.mark.notices(
    "a machine that is not here is planned as one without GPUs",
    "launch/ray_cluster.py",
    ' and (device == "cpu" or count > 0)',
    "",
)
def test_gpus_that_are_asked_for_where_there_are_none_are_those_of_another_machine(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine(LaunchConfig.of("ppo", device="cuda")) == Machine("cuda", None)
    assert machine(LaunchConfig.of("ppo", device="cpu")) == Machine("cpu", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert machine(LaunchConfig.of("ppo", device="cuda")) == Machine("cuda", 2)
    assert machine(LaunchConfig.of("ppo", device="cuda", ray_address="head:6379")) == Machine("cuda", None)


def test_cpu_profile_has_one_sleeping_thread_and_no_gpu(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    env = runtime_env("cpu")
    assert (env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"], env["DS_ACCELERATOR"]) == ("1", "PASSIVE", "cpu")
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in runtime_env("cuda")


@pytest.mark.notices(
    "Muon is compiled on a CPU", "launch/environment.py", '"TORCHDYNAMO_DISABLE": "1"', '"TORCHDYNAMO_DISABLE": "0"'
)
def test_nothing_is_compiled_on_a_cpu():
    """The first step with Muon would wait for a C++ compiler, in every run."""
    script = "import torch\nprint(torch.compile(lambda: torch.compiler.is_compiling(), backend='eager')())"
    environment = os.environ | runtime_env("cpu")
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.notices(
    "what the user has set in the environment is replaced",
    "launch/environment.py",
    "os.environ.get(name, value) for name, value",
    "value for name, value",
)
def test_what_the_user_set_is_kept_and_the_hub_is_left_alone(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert runtime_env("cpu")["OMP_NUM_THREADS"] == "3"
    assert "HF_HUB_OFFLINE" not in runtime_env("cpu")


@pytest.mark.notices(
    "every actor takes all cores of its machine",
    "launch/environment.py",
    "cpu_count() // max(1, gpu_count())",
    "cpu_count()",
)
def test_actors_on_gpus_share_the_cores_of_their_machine(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = {}
    for visible in ("0", "0,1", "0,1,2"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        threads[len(visible.split(","))] = int(runtime_env("cuda")["OMP_NUM_THREADS"])
    assert threads == {gpus: max(1, cpu_count() // gpus) for gpus in (1, 2, 3)}


@pytest.mark.parametrize(("value", "expected"), [(None, 0o022), ("077", 0o077), ("007", 0o027)])
def test_a_umask_is_added_to_the_processs_own_for_the_run_and_its_actors(value, expected, tmp_path):
    before = os.umask(0o022)
    try:
        with limit_rights(LaunchConfig.of("ppo", umask=value)):
            (tmp_path / "file").touch()
            assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~expected
            actor = runtime_env("cpu")
        assert os.umask(0o022) == 0o022, "and no longer"
        code = "import os; from rlhf_suite.launch.environment import adopt_umask; adopt_umask(); print(os.umask(0))"
        foreign = subprocess.run([sys.executable, "-c", code], env=os.environ | actor, capture_output=True, check=True)
        assert int(foreign.stdout) == expected, "also where a foreign cluster starts the actor"
    finally:
        os.umask(before)
