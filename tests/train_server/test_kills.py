"""A server that is killed after any call: what it had acknowledged is there after a load, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from train_client import RANK, Client, serving, shifted

pytestmark = pytest.mark.proof
DATA = [shifted([5, 60, 61, 62, 63, 64]), shifted([9, 70, 71, 72])]
WORDS = (f"ds.lora.rank={RANK}", "ckpt.load_enable=true")
CALLS = ("create", "pass", "step", "pass", "step", "save", "sampler", "sample", "pass", "step")


def make_calls(client, calls):
    """Make calls of one model; return it, and the log-probs after the last acknowledged step."""
    model, sampler = None, ""
    for call in calls:
        if call == "create":
            model = client.create()
        elif call == "pass":
            model.compute(DATA)
        elif call == "step":
            model.step()
        elif call == "save":
            model.ask("save_weights", path="named")
        elif call == "sampler":
            sampler = model.ask("save_weights_for_sampler", sampling_session_seq_id=0)["sampling_session_id"]
        else:
            client.sample(sampler, [5, 60], 1, max_tokens=3)
    return model


def go_on(model, steps):
    """Return the log-probs before each of so many further steps."""
    seen = []
    for _ in range(steps):
        seen.append(np.concatenate(model.compute(DATA)[1]))
        model.step()
    return seen


@pytest.mark.timeout(1800)
def test_a_kill_behind_any_call_loses_no_acknowledged_step(tmp_path):
    """Each server checks what the one before it has left, makes one call more, and is killed."""
    killed, taken, wanted = "", 0, []
    for number in range(1, len(CALLS) + 2):
        with serving(tmp_path, *WORDS) as (process, url):
            wanted = wanted or go_on(Client(url).create(), CALLS.count("step") + 2)
            if taken:
                seen = go_on(Client(url).load(f"tinker://{killed}/weights/latest", optimizer=True), 2)
                assert all(np.array_equal(a, b) for a, b in zip(seen, wanted[taken : taken + 2], strict=True)), number
            killed, taken = make_calls(Client(url), CALLS[:number]).name, CALLS[:number].count("step")
            process.kill()
            process.wait(60)


@pytest.mark.timeout(1800)
def test_latest_follows_the_line_of_steps_that_was_taken_last(tmp_path):
    """After a load of an earlier state, newer steps have lower numbers than those that were left."""
    with serving(tmp_path, *WORDS) as (process, url):
        model = make_calls(Client(url), ("create", "pass", "step"))
        model.ask("save_weights", path="early")
        go_on(model, 3)
        model.ask("load_weights", path=f"tinker://{model.name}/weights/early", optimizer=True)
        go_on(model, 1)
        wanted = np.concatenate(model.compute(DATA, forward_only=True)[1])
        process.kill()
        process.wait(60)
    with serving(tmp_path, *WORDS) as (_, url):
        loaded = Client(url).load(f"tinker://{model.name}/weights/latest", optimizer=True)
        assert np.array_equal(np.concatenate(loaded.compute(DATA, forward_only=True)[1]), wanted)


WRITTEN = ("v*/*.tmp", "v*/*.tmp/actor/state_0.pt", "v*/*.tmp/manifest.json", "v*/step_000003")  # in this order


@pytest.mark.timeout(1800)
def test_behind_a_kill_during_a_step_latest_has_that_step_or_the_one_before(tmp_path):
    """Each server is killed as soon as a file of the state of its third step is there."""
    wanted, found = [], []
    for pattern in WRITTEN:
        with serving(tmp_path, *WORDS) as (process, url):
            wanted = wanted or go_on(Client(url).create(), 4)
            model = Client(url).create()
            go_on(model, 2)
            latest = tmp_path / "run" / "checkpoints" / model.name / "weights" / "latest"
            model.begin(DATA, "cross_entropy")
            model.start("optim_step", adam_params={"learning_rate": 1e-2})
            while not any(latest.glob(pattern)):
                assert process.poll() is None
            process.kill()
            process.wait(60)
        with serving(tmp_path, *WORDS) as (process, url):
            loaded = Client(url).load(f"tinker://{model.name}/weights/latest", optimizer=True)
            (seen,) = go_on(loaded, 1)
            found.append([np.array_equal(seen, one) for one in wanted].index(True))
    assert set(found) <= {2, 3} and found[-1] == 3
