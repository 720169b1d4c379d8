"""Losses of preferences: of a pair of answers to the same prompt, a better and a worse one, and of single answers.

Shapes: P pairs, unit pairs; KTO: B answers, unit answers.

log pi(y) is the sum of the log-probs of an answer's tokens, |y| their number, and

    h = beta [(log pi(y_c) - log pi_ref(y_c)) - (log pi(y_r) - log pi_ref(y_r))]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.losses.metrics import Mean, Metric, Quantile, Ranking
from rlhf_suite.losses.reduce import LossSum, counted_deviation, counted_mean, counted_sum, log1mexp
from rlhf_suite.registry import preference_loss, reward_loss
from rlhf_suite.shapes import is_like, same_shape


@dataclass(frozen=True)
class Answers:
    """The chosen or the rejected answers of P pairs, each [P]; only `log_probs` carries a gradient."""

    log_probs: Tensor  # summed over the answer's tokens
    reference: Tensor  # the same of the reference model; 0 without one
    tokens: Tensor  # how many they are

    def __post_init__(self) -> None:
        same_shape(self.log_probs, self.reference, self.tokens)

    @property
    def mean_log_probs(self) -> Tensor:
        return self.log_probs / self.tokens.clamp(min=1)

    @property
    def log_ratios(self) -> Tensor:
        return self.log_probs - self.reference


SHARES = (5, 25, 50, 75, 95)  # of the scores, in per cent: quantiles in the metrics


@preference_loss(name="sigmoid", needs=("reference",), reads=("label_smoothing",))
def sigmoid_loss(chosen: Answers, rejected: Answers, config: AlgoConfig) -> Tensor:
    """DPO (Rafailov et al., arXiv:2305.18290) with labels of which a share e is wrong (cDPO, Mitchell 2023):

    -(1 - e) log sigmoid(h) - e log sigmoid(-h)
    """
    h = config.beta * (chosen.log_ratios - rejected.log_ratios)
    return -(1 - config.label_smoothing) * F.logsigmoid(h) - config.label_smoothing * F.logsigmoid(-h)


@preference_loss(name="ipo", needs=("reference",))
def ipo_loss(chosen: Answers, rejected: Answers, config: AlgoConfig) -> Tensor:
    """(h / beta - 1 / (2 beta))^2 on summed log-probs (Azar et al., arXiv:2310.12036, eq. 17)."""
    return (chosen.log_ratios - rejected.log_ratios - 1 / (2 * config.beta)).square()


@preference_loss(name="hinge", needs=("reference",))
def hinge_loss(chosen: Answers, rejected: Answers, config: AlgoConfig) -> Tensor:
    """max(0, 1 - h) (SLiC-HF, arXiv:2305.10425, normalised by a reference as in RSO, arXiv:2309.06657)."""
    return F.relu(1 - config.beta * (chosen.log_ratios - rejected.log_ratios))


@preference_loss(name="simpo", needs=(), reads=("simpo_gamma",))
def simpo_loss(chosen: Answers, rejected: Answers, config: AlgoConfig) -> Tensor:
    """-log sigmoid(beta (log pi(y_c) / |y_c| - log pi(y_r) / |y_r|) - gamma) (Meng et al., arXiv:2405.14734)."""
    gap = chosen.mean_log_probs - rejected.mean_log_probs
    return -F.logsigmoid(config.beta * gap - config.simpo_gamma)


@preference_loss(name="orpo", needs=("chosen_loss",))
def orpo_loss(chosen: Answers, rejected: Answers, config: AlgoConfig) -> Tensor:
    """-beta log sigmoid(log odds(y_c) - log odds(y_r)), odds = p / (1 - p) of the length-averaged likelihood p
    (Hong et al., arXiv:2403.07691, eq. 7). The paper's other term is `algo.nll_loss_coef` = 1."""
    log_odds = [a.mean_log_probs - log1mexp(a.mean_log_probs) for a in (chosen, rejected)]
    return -config.beta * F.logsigmoid(log_odds[0] - log_odds[1])


def preference_term(chosen: Answers, rejected: Answers, counted: Tensor, config: AlgoConfig) -> LossSum:
    """Sum over counted pairs of the loss named `algo.loss` + `algo.nll_loss_coef` x (-log pi(y_c) / |y_c|).

    `counted` [P] of 0 and 1. Metrics, means over pairs: `loss`, `nll_loss`, `acc` (the chosen answer has the higher
    reward; equal rewards count half), `chosen_reward`, `reject_reward` = beta (log pi - log pi_ref), `reward_margin`
    their difference, and `chosen_logps`, `reject_logps` = log pi.
    """
    same_shape(chosen.log_probs, rejected.log_probs, counted)
    nll = -chosen.mean_log_probs
    losses = preference_loss.load(config.loss)(chosen, rejected, config)
    if not is_like(losses, counted):
        raise preference_loss.wrong_result(config.loss, losses, f"the loss of each of the {len(counted)} pairs")
    losses = losses + config.nll_loss_coef * nll
    rewards = [config.beta * answers.log_ratios.detach() for answers in (chosen, rejected)]
    return LossSum(
        counted_sum(losses, counted),
        pair_means({"loss": losses, "nll_loss": nll}, counted)
        | pair_means({"chosen_logps": chosen.log_probs, "reject_logps": rejected.log_probs}, counted)
        | pair_metrics(rewards[0], rewards[1], counted),
    )


@reward_loss(name="sigmoid", needs=("margin",))
def sigmoid_reward_loss(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """Bradley-Terry with margins: -log sigmoid(r_c - r_r - margin) (Llama 2, arXiv:2307.09288, eq. 2)."""
    return -F.logsigmoid(chosen - rejected - margin)


@reward_loss(name="logexp")
def logexp_reward_loss(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """Bradley-Terry without margins: log(1 + exp(r_r - r_c)), as softplus, finite at any gap."""
    return F.softplus(-(chosen - rejected))


def reward_term(chosen: Tensor, rejected: Tensor, margin: Tensor, counted: Tensor, kind: str) -> LossSum:
    """Return the loss `kind` of a reward model's scores, all [P], summed over counted pairs.

    Metrics, means over pairs: `loss`, `acc`, `chosen_reward`, `reject_reward`, `reward_margin`; over both answers
    `reward_mean`, `reward_std`, and the quantiles `reward_p05` to `reward_p95`, which say how they are spread.
    """
    same_shape(chosen, rejected, margin, counted)
    losses = reward_loss.load(kind)(chosen, rejected, margin)
    if not is_like(losses, counted):
        raise reward_loss.wrong_result(kind, losses, f"the loss of each of the {len(counted)} pairs")
    both, of_both = torch.cat([chosen, rejected]).detach(), torch.cat([counted, counted])
    scores: dict[str, Metric] = {
        "reward_mean": counted_mean(both, of_both),
        "reward_std": counted_deviation(both, of_both),
        **{f"reward_p{share:02d}": Quantile(both, of_both, share / 100) for share in SHARES},
    }
    return LossSum(
        counted_sum(losses, counted),
        pair_means({"loss": losses}, counted) | scores | pair_metrics(chosen.detach(), rejected.detach(), counted),
    )


def pair_metrics(chosen: Tensor, rejected: Tensor, counted: Tensor) -> dict[str, Mean]:
    """Of the rewards of P pairs. Two equal rewards prefer neither answer, so `acc` counts half of the pair, as `auc`
    does: a policy that is its own reference has 0.5."""
    right = (chosen > rejected).float() + 0.5 * (chosen == rejected).float()
    rewards = {"chosen_reward": chosen, "reject_reward": rejected, "reward_margin": chosen - rejected}
    return pair_means({"acc": right, **rewards}, counted)


def pair_means(values: dict[str, Tensor], counted: Tensor) -> dict[str, Mean]:
    return {name: counted_mean(value, counted) for name, value in values.items()}


def reference_point(total: Tensor, count: Tensor) -> Tensor:
    """z = max(0, mean log-ratio), without gradient; 0 where nothing was counted."""
    return (total / count.clamp(min=1)).clamp(min=0)


def kto_loss(log_ratios: Tensor, labels: Tensor, kl: Tensor, counted: Tensor, config: AlgoConfig) -> LossSum:
    """Sum over counted answers, with r = log pi(y) - log pi_ref(y), of

        desirable (label 1)      w_d (1 - sigmoid(beta (r - z)))
        undesirable (label 0)    w_u (1 - sigmoid(beta (z - r)))

    All [B]; `kl` holds z, in which no gradient flows. Metrics: `loss`, `kl`, beta r of either class as `chosen_reward`
    and `reject_reward`, and `auc`: how often a desirable answer's r is above an undesirable one's.
    """
    same_shape(log_ratios, labels, kl, counted)
    desirable = labels > 0.5
    sign = torch.where(desirable, 1.0, -1.0)
    weights = torch.where(desirable, config.desirable_loss_weight, config.undesirable_loss_weight)
    losses = weights * torch.sigmoid(-config.beta * sign * (log_ratios - kl))  # 1 - sigmoid(x) = sigmoid(-x)
    rewards = config.beta * log_ratios.detach()
    return LossSum(
        counted_sum(losses, counted),
        {
            "loss": counted_mean(losses, counted),
            "kl": counted_mean(kl, counted),
            "chosen_reward": counted_mean(rewards, counted * desirable),
            "reject_reward": counted_mean(rewards, counted * ~desirable),
            "auc": Ranking(rewards, desirable, counted),
        },
    )
