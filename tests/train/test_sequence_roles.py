"""Policy, critic and reference of PPO on ranks that split the tokens of a batch, or the matrices of each model, have
the numbers of one rank."""

from __future__ import annotations

import os

import pytest
import torch

from rlhf_suite.config.declarations.algo import KLConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.models import ActorConfig, CriticConfig
from rlhf_suite.config.declarations.rollout import RolloutConfig
from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.distributed.mesh import Mesh, Rank
from rlhf_suite.rl.roles import CriticRole, PolicyRole, ReferenceRole, WorkerSettings

pytestmark = pytest.mark.stack
TEMPERATURE = 0.7


def numbers(world, folder, batch, axes, mode="gather", budget=0):
    """What the roles of this rank say of a batch, before and after an optimiser step, and the metrics of the step."""
    sequence, tensor = axes
    mesh = Mesh(world.mesh.size // (sequence * tensor), sequence, tensor)
    rank = Rank(world.rank, mesh, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), "cpu")
    ds = DeepSpeedConfig.of(
        "ppo", zero_stage=2, param_dtype="fp32", packing_samples=True, ring_attn_size=sequence, ring_attn_mode=mode
    )
    ds.tensor_parallel_size = tensor
    train = TrainConfig.of(
        "ppo", micro_batch_size=4, dynamic_batch_enable=budget > 0, max_tokens_per_gpu=max(budget, 1)
    )
    rollout = RolloutConfig.of("ppo", temperature=TEMPERATURE, micro_batch_size=4)
    settings = WorkerSettings(ds, train, rollout, DataConfig.of("ppo"), str(folder / "plain"))
    language, scalar = ModelPlan("actor", str(folder / "lm")), ModelPlan("critic", str(folder / "value"), head="value")
    policy = PolicyRole(rank, language, settings, ActorConfig.of("ppo", entropy_coef=0.01), KLConfig(), 4)
    critic = CriticRole(rank, scalar, settings, CriticConfig.of("ppo"), 4)
    reference = ReferenceRole(rank, language, settings)
    found = {"reference": reference.log_probs(batch, TEMPERATURE), "values": critic.values(batch)}
    metrics = policy.update([batch], 0, 0.0, None) | critic.update([batch], 0)
    found |= {name: torch.tensor(value) for name, value in metrics.items() if not name.startswith("perf/")}
    return found | {"policy": policy.log_probs(batch, TEMPERATURE), "values after": critic.values(batch)}


@pytest.fixture(scope="module")
def wanted(ranks, folder, batch):
    return ranks(1).call(numbers, folder, batch, (1, 1))[0]


@pytest.mark.parametrize(
    ("axes", "mode", "budget"),
    [
        ((2, 1), "gather", 0),
        ((2, 1), "ring", 50),
        ((2, 1), "ulysses", 0),
        ((1, 2), "gather", 0),
        ((1, 2), "gather", 100),
    ],
)
def test_the_roles_of_ppo_have_the_numbers_of_one_rank(ranks, folder, batch, wanted, axes, mode, budget):  # noqa: PLR0917
    for found in ranks(2, axes[1]).call(numbers, folder, batch, axes, mode, budget):
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            torch.testing.assert_close(
                value, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}"
            )
    assert float((wanted["policy"] - wanted["reference"]).abs().max()) > 0  # the step moved the policy
