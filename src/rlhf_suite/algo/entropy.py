"""The coefficient of the entropy bonus, steered so that the entropy of the policy stays above a target."""

from __future__ import annotations

import math


class AdaptiveEntropy:
    """Gives a bonus while the entropy is at or below a target, and more of it the longer that lasts (Skywork-OR1, He et
    al. 2025, arXiv:2505.22312, "adaptive entropy control").

        alpha_k = c_k where e_k <= target, else 0
        c_{k+1} = c_k + delta where e_k < target,    c_k - delta where e_k > target

    e_k is the mean entropy of the policy at the tokens of the rollout, before step k trains on it, and alpha_k the
    coefficient of that step. c stays within [0, `most`]: the paper gives no bounds, and below 0 the bonus would be a
    penalty as soon as the entropy falls below the target again.
    """

    def __init__(self, coef: float, target: float, delta: float, most: float) -> None:
        self.coef = coef
        self.target = target
        self.delta = delta
        self.most = most

    def update(self, entropy: float) -> float:
        """Take note of the entropy before a step, in nats, and return the coefficient of the bonus in this step."""
        assert math.isfinite(entropy), entropy
        alpha = self.coef if entropy <= self.target else 0.0
        if entropy != self.target:
            moved = self.coef + math.copysign(self.delta, self.target - entropy)
            self.coef = min(max(moved, 0.0), self.most)
        return alpha

    def state_dict(self) -> dict[str, float]:
        """Return c, for a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint's c."""
        self.coef = state["coef"]
