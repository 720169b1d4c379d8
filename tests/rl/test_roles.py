"""The policy as a worker: its optimiser steps on a rollout, what it is measured by, and the average of its weights.

Each test trains the tiny model on four made-up samples; what the numbers should be is known beforehand.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from plain_run import models, small
from safetensors.torch import load_file
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM

from rlhf_suite.data.batch import Example, collate
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.models.load import model_folder
from rlhf_suite.rl.sharding import ForwardBatch

pytestmark = pytest.mark.stack

LENGTHS = (6, 5, 7, 6)
PROMPT = 2
PLAIN = {"algo__kl__init_coef": 0.0, "algo__kl__target": None, "rollout__max_new_tokens": 10}


def rollout(policy, temperature: float, advantage: float) -> Experience:
    """Samples of which the policy has not moved since; every token after the prompt has the same advantage."""
    generator = torch.Generator().manual_seed(1)
    examples = [
        Example(torch.randint(10, 90, (length,), generator=generator).tolist(), [0] * PROMPT + [1] * (length - PROMPT))
        for length in LENGTHS
    ]
    batch = replace(collate(examples, Experience), index=torch.arange(len(LENGTHS)))
    log_probs = policy.log_probs(ForwardBatch(batch), temperature).result()
    batch = replace(batch, old_log_probs=log_probs, engine_log_probs=log_probs, ref_log_probs=log_probs - 0.5)
    return replace(batch, advantages=advantage * batch.mask)


def trained(world, config, batches, advantage, kl_coefs):
    """The metrics of an update for each of `kl_coefs`, in the run's first optimiser steps."""
    policy = models(config, steps=4)["policy"]
    whole = rollout(policy, config.rollout.temperature, advantage)
    return [
        policy.update(whole, batches, number * len(batches), kl_coef, None, "update").result()
        for number, kl_coef in enumerate(kl_coefs)
    ]


@pytest.fixture(scope="module")
def update(ranks):
    def run(batches=((0, 1, 2, 3),), advantage=1.0, kl_coefs=(0.0,), **flags):
        return ranks(1).call(trained, small(**PLAIN | flags), batches, advantage, kl_coefs)[0]

    return run


@pytest.mark.notices(
    "metrics are those of the last optimiser step, not their mean",
    "rl/roles.py",
    "sum(values) / len(values)",
    "values[-1]",
)
def test_metrics_are_means_over_the_optimiser_steps_of_a_rollout(update):
    """Four RL steps of one optimiser step each set the schedule; two steps are at 1 and 3/4 of the peak of 1e-3."""
    rows = update(batches=((0, 1), (2, 3)))
    assert rows[0]["train/actor_lr"] == pytest.approx(0.875e-3)
    still = {"actor__adam__lr": 0.0}
    (both,), (one,), (other,) = (update(batches=some, **still) for some in (((0, 1), (2, 3)), ((0, 1),), ((2, 3),)))
    norms = [row["train/actor_grad_norm"] for row in (one, other)]
    assert both["train/actor_grad_norm"] == pytest.approx(sum(norms) / 2)
    assert norms[0] != pytest.approx(norms[1], rel=1e-2)


@pytest.mark.notices(
    "the policy trains at temperature 1", "rl/roles.py", "kl, rollout.temperature, horizon)", "kl, 1.0, horizon)"
)
def test_the_policy_is_trained_at_the_temperature_of_its_samples(update):
    """Then it has not moved: no ratio differs from 1, and none is clipped."""
    for temperature in (0.5, 1.0, 2.0):
        row = update(rollout__temperature=temperature)[0]
        assert row["train/ppo_kl"] == pytest.approx(0, abs=1e-6)
        assert row["train/policy_loss"] == pytest.approx(-1, abs=1e-5)


def measured(world, config, temperature):
    """Log-probs and entropies from one forward pass in two micro-batches, and log-probs alone."""
    policy = models(config, steps=1)["policy"]
    batch = rollout(policy, temperature, 1.0)
    both = policy.log_probs_and_entropies(ForwardBatch(batch), temperature).result()
    return batch, both, policy.log_probs(ForwardBatch(batch), temperature).result()


def test_entropies_are_those_of_what_the_tokens_were_drawn_from(ranks):
    config = small(**PLAIN, rollout__micro_batch_size=2)
    ((batch, both, log_probs),) = ranks(1).call(measured, config, 0.7)
    assert torch.equal(both[:, 0], log_probs)
    plain = AutoModelForCausalLM.from_pretrained(model_folder("builtin:tiny", "actor.model_name_or_path"))
    logits = [plain.double()(ids[None]).logits[0, :-1] / 0.7 for ids in batch.ids.split(batch.lengths.tolist())]
    wanted = torch.cat([torch.cat([each.new_zeros(1), Categorical(logits=each).entropy()]) for each in logits])
    torch.testing.assert_close(both[:, 1].double(), wanted * batch.mask, atol=1e-5, rtol=0)
    assert float(wanted.detach().std()) > 1e-3


@pytest.mark.notices(
    "the longest response has data.max_len tokens",
    "rl/roles.py",
    "horizon = rollout.max_new_tokens or settings.data.max_len",
    "horizon = settings.data.max_len",
)
def test_token_sums_are_divided_by_the_longest_response_that_is_allowed(update):
    """(4 + 3 + 5 + 4) tokens of advantage 1 in four sequences, 10 tokens allowed."""
    row = update(actor__loss_agg_mode="seq-mean-token-sum-norm")[0]
    assert row["train/policy_loss"] == pytest.approx(-(4 + 3 + 5 + 4) / 4 / 10, abs=1e-5)


@pytest.mark.notices(
    "the policy trains with the first KL coefficient",
    "rl/roles.py",
    "self.policy_objective.kl_coef = kl_coef",
    "self.policy_objective.kl_coef = self.policy_objective.kl.init_coef",
)
def test_the_kl_term_has_the_coefficient_of_the_step(update):
    """Without advantages the KL to the reference is all there is, so the gradient grows with its coefficient."""
    kl = {"algo__kl__init_coef": 0.1, "algo__kl__use_loss": True, "algo__kl__estimator": "k2", "actor__adam__lr": 0.0}
    rows = update(advantage=0.0, kl_coefs=(0.1, 0.2, 0.05), **kl)
    norms = [row["train/actor_grad_norm"] for row in rows]
    assert [norm / norms[0] for norm in norms] == pytest.approx([1, 2, 0.5], rel=1e-4)


def averaged(world, config, advantages):
    """How far the average of the weights moved in each update on samples of these advantages."""
    policy = models(config, steps=9)["policy"]
    average = policy.group._worker.average
    states, skipped = [{name: value.clone() for name, value in average.average.items()}], []
    for number, advantage in enumerate(advantages):
        batch = rollout(policy, 0.7, advantage)
        row = policy.update(batch, [range(len(batch))], number, 0.0, None, "update").result()
        states.append({name: value.clone() for name, value in average.average.items()})
        skipped.append(row["train/actor_skipped"])
    moves = [sum(float((new[n] - old[n]).abs().sum()) for n in new) for old, new in pairwise(states)]
    return skipped, moves


@pytest.mark.notices(
    "a skipped step moves the average of the weights", "rl/roles.py", 'if not row["skipped"]:', "if True:"
)
def test_a_step_that_was_skipped_is_no_step_of_the_average(ranks):
    flags = {
        "train__enable_ema": True,
        "train__ema_beta": 0.5,
        "train__on_nonfinite": "skip",
        "actor__lr_scheduler": "constant",
    }
    config = small(**PLAIN | flags)
    ((skipped, moves),) = ranks(1).call(averaged, config, [1.0, float("nan")])
    assert skipped == [0, 1]
    assert moves[0] > 0 and moves[1] == 0, "it is half-way to the weights, and a step more would bring it nearer"


def documents_beside(world, config):
    """The documents beside each of three optimiser steps."""
    worker = models(config, steps=4)["policy"].group._worker
    return [[batch.ids.tolist() for batch in worker.beside(step)] for step in (0, 1, 2, 1)]


@pytest.mark.notices(
    "documents are those of step 0 for ever",
    "rl/roles.py",
    "self.documents.step(step, self",
    "self.documents.step(0, self",
)
def test_each_step_takes_documents_of_its_own(ranks, tmp_path):
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(60)))
    config = small(**PLAIN | {"data__pretrain_dataset": str(file), "data__cache_enable": False})
    (found,) = ranks(1).call(documents_beside, config)
    assert found[0] != found[1] != found[2] != found[0] and found[1] == found[3]


def modes(world, config):
    """Whether the model is in training mode in a forward pass, and after it."""
    worker = models(config, steps=4)["policy"].group._worker
    seen = []
    batch = collate([Example([5, 6, 7], [0, 1, 1])], Experience)
    worker.forward(batch, lambda part: seen.append(worker.model.module.training) or part.mask)
    return [*seen, worker.model.module.training]


@pytest.mark.notices(
    "forward passes have dropout on",
    "rl/roles.py",
    "        self.model.module.eval()\n",
    "        self.model.module.train()\n",
)
def test_forward_passes_measure_the_model_without_dropout(ranks):
    assert ranks(1).call(modes, small(**PLAIN)) == [[False, True]]


def kept_average(world, config, folder):
    """The average of the weights after an update, after a resume, and in the export beside the model; the weights."""
    first = models(config, steps=9)["policy"]
    batch = rollout(first, 0.7, 1.0)
    first.update(batch, [range(len(batch))], 0, 0.0, None, "update").result()
    worker = first.group._worker
    worker.save_state(folder / "state", with_optimizer=True)
    worker.export(folder / "model")
    again = models(config, steps=9)["policy"].group._worker
    again.load_state(folder / "state", with_optimizer=True)
    files = [load_file(folder / name / "model.safetensors") for name in ("model_ema", "model")]
    name = next(name for name in files[0] if "layers.0" in name and name.endswith("weight"))
    averages = [each.average.average[f"model.{name}"] for each in (worker, again)]
    return [value.flatten().tolist() for value in (*averages, *(file[name].float() for file in files))]


@pytest.mark.notices(
    "the average of the weights is forgotten at a resume",
    "rl/roles.py",
    "            self.average.load_state(folder)\n",
    "            pass\n",
)
@pytest.mark.notices(
    "the weights are exported in place of their average",
    "rl/roles.py",
    "            with self.average.in_place():\n",
    "            with nullcontext():\n",
)
def test_the_average_of_the_weights_is_resumed_and_exported(ranks, tmp_path):
    (tmp_path / "state").mkdir()
    flags = {"train__enable_ema": True, "train__ema_beta": 0.5, "actor__lr_scheduler": "constant"}
    config = small(**PLAIN | flags)
    ((average, resumed, exported, weights),) = ranks(1).call(kept_average, config, tmp_path)
    assert resumed == average == exported != weights
