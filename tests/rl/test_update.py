"""Which sequences each optimiser step of a rollout takes, and what each rank gets of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch

from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.config.declarations.rollout import RolloutConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.config.plan.run_plan import Machine, resolve
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.rl.model_groups import CriticGroup, PolicyGroup
from rlhf_suite.rl.sharding import split
from rlhf_suite.rl.update import Updater, choose_tokens, step_indices


def rollout(*lengths: int) -> Experience:
    total = sum(lengths)
    plain = Experience(torch.arange(total), torch.tensor(lengths), torch.ones(total), torch.arange(len(lengths)))
    return replace(plain, mask=plain.mask.index_fill(0, plain.starts, 0))


@pytest.mark.notices("steps and prompts are shuffled by one draw", "rl/update.py", "[*seed, SHUFFLE]", "[*seed]")
def test_every_epoch_takes_every_sequence_once():
    steps = step_indices(10, 4, 2, (0, 0))
    assert [*chain(*steps[:3])] != BatchOrder(10, 10, 0).indices(0), "the order of prompts is another draw"
    assert [len(step) for step in steps] == [4, 4, 2] * 2
    assert sorted(chain(*steps[:3])) == sorted(chain(*steps[3:])) == list(range(10))
    assert steps[:3] != steps[3:]


def test_the_order_is_a_function_of_seed_and_rollout():
    assert step_indices(10, 4, 1, (1, 5)) == step_indices(10, 4, 1, (1, 5))
    assert step_indices(10, 4, 1, (1, 5)) != step_indices(10, 4, 1, (1, 6)) != step_indices(10, 4, 1, (2, 6))


def test_steps_per_rollout_counts_what_step_indices_gives():
    config = Run.of(
        "ppo",
        rollout=RolloutConfig.of("ppo", batch_size=5, n_samples_per_prompt=3),
        train=TrainConfig.of("ppo", batch_size=4, max_epochs=2),
    )
    config.actor.model_name_or_path = "builtin:tiny"
    plan = resolve(config, Machine("cpu", 0))
    assert plan.optimizer_steps_per_rollout == len(step_indices(15, 4, 2, (0, 0))) == 8


@pytest.mark.notices(
    "ranks share the first sequences of a rollout in place of those of an optimiser step",
    "rl/sharding.py",
    "[[rows[place] for place in part] for part in",
    "[list(part) for part in",
)
def test_the_ranks_share_every_step_evenly():
    batch, steps = rollout(9, 7, 3, 5, 4, 2, 8), [[6, 4, 2, 0], [1, 5, 3]]
    first, second = split(batch, steps, 2)
    for step, one, other in zip(steps, first, second, strict=True):
        assert one.num_tokens == other.num_tokens
        assert sorted(one.index.tolist() + other.index.tolist()) == sorted(step)
    (alone,) = split(batch, steps, 1)
    assert [share.index.tolist() for share in alone] == steps
    assert split(batch, [range(7)], 1)[0][0] is batch


def test_a_rank_beyond_the_sequences_gets_one_without_weight():
    shares = [rank[0] for rank in split(rollout(6, 5), [[1]], 3)]
    assert sorted(float(share.mask.sum()) for share in shares) == [0, 0, 4]
    assert all(share.num_tokens == 5 for share in shares)


class Asked:
    """In place of a worker group: keeps what each optimiser step is to train on, and with which numbers."""

    mesh = Mesh(1)

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, []

    def start_sharded(self, method, shards, *numbers):
        (mine,) = shards
        self.asked.append(([batch.index.tolist() for batch in mine], *numbers))
        self.columns = {*mine[0].columns("token")}
        return [{f"{self.name}/steps": float(len(mine))}]

    def wait(self, refs, what):
        return refs


def updated(
    steps: int, batch: Experience | None = None, **actor: object
) -> tuple[Asked, Asked, list[dict[str, float]]]:
    """RL steps of `batch`, or of four sequences, two episodes to an optimiser step; the critic warms up for two of
    them."""
    run = Run.of(
        "ppo", rollout=RolloutConfig.of("ppo", batch_size=4), train=TrainConfig.of("ppo", batch_size=2, seed=3)
    )
    run.critic.freezing_steps, run.actor.model_name_or_path = 2, "builtin:tiny"
    run.actor = replace(run.actor, **actor)
    policy, critic = Asked("policy"), Asked("critic")
    plan = resolve(run, Machine("cpu", 0))
    updater = Updater(
        run.train,
        run.actor,
        PolicyGroup(policy),
        CriticGroup(critic),
        steps_per_rollout=plan.optimizer_steps_per_rollout,
        critic_warm_up=plan.critic_warm_up,
        mismatch_limit=1e-4,
    )
    batch = rollout(3, 4, 5, 6) if batch is None else batch
    zeros = torch.zeros(batch.num_tokens)
    batch = replace(batch, old_log_probs=zeros, advantages=zeros, values=zeros, returns=zeros, owner=zeros)
    rollouts = [replace(batch, entropies=torch.full((batch.num_tokens,), 1.0 + step)) for step in range(steps)]
    return policy, critic, [updater.update(made, step, 0.5 + step) for step, made in enumerate(rollouts)]


@pytest.mark.notices(
    "the policy's schedule does not wait for the critic's warm-up",
    "rl/update.py",
    "first = (step - self.critic_warm_up) * self.steps_per_rollout",
    "first = step * self.steps_per_rollout",
)
@pytest.mark.notices(
    "the policy waits one step too long",
    "rl/update.py",
    "if step >= self.critic_warm_up:",
    "if step > self.critic_warm_up:",
)
@pytest.mark.notices(
    "the critic's schedule counts RL steps",
    "rl/update.py",
    "steps, step * self.steps_per_rollout, activity)",
    "steps, step, activity)",
)
def test_the_policys_schedule_begins_after_the_critics_warm_up():
    policy, critic, metrics = updated(4)
    assert [coefficients for _, *coefficients in policy.asked] == [[0, 2.5, None], [2, 3.5, None]]
    assert [first for _, first in critic.asked] == [0, 2, 4, 6]
    assert [sorted(row) for row in metrics] == [["critic/steps"]] * 2 + [["critic/steps", "policy/steps"]] * 2


@pytest.mark.notices(
    "every rollout is shuffled alike", "rl/update.py", "(self.config.seed, step)", "(self.config.seed, 0)"
)
def test_each_rollout_is_shuffled_anew_and_both_models_take_the_same_steps():
    policy, critic, _ = updated(4)
    orders = [steps for steps, _ in critic.asked]
    assert all(sorted(chain(*steps)) == [0, 1, 2, 3] for steps in orders)
    assert len({str(steps) for steps in orders}) > 1
    assert [steps for steps, *_ in policy.asked] == orders[2:]


@pytest.mark.notices(
    "an optimiser step has a part of the roles of an episode",
    "rl/update.py",
    "step_indices(experience.num_games,",
    "step_indices(experience.num_episodes,",
)
def test_all_roles_of_an_episode_are_in_one_optimiser_step():
    """Four games of two roles: as many steps as four episodes without roles, each with two whole games."""
    games = replace(rollout(*range(2, 10)), game=torch.arange(8) // 2, episode=torch.arange(8))
    for steps, *_ in updated(4, games)[1].asked:
        assert [len(step) for step in steps] == [4, 4] and sorted(chain(*steps)) == list(range(8))
        assert all(sorted(step) == sorted({*step, *(row ^ 1 for row in step)}) for step in steps), "a role is elsewhere"


@pytest.mark.notices(
    "the critic is trained without its targets",
    "rl/model_groups.py",
    '"advantages", "chosen", "routes")\n',
    '"advantages", "chosen", "routes", "returns")\n',
)
def test_each_model_gets_the_columns_that_it_trains_on():
    policy, critic, _ = updated(3)
    assert policy.columns == {"mask", "old_log_probs", "advantages"}
    assert critic.columns == {"mask", "values", "returns"}


def varied(*lengths: int) -> Experience:
    batch, numbers = rollout(*lengths), torch.Generator().manual_seed(1)
    columns = {name: torch.randn(batch.num_tokens, generator=numbers) for name in ("old_log_probs", "advantages")}
    return replace(batch, **columns)


@pytest.mark.notices("every rollout draws the same places", "rl/update.py", "[*seed, CHOICE]", "[seed[0], CHOICE]")
@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_tokens_are_chosen_by_the_whole_rollout_and_its_number(loss):
    """Sequences far from the others' means are those of which most tokens are chosen, in whichever step they train."""
    actor = ActorConfig.of(
        "ppo", policy_loss_type=loss, clip_cov_ratio=0.1, kl_cov_ratio=0.1, clip_cov_range=[0.0, 9.0]
    )
    batch = varied(40, 60, 50, 30)
    chosen, metrics = choose_tokens(batch, actor, (5, 2))
    count = int(0.1 * float(batch.mask.sum()))
    assert int(chosen.chosen.sum()) == count and not chosen.chosen[batch.mask == 0].any()
    assert metrics["train/chosen_token_ratio"] == pytest.approx(count / float(batch.mask.sum()))
    own = batch.mask.bool()
    columns = torch.stack([batch.old_log_probs[own], batch.advantages[own]]).double()
    assert metrics["train/covariance"] == pytest.approx(float(columns.cov(correction=0)[0, 1]), abs=1e-9)
    again, other = (choose_tokens(batch, actor, seed)[0].chosen for seed in ((5, 2), (5, 3)))
    assert torch.equal(again, chosen.chosen) and torch.equal(other, chosen.chosen) == (loss == "kl_cov")


def test_the_chosen_tokens_reach_the_policy_alone():
    policy, critic, metrics = updated(3, policy_loss_type="clip_cov")
    assert "chosen" in policy.columns and "chosen" not in critic.columns
    assert {"train/covariance", "train/chosen_token_ratio"} <= metrics[2].keys()
    assert "chosen" not in updated(3)[0].columns


@pytest.mark.notices(
    "the entropy bonus is steered while the policy stays as it is",
    "rl/update.py",
    "        running, activity = [], f",
    "        self.steer_entropy(experience)\n        running, activity = [], f",
)
@pytest.mark.notices(
    "the steered coefficient does not reach the policy",
    "rl/update.py",
    "first, kl_coef, entropy_coef, activity",
    "first, kl_coef, None, activity",
)
def test_the_entropy_bonus_is_steered_by_the_entropy_before_each_update_of_the_policy():
    """Entropies of 3, 4 and 5 nats in the steps that train the policy, the target 4."""
    flags = {"entropy_coef": 0.25, "entropy_target": 4.0, "entropy_coef_step": 0.125}
    policy, _, metrics = updated(5, **flags)
    assert [coefficients[-1] for _, *coefficients in policy.asked] == [0.25, 0.375, 0]
    assert [row.get("train/entropy_coef") for row in metrics] == [None, None, 0.25, 0.375, 0]
    assert [row["train/entropy_before"] for row in metrics[2:]] == [3, 4, 5]
