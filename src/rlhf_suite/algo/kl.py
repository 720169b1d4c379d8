"""KL to the reference policy: the per-token estimators and the controllers of its coefficient."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from rlhf_suite.config.declarations.algo import KLConfig
from rlhf_suite.errors import UserError
from rlhf_suite.registry import kl_estimator
from rlhf_suite.shapes import is_like

MAX_KL = 10.0
MAX_LOG_WEIGHT = math.log(10.0)
MAX_RELATIVE_ERROR = 0.2


@kl_estimator(needs=("reward",))
def k1(log_ratio: Tensor) -> Tensor:
    """The log-ratio l itself: unbiased, and below 0 for half of the tokens. As a loss its gradient has mean zero."""
    return log_ratio


@kl_estimator()
def k2(log_ratio: Tensor) -> Tensor:
    """l^2 / 2: biased, never below 0; its gradient is that of the reverse KL."""
    return log_ratio.square() / 2


@kl_estimator()
def k3(log_ratio: Tensor) -> Tensor:
    """exp(-l) - 1 + l: unbiased and never below 0; its gradient is that of the forward KL.

    l is at least -10, else a token that the reference likes far better would turn the gradient into 0 x inf = NaN.
    """
    bounded = log_ratio.clamp(min=-MAX_KL)
    # expm1, because exp(-l) - 1 loses all digits of a small l; the clamp, because even its last digit may be wrong.
    return (torch.expm1(-bounded) + bounded).clamp(min=0)


def estimate_kl(log_probs: Tensor, reference_log_probs: Tensor, estimator: str) -> Tensor:
    """Return the estimate of KL(pi || pi_ref) at each sampled token (Schulman, "Approximating KL Divergence", 2020).

    The estimators read l = log pi - log pi_ref; the result is clamped to [-10, 10]. Any shape; the gradient flows
    through `log_probs`. As a loss, k2 and k3 pull towards the reference; k1 belongs in the reward.
    """
    assert log_probs.shape == reference_log_probs.shape, (log_probs.shape, reference_log_probs.shape)
    kl: Tensor = kl_estimator.load(estimator)(log_probs - reference_log_probs)
    if not is_like(kl, log_probs):
        raise kl_estimator.wrong_result(estimator, kl, f"a tensor with the shape of log_ratio, {[*log_probs.shape]}")
    return kl.clamp(-MAX_KL, MAX_KL)


def estimate_unbiased_kl(
    log_probs: Tensor, reference_log_probs: Tensor, old_log_probs: Tensor, estimator: str
) -> Tensor:
    """The value of `estimate_kl`, with an unbiased gradient of KL(pi || pi_ref) under samples of pi_old.

    The gradient is w l grad log pi, that of w k2, with l = log pi - log pi_ref in [-10, 10] and w = min(pi / pi_old,
    10) held constant. Its mean is E_pi[l grad log pi], the gradient of the reverse KL, where that of k1 is 0 and that
    of k3 the forward KL's (Tang and Munos 2025; DeepSeek-V3.2 2025). Any shape.
    """
    value = estimate_kl(log_probs, reference_log_probs, estimator).detach()
    weight = (log_probs - old_log_probs).detach().clamp(max=MAX_LOG_WEIGHT).exp()
    pull = weight * (log_probs - reference_log_probs).detach().clamp(-MAX_KL, MAX_KL)
    return value + pull * (log_probs - log_probs.detach())


class KLController(Protocol):
    """Holds the coefficient beta of the KL penalty over a run."""

    @property
    def coef(self) -> float:
        """Beta now."""
        ...

    def update(self, kl: float, num_samples: int) -> None:
        """Take note of the mean KL per token of a step's `num_samples` sequences."""
        ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKL:
    """Beta stays `algo.kl.init_coef`."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, num_samples: int) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, float]:
        """Nothing: a resumed run takes beta from its command line."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing to restore."""


class AdaptiveKL:
    """Steers beta so that the mean KL stays near a target (Ziegler et al. 2019, section 2.2).

    e = clip(KL / target - 1, -0.2, 0.2);    beta <- beta (1 + e num_samples / horizon)
    """

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        """One step of the controller; refuses steps so large that beta could pass zero."""
        assert math.isfinite(kl), kl
        if MAX_RELATIVE_ERROR * num_samples >= self.horizon:
            raise UserError(
                f"algo.kl.horizon={self.horizon} is too short for {num_samples} samples a step: beta could fall to 0. "
                f"Set algo.kl.horizon above {int(MAX_RELATIVE_ERROR * num_samples)}, better {10 * num_samples}"
            )
        error = min(max(kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.coef *= 1 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Beta, for a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint's beta."""
        self.coef = state["coef"]


def make_kl_controller(config: KLConfig) -> KLController:
    """Adaptive when `algo.kl.target` is set, else fixed."""
    if config.target is None:
        return FixedKL(config.init_coef)
    return AdaptiveKL(config.init_coef, config.target, config.horizon)
