"""A server whose disk is full, whose files are damaged, or that is killed while it writes: what it says is true."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest

import rlhf_suite as rs
from full_disk import fill, small_disk
from train_client import RANK, Client, Refused, serving, shifted

pytestmark = pytest.mark.e2e
DATA = [shifted([5, 60, 61, 62, 63, 64])]
DISK_KB = 65_536


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server whose run folder is a disk of its own, with checkpoints and metrics."""
    folder = tmp_path_factory.mktemp("disks")
    with (
        small_disk(folder / "run", DISK_KB) as disk,
        serving(folder, f"ds.lora.rank={RANK}", "serve.max_models=64") as (process, url),
    ):
        yield url, disk
        assert process.poll() is None, (folder / "log").read_text()


@pytest.fixture
def client(server):
    return Client(server[0])


@pytest.fixture
def disk(server):
    yield server[1]
    (server[1] / "filler").unlink(missing_ok=True)


def log_probs(model):
    return np.concatenate(model.compute(DATA, forward_only=True)[1])


def steps_in(disk):
    """Return the steps of the rows of metrics, and of status.json."""
    rows = [json.loads(line) for line in (disk / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows], rs.load(disk).last_step


def states_of(disk, model):
    return disk / "checkpoints" / model.name / "weights"


def fail_to_step(model, disk):
    """Take a step whose state cannot be written; return the reason that its client is given."""
    model.compute(DATA)
    fill(disk)
    with pytest.raises(Refused, match=r"user: optim_step: step \d+ of the model was taken and counts") as refused:
        model.step()
    return str(refused.value)


@pytest.mark.notices(
    "the row of a step is left out where its state cannot be written",
    "train_server/models.py",
    """        except BadRequest:  # the step counts
            self.steps.log(passes | metrics)
            raise
""",
    """        except BadRequest:
            raise
""",
)
def test_a_step_that_cannot_be_written_counts_once_and_is_written_when_asked_for_again(client, disk):
    model, twin = client.create(), client.create()
    for each in (model, twin):
        each.compute(DATA)
        each.step()
    before, _ = steps_in(disk)
    reason = fail_to_step(model, disk)
    assert "step 2 of the model" in reason and "the disk is full" in reason
    with pytest.raises(Refused, match="step 2 of the model was taken"):
        model.step()
    twin.compute(DATA)
    (disk / "filler").unlink()
    twin_metrics = twin.step()
    assert model.step() == twin_metrics  # those of the step that was taken
    with pytest.raises(Refused, match="no gradients wait"):
        model.step()
    assert np.array_equal(log_probs(model), log_probs(twin))
    again = client.load(f"tinker://{model.name}/weights/latest", optimizer=True)
    assert np.array_equal(log_probs(again), log_probs(twin))
    last = before[-1]
    assert steps_in(disk) == ([*before, last + 1, last + 2], last + 2)


def test_the_next_step_writes_what_the_last_one_could_not(client, disk):
    model = client.create()
    before, _ = steps_in(disk)
    fail_to_step(model, disk)
    (disk / "filler").unlink()
    model.compute(DATA)
    model.step()
    again = client.load(f"tinker://{model.name}/weights/latest", optimizer=True)
    assert np.array_equal(log_probs(again), log_probs(model))
    assert steps_in(disk)[0] == [*before, before[-1] + 1, before[-1] + 2]


def test_a_request_that_is_sent_again_is_not_done_again(client, disk):
    """Also where its step was taken and could not be written: the answer is the same error."""
    model = client.create()
    fail_to_step(model, disk)
    (disk / "filler").unlink()
    was = log_probs(model)
    with pytest.raises(Refused, match="was taken and counts"):
        body = {"model_id": model.name, "seq_id": 2, "adam_params": {"learning_rate": 1e-2}}
        client.wait(client.post("optim_step", **body))
    assert np.array_equal(log_probs(model), was)


@pytest.mark.notices(
    "a state that was never written is loaded as if it were empty",
    "train_server/states.py",
    "if self.has_checkpoint(version)]",
    "]",
)
def test_a_state_that_could_not_be_written_is_not_there(client, disk):
    """What was there under its name before stays, for loads and for samplers; a new name is free still."""
    model = client.create()
    model.compute(DATA)
    model.step()
    model.ask("save_weights", path="kept")
    sampled = model.ask("save_weights_for_sampler", path="kept")["path"]
    was = log_probs(model)
    model.compute(DATA)
    model.step()
    fill(disk)
    for route, name in (("save_weights", "kept"), ("save_weights", "new"), ("save_weights_for_sampler", "kept")):
        with pytest.raises(Refused, match=rf"user: {route}: .*the disk is full"):
            model.ask(route, path=name, overwrite=True)
    (disk / "filler").unlink()
    with pytest.raises(Refused, match="there is nothing at"):
        client.load(f"tinker://{model.name}/weights/new", optimizer=True)
    assert np.array_equal(log_probs(client.load(f"tinker://{model.name}/weights/kept", optimizer=True)), was)
    _, scores = client.sample(client.sampler(model_path=sampled), [5, 60, 61, 62, 63, 64], 1, scores=True, max_tokens=1)
    assert np.abs(scores[1:] - was).max() < 1e-4
    assert model.ask("save_weights", path="new")["path"].endswith("/new")


def test_a_version_whose_writing_was_cut_off_is_passed_over(client, disk):
    """As a kill leaves it: a newer folder without a checkpoint."""
    model = client.create()
    model.compute(DATA)
    model.step()
    path = model.ask("save_weights", path="cut")["path"]
    was = log_probs(model)
    (states_of(disk, model) / "cut" / "v000002" / "step_000001.tmp").mkdir(parents=True)
    (states_of(disk, model) / "latest" / "v000009").mkdir()
    for address in (path, path.replace("/cut", "/latest")):
        assert np.array_equal(log_probs(client.load(address, optimizer=True)), was)


@pytest.mark.notices(
    "a load that fails leaves a model with other weights",
    "train_server/models.py",
    """        self.leave()
        self.policy.put_state(INITIAL).result()
        try:
""",
    """        self.policy.put_state(INITIAL).result()
        try:
""",
)
def test_a_load_that_fails_changes_nothing(client, disk):
    """Neither the weights of the model, nor its gradients that wait; and no new model takes a place."""
    model, twin = client.create(), client.create()
    for each in (model, twin):
        each.compute(DATA)
        each.step()
    path = model.ask("save_weights", path="damaged")["path"]
    damage(states_of(disk, model) / "damaged")
    for each in (model, twin):
        each.compute(DATA)
    for _ in range(2):
        with pytest.raises(Refused, match=r"user: load_weights: .*damaged"):
            model.ask("load_weights", path=path, optimizer=True)
        with pytest.raises(Refused, match=r"user: load_weights: .*damaged") as refused:
            client.load(path, optimizer=True)
        assert "Skipping" not in str(refused.value)
    assert model.step() == twin.step()
    assert np.array_equal(log_probs(model), log_probs(twin))


def damage(folder):
    """Cut off the end of the newest file of weights below a folder, and return its checkpoint."""
    file = sorted(folder.rglob("actor/state_0.pt"))[-1]
    file.write_bytes(file.read_bytes()[:-7])
    return file.parents[1]


@pytest.mark.notices(
    "a damaged latest state is replaced by the one before it without a word",
    "train_server/models.py",
    "if loaded != newest.step:",
    "if False:",
)
def test_a_damaged_newest_state_is_not_replaced_by_an_older_one_unasked(client, disk):
    model, seen = client.create(), []
    for _ in range(2):
        model.compute(DATA)
        model.step()
        seen.append(log_probs(model))
    damaged = damage(states_of(disk, model) / "latest")
    address = f"tinker://{model.name}/weights/latest"
    with pytest.raises(Refused, match=rf"{re.escape(str(damaged))} is damaged. .*is that of step 1: delete"):
        client.load(address, optimizer=True)
    shutil.rmtree(damaged)
    assert np.array_equal(log_probs(client.load(address, optimizer=True)), seen[0])


def test_the_state_of_a_model_that_is_gone_is_named(client):
    model = client.create()
    model.compute(DATA)
    model.step()
    client.wait(client.post("unload_model", model_id=model.name))
    address = f"tinker://{model.name}/weights/latest"
    with pytest.raises(Refused, match=f"there is no model {model.name}.* Its last state is at {address}"):
        model.step()
    assert client.load(address, optimizer=True).name
    with pytest.raises(
        Refused, match=r"there is no model \.\./x\. Create it first: a server forgets all models when it stops$"
    ):
        client.post("get_info", model_id="../x")
