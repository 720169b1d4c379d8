"""The policy trained call by call: its calls are an optimiser step, however they split it.

The tiny model is trained on four made-up samples, in micro-batches of two.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plain_run import models, small
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from rlhf_suite.config.declarations.models import AdamConfig
from rlhf_suite.config.plan.run_plan import ACTOR, Machine, resolve
from rlhf_suite.data.batch import Example, collate, take
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.distributed.group import LocalGroup
from rlhf_suite.models.load import model_folder
from rlhf_suite.rl.primitives import CROSS_ENTROPY, LossRequest, SteppedPolicyGroup, SteppedPolicyRole
from rlhf_suite.rl.roles import WorkerSettings
from rlhf_suite.rl.sharding import ForwardBatch
from rlhf_suite.train.step import count_units

pytestmark = pytest.mark.stack

LENGTHS = (6, 5, 7, 6)
FLAGS = {"algo__kl__use_loss": True, "algo__kl__target": None, "actor__loss_agg_mode": "seq-mean-token-mean"}
PPO = LossRequest("ppo", 0.1, None)
KEPT = AdamConfig()


def make_policy(config):
    """Return a policy of one rank in this process, and the rank."""
    plan = resolve(config, Machine("cpu", 0))
    settings = WorkerSettings(config.ds, config.train, config.rollout, config.data, plan.models[ACTOR].path)
    arguments = (plan.models[ACTOR], settings, config.actor, config.algo.kl, plan.policy_steps(4))
    group = LocalGroup(SteppedPolicyRole, ACTOR, "cpu", arguments)
    return SteppedPolicyGroup(group), group._worker


def rollout(policy):
    """Return samples with old log-probs that differ from the policy's, so that ratios are not 1."""
    generator = torch.Generator().manual_seed(1)
    examples = [
        Example(torch.randint(10, 90, (length,), generator=generator).tolist(), [0, 0] + [1] * (length - 2))
        for length in LENGTHS
    ]
    batch = replace(collate(examples, Experience), index=torch.arange(len(LENGTHS)))
    log_probs = policy.log_probs(ForwardBatch(batch), 0.7).result()
    noise = 0.1 * torch.randn(batch.num_tokens, generator=generator)
    advantages = torch.randn(batch.num_tokens, generator=generator)
    return replace(batch, old_log_probs=log_probs + noise, ref_log_probs=log_probs - 0.5, advantages=advantages)


def weights(rank):
    return {name: p.detach().clone() for name, p in rank.model.module.named_parameters()}


def by_parts(world, config, parts, loss=PPO, rate=None):
    """Return the weights after two updates, each with the gradients of `parts` by the counts of all samples; the last
    metrics, and the first gradients."""
    policy, rank = make_policy(config)
    batch = rollout(policy)
    objective = rank.policy_objective
    objective.kl_coef = loss.kl_coef
    counts = {name: float(number) for name, number in count_units(objective, batch).items()}
    first: dict[str, torch.Tensor] = {}
    for step in range(2):
        for part in parts:
            policy.forward_backward(take(batch, part), replace(loss, counts=counts)).result()
        first = first or {name: p.grad.clone() for name, p in rank.model.module.named_parameters()}
        metrics = policy.optim_step(step, KEPT, rate, 1.0).result()
    return weights(rank), metrics, first


def as_a_run(world, config):
    """Return the weights after two updates as task=ppo takes them."""
    policy, before = models(config, steps=4)["policy"], make_policy(config)[0]
    batch = rollout(before)
    batch = replace(batch, engine_log_probs=batch.old_log_probs)
    for step in range(2):
        policy.update(batch, [[0, 1, 2, 3]], step, 0.1, None, "update").result()
    return weights(policy.group._worker)


def are_equal(ours, others):
    return all(torch.equal(ours[name], others[name]) for name in others)


@pytest.mark.notices(
    "each call is divided by its own count",
    "rl/primitives.py",
    "micro_batches, request.counts, backward",
    "micro_batches, None, backward",
)
@pytest.mark.notices(
    "an update forgets the gradients of earlier calls",
    "rl/primitives.py",
    "        if backward:\n            self.accumulated",
    "        if backward:\n            self.model.engine.zero_grad()\n            self.accumulated",
)
def test_parts_of_a_step_are_the_step_bit_for_bit(ranks):
    config = small(**FLAGS, train__micro_batch_size=2)
    run = ranks(1).call(as_a_run, config)[0]
    for parts in ([[0, 1, 2, 3]], [[0, 1], [2, 3]]):
        assert are_equal(ranks(1).call(by_parts, config, parts)[0][0], run)


def test_single_sequences_are_the_step_but_for_rounding(ranks):
    config = small(**FLAGS, train__micro_batch_size=2)
    (*_, whole), (*_, single) = (
        ranks(1).call(by_parts, config, parts)[0] for parts in ([[0, 1, 2, 3]], [[3], [1], [0], [2]])
    )
    assert max(float((whole[name] - single[name]).abs().max()) for name in whole) < 1e-6


def measured(world, config):
    """Return the batch; whether a forward pass leaves no gradient; its log-probs; the gradient of the next-token loss
    with weights of 0.5 over 4; and the same in float64 by transformers and torch alone."""
    policy, rank = make_policy(config)
    batch = rollout(policy)
    weighted = replace(batch, correction=batch.mask * 0.5)
    request = LossRequest(CROSS_ENTROPY, 0.0, {"tokens": 4.0, "all_tokens": 4.0})
    _, log_probs, _ = policy.measure_loss(weighted, request).result()
    is_left_alone = all(p.grad is None or not p.grad.any() for p in rank.model.module.parameters())
    policy.forward_backward(weighted, request).result()
    gradient = {name: p.grad.clone() for name, p in rank.model.module.named_parameters()}
    plain = AutoModelForCausalLM.from_pretrained(model_folder("builtin:tiny", "actor.model_name_or_path")).double()
    sequences = zip(batch.ids.split(LENGTHS), batch.mask.split(LENGTHS), strict=True)
    loss = sum((0.5 / 4 * mask[1:] * cross_entropy(plain(ids[None]).logits[0, :-1], ids[1:], reduction="none")).sum()
               for ids, mask in sequences)  # fmt: skip
    loss.backward()
    return batch, is_left_alone, log_probs, gradient, {f"model.{name}": p.grad for name, p in plain.named_parameters()}


def test_cross_entropy_weighs_tokens_and_divides_by_the_count(ranks):
    batch, is_left_alone, log_probs, gradient, wanted = ranks(1).call(measured, small(**FLAGS))[0]
    assert is_left_alone and (log_probs * batch.mask < 0).sum() == batch.mask.sum()
    assert gradient.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(gradient[name].double(), value, atol=1e-6, rtol=1e-5)


@pytest.mark.notices(
    "a rate of the caller's own is not followed",
    "train/strategy.py",
    "peak * factor if rate is None else rate",
    "peak * factor",
)
def test_a_rate_of_ones_own_takes_the_place_of_the_schedule(ranks):
    config = small(**FLAGS)
    (still, metrics, _), (moved, other, _) = (
        ranks(1).call(by_parts, config, [[0, 1, 2, 3]], PPO, rate)[0] for rate in (0.0, 1e-2)
    )
    assert (metrics["train/actor_lr"], other["train/actor_lr"]) == (0.0, 1e-2)
    assert not are_equal(still, moved) and are_equal(still, ranks(1).call(initial, config)[0])


def initial(world, config):
    return weights(make_policy(config)[1])
