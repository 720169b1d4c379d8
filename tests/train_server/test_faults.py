"""What clients do wrong, and what happens to a server: one clear error each, and the server goes on."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from full_disk import fill, small_disk
from train_client import RANK, Client, Refused, serving, shifted

pytestmark = pytest.mark.e2e
DATA = [shifted([5, 60, 61, 62, 63, 64])]
WRONG = (5, 1.5, True, "x", [], [1], ["x"], {}, {"x": 1}, None)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    with serving(folder, f"ds.lora.rank={RANK}", "serve.max_models=64", "serve.max_request_mb=1") as (process, url):
        yield url, folder
        assert process.poll() is None, (folder / "log").read_text()


@pytest.fixture
def client(server):
    return Client(server[0])


def bodies(client, model, sampler):
    """Return a request that is right for each route with JSON, but for the numbers of futures."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 60]}]}
    return {
        "session_heartbeat": {"session_id": client.session},
        "create_model": {"session_id": client.session, "model_seq_id": 90, "base_model": "builtin:tiny",
                         "lora_config": {"rank": RANK}, "optimizer_config": {"type": "adamw"}},
        "get_info": {"model_id": model.name},
        "weights_info": {"tinker_path": "tinker://a/weights/b"},
        "optim_step": {"model_id": model.name, "seq_id": 0, "adam_params": {"learning_rate": 0.1}},
        "save_weights": {"model_id": model.name, "seq_id": 0, "path": "a/b"},
        "load_weights": {"model_id": model.name, "seq_id": 0, "path": "tinker://a/weights/b"},
        "save_weights_for_sampler": {"model_id": model.name, "seq_id": 0, "path": "a/b"},
        "create_sampling_session": {"session_id": client.session, "sampling_session_seq_id": 7, "model_path": "a"},
        "join_sampling_session": {"sampling_session_id": sampler},
        "asample": {"sampling_session_id": sampler, "seq_id": 3, "prompt": prompt, "num_samples": 1,
                    "sampling_params": {"max_tokens": 1, "stop": ["x"], "temperature": 1.0, "seed": 1},
                    "topk_prompt_logprobs": 0, "prompt_logprobs": False},
        "unload_model": {"model_id": "nobody"},
        "retrieve_future": {"request_id": "nobody"},
    }  # fmt: skip


def changed(body):
    """Yield a body with each of its values, those of tables too, replaced by each wrong one."""
    for key, value in body.items():
        yield from ({**body, key: wrong} for wrong in WRONG)
        if isinstance(value, dict):
            yield from ({**body, key: inner} for inner in changed(value))


def test_values_of_any_type_are_answered_with_a_reason(client):
    """A value that is refused at once has the status 4xx; one that is refused in its turn is an error of the user."""
    model, sampler, seq = client.create(), client.sampler(base_model="builtin:tiny"), 0
    for route, right in bodies(client, model, sampler).items():
        for body in changed(right):
            if body.get("seq_id") == 5:  # a number that comes later: it waits for those before it
                continue
            if body.get("seq_id") in (0, 3) and not isinstance(body["seq_id"], bool):
                seq += 1
                body |= {"seq_id": seq + 1000 if route == "asample" else model.seq + 1}
            answer = client.http.post(route, json=body)
            assert answer.status_code in (200, 404, 422), (route, body, answer.text)
            if answer.status_code == 200 and "request_id" in answer.json():
                model.seq += route != "asample" and body.get("seq_id") == model.seq + 1
                try:
                    client.wait(answer.json())
                except Refused as refused:
                    assert str(refused).startswith("user: "), (route, body, refused)
    model.compute(DATA)
    assert model.step()["skipped"] == 0


def test_other_clients_are_told_whose_protocol_this_is(server, client):
    model = client.create()
    for method, route, reason in (
        ("post", "forward_backward", "the request is JSON, as clients before tinker 0.38 send it"),
        ("post", "save_weights_external", "this server has no call POST save_weights_external. It has those of tinker"),
        ("get", "checkpoints", "this server has no call GET checkpoints"),
    ):
        more = {"json": {"model_id": model.name}} if method == "post" else {}
        answer = getattr(client.http, method)(route, **more)
        assert answer.status_code in (404, 422) and answer.json()["detail"].startswith(reason)
    answer = client.http.post("forward_backward", content=bytes(2**20 + 1))
    assert answer.status_code == 413 and "serve.max_request_mb" in answer.json()["detail"]


def test_numbers_that_no_gradient_survives_are_the_mistake_of_their_client(client):
    model, other = client.create(), client.create()
    other.compute(DATA)
    wild = [shifted([5, 60, 61], advantages=[3e38, 3e38], logprobs=[-5.0, -5.0])]
    with pytest.raises(Refused, match=r"user: .*not finite"):
        model.compute(wild, "importance_sampling")
        model.step()
    assert other.step()["skipped"] == 0
    model.compute(DATA)
    assert model.step()["skipped"] == 0


def test_a_full_disk_fails_a_save_and_nothing_else(server, client):
    model = client.create()
    states = server[1] / "run" / "checkpoints" / model.name / "weights"
    states.mkdir(parents=True)
    with small_disk(states / "full", 64) as disk:
        fill(disk)
        with pytest.raises(Refused, match=r"user: save_weights: .*the disk is full"):
            model.ask("save_weights", path="full", overwrite=True)
    model.compute(DATA)
    model.step()
    assert model.ask("save_weights", path="other")["path"].endswith("/weights/other")


def test_a_damaged_state_fails_a_load_and_nothing_else(server, client):
    model = client.create()
    model.compute(DATA)
    model.step()
    path = model.ask("save_weights", path="damaged")["path"]
    (file,) = (server[1] / "run" / "checkpoints" / model.name / "weights" / "damaged").rglob("actor/state_0.pt")
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(Refused, match=r"user: .*damaged"):
        client.load(path, optimizer=True)
    assert client.create().name


def test_a_client_that_disappears_in_a_request_takes_nothing_with_it(server, client):
    """Half of a request is none; gradients of a client that has gone keep nobody from training."""
    host, port = server[0].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\nhalf")
    gone = Client(server[0])
    left = gone.create()
    left.begin(DATA, "cross_entropy")
    gone.http.close()
    model = client.create()
    before = np.concatenate(model.compute(DATA)[1])
    model.step()
    assert not np.array_equal(np.concatenate(model.compute(DATA, forward_only=True)[1]), before)


def test_an_answer_can_be_asked_for_twice(client):
    model = client.create()
    future = model.begin(DATA, "cross_entropy")
    assert client.wait(future) == client.wait(future)


def test_two_models_may_save_under_one_name(client):
    models = [client.create(), client.create()]
    paths = {model.ask("save_weights", path="best")["path"] for model in models}
    assert paths == {f"tinker://{model.name}/weights/best" for model in models}


@pytest.mark.notices(
    "after a request that is too large the next one waits two minutes, and fails",
    "train_server/routes.py",
    "refuse(error.beginning or await beginning_of(request), reason)",
    "pass",
    limit_s=200,
)
def test_behind_a_request_that_is_too_large_the_next_one_is_done(server, client):
    """The server of this module takes a MiB in a request."""
    model = client.create()
    loss, _ = model.compute(DATA)
    large = [shifted([5] * 60)] * 4000
    with pytest.raises(Refused, match="413: the request is larger than 1048576 bytes"):
        model.begin(large, "cross_entropy")
    again, _ = model.compute(DATA, forward_only=True)
    assert again == pytest.approx(loss)
