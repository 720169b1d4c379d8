"""Models that take turns on one rank, under every optimiser that DeepSpeed or torch trains with here: each ends as one
that is alone, bit for bit, also where gradients of another one wait or are dropped."""

from __future__ import annotations

import pytest
import torch
from plain_run import small
from test_primitives import make_policy, rollout

from rlhf_suite.config.declarations.models import AdamConfig
from rlhf_suite.data.batch import take
from rlhf_suite.rl.primitives import LossRequest
from rlhf_suite.train.parts import local_part

pytestmark = pytest.mark.stack
ADAM, CLIP = AdamConfig(weight_decay=0.1), 0.5
REQUEST = LossRequest("ppo", 0.0, None, {"entropy_coef": None})


def state(rank):
    """Return the trained weights, and all that the optimiser knows."""
    trained = {name: p for name, p in rank.model.module.named_parameters() if p.requires_grad}
    found = {name: local_part(p)[1].clone() for name, p in trained.items()}  # ZeRO-3 has a part of each
    optimizer = rank.model.engine.optimizer
    base = getattr(optimizer, "optimizer", optimizer)
    for number, own in enumerate(base.state.values()):
        found |= {f"{number}.{key}": torch.as_tensor(value).clone() for key, value in own.items()}
    return found


def turns(world, config):
    """Return the states of two models that are trained one behind the other, and of two that take turns."""
    policy, rank = make_policy(config)
    whole = rollout(policy)
    batches = {"a": take(whole, [0, 1]), "b": take(whole, [2, 3])}
    policy.keep_state("base").result()
    ends = []

    def train(name, step):
        policy.forward_backward(batches[name], REQUEST).result()
        policy.optim_step(step, ADAM, 1e-2, CLIP).result()

    for name in batches:
        policy.put_state("base").result()
        for step in range(3):
            train(name, step)
        ends.append(state(rank))
    for name in batches:
        policy.put_state("base").result()
        policy.keep_state(name).result()
    for step in range(3):
        for name, other in (("a", "b"), ("b", "a")):
            policy.put_state(other).result()
            policy.forward_backward(batches[other], REQUEST).result()  # gradients that wait, and are dropped
            policy.put_state(name).result()
            train(name, step)
            policy.keep_state(name).result()
    for name in batches:
        policy.put_state(name).result()
        ends.append(state(rank))
    policy.put_state("base", with_optimizer=False).result()
    policy.forget_state("a").result()
    return ends, state(rank), sorted(rank.kept)


FLAGS = {"algo__kl__init_coef": 0.0, "algo__kl__target": None, "ds__lora__rank": 4}


@pytest.mark.notices(
    "the optimiser goes on from the moments of another model",
    "train/kept_state.py",
    "                put_tensor(own, key, held, part.tensors.get(key))",
    "                pass",
    cases="1",
)
@pytest.mark.parametrize(
    "flags",
    [
        {"ds__zero_stage": None},
        {"ds__zero_stage": None, "ds__param_dtype": "bf16"},
        {"ds__zero_stage": 0},
        {"ds__zero_stage": 1},
        {"ds__zero_stage": 1, "ds__param_dtype": "bf16"},
        {"ds__zero_stage": 2},
        {"ds__zero_stage": 2, "ds__param_dtype": "bf16"},
        {"ds__zero_stage": 3},
        {"ds__zero_stage": 2, "ds__lora__rank": 0},
    ],
    ids=str,
)
def test_models_that_take_turns_end_as_those_that_are_alone(ranks, flags):
    (a, b, a_in_turn, b_in_turn), last, kept = ranks(1).call(turns, small(**FLAGS | flags))[0]
    for alone, mixed in ((a, a_in_turn), (b, b_in_turn)):
        assert alone.keys() == mixed.keys()
        assert [name for name in alone if not torch.equal(alone[name], mixed[name])] == []
    assert any(not torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(last[name], b[name]) for name in a) and kept == ["b", "base"]
