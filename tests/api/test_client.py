"""The primitives on the real stack: DeepSpeed, Ray and vLLM; and the mistakes that a user's own loop can make."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import rlhf_suite as rs
from actor_processes import process_of
from rlhf_suite.api.client_start import choose_stand_ins, compose, flatten, remark_on_unread
from rlhf_suite.data.ending import Ending
from rlhf_suite.rl.datum import as_datum, to_experience

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "ds.param_dtype": "fp32",
    "data.max_len": 64,
    "rollout.max_new_tokens": 6,
    "train.max_steps": 8,
    "actor.adam.lr": 1e-3,
}
GRPO = {
    "train.max_steps": 2,
    "train.seed": 7,
    "train.batch_size": 64,
    "train.micro_batch_size": 64,
    "rollout.batch_size": 16,
    "rollout.micro_batch_size": 64,
    "eval.dataset": None,
    "eval.steps": -1,
}
GONE_S = 60.0


@pytest.mark.parametrize(
    ("datum", "message"),
    [
        (rs.Datum([1, 300]), "datum 0: the token id 300 is not in the vocabulary, which has 0 to 259"),
        (rs.Datum([1, -1]), "datum 0: the token id -1 is not in the vocabulary"),
        (rs.Datum([1.5, 2]), r"datum 0: tokens is \[1.5, 2\]. Give a list of token ids"),
        (rs.Datum("text"), "datum 0: tokens is 'text'. Give a list of token ids"),
        (rs.Datum([1] * 9), "datum 0: 9 tokens, but a sequence has at most data.max_len=8"),
        (rs.Datum([1, 2], advantages=[1.0], old_log_probs=0), "datum 0: advantages has 1 number for 2 tokens"),
        (rs.Datum([1, 2], advantages="x", old_log_probs=0), "datum 0: advantages is 'x'. Give a number for each token"),
        (rs.Datum([1, 2], advantages=[0, np.nan], old_log_probs=0), "datum 0: advantages has nan at token 1"),
        (rs.Datum([1, 2], advantages=1), "datum 0 has no old_log_probs, which this loss reads"),
        (rs.Datum([1, 2], [0, -1], 1, 0), "datum 0: weights has -1. A weight is at least 0"),
        (rs.Datum([1, 2], [1, 1], 1, 0), "datum 0: weights begins with 1. The first token has no log-prob"),
        (rs.Datum([1, 2], [0, 0], 1, 0), "no token has a weight above 0"),
        (rs.Datum([]), "datum 0 has no tokens. Give at least one"),
        (rs.Datum([[1, 2], [3]]), "datum 0: tokens is .*. Give a list of token ids"),
        ([1, 2], "datum 0 is a list. Give a list of rs.Datum"),
        (as_datum(5), "datum 0: tokens is 5. Give a list of token ids"),
        (as_datum("text"), "datum 0: tokens is 'text'. Give a list of token ids"),
    ],
)
def test_a_mistake_in_data_is_one_sentence(datum, message):
    with pytest.raises(rs.UserError, match=message) as raised:
        to_experience([datum], 260, 8, ("advantages", "old_log_probs"))
    assert "\n" not in str(raised.value)


def test_no_data_is_a_mistake():
    with pytest.raises(rs.UserError, match="there are no sequences"):
        to_experience([], 260, 8)
    with pytest.raises(rs.UserError, match=r"data is one rs.Datum. Give a list of rs.Datum"):
        to_experience(rs.Datum([1, 2]), 260, 8)


def test_numbers_may_be_tensors_with_a_gradient_and_of_half_precision():
    advantages = torch.tensor([0.0, 1.5], dtype=torch.bfloat16, requires_grad=True)
    datum = rs.Datum(torch.tensor([5, 6]), None, advantages, torch.tensor(-1.0, requires_grad=True))
    batch = to_experience([datum], 260, 8, ("advantages", "old_log_probs"))
    assert batch.ids.tolist() == [5, 6] and batch.advantages.tolist() == [0, 1.5]
    assert batch.old_log_probs.tolist() == [-1, -1] and not batch.advantages.requires_grad


def test_weights_become_mask_and_correction():
    batch = to_experience([rs.Datum([5, 6, 7], [0, 0.5, 2], 1.0, [0, -1, -2]), rs.Datum([8, 9], None, [0, 3], -1)],
                          260, 8, ("advantages", "old_log_probs"))  # fmt: skip
    assert batch.ids.tolist() == [5, 6, 7, 8, 9] and batch.lengths.tolist() == [3, 2]
    assert batch.mask.tolist() == [0, 1, 1, 0, 1] and batch.correction.tolist() == [0, 0.5, 2, 0, 1]
    assert batch.advantages.tolist() == [1, 1, 1, 0, 3] and batch.old_log_probs.tolist() == [0, -1, -2, -1, -1]
    assert to_experience([rs.Datum([5, 6])], 260, 8).correction is None


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"model": "m"}, ["data.prompt_dataset", "reward.rule", "algo.advantage.estimator", "algo.kl.init_coef"]),
        ({"model": "m", "experiment": "grpo"}, ["data.prompt_dataset", "reward.rule"]),
        ({"model": "m", "data": "a.jsonl", "reward": {"rule": "x"}}, ["algo.advantage.estimator", "algo.kl.init_coef"]),
        ({"model": "m", "demo": "ppo"}, []),
        ({"experiment": "grpo"}, []),  # the demo
        ({}, ["algo.advantage.estimator"]),  # that of the demo needs a critic
        ({"model": "m", "data": {"max_len": 8}, "algo": {"kl": {"init_coef": 0.1}}},
         ["data.prompt_dataset", "reward.rule", "algo.advantage.estimator"]),
    ],
)  # fmt: skip
def test_flags_stand_in_only_for_what_a_call_is_silent_about(settings, missing):
    assert list(choose_stand_ins({name for name, _ in flatten(settings)})) == missing


@pytest.mark.parametrize(
    ("settings", "unread"),
    [
        ({"model": "m", "ds": {"zero_stage": 2}, "eval": {"dataset": None}}, None),
        ({"reward": len, "eval": {"steps": 5}, "logger.progress": False}, "eval.steps, logger.progress, reward"),
        ({"train": {"num_episodes": 2, "seed": 1}, "estimator": "rloo"}, "estimator, train.num_episodes"),
    ],
)
def test_settings_that_the_loop_follows_itself_are_named(settings, unread):
    said = [*remark_on_unread(settings)]
    assert said == ([] if unread is None else [f"Warning: a client does not read {unread}: your loop scores, evaluates and logs by itself"])  # fmt: skip  # noqa: E501


@pytest.mark.stack
def test_a_client_without_settings_takes_the_model_of_the_demo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, _, has_prompts = compose({})
    assert run.actor.model_name_or_path == "builtin:tiny" and has_prompts
    assert run.algo.advantage.estimator == "reinforce"


@pytest.mark.stack
def test_a_rank_that_is_given_twice_is_refused():
    with pytest.raises(rs.ConfigurationError, match=r"ds\.lora\.rank: is set twice"):
        rs.Client("builtin:tiny", lora_rank=4, **{"ds.lora.rank": 8})


@pytest.mark.stack
def test_what_a_client_does_not_do_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = {"algo.advantage.estimator": "gae", "algo.advantage.is_correction_level": "token"}
    with pytest.raises(rs.ConfigurationError) as raised:
        rs.Client("builtin:tiny", **asked)
    assert {problem.key for problem in raised.value.problems} == {*asked}
    with pytest.raises(rs.ConfigurationError, match=r"actor\.adam\.lr"):
        rs.Client("builtin:tiny", **{"actor.adam.lr": -1})
    assert not list(tmp_path.glob("outputs/ppo/*"))


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("client") / "run"
    with rs.Client("builtin:tiny", run_dir=folder, **SETTINGS, **{"launch.umask": "077"}) as made:
        yield made


def train(client, step):
    """Sample, and train on advantages that differ; return the ledgers and the log-probs afterwards."""
    groups = client.sample(["reverse 0123 = ", "reverse 98 = "], 2, step=step)
    ledgers = [ledger for group in groups for ledger in group]
    data = [rs.Datum.of(ledger, number - 1.5) for number, ledger in enumerate(ledgers)]
    count = client.count_units(data)
    for part in (data[:2], data[2:]):
        client.forward_backward(part, count=count)
    metrics = client.optim_step()
    client.save_weights_for_sampler()
    return ledgers, client.compute_logprobs(ledgers), metrics


@pytest.mark.stack
def test_its_files_have_the_rights_that_the_flag_leaves(client):
    files = [client.folder, *client.folder.rglob("*")]
    assert len(files) > 3
    assert [str(file) for file in files if file.stat().st_mode & 0o077] == []


@pytest.mark.stack
def test_ledgers_say_who_wrote_each_token_with_which_weights(client):
    (first, second), (other, _) = client.sample(["reverse 0123 = ", [81, 68, 85]], 2, step=0)
    assert (
        first.ids[: len(second.prompt.ids)].tolist()
        == second.prompt.ids
        == client.tokenizer("reverse 0123 = ").input_ids
    )
    assert other.prompt.ids == [81, 68, 85] and first.ending in (Ending.FINISHED, Ending.CUT)
    assert set(first.version[first.model_mask]) == {client.version} and set(first.version[~first.model_mask]) == {-1}
    ours = client.compute_logprobs([first])[0]
    np.testing.assert_allclose(ours, first.engine_log_probs, atol=1e-4)
    again = client.sample(["reverse 0123 = "], 2, step=0)[0]
    assert [ledger.ids.tolist() for ledger in again] == [first.ids.tolist(), second.ids.tolist()]
    assert client.sample(["reverse 0123 = "], 1, step=1, max_new_tokens=1)[0][0].response_length == 1


@pytest.mark.stack
def test_a_loaded_state_goes_on_bit_for_bit(client, tmp_path):
    train(client, 0)  # the optimiser has moments
    folder = client.save_state(tmp_path / "states")
    assert folder.name == f"step_{client.step:06d}" and client.step == 1
    version, (ledgers, log_probs, metrics) = client.version, train(client, 1)
    assert client.load_state(tmp_path / "states") == 1 and client.version == version
    again, same, repeated = train(client, 1)
    assert [ledger.ids.tolist() for ledger in again] == [ledger.ids.tolist() for ledger in ledgers]
    assert repeated == metrics and all(map(np.array_equal, same, log_probs))
    client.load_state(tmp_path / "states")
    assert not all(map(np.array_equal, client.compute_logprobs(ledgers), log_probs))


@pytest.mark.stack
def test_forward_says_what_a_pass_with_gradients_says(client):
    data = [rs.Datum([81, 68, 85, 68], [0, 0, 1, 0.5]), rs.Datum([15, 16, 17])]
    ours, other = client.forward(data, "cross_entropy"), client.forward_backward(data, "cross_entropy")
    assert ours.metrics == other.metrics and all(map(np.array_equal, ours.log_probs, other.log_probs))
    chosen = [*ours.log_probs[0][2:], *ours.log_probs[1][1:]]
    assert ours.metrics["train/gpt_loss"] == pytest.approx(-np.mean(chosen), rel=1e-5)
    metrics = client.optim_step(rs.Adam(lr=2e-4, betas=(0.8, 0.9)))
    assert metrics["train/actor_lr"] == 2e-4


@pytest.mark.stack
def test_a_mistake_in_a_loop_is_one_sentence(client, tmp_path):
    datum = rs.Datum([81, 68], None, 1.0, -1.0)
    calls = {
        "optim_step: no gradients wait. Call forward_backward first": client.optim_step,
        "loss=pppo: there is no such loss. There are cross_entropy, ppo, ": lambda: client.forward([datum], "pppo"),
        "loss=kl_cov chooses tokens": lambda: client.forward([datum], "kl_cov"),
        "count=0 is not above 0": lambda: client.forward([datum], count=0),
        "prompt 0: the token id 300 is not in the vocabulary": lambda: client.sample([[300]]),
        "prompt 0 has no tokens": lambda: client.sample([[]]),
        "prompt 0: its 64 tokens fill data.max_len=64, so no response fits": lambda: client.sample([[1] * 64]),
        r"prompt 0: tokens is \[1.9\]. Give a list of token ids": lambda: client.sample([[1.9]]),
        "prompt 0: tokens is 81. Give a list of token ids": lambda: client.sample([81, 68]),
        "sample: prompts is one prompt. Give a list of prompts": lambda: client.sample("reverse 0123 = "),
        "sample: num_samples=0 is below 1": lambda: client.sample(["x"], 0),
        "sample: temperature=3 is not between 0 and 2": lambda: client.sample(["x"], temperature=3),
        "sample: step=-1 is not a whole number of at least 0": lambda: client.sample(["x"], step=-1),
        "minibatches: step=1.5 is not a whole number of at least 0": lambda: client.minibatches(4, 1.5),
        "there is no reference": lambda: client.compute_logprobs([[1, 2]], reference=True),
        "prompts: the client has no data": lambda: client.prompts(0),
        "load_state: .* has no checkpoint": lambda: client.load_state(tmp_path),
        "this process has a client already": lambda: rs.Client("builtin:tiny"),
    }
    for message, call in calls.items():
        with pytest.raises(rs.UserError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)
    client.forward_backward([datum])
    with pytest.raises(rs.UserError, match="save_state: gradients wait"):
        client.save_state(tmp_path)
    client.optim_step()


@pytest.mark.stack
def test_a_client_that_is_closed_says_so_and_leaves_no_process(client):
    folder, family = client.folder, psutil.Process().children(recursive=True)
    client.close()
    client.close()
    with pytest.raises(rs.UserError, match="sample: the client is closed"):
        client.sample(["x"])
    assert rs.load(folder).status == "done" and survivors(family) == []


def survivors(family):
    """Return those of the processes that are still there after a while."""
    return [process for process in psutil.wait_procs(family, GONE_S)[1] if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("actor", "call", "doing"),
    [
        ("actor-0", lambda client: client.forward([rs.Datum([81, 68])], "cross_entropy"), "actor: a forward pass"),
        ("engine-0", lambda client: client.sample(["reverse 0123 = "]), "1 generations"),
    ],
)
def test_a_dead_process_ends_the_call_with_its_name(tmp_path, actor, call, doing):
    settings = {**SETTINGS, "run_dir": tmp_path / "run", "vllm.max_restarts": 0}
    with (
        pytest.raises(rs.RunError, match=f"{actor} died during {doing}"),
        rs.Client("builtin:tiny", **settings) as client,
    ):
        process_of(client.folder / "logs" / f"{actor}.log", psutil.Process().children(recursive=True)).kill()
        call(client)
    run = rs.load(tmp_path / "run")
    assert run.status == "failed" and f"{actor} died" in run.error


PROGRAM = f"""
import rlhf_suite as rs
client = rs.Client("builtin:tiny", run_dir="run", **{SETTINGS})
print("up", flush=True)
input()
"""


@pytest.mark.proof
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_program_that_a_signal_ends(tmp_path, number):
    command = [sys.executable, "-c", PROGRAM]
    program = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while "up" not in (line := program.stdout.readline()):
        assert line, "the client did not come up"
    family = psutil.Process(program.pid).children(recursive=True)
    program.send_signal(number)
    assert program.wait(GONE_S) != 0
    assert family and survivors(family) == []


@pytest.mark.proof
def test_two_ranks_of_zero_3_take_the_step_of_one(tmp_path):
    """Also where a call has fewer sequences than there are ranks."""
    norms, log_probs = [], []
    for ranks, stage in ((1, 0), (2, 3)):
        divided = {"actor.num_gpus_per_node": ranks, "ds.zero_stage": stage, "run_dir": tmp_path / str(ranks)}
        with rs.Client("builtin:tiny", **SETTINGS, **divided) as client:
            data = [rs.Datum([81, 68, 85, 68 + number], None, number - 1.5, -5.0) for number in range(4)]
            count = client.count_units(data)
            for part in (data[:1], data[1:]):
                client.forward_backward(part, "importance_sampling", count)
            norms.append(client.optim_step()["train/actor_grad_norm"])
            log_probs.append(np.concatenate(client.compute_logprobs(data)))
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    np.testing.assert_allclose(log_probs[1], log_probs[0], atol=1e-4)


@pytest.mark.proof
def test_adapters_are_trained_and_sampled_from(tmp_path):
    with rs.Client("builtin:tiny", 4, run_dir=tmp_path / "run", **SETTINGS) as client:
        train(client, 0)
        (ledger,) = client.sample(["reverse 0123 = "], 1)[0]
        assert set(ledger.version[ledger.model_mask]) == {1}
        np.testing.assert_allclose(client.compute_logprobs([ledger])[0], ledger.engine_log_probs, atol=1e-4)


@pytest.mark.proof
def test_a_loop_of_ones_own_ends_in_the_weights_of_a_run_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "grpo_client"))
    import loop

    run = rs.run("ppo", experiment="grpo", logger={"progress": False}, run_dir="run", **GRPO)
    loop.train(2, "loop_model", run_dir="loop", **GRPO)
    ours, other = (folder / "model.safetensors" for folder in (run.model, Path("loop_model")))
    assert ours.read_bytes() == other.read_bytes()
