"""The clipped surrogate by hand, its gradient where the clip holds and where not, and the signs of its companions."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.losses.policy import PolicyTokens, clip_range, entropy_term, kl_term, policy_term
from rlhf_suite.losses.reduce import LossSum, num_units, token_weights
from rlhf_suite.registry import aggregation, policy_loss

CONFIG = ActorConfig.of("ppo", eps_clip=0.2)


def loss_of(log_probs, old, advantages, config=CONFIG, *, mask=None, segments=None, correction=None, chosen=None):
    """The policy loss of tokens that are one sequence, where `segments` does not say otherwise. None is `chosen`."""
    mask = torch.ones(len(log_probs)) if mask is None else torch.tensor(mask)
    segments = torch.zeros(len(mask), dtype=torch.int64) if segments is None else torch.tensor(segments)
    rows = int(segments.max()) + 1
    chosen = torch.zeros(len(mask), dtype=torch.bool) if chosen is None else torch.tensor(chosen)
    tokens = PolicyTokens(log_probs, old, advantages, mask, segments, rows, chosen)
    weights = token_weights(mask, segments, rows, config.loss_agg_mode, horizon=10)
    return policy_term(tokens, config, weights, num_units(mask, segments, rows, config.loss_agg_mode), correction)


def run(ratios, advantages, config=CONFIG, **more):
    """The loss and its gradient with respect to log pi, of tokens with these ratios to pi_old; log pi_old is -1."""
    log_probs = (torch.tensor(ratios, dtype=torch.float64).log() - 1).requires_grad_()
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    loss = loss_of(log_probs, old, torch.tensor(advantages, dtype=torch.float64), config, **more)
    (gradient,) = torch.autograd.grad(loss.total, log_probs)
    return loss, gradient


@pytest.mark.notices(
    "the surrogate takes the larger of both terms",
    "losses/policy.py",
    "    gain = torch.minimum(plain, clipped)",
    "    gain = torch.maximum(plain, clipped)",
)
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: plain policy gradient
        (1.1, 2.0, -2.2, -2.2),  # inside the clip
        (1.5, 2.0, -2.4, 0.0),  # gone up far enough: 1.2 x 2, no gradient
        (0.5, 2.0, -1.0, -1.0),  # gone the wrong way: the clip must not hold it there
        (0.5, -2.0, 1.6, 0.0),  # gone down far enough: 0.8 x -2
        (1.5, -2.0, 3.0, 3.0),  # gone up although bad: full gradient
    ],
)
def test_ppo_clips_only_what_would_be_over_rewarded(ratio, advantage, loss, gradient):
    result, grad = run([ratio], [advantage])
    assert result.total.item() == pytest.approx(loss)
    assert grad.item() == pytest.approx(gradient)


@pytest.mark.notices(
    "the lower clip is used above as well",
    "losses/policy.py",
    "    low, high = config.eps_clip_low_high\n    return low, high",
    "    low, high = config.eps_clip_low_high\n    return low, low",
)
def test_ppo_with_an_asymmetric_clip_uses_low_below_and_high_above():
    config = ActorConfig.of("ppo", eps_clip=0.9, eps_clip_low_high=[0.2, 0.28])
    assert clip_range(config) == (0.2, 0.28) and clip_range(CONFIG) == (0.2, 0.2)
    result, _ = run([1.5, 0.5], [1.0, -1.0], config)
    assert result.total.item() == pytest.approx(-1.28 + 0.8)


@pytest.mark.notices(
    "the dual clip bounds positive advantages",
    "losses/policy.py",
    "torch.where(advantages < 0, torch.maximum",
    "torch.where(advantages > 0, torch.maximum",
)
def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    config = ActorConfig.of("ppo", eps_clip=0.2, dual_clip=3.0)
    result, gradient = run([10.0, 2.0, 10.0], [-1.0, -1.0, 1.0], config)
    assert result.total.item() == pytest.approx(3.0 + 2.0 - 1.2)
    assert gradient.tolist() == pytest.approx([0.0, 2.0, 0.0])


def test_ppo_gradient_is_the_numerical_derivative():
    generator = torch.Generator().manual_seed(1)
    log_probs = (0.4 * torch.randn(20, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(20, generator=generator, dtype=torch.float64)
    config = ActorConfig.of("ppo", eps_clip=0.2, dual_clip=3.0)

    def loss(x):
        return loss_of(x, torch.zeros_like(advantages), advantages, config).total

    assert torch.autograd.gradcheck(loss, (log_probs,))


@pytest.mark.parametrize("name", policy_loss.names())
def test_extreme_log_ratios_stay_finite(name):
    for advantage in (-1.0, 1.0):
        log_probs = torch.tensor([0.0, -1e4]).requires_grad_()
        old = torch.tensor([-1e4, 0.0])
        loss = loss_of(
            log_probs, old, torch.full((2,), advantage), ActorConfig.of("ppo", policy_loss_type=name), segments=[0, 1]
        )
        loss.total.backward()
        assert loss.total.isfinite()
        assert log_probs.grad is not None and log_probs.grad.isfinite().all()


def test_a_ratio_is_bounded_by_exp_20():
    log_probs, old = torch.tensor([0.0, -100.0]), torch.tensor([-100.0, 0.0])
    assert loss_of(log_probs, old, -torch.ones(2)).total.item() == pytest.approx(math.exp(20), rel=1e-5)


def test_ppo_metrics_count_clipped_tokens_and_estimate_kl():
    result, _ = run([1.5, 0.5, 1.0, 9.0], [1.0, 1.0, 1.0, 1.0], mask=[1.0, 1.0, 1.0, 0.0])
    clipped, kl, loss = (result.metrics[name] for name in ("ppo_clip_ratio", "ppo_kl", "policy_loss"))
    assert clipped.total == 1 and clipped.count == 3
    assert kl.total.item() == pytest.approx(-math.log(1.5) - math.log(0.5)) and kl.count == 3
    assert loss.total.item() == pytest.approx(-1.2 - 0.5 - 1.0) and loss.count == 3
    assert not any(mean.total.requires_grad for mean in result.metrics.values())


def test_the_clip_ratio_is_told_by_the_side_on_which_the_ratio_left_the_range():
    """Ratios 1.5 and 2 with positive advantages are above the range, 0.5 with a negative one is below."""
    metrics = run([1.5, 2.0, 0.5, 0.5, 1.0], [1.0, 1.0, -1.0, 1.0, 1.0])[0].metrics
    shares = [float(metrics[f"ppo_clip_ratio{side}"].total) for side in ("", "_low", "_high")]
    assert shares == [3, 1, 2]


def test_unmasked_tokens_never_reach_the_policy_gradient():
    masked, gradient = run([1.1, 1.1], [1.0, 5.0], mask=[1.0, 0.0])
    unmasked, _ = run([1.1, 1.1], [1.0, 5.0])
    assert masked.total.item() == pytest.approx(-1.1) and gradient.tolist() == pytest.approx([-1.1, 0.0])
    assert unmasked.total.item() == pytest.approx(-6.6)


@pytest.mark.parametrize("mode", aggregation.names())
def test_policy_loss_metric_is_the_mean_that_is_minimised(mode):
    config = ActorConfig.of("ppo", loss_agg_mode=mode)
    loss, _ = run([1.0, 1.0, 1.0], [1.0, 3.0, 5.0], config, segments=[0, 0, 1])
    total, count = {"token-mean": (9, 3), "seq-mean-token-mean": (7, 2), "seq-mean-token-sum-norm": (0.9, 2)}[mode]
    assert loss.total.item() == pytest.approx(-total)
    assert loss.metrics["policy_loss"].total.item() == pytest.approx(-total)
    assert loss.metrics["policy_loss"].count == count


# The other losses. Where nothing is said pi_old is exp(-1).


@pytest.mark.notices(
    "CISPO's weight has a gradient",
    "losses/policy.py",
    "    ratio = compute_ratio(tokens.log_ratio.detach())",
    "    ratio = compute_ratio(tokens.log_ratio)",
)
@pytest.mark.parametrize("name", policy_loss.names())
def test_on_policy_every_loss_has_the_plain_policy_gradient(name):
    _, gradient = run(
        [1.0, 1.0, 1.0], [2.0, -1.0, 3.0], ActorConfig.of("ppo", policy_loss_type=name), segments=[0, 0, 1]
    )
    assert gradient.tolist() == pytest.approx([-2.0, 1.0, -3.0])


@pytest.mark.notices(
    "GSPO's ratio is a product, not a geometric mean", "losses/policy.py", " / counts.clamp(min=1)  # [B]", "  # [B]"
)
def test_gspo_gives_every_token_the_geometric_mean_of_its_sequence():
    """Ratios 1.21 and 1 have the mean 1.1, inside the clip; 4 and 1 have 2, outside."""
    config = ActorConfig.of("ppo", policy_loss_type="gspo", loss_agg_mode="seq-mean-token-mean")
    loss, gradient = run([1.21, 1.0, 4.0, 1.0], [1.0, 1.0, 1.0, 1.0], config, segments=[0, 0, 1, 1])
    assert loss.total.item() == pytest.approx(-1.1 - 1.2)
    assert gradient.tolist() == pytest.approx([-0.55, -0.55, 0.0, 0.0])
    assert loss.metrics["ppo_clip_ratio"].total == 2


def test_gspo_reads_masked_tokens_only():
    config = ActorConfig.of("ppo", policy_loss_type="gspo", loss_agg_mode="seq-mean-token-mean")
    loss, gradient = run([1.1, 9.0, 5.0], [1.0, 1.0, 1.0], config, mask=[1.0, 0.0, 0.0], segments=[0, 0, 1])
    assert loss.total.item() == pytest.approx(-1.1)
    assert gradient.tolist() == pytest.approx([-1.1, 0.0, 0.0])
    assert loss.metrics["policy_loss"].count == 1


def test_gspo_with_one_token_a_sequence_is_ppo():
    ratios, advantages = [1.5, 0.5, 0.5, 1.5], [1.0, 1.0, -1.0, -1.0]
    ours, gradient = run(ratios, advantages, ActorConfig.of("ppo", policy_loss_type="gspo"), segments=[0, 1, 2, 3])
    ppo, ppo_gradient = run(ratios, advantages, segments=[0, 1, 2, 3])
    assert ours.total.item() == pytest.approx(ppo.total.item())
    assert gradient.tolist() == pytest.approx(ppo_gradient.tolist())


def test_cispo_caps_the_weight_and_keeps_the_gradient():
    """Weights 1.2 (cut from 1.5), 0.5 (no lower bound) and 1, times log pi = log ratio - 1."""
    config = ActorConfig.of("ppo", policy_loss_type="cispo", eps_clip_low_high=[1.0, 0.2])
    loss, gradient = run([1.5, 0.5, 1.0], [2.0, 2.0, -1.0], config)
    assert gradient.tolist() == pytest.approx([-2.4, -1.0, 1.0])
    wanted = -2.4 * (math.log(1.5) - 1) - 1.0 * (math.log(0.5) - 1) - 1.0
    assert loss.total.item() == pytest.approx(wanted)
    assert loss.metrics["ppo_clip_ratio"].total == 1
    loss, _ = run([1.5, 1.5], [0.0, 2.0], config)  # without an advantage nothing is clipped, as in ppo
    assert loss.metrics["ppo_clip_ratio"].total == 1


@pytest.mark.notices(
    "SAPO's temperatures change places",
    "losses/policy.py",
    "config.sapo_tau_pos, config.sapo_tau_neg)",
    "config.sapo_tau_neg, config.sapo_tau_pos)",
)
def test_sapo_gates_by_the_sign_of_the_advantage():
    """4/2 sigmoid(2 x 0.5) and 4/4 sigmoid(4 x 0.5) at ratio 1.5; the gradient is 4 s (1 - s) of plain PPO's."""
    config = ActorConfig.of("ppo", policy_loss_type="sapo", sapo_tau_pos=2.0, sapo_tau_neg=4.0)
    loss, gradient = run([1.5, 1.5], [1.0, -1.0], config)
    up, down = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))
    assert loss.total.item() == pytest.approx(-2 * up + down)
    assert gradient.tolist() == pytest.approx([-4 * up * (1 - up) * 1.5, 4 * down * (1 - down) * 1.5])
    assert "ppo_clip_ratio" not in loss.metrics


FAR = 0.5 / math.exp(-1)  # the ratio by which a token of probability 1/e has 1/2


@pytest.mark.notices(
    "DPPO keeps what pushes further away",
    "losses/policy.py",
    "tokens.advantages * (ratio - 1) > 0",
    "tokens.advantages * (ratio - 1) < 0",
)
@pytest.mark.notices(
    "DPPO measures ratios",
    "losses/policy.py",
    "now, before = tokens.log_probs.detach().exp(), tokens.old_log_probs.exp()",
    "now, before = tokens.log_ratio.detach().exp(), 1.0",
)
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_drops_tokens_that_are_far_and_pushed_further(name):
    """From 1/e to 1/2 it is 0.132 (as KL 0.0353), to 2/e^2 0.097 (0.0225); a fifth more or less is within both."""
    config = ActorConfig.of("ppo", policy_loss_type=name, dppo_tv_max=0.09, dppo_kl_max=0.02)
    loss, gradient = run([FAR, FAR, 1 / FAR, 1 / FAR, 1.2, 0.8], [1.0, -1.0, -1.0, 1.0, 1.0, -1.0], config)
    assert gradient.tolist() == pytest.approx([0.0, FAR, 0.0, -1 / FAR, -1.2, 0.8])
    parts = [float(loss.metrics[f"ppo_clip_ratio{side}"].total) for side in ("", "_low", "_high")]
    assert parts == [2, 1, 1]


@pytest.mark.notices(
    "the KL of DPPO leaves the other tokens out",
    "losses/policy.py",
    "sampled + others > config.dppo_kl_max",
    "sampled > config.dppo_kl_max",
)
@pytest.mark.parametrize(
    ("old", "now"), [(0.3, 0.5), (0.5, 0.3), (0.999, 0.9), (0.9, 0.999), (1e-6, 1e-3), (0.2, 0.21)]
)
def test_the_kl_of_dppo_is_that_of_the_sampled_token_against_all_others(old, now):
    """A bound just below it drops the token, and one just above it does not."""
    kl = old * math.log(old / now) + (1 - old) * math.log((1 - old) / (1 - now))
    log_probs = torch.tensor([math.log(now)], dtype=torch.float64).requires_grad_()
    before, advantage = torch.tensor([math.log(old)], dtype=torch.float64), torch.tensor([1.0 if now > old else -1.0])
    for bound, is_kept in ((0.9999 * kl, False), (1.0001 * kl, True)):
        config = ActorConfig.of("ppo", policy_loss_type="dppo_kl", dppo_kl_max=bound)
        (gradient,) = torch.autograd.grad(loss_of(log_probs, before, advantage.double(), config).total, log_probs)
        assert bool(gradient.item()) is is_kept


@pytest.mark.notices(
    "the ratio of DPPO has no bound", "losses/policy.py", "-ratio.clamp(max=config.dppo_ratio_max)", "-ratio"
)
def test_an_unlikely_token_stays_within_dppos_bound_and_its_ratio_is_bounded():
    """1e-6 to 1e-3 is a ratio of 1000, which PPO clips, and a difference of 0.001."""
    log_probs = torch.tensor([math.log(1e-3)], dtype=torch.float64).requires_grad_()
    old, advantage = torch.tensor([math.log(1e-6)], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for name, wanted in (("ppo", 0.0), ("dppo_tv", -20.0), ("dppo_kl", -20.0)):
        config = ActorConfig.of("ppo", policy_loss_type=name)
        (gradient,) = torch.autograd.grad(loss_of(log_probs, old, advantage, config).total, log_probs)
        assert gradient.item() == pytest.approx(wanted), name


@pytest.mark.notices(
    "Clip-Cov leaves the tokens out that it should keep",
    "losses/policy.py",
    "torch.where(tokens.chosen, 0, surrogate.losses)",
    "torch.where(tokens.chosen, surrogate.losses, 0)",
)
def test_clip_cov_is_ppo_without_the_chosen_tokens():
    ratios, advantages, chosen = [1.1, 1.5, 0.9, 1.1], [2.0, 1.0, -1.0, 1.0], [True, False, False, True]
    config = ActorConfig.of("ppo", policy_loss_type="clip_cov")
    loss, gradient = run(ratios, advantages, config, chosen=chosen)
    plain, whole = run(ratios, advantages)
    assert gradient.tolist() == pytest.approx([0.0, 0.0, whole[2].item(), 0.0])
    assert loss.total.item() == pytest.approx(-1.2 + 0.9)
    assert loss.metrics["ppo_clip_ratio"].total == plain.metrics["ppo_clip_ratio"].total == 1


@pytest.mark.notices(
    "KL-Cov pushes away from the old policy",
    "losses/policy.py",
    "losses + config.kl_cov_coef * tokens.log_ratio.abs()",
    "losses - config.kl_cov_coef * tokens.log_ratio.abs()",
)
@pytest.mark.notices(
    "KL-Cov holds all tokens back",
    "losses/policy.py",
    "torch.where(tokens.chosen, pulled, losses)",
    "pulled",
)
def test_kl_cov_pulls_the_chosen_tokens_back_and_clips_none():
    """The gradient of beta |log rho| is beta above the old policy, -beta below it, and 0 on it."""
    config = ActorConfig.of("ppo", policy_loss_type="kl_cov", kl_cov_coef=0.25)
    loss, gradient = run([1.5, 0.5, 1.0, 1.5], [1.0, 1.0, 1.0, 1.0], config, chosen=[True, True, True, False])
    assert gradient.tolist() == pytest.approx([-1.5 + 0.25, -0.5 - 0.25, -1.0, -1.5])
    assert loss.total.item() == pytest.approx(-4.5 + 0.25 * (math.log(1.5) + math.log(2)))
    assert "ppo_clip_ratio" not in loss.metrics


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_loss_that_chooses_tokens_is_refused_without_them(name):
    one = torch.ones(1)
    tokens = PolicyTokens(one, one, one, one, torch.zeros(1, dtype=torch.int64), 1)
    with pytest.raises(AssertionError, match="the tokens that its covariances choose"):
        policy_loss.load(name)(tokens, ActorConfig.of("ppo", policy_loss_type=name))


def test_importance_sampling_weighs_by_the_ratio_however_large():
    loss, gradient = run([3.0, 0.1], [2.0, -1.0], ActorConfig.of("ppo", policy_loss_type="importance_sampling"))
    assert loss.total.item() == pytest.approx(-3 * 2.0 + 0.1 * 1.0)
    assert gradient.tolist() == pytest.approx([-6.0, 0.1])


@pytest.mark.notices(
    "DRO pays for the distance from the old policy twice",
    "losses/policy.py",
    "config.dro_beta / 2 * tokens.log_ratio.square()",
    "config.dro_beta * tokens.log_ratio.square()",
)
def test_dro_adds_a_quadratic_penalty_to_the_plain_policy_gradient():
    loss, gradient = run([3.0, 0.1], [2.0, -1.0], ActorConfig.of("ppo", policy_loss_type="dro", dro_beta=0.5))
    up, down = math.log(3.0), math.log(0.1)
    assert loss.total.item() == pytest.approx(-2 * (up - 1) + (down - 1) + 0.25 * (up**2 + down**2))
    assert gradient.tolist() == pytest.approx([-2.0 + 0.5 * up, 1.0 + 0.5 * down])


def test_reinforce_takes_no_note_of_the_ratio():
    loss, gradient = run([3.0, 0.1], [2.0, -1.0], ActorConfig.of("ppo", policy_loss_type="reinforce"))
    assert gradient.tolist() == pytest.approx([-2.0, 1.0])
    assert loss.total.item() == pytest.approx(-2 * (math.log(3.0) - 1) + (math.log(0.1) - 1))


@pytest.mark.parametrize("name", policy_loss.names())
def test_a_correction_multiplies_the_loss_of_its_token_and_changes_no_count(name):
    config = ActorConfig.of("ppo", policy_loss_type=name)
    plain, gradient = run([1.1, 0.9, 1.0], [2.0, -1.0, 1.0], config, segments=[0, 1, 2])
    weight = torch.tensor([0.5, 0.0, 2.0])
    corrected, weighted = run([1.1, 0.9, 1.0], [2.0, -1.0, 1.0], config, segments=[0, 1, 2], correction=weight)
    assert weighted.tolist() == pytest.approx((gradient * weight).tolist())
    assert corrected.metrics["policy_loss"].count == plain.metrics["policy_loss"].count == 3


def descend(loss: LossSum, leaf: torch.Tensor) -> torch.Tensor:
    """Which way gradient descent moves `leaf`."""
    (gradient,) = torch.autograd.grad(loss.total, leaf)
    return -gradient


@pytest.mark.notices(
    "the entropy bonus is a penalty",
    "losses/policy.py",
    "    return LossSum(-coef * masked_sum(kept, mask)",
    "    return LossSum(coef * masked_sum(kept, mask)",
)
def test_minimising_the_entropy_term_raises_entropy():
    entropy = torch.tensor([1.0, 2.0, 4.0]).requires_grad_()
    term = entropy_term(entropy, torch.tensor([1.0, 1.0, 0.0]), coef=0.5)
    assert term.total == -1.5 and term.metrics["entropy"].total == 3
    assert descend(term, entropy).tolist() == [0.5, 0.5, 0.0]


def test_minimising_the_kl_term_lowers_kl():
    kl = torch.tensor([1.0, 2.0, 4.0]).requires_grad_()
    term = kl_term(kl, torch.tensor([1.0, 1.0, 0.0]), coef=0.5)
    assert term.total == 1.5 and term.metrics["kl_loss"].total == 3 and term.metrics["kl_loss"].count == 2
    assert descend(term, kl).tolist() == [-0.5, -0.5, 0.0]
