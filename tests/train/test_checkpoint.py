"""Checkpoints: whole or not at all, the newest found, the oldest rotated out."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch

from rlhf_suite.config.declarations.ckpt import CheckpointConfig
from rlhf_suite.disk import file_digest
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.errors import RunError
from rlhf_suite.polling import poll_until
from rlhf_suite.train.checkpoint import MANIFEST, CheckpointStore, remove
from rlhf_suite.train.checkpoint_files import Entry, digest_new_file, file_digests, share

KILLS = 12


def save(store: CheckpointStore, step: int, kind: str = "step", size: int = 10, **state: float) -> Path:
    folder = store.begin(step, kind)
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_bytes(bytes([step % 256]) * size)
    return store.commit(step, {"step": step, **state}, kind)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(CheckpointConfig.of("sft", max_num=2), tmp_path / "checkpoints")


def steps(store: CheckpointStore, kind: str = "step") -> list[int]:
    return [checkpoint.step for checkpoint in store.all(kind)]


def test_a_committed_checkpoint_is_found_with_its_state(store):
    assert store.latest() is None
    path = save(store, 3, best=0.5)
    found = store.newest_sound([].append)
    assert (found.path, found.step, found.state()) == (path, 3, {"step": 3, "best": 0.5})
    assert (found.path / "actor" / "weights").read_bytes() == b"\x03" * 10


def test_what_was_not_committed_is_nothing(store):
    save(store, 1)
    (store.begin(2) / "weights").write_text("half")
    assert store.latest().step == 1
    save(store, 3)
    assert not list(store.path.glob("*.tmp")), "what a killed save left is cleared away by the next one"


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def half_of_it(path: Path) -> None:
    path.write_text(path.read_text()[:20])


# What is done to which file, and what is said of it.
DAMAGES = [
    (flipped, "actor/weights", "actor/weights is not what was written (its SHA-256 differs)"),
    (truncated, "actor/weights", "actor/weights has 9 bytes instead of 10"),
    (Path.unlink, "actor/weights", "actor/weights is missing"),
    (flipped, "state.json", "state.json is not what was written (its SHA-256 differs)"),
    (Path.unlink, "state.json", "state.json is missing"),
    (half_of_it, MANIFEST, "manifest.json cannot be read"),
    (Path.unlink, MANIFEST, "manifest.json is missing"),
    (lambda path: path.write_text("[]"), MANIFEST, "manifest.json cannot be read"),
    (lambda path: path.write_bytes(b"\xff\xfe"), MANIFEST, "manifest.json cannot be read"),
    (lambda path: path.write_text('{"step": 7, "files": {}}'), MANIFEST, "manifest.json is not that of step 2"),
]


@pytest.mark.notices(
    "a resume begins at the oldest checkpoint",
    "train/checkpoint.py",
    "(ckpt.step, ckpt.kind), reverse=True)",
    "(ckpt.step, ckpt.kind))",
    cases="not kill",
)
@pytest.mark.notices(
    "a checkpoint whose contents have changed is loaded",
    "train/checkpoint.py",
    "if read[name] != entry.sha256:",
    "if False:",
    cases="not kill",
)
@pytest.mark.parametrize(("damage", "file", "words"), DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_its_file_and_the_reason(store, damage, file, words):
    sound, said = save(store, 1), []
    path = save(store, 2)
    damage(path / file)
    assert store.newest_sound(said.append).path == sound
    assert said == [f"Skipping a checkpoint: {path} is damaged: {words}"]


def test_where_every_checkpoint_is_damaged_the_run_stops_and_says_what_to_do(store):
    for step in (1, 2):
        flipped(save(store, step) / "actor" / "weights")
    with pytest.raises(RunError, match=r"step_000002 is damaged: actor/weights .*step_000001 .*another folder"):
        store.newest_sound([].append)


def test_the_manifest_has_the_size_and_the_digest_of_every_file(store):
    manifest = json.loads((save(store, 4) / MANIFEST).read_text())
    assert manifest["step"] == 4
    assert set(manifest["files"]) == {"actor/weights", "state.json"}
    entry = {"bytes": 10, "sha256": hashlib.sha256(b"\x04" * 10).hexdigest()}
    assert manifest["files"]["actor/weights"] == entry


def test_files_that_were_digested_while_they_were_written_are_not_read_again(store):
    folder, said = store.begin(1), Entry(10, "0" * 64)
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_bytes(bytes(10))
    read = []

    def digests(folder: Path, names: Sequence[str]) -> Mapping[str, str]:
        read.extend(names)
        return file_digests(folder, names)

    store.commit(1, {"step": 1}, written={"actor/weights": said}, digests=digests)
    assert read == ["state.json"]
    assert store.latest().check_sizes()["actor/weights"] == said
    assert store.newest_sound([].append, lambda folder, names: digests(folder, names) | {"actor/weights": "0" * 64})
    with pytest.raises(RunError, match=r"actor/weights cannot be read"):
        store.newest_sound([].append, lambda folder, names: digests(folder, ["state.json"]))


@pytest.mark.notices(
    "a rank's file that no other node sees is listed",
    "train/checkpoint.py",
    "if sizes.get(name) != entry.bytes]",
    "if False]",
)
@pytest.mark.parametrize("content", [None, b"half"], ids=["missing", "cut off"])
def test_a_file_that_only_the_node_of_its_rank_has_ends_the_run(store, content):
    folder = store.begin(1)
    if content is not None:
        (folder / "weights").write_bytes(content)
    with pytest.raises(RunError, match=r"step_000001\.tmp/weights was written by .* ckpt\.path=<folder>"):
        store.commit(1, {"step": 1}, written={"weights": Entry(10, "0" * 64)})
    assert store.list_all() == []


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(3), Mesh(2, 2), Mesh(2, 1, 2), Mesh(2, 2, 2)], ids=str)
def test_every_file_is_digested_by_one_rank_and_its_own_by_the_one_that_loads_it(mesh):
    ranks = range(mesh.size)
    kind = "state" if mesh.tensor == 1 else "state_tensor{}"
    own = [f"{kind.format(mesh.tensor_index(rank))}_{mesh.replica_index(rank)}.pt" for rank in ranks]
    names = [*(f"hf/model-{part}.safetensors" for part in range(7)), *own, *(f"rng_{rank}.pt" for rank in range(11))]
    shares = [share(names, rank, mesh) for rank in ranks]
    assert sorted(chain.from_iterable(shares)) == sorted(names)
    assert all(own[rank] in shares[rank] for rank in ranks)
    assert max(map(len, shares)) < len(names) or mesh.size == 1


def test_a_digest_computed_while_a_file_is_written_is_that_of_the_file(tmp_path):
    with digest_new_file(tmp_path / "file") as file:
        torch.save({"weight": torch.randn(1000), "steps": 3}, file)
    assert file.entry == Entry((tmp_path / "file").stat().st_size, file_digest(tmp_path / "file"))
    assert torch.load(tmp_path / "file", mmap=True, weights_only=True)["steps"] == 3


def test_a_kill_while_a_checkpoint_is_deleted_leaves_no_damaged_one(store, monkeypatch):
    path = save(store, 1)
    monkeypatch.setattr("shutil.rmtree", lambda *args, **kwargs: None)  # the kill comes before any file is deleted
    remove(path)
    monkeypatch.undo()
    assert store.list_all() == []
    store.sweep()
    assert list(store.path.iterdir()) == []


@pytest.mark.notices(
    "the rotation deletes the newest checkpoint", "train/checkpoint.py", "regular.pop(0)", "regular.pop(-2)"
)
def test_the_oldest_go_first_and_the_best_stays(store):
    save(store, 1, "best")
    for step in (1, 2, 3, 4):
        save(store, step)
    assert (steps(store), steps(store, "best")) == ([3, 4], [1])
    save(store, 4, "best")
    assert (steps(store), steps(store, "best")) == ([3, 4], [4])
    assert sorted(folder.name for folder in store.path.iterdir()) == ["best_000004", "step_000003", "step_000004"]


def test_the_newest_may_be_the_best(store):
    save(store, 2)
    save(store, 3, "best")
    assert store.latest().step == 3


def test_a_size_limit_keeps_at_least_the_newest(tmp_path):
    store = CheckpointStore(CheckpointConfig.of("sft", max_num=9, max_mem=3000 / 2**30), tmp_path)
    for step in (1, 2, 3):
        save(store, step, size=1000)
    assert steps(store) == [2, 3]
    save(store, 4, size=5000)
    assert steps(store) == [4]


def test_a_step_saved_again_replaces_the_first(store):
    save(store, 1, size=10)
    path = save(store, 1, size=20)
    assert (path / "actor" / "weights").stat().st_size == 20
    assert steps(store) == [1]


def save_for_ever(path: Path, first: int) -> None:
    store = CheckpointStore(CheckpointConfig.of("sft", max_num=2), path)
    for step in range(first, 10**6):
        save(store, step, size=20_000)
        save(store, step, "best", size=20_000)


@pytest.mark.stack
def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(tmp_path):
    """And never takes one away: what was the newest before is there, or a newer one."""
    path, chance, newest = tmp_path / "checkpoints", random.Random(0), 0
    for _ in range(KILLS):
        process = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(path, newest + 1))
        process.start()
        has_begun = lambda: any(int(each.name[5:11]) > newest for each in path.glob("step_*"))  # noqa: B023, E731
        assert poll_until(has_begun, 60, 0.001)
        time.sleep(0.1 * chance.random())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        said: list[str] = []
        found = CheckpointStore(CheckpointConfig.of("sft"), path).newest_sound(said.append)
        assert said == [], "what a kill leaves never looks like a damaged checkpoint"
        if found is None:
            assert newest == 0
            continue
        assert found.step >= newest
        assert found.state()["step"] == found.step
        assert (found.path / "actor" / "weights").read_bytes() == bytes([found.step % 256]) * 20_000
        newest = found.step
    assert newest > 0
