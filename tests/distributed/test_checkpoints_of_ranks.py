"""Checkpoints of a model with several ranks on a real Ray cluster: ranks digest what they write and load, the driver
reads none of it, and a damaged file is refused before any rank has loaded anything."""

import os
from pathlib import Path

import pytest
import torch

from rlhf_suite.config.declarations.ckpt import CheckpointConfig
from rlhf_suite.config.declarations.launch import LaunchConfig
from rlhf_suite.distributed.mesh import Rank
from rlhf_suite.distributed.workers import GroupOptions, WorkerGroup
from rlhf_suite.errors import RunError
from rlhf_suite.launch.placement import Slot
from rlhf_suite.launch.ray_cluster import ray_cluster
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.train.checkpoint_files import Entries
from rlhf_suite.train.parts import load_tensors, write_tensors
from rlhf_suite.train.saving import Saver, TrainingRows
from rlhf_suite.train.trained_worker import TrainedGroup, TrainedWorker

RANKS, NUMBERS = 2, 1 << 20  # of 4 bytes, so that what else a process reads is far less


class Holder(TrainedWorker):
    """A rank whose part of a model is one tensor."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self.part = torch.full((NUMBERS,), float(rank.number))
        self.loads = 0

    def add(self, number: float) -> None:
        self.part += number

    def get(self) -> tuple[float, int]:
        return float(self.part[-1]), self.loads

    def save_state(self, folder: Path, with_optimizer: bool) -> Entries:
        return write_tensors(folder / f"state_{self.rank.number}.pt", self.part)

    def load_state(self, folder: Path, with_optimizer: bool) -> None:
        self.part, self.loads = load_tensors(folder / f"state_{self.rank.number}.pt"), self.loads + 1

    def export(self, path: Path) -> list[str]:
        if self.rank.number == 0:
            path.mkdir()
            torch.save(self.part, path / "model.safetensors")
        return []


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    launch = LaunchConfig.of("ppo", device="cpu", num_cpus=2, object_store_mb=80)
    with ray_cluster(launch, tmp_path_factory.mktemp("run"), slots=RANKS):
        yield


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # Holder is in this file
    options = GroupOptions("cpu", tmp_path_factory.mktemp("logs"), 120.0, {"PYTHONPATH": os.pathsep.join(paths)})
    made = WorkerGroup(Holder, "actor", [Slot(0.25)] * RANKS, options)
    made.ready()
    yield made
    made.kill()


@pytest.fixture
def saver(workers, tmp_path):
    def make(**config) -> Saver:
        rows = TrainingRows("data.dataset", "all")
        flags = CheckpointConfig.of("sft", save_steps=1, **config)
        return Saver(flags, RunFolder(tmp_path), {"actor": TrainedGroup(workers)}, "eval/gpt_loss", rows)

    return make


def call(workers: WorkerGroup, method: str, *args):
    return workers.wait(workers.start(method, *args), method)


def bytes_read() -> int:
    """The bytes that this process has asked files and pipes for so far."""
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


@pytest.mark.notices(
    "the driver digests the files of models",
    "train/saving.py",
    "files = own if not rest or top in self.driver_files else",
    "files = own if True else",
)
def test_the_driver_reads_none_of_what_the_ranks_write_and_load(saver, workers):
    before = bytes_read()
    saver(save_hf=True).save(1, "step")
    assert saver(load_enable=True).resume(print) == 1
    assert bytes_read() - before < NUMBERS, "a rank has written four times as many bytes, and the export has as many"
    (_, first), (_, second) = call(workers, "get")
    assert first == second > 0


@pytest.mark.parametrize("name", ["actor/state_0.pt", "actor/state_1.pt", "hf/model.safetensors", "state.json"])
def test_a_file_that_any_rank_finds_damaged_is_refused_before_a_rank_has_loaded_anything(saver, workers, name):
    one = saver(save_hf=True)
    one.save(1, "step")
    call(workers, "add", 1.0)
    one.save(2, "step")
    call(workers, "add", 1.0)
    held = call(workers, "get")
    said = []
    damaged = one.store.path / "step_000002" / name
    damage(damaged)
    assert saver(load_enable=True).resume(said.append) == 1
    words = f"{damaged.parents[len(Path(name).parts) - 1]} is damaged: {name} is not what was written (its SHA-256"
    assert said[0].startswith(f"Skipping a checkpoint: {words}")
    assert call(workers, "get") == [(number - 2, loads + 1) for number, loads in held]
    held = call(workers, "get")
    damage(one.store.path / "step_000001" / name)
    with pytest.raises(RunError, match=rf"step_000002 is damaged: {name} .*step_000001 .*start again from step 0"):
        saver(load_enable=True).resume(said.append)
    assert call(workers, "get") == held, "nothing was loaded, and the ranks still answer"


def damage(path: Path) -> None:
    """Change a byte in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        before = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([before[0] ^ 1]))
