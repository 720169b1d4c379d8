"""A machine that cannot carry a run is named in the preflight. Namespaces make such machines (as root)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.preflight.inspections.machine import flags_fit_the_device

pytestmark = pytest.mark.stack

ROOT = Path(__file__).parents[2]
PPO = ["task=ppo", "demo=ppo"]


def refused(words: list[str], prepare: str, kinds: str, folder: Path, **environment: str) -> str:
    """What a run says on a machine that the shell line `prepare` makes in new namespaces; it must be refused."""
    if kinds and subprocess.run(["unshare", *kinds.split(), "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make namespaces")
    script = f'{prepare}; exec "$@"'
    command = [sys.executable, str(ROOT / "run.py"), *words, f"hydra.run.dir={folder / 'run'}"]
    wrapped = [*(["unshare", *kinds.split()] if kinds else []), "sh", "-c", script, "sh", *command]
    ended = subprocess.run(wrapped, capture_output=True, text=True, env=os.environ | environment, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("1 problem in the configuration:\n"), ended.stderr
    assert not (folder / "run" / "status.json").exists()
    return ended.stderr


@pytest.mark.parametrize("words", [PPO, ["task=sft", "demo=sft"]])
def test_a_machine_without_loopback_is_named(words, tmp_path):
    said = refused(words, ":", "--net", tmp_path)
    assert "nothing can listen on 127.0.0.1" in said and "ip link set lo up" in said


def test_a_machine_without_gpus_has_no_engines_of_stages(tmp_path):
    words = [*PPO, "launch.device=cpu", "train.colocate_all=false", "vllm.pipeline_parallel_size=2"]
    assert "vllm.pipeline_parallel_size: the CPU build of vLLM" in refused(words, ":", "", tmp_path)


def test_a_machine_with_too_few_ports_is_named(tmp_path):
    up = "ip link set lo up && echo '40000 40009' > /proc/sys/net/ipv4/ip_local_port_range"
    if subprocess.run(["which", "ip"], check=False, capture_output=True).returncode:
        pytest.skip("there is no ip command here")
    said = refused(PPO, up, "--net", tmp_path)
    assert re.search(r"only (9|10) TCP ports are free", said) and "ip_local_port_range" in said


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        ("mount -t tmpfs -o ro none /dev/shm", "/dev/shm is missing or cannot be written"),
        ("mount -t tmpfs -o size=64m none /dev/shm", "/dev/shm has 64 MiB free, but Ray's object store takes 75 MiB"),
    ],
)
def test_a_machine_without_enough_shared_memory_is_named(prepare, said, tmp_path):
    assert said in refused(PPO, prepare, "--mount", tmp_path)


def test_rollouts_that_do_not_fit_into_shared_memory_are_refused_with_their_size(tmp_path):
    """2048 x 8 samples of 4096 tokens, for which policy and critic take (12 + 33 + 20) x 1.25 bytes each: 5200 MiB."""
    words = [*PPO, "rollout.batch_size=2048", "rollout.n_samples_per_prompt=8", "data.max_len=4096"]
    small = "mount -t tmpfs -o size=200m none /dev/shm"
    said = refused(words, small, "--mount", tmp_path)
    assert "/dev/shm has 200 MiB free, but Ray's object store takes 5200 MiB for the 16384 samples of a step" in said
    assert "write launch.object_store_mb=200 (objects that do not fit are then written to disk)" in said
    said = refused([*words, "launch.object_store_mb=300"], small, "--mount", tmp_path)
    assert "/dev/shm has 200 MiB free, but Ray's object store takes 300 MiB\n" in said


@pytest.mark.parametrize(("name", "said"), [("tmp-é", "other than ASCII"), ("t" * 40, "leave room for")])
def test_a_folder_for_temporary_files_that_cannot_hold_sockets_is_named(name, said, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    answer = refused(PPO, ":", "", tmp_path, TMPDIR=str(folder))
    assert said in answer and f"TMPDIR: {folder} has" in answer


def test_a_run_without_ray_may_have_its_temporary_files_anywhere(tmp_path, monkeypatch):
    from rlhf_suite.config.declarations.runs import Run
    from rlhf_suite.preflight.inspections.machine import machine

    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "t" * 40)
    assert list(machine(Run.of("sft"), tmp_path)) == []
    assert list(machine(Run.of("check_reward"), tmp_path)) == []


def test_a_flag_that_needs_a_gpu_is_refused_where_auto_finds_none(tmp_path, monkeypatch):
    run = Run.of("dpo")
    run.ref.offload = True
    for visible, keys in (("", ["ref.offload"]), ("0", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [problem.key for problem in flags_fit_the_device(run, tmp_path)] == keys
    assert not [*flags_fit_the_device(run, None)], "the machine is not known yet"
