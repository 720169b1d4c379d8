"""What a served optimiser step writes: means over what was trained on, and phases that add up to the time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhf_suite.data.trajectory import Experience
from rlhf_suite.rl.datum import LossOutput
from rlhf_suite.train_server.steps import Clock, PassSums

pytestmark = pytest.mark.quick


def batch(mask, **columns):
    size = len(mask)
    values = {name: torch.tensor(column) for name, column in columns.items()}
    return Experience(
        ids=torch.arange(size),
        lengths=torch.tensor([size]),
        mask=torch.tensor(mask),
        index=torch.arange(1),
        **values,
    )


def output(log_probs, loss_sum, **metrics):
    return LossOutput(
        {f"train/{name}": value for name, value in metrics.items()}, [np.array(log_probs, np.float32)], loss_sum
    )


@pytest.mark.notices(
    "the mean loss of a served step counts positions without a weight",
    "train_server/steps.py",
    'self.count("gpt_loss", output.loss_sum, weights.sum())',
    'self.count("gpt_loss", output.loss_sum, float(mask.sum()))',
)
def test_a_loss_is_a_mean_over_the_weights_of_all_passes():
    sums = PassSums()
    sums.add("cross_entropy", batch([0.0, 1, 1], correction=[0.0, 0, 0.5]), output([0, -9, -2], 1.0))
    sums.add("cross_entropy", batch([0.0, 1, 1], correction=[0.0, 1, 1]), output([0, -1, -3], 4.0))
    assert sums.means() == {"train/gpt_loss": pytest.approx(5 / 2.5)}


def test_gradients_of_a_clients_own_loss_have_no_mean():
    sums = PassSums()
    sums.add("cross_entropy", batch([0.0, 1], correction=[0.0, 1.0]), output([0, -1], 1.0))
    sums.add("cross_entropy", batch([0.0, 1, 1], correction=[0.0, -1, 3]), output([0, -1, -1], 2.0))
    assert sums.means() == {}
    nothing = PassSums()
    nothing.add("cross_entropy", batch([0.0, 1], correction=[0.0, 0.0]), output([0, -1], 0.0))
    assert nothing.means() == {}


@pytest.mark.notices(
    "the KL of a served step counts tokens of the prompt, whose log-probs are 0",
    "train_server/steps.py",
    'mask & (require_column(batch.advantages, "advantages").numpy() != 0)',
    "mask",
)
def test_what_a_client_gives_for_the_prompt_counts_for_nothing():
    """As tinker-cookbook does: log-prob and advantage of a token of the prompt are 0."""
    sums = PassSums()
    prompt = batch([0.0, 1, 1, 1], advantages=[0.0, 0, 2, -1], old_log_probs=[0.0, 0, -1, -2])
    sums.add("ppo", prompt, output([0, -7, -1.5, -2.25], -1.0, ppo_clip_ratio=1 / 3, aux_loss=2.0))
    wanted = {"policy_loss": -1 / 2, "ppo_kl": (0.5 + 0.25) / 2, "ppo_clip_ratio": 1 / 2, "aux_loss": 2.0}
    assert sums.means() == {f"train/{name}": pytest.approx(value) for name, value in wanted.items()}
    sums.add("ppo", batch([0.0, 1], advantages=[0.0, 3], old_log_probs=[0.0, -1]), output([0, -4], -3.0, aux_loss=8.0))
    means = sums.means()
    assert means["train/policy_loss"] == pytest.approx(-4 / 3)
    assert means["train/ppo_kl"] == pytest.approx((0.5 + 0.25 + 3) / 3)
    assert means["train/aux_loss"] == pytest.approx((4 * 2 + 2 * 8) / 6)


def test_every_position_counts_in_dro():
    sums = PassSums()
    sums.add("dro", batch([0.0, 1, 1], advantages=[0.0, 0, 1], old_log_probs=[0.0, -1, -1]), output([0, -2, -2], 6.0))
    assert sums.means() == {"train/policy_loss": 3.0, "train/ppo_kl": 1.0}


def test_phases_add_up_to_the_time_that_has_passed():
    times = iter([0, 1, 3, 6, 10, 15, 21, 28])
    clock = Clock(lambda: next(times))
    with clock.during("sampling"):  # from 1
        with clock.during("forward_backward"):  # from 3 to 6: it counts, though samples are under way
            pass
        with clock.during("sampling"):  # from 10 to 15
            pass
    assert clock.take() == {"waiting_for_clients": 1 + 7, "sampling": 2 + 4 + 5 + 6, "forward_backward": 3}
