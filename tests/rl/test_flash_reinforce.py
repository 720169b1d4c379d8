"""The preset of FlashREINFORCE: the gradient of its loss is that of the paper, of one response after the other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import yaml

from rlhf_suite.config import conf_dir
from rlhf_suite.config.declarations.algo import AdvantageConfig, AlgoConfig, KLConfig
from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.mismatch import correct
from rlhf_suite.rl.objectives import PolicyObjective

PRESET = yaml.safe_load((conf_dir() / "experiment" / "flash_reinforce.yaml").read_text())
LENGTHS, REWARDS = [4, 3, 5, 2], [1.0, 0.0, 0.0, 1.0]
DISTANCES = [0.02, 0.3, -0.05, 0.9]  # log p - log q of every token of a response, times its place


def rollout() -> Experience:
    """Four responses, with a prompt of one token each; some are close to the policy that sampled them."""
    numbers = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    lengths = torch.tensor(LENGTHS)
    plain = Experience(torch.arange(total), lengths, torch.ones(total), torch.arange(4))
    mask = plain.mask.index_fill(0, plain.starts, 0)
    now = -1.5 * torch.rand(total, generator=numbers) - 0.2
    gaps = torch.tensor(DISTANCES)[plain.segments] * torch.rand(total, generator=numbers)
    columns = {"old_log_probs": now, "engine_log_probs": now - gaps}
    return replace(plain, mask=mask, reward=torch.tensor(REWARDS), group=torch.arange(4), **columns)


def by_the_paper(batch: Experience) -> tuple[list[float], list[bool]]:
    """What the gradient of the loss is at each token's log-prob, and which responses are kept."""
    bound = PRESET["algo"]["advantage"]["is_correction_threshold"][0]
    mean = math.fsum(REWARDS) / len(REWARDS)
    gradient, kept = [], []
    for row, reward in enumerate(REWARDS):
        own = batch.segments == row
        p, q = (getattr(batch, name)[own][1:].double().exp().tolist() for name in ("old_log_probs", "engine_log_probs"))
        kls = [b * math.log(b / a) + (1 - b) * math.log((1 - b) / (1 - a)) for a, b in zip(p, q, strict=True)]
        kept.append(math.fsum(kls) / len(kls) <= bound)
        share = -(reward - mean) / len(p) / len(REWARDS) if kept[-1] else 0.0
        gradient += [0.0, *(share * a / b for a, b in zip(p, q, strict=True))]
    return gradient, kept


def test_the_gradient_is_that_of_the_paper():
    batch = rollout()
    wanted, kept = by_the_paper(batch)
    assert {*kept} == {True, False}, "some responses are dropped and some are not"
    config = AlgoConfig.of(
        "ppo", advantage=AdvantageConfig(**PRESET["algo"]["advantage"]), kl=KLConfig(**PRESET["algo"]["kl"])
    )
    batch, _ = CreditAssigner(config).assign(batch)
    batch, _ = correct(batch, config.advantage)
    objective = PolicyObjective(ActorConfig.of("ppo", **PRESET["actor"]), config.kl, temperature=1.0, horizon=8)
    log_probs = batch.old_log_probs.clone().requires_grad_()
    loss = objective.surrogate(log_probs, batch).total / objective.units(batch)["policy_units"]
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-8)
