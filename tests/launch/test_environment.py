"""Device detection and the environment of the run's processes."""

import pytest

from rlhf_suite.config.launch import LaunchConfig
from rlhf_suite.errors import UserError
from rlhf_suite.launch.environment import cpu_count, device_kind, gpu_count, runtime_env


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,2,5", 3), ("GPU-a,GPU-b", 2)])
def test_visible_devices_decide_how_many_gpus_there_are(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == count


def test_auto_takes_the_gpu_when_there_is_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert device_kind(LaunchConfig()) == "cuda"
    assert device_kind(LaunchConfig(device="cpu")) == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_kind(LaunchConfig()) == "cpu"


def test_cuda_without_a_gpu_is_an_error_unless_the_cluster_is_elsewhere(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"launch\.device=cuda.*launch\.device=cpu"):
        device_kind(LaunchConfig(device="cuda"))
    assert device_kind(LaunchConfig(device="cuda", ray_address="head:6379")) == "cuda"


def test_cpu_profile_has_one_sleeping_thread_and_no_gpu(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    env = runtime_env("cpu")
    assert (env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"], env["DS_ACCELERATOR"]) == ("1", "PASSIVE", "cpu")
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in runtime_env("cuda")


def test_what_the_user_set_is_kept_and_the_hub_is_left_alone(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert runtime_env("cpu")["OMP_NUM_THREADS"] == "3"
    assert "HF_HUB_OFFLINE" not in runtime_env("cpu")


def test_actors_on_gpus_share_the_cores_of_their_machine(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = {}
    for visible in ("0", "0,1", "0,1,2"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        threads[len(visible.split(","))] = int(runtime_env("cuda")["OMP_NUM_THREADS"])
    assert threads == {gpus: max(1, cpu_count() // gpus) for gpus in (1, 2, 3)}
