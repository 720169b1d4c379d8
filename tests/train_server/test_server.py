"""task=serve_train on builtin:tiny, asked by plain HTTP: losses by their formulas, models that take turns, mistakes."""

from __future__ import annotations

import math
import time

import httpx
import numpy as np
import pytest
import torch

import flag_reads
import rlhf_suite as rs
from train_client import RANK, SETTINGS, Client, Refused, serving, shifted

pytestmark = pytest.mark.e2e
TOKENS = [[5, 60, 61, 62, 63, 64], [9, 70, 71, 72], [5, 80, 81, 82, 83]]
ADVANTAGES = [[0.0, 1.5, -2.0, 0.5, 3.0], [1.0, -1.0, 2.0], [-0.5, 0.25, 1.0, -3.0]]
SHIFTS = [[0.0, 0.4, -0.6, 0.1, -0.05], [0.3, -0.3, 0.01], [0.9, -0.9, 0.2, 0.0]]  # of log p - log q
LOW, HIGH = 0.7, 1.25
WORDS = f"ds.lora.rank={RANK}", "serve.max_models=64", "train.micro_batch_size=2"
READ_ELSEWHERE = {
    "ckpt.load_enable": "the command line finds the earlier server, tests/train_server/test_kills.py",
    "explain": "the command line shows the plan instead of running",
    "logger.report": "the command line writes the page of a run",
    "own_code": "the run writes it itself",
    "plan": "as explain",
    "run_dir": "the command line names the folder of the run",
}
BETA = 0.3


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with serving(folder, *WORDS, env=flag_reads.environment(folder / "reads")) as (_, url):
        yield url, folder


@pytest.fixture
def client(server):
    return Client(server[0])


def importance_sampling(p, q, advantages):
    return -(p - q).exp() * advantages


def ppo(p, q, advantages):
    ratio = (p - q).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(LOW, HIGH) * advantages)


def cispo(p, q, advantages):
    return -(p - q).exp().clamp(LOW, HIGH).detach() * advantages * p


def gspo(p, q, advantages):
    ratio = ((p - q).detach().mean() + p - p.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(LOW, HIGH) * advantages)


def dro(p, q, advantages):
    return -(p * advantages - 0.5 * BETA * (p - q) ** 2)


CLIP = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}
FORMULAS = {
    "importance_sampling": (importance_sampling, {}),
    "ppo": (ppo, CLIP),
    "cispo": (cispo, CLIP),
    "gspo": (gspo, CLIP),
    "dro": (dro, {"beta": BETA}),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_named_loss_and_its_gradient_are_those_of_the_formula_in_float64(client, name):
    """The gradient by the same means as the client's custom losses: weights of cross-entropy, and the same update."""
    formula, settings = FORMULAS[name]
    plain = [shifted(tokens, weights=[0.0] * (len(tokens) - 1)) for tokens in TOKENS]
    model, custom = client.create(), client.create()
    _, log_probs = model.compute(plain, forward_only=True)
    now = [torch.tensor(own, dtype=torch.float64, requires_grad=True) for own in log_probs]
    old = [torch.from_numpy(p - np.array(shift, np.float32)) for p, shift in zip(log_probs, SHIFTS, strict=True)]
    better = [torch.tensor(own, dtype=torch.float64) for own in ADVANTAGES]
    total = torch.cat([formula(p, q.double(), a) for p, q, a in zip(now, old, better, strict=True)]).sum()
    total.backward()
    data = [
        shifted(tokens, advantages=a, logprobs=q.tolist())
        | ({"sequence_ratio_mask": [1.0] * len(a)} if name == "gspo" else {})
        for tokens, q, a in zip(TOKENS, old, ADVANTAGES, strict=True)
    ]
    loss, same = model.compute(data, name, **settings)
    assert loss == pytest.approx(total.item(), rel=1e-6, abs=1e-6)
    assert all(np.array_equal(one, two) for one, two in zip(same, log_probs, strict=True))
    weights = [(-p.grad).tolist() for p in now]
    custom.compute([shifted(tokens, weights=own) for tokens, own in zip(TOKENS, weights, strict=True)])
    ours, theirs = model.step(), custom.step()
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    _, after = model.compute(plain, forward_only=True)
    _, other = custom.compute(plain, forward_only=True)
    assert np.allclose(np.concatenate(after), np.concatenate(other), atol=2e-4)
    assert not np.allclose(np.concatenate(after), np.concatenate(log_probs), atol=1e-3)


def test_cross_entropy_is_a_sum_with_weights_of_any_sign(client):
    model = client.create()
    weights = [[0.0, 1.0, -2.0, 0.5, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 3.0]]
    loss, log_probs = model.compute([shifted(t, weights=w) for t, w in zip(TOKENS, weights, strict=True)])
    wanted = -sum(float(np.dot(p.astype(np.float64), w)) for p, w in zip(log_probs, weights, strict=True))
    assert loss == pytest.approx(wanted, rel=1e-6)


def test_settings_of_adam_are_those_of_the_call(client):
    """One step from zero moments: each weight moves by the rate, however long the gradient, unless eps is large."""
    data = [shifted(TOKENS[0])]
    moved = []
    for adam in ({}, {"eps": 1e3}, {"learning_rate": 0.0}, {"grad_clip_norm": 1e-3, "eps": 1e-3}):
        model = client.create()
        _, before = model.compute(data)
        norm = model.step(**adam)["grad_norm"]
        _, after = model.compute(data, forward_only=True)
        moved.append(float(np.abs(after[0] - before[0]).max()))
        assert norm > 1.0
    plain, damped, still, clipped = moved
    assert still == 0 and plain > 0.01 and damped < plain / 100 and clipped < plain / 2


def trained(model, data, steps, between=lambda: None):
    """Return the log-probs of each step; between a pass and its optimiser step another model may be asked for."""
    seen = []
    for _ in range(steps):
        _, log_probs = model.compute(data)
        between()
        model.step()
        between()
        seen.append(np.concatenate(log_probs))
    return seen


def state_of(folder, name):
    """Return the tensors of the newest state that the server itself has written for a model."""
    (newest,) = sorted((folder / "run" / "checkpoints" / name / "weights" / "latest").glob("v*"))[-1:]
    return torch.load(sorted(newest.glob("step_*"))[-1] / "actor" / "state_0.pt", weights_only=True)


def test_two_clients_with_two_adapters_do_not_mix_bit_for_bit(server):
    """Every call of one client lies between a pass and an optimiser step of the other."""
    url, folder = server
    first, second = [shifted(TOKENS[0])], [shifted(TOKENS[1]), shifted(TOKENS[2])]
    alone, other_alone = Client(url).create(), Client(url).create()
    wanted, other_wanted = trained(alone, first, 3), trained(other_alone, second, 3)
    mixed, other = Client(url).create(), Client(url).create()
    calls = iter([call for _ in range(3) for call in ("pass", "step")])
    other_seen = []

    def ask_other():
        if next(calls) == "pass":
            other_seen.append(np.concatenate(other.compute(second)[1]))
        else:
            other.step()

    seen = trained(mixed, first, 3, ask_other)
    assert all(np.array_equal(one, two) for one, two in zip(seen, wanted, strict=True))
    assert all(np.array_equal(one, two) for one, two in zip(other_seen, other_wanted, strict=True))
    for one, two in ((alone, mixed), (other_alone, other)):
        ours, theirs = state_of(folder, one.name), state_of(folder, two.name)
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert all(torch.equal(ours[name][1][key], theirs[name][1][key]) for key in ours[name][1]), name
    assert not np.array_equal(wanted[-1], wanted[0])


def test_samples_are_of_the_weights_that_were_saved_for_them(client):
    """Log-probs of the engine are those of the trainer, of each model and of the model without adapters."""
    prompt = TOKENS[0]
    datum = [shifted(prompt, weights=[0.0] * (len(prompt) - 1))]
    models = client.create(), client.create()
    base = client.sampler(base_model="builtin:tiny")
    wanted = {base: models[0].compute(datum, forward_only=True)[1][0]}
    for number, model in enumerate(models):
        model.compute([shifted(TOKENS[number])])
        model.step(learning_rate=0.05)
        path = model.ask("save_weights_for_sampler", path=f"weights-{number}")["path"]
        sampler = client.sampler(model_path=path)
        wanted[sampler] = model.compute(datum, forward_only=True)[1][0]
        unnamed = model.ask("save_weights_for_sampler", sampling_session_seq_id=90 + number)["sampling_session_id"]
        wanted[unnamed] = wanted[sampler]
    for sampler in (*wanted, *wanted):  # there and back again
        seq = client.samplers = client.samplers + 1
        pairs, scores = client.sample(sampler, prompt, seq, count=2, scores=True, max_tokens=4, seed=5)
        again, _ = client.sample(sampler, prompt, seq + 1000, count=2, max_tokens=4, seed=5)
        assert math.isnan(scores[0]) and np.abs(scores[1:] - wanted[sampler]).max() < 1e-4
        assert [ids for ids, _ in pairs] == [ids for ids, _ in again] and len(pairs[0][0]) == len(pairs[0][1])


def test_a_step_writes_its_metrics_and_the_samples_before_it(server):
    """All of its metrics, each computed here once more; the file of samples has what the client was told."""
    url, folder = server
    run, client = rs.load(folder / "run"), Client(url)
    model = client.create()
    session = model.ask("save_weights_for_sampler", sampling_session_seq_id=0)["sampling_session_id"]
    before = run.last_step
    drawn, _ = client.sample(session, TOKENS[0], 7, count=2, max_tokens=4)
    weights = [[0.0, 0.0, 0.5, 1.0, 1.0], [0.0, 2.0, 0.0]]
    data = [shifted(tokens, weights=own) for tokens, own in zip(TOKENS, weights, strict=False)]
    losses = [model.compute(data[:1])[0], model.compute(data[1:])[0]]
    log_probs = np.concatenate(model.compute([shifted(TOKENS[0])], forward_only=True)[1])
    old, advantages = log_probs - np.array([0, 0, 0.5, -0.5, 0.1], np.float32), [0, 0, 1.0, -1.0, 1.0]
    old[:2] = 0  # of the prompt
    policy, _ = model.compute([shifted(TOKENS[0], advantages=advantages, logprobs=old.tolist())], "cispo")
    told = model.step()
    assert run.last_step == before + 1
    row = {name: value for name, value in run.metrics.iloc[-1].dropna().items()}
    phases = {name: value for name, value in row.items() if name.startswith("timing/")}
    assert phases.pop("timing/step_total") == pytest.approx(sum(phases.values()))
    assert {"timing/sampling", "timing/forward_backward", "timing/optim_step"} <= phases.keys()
    numbers = {name: value for name, value in row.items() if not name.startswith("timing/")}
    assert numbers.pop("step") == before + 1 and numbers.pop("time") > 0
    assert numbers == {
        "train/gpt_loss": pytest.approx(sum(losses) / 4.5),
        "train/policy_loss": pytest.approx(policy / 3),
        "train/ppo_kl": pytest.approx((-0.5 + 0.5 - 0.1) / 3, abs=1e-6),
        "train/ppo_clip_ratio": pytest.approx(2 / 3),
        "train/ppo_clip_ratio_low": pytest.approx(1 / 3),
        "train/ppo_clip_ratio_high": pytest.approx(1 / 3),
        **{f"train/actor_{name}": told[name] for name in ("grad_norm", "lr", "skipped")},
    }
    own = [row for row in samples_of(run, before + 1) if row["sequence_id"].startswith(f"{session}:7:")]
    assert [row["sequence_id"] for row in own] == [f"{session}:7:0", f"{session}:7:1"]
    for row, (ids, engine_log_probs) in zip(own, drawn, strict=True):
        start = len(TOKENS[0])
        assert row["ids"].tolist() == [*TOKENS[0], *ids] and row["owner"].tolist() == [0] * start + [1] * len(ids)
        assert row["engine_log_probs"][start:].tolist() == engine_log_probs.tolist()
        assert set(row["weight_version"][start:]) == {row["weight_version"][-1]} and row["weight_version"][0] == -1
        assert row["weights"] == session and math.isnan(row["reward"])


def samples_of(run, step):
    """Return the samples before a step as rows, once they are written."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return run.samples(step).to_dict("records")
        except rs.UserError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_a_state_gives_back_weights_and_moments(client):
    model, data = client.create(), [shifted(TOKENS[0])]
    trained(model, data, 2)
    path = model.ask("save_weights", path="half-way")["path"]
    assert path == f"tinker://{model.name}/weights/half-way"
    with pytest.raises(Refused, match="half-way exists already"):
        model.ask("save_weights", path="half-way")
    wanted = trained(model, data, 2)
    whole = client.load(path, optimizer=True)
    assert all(np.array_equal(one, two) for one, two in zip(trained(whole, data, 2), wanted, strict=True))
    weights = client.load(path, optimizer=False)
    seen = trained(weights, data, 2)
    assert np.array_equal(seen[0], wanted[0]) and not np.array_equal(seen[1], wanted[1])
    model.ask("load_weights", path=path, optimizer=True)
    assert all(np.array_equal(one, two) for one, two in zip(trained(model, data, 2), wanted, strict=True))
    assert client.post("weights_info", tinker_path=path)["lora_rank"] == RANK


def test_requests_are_done_in_the_order_of_their_numbers_and_once(client):
    model, data = client.create(), [shifted(TOKENS[0])]
    late = client.post("optim_step", model_id=model.name, seq_id=2, adam_params={"learning_rate": 1e-2})
    first = model.begin(data, "cross_entropy", seq=1)
    again = model.begin(data, "cross_entropy", seq=1)
    assert first == again
    client.wait(late)
    model.seq = 2
    with pytest.raises(Refused, match="user: optim_step: no gradients wait"):
        model.step()


def test_mistakes_are_answered_with_their_reasons(server, client):
    model = client.create()
    for reason, call in {
        "base_model='other': this server trains builtin:tiny": lambda: client.create(base="other"),
        r"rank=32, but this server trains adapters of rank 4 \(ds.lora.rank=4\)": lambda: client.create(rank=32),
        "there is no model nobody": lambda: client.post("optim_step", model_id="nobody", seq_id=1, adam_params={}),
        "beta1=1.5 is not below 1": lambda: model.step(beta1=1.5),
        "is not an address of weights": lambda: client.load("/etc/passwd", optimizer=True),
        "is not a name": lambda: client.load("tinker://a/weights/..", optimizer=True),
        "there is nothing at tinker://a/weights/b": lambda: client.load("tinker://a/weights/b", optimizer=True),
        "there is no sampling session": lambda: client.sample("nobody", [5], 1),
        "temperature=-1 is not a number from 0": lambda: client.sample(base(client), [5], 1, temperature=-1),
        "the prompt: the token id 999 is not in the vocabulary": lambda: client.sample(base(client), [999], 1),
        "datum 0: 65 tokens, but a sequence has at most data.max_len=64": lambda: model.compute([shifted([5] * 65)]),
        "there is no request 'x'": lambda: client.wait({"request_id": "x"}),
        "there is no session 'gone'": lambda: client.post("session_heartbeat", session_id="gone"),
    }.items():
        with pytest.raises(Refused, match=reason):
            call()
    model.compute([shifted(TOKENS[0])])
    with pytest.raises(Refused, match="gradients wait, which a state does not hold"):
        model.ask("save_weights", path="x")
    answer = httpx.post(f"{server[0]}/api/v1/create_session", content=b"[1]", trust_env=False)
    assert (answer.status_code, answer.json()) == (422, {"detail": "expected a JSON object"})


def base(client):
    return client.sampler(base_model="builtin:tiny")


def test_small_calls_that_clients_make(client):
    model = client.create()
    info = client.post("get_info", model_id=model.name)
    assert (info["model_name"], info["lora_rank"]) == ("builtin:tiny", RANK)
    models = client.http.get("get_server_capabilities").json()["supported_models"]
    assert {"builtin:tiny", info["model_data"]["tokenizer_id"]} == {each["model_name"] for each in models}
    assert client.post("client/config", sdk_version="0.38.0")["pjwt_auth_enabled"] is False
    assert client.post("telemetry", events=[])["status"] == "accepted"
    assert client.wait(client.post("unload_model", model_id=model.name))["model_id"] == model.name
    with pytest.raises(Refused, match="there is no model"):
        client.post("get_info", model_id=model.name)


def test_the_likeliest_tokens_of_a_prompt_are_those_with_the_largest_log_probs(client):
    """The log-prob of a likeliest token is that of the prompt which has this token in the place."""
    sampler = client.sampler(base_model="builtin:tiny")
    prompt = TOKENS[0]
    own, ids, log_probs = client.likeliest(sampler, prompt, 1, 5)
    assert ids.shape == log_probs.shape == (len(prompt), 5) and (log_probs[0] == -99999).all()
    assert (np.diff(log_probs[1:]) <= 0).all() and (np.exp(log_probs[1:].astype(np.float64)).sum(1) <= 1).all()
    for place, rank in ((1, 0), (3, 4), (5, 2)):
        other, _, _ = client.likeliest(sampler, [*prompt[:place], int(ids[place, rank])], 10 * place + rank, 1)
        assert other[place] == pytest.approx(log_probs[place, rank], abs=1e-5)
        assert own[place] <= log_probs[place, 0] + 1e-6
    with pytest.raises(Refused, match="topk_prompt_logprobs=21 is not between 0 and 20"):
        client.likeliest(sampler, prompt, 99, 21)


def test_every_flag_of_the_server_is_read(server):
    """What a flag of task=ppo says that clients say themselves is no flag of the server (`declarations/calls.py`)."""
    url, folder = server
    client = Client(url)
    model = client.create()
    model.compute([shifted(TOKENS[0])])
    model.step()
    session = model.ask("save_weights_for_sampler", sampling_session_seq_id=0)["sampling_session_id"]
    client.sample(session, TOKENS[0], 1, max_tokens=2)
    words = [*SETTINGS, *WORDS, f"run_dir={folder / 'other'}"]
    assert flag_reads.unread([words], [folder / "reads"]) - READ_ELSEWHERE.keys() == set()
