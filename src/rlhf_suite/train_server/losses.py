"""The named losses of the protocol, which are losses of the suite; each is a sum over positions, never a mean.

    name                 loss of position t, rho_t = p / q of the target, sg = stop-gradient
    cross_entropy        -w_t log p; w_t may be negative
    importance_sampling  -rho_t A_t
    ppo                  -min(rho_t A_t, clip(rho_t, low, high) A_t)
    cispo                -sg(clip(rho_t, low, high)) A_t log p
    gspo                 ppo's with s p / sg(p), s = sg(geometric mean of rho over sequence_ratio_mask)
    dro                  -A_t log p + beta / 2 (log p - log q)^2

Their settings (loss_fn_config) are clip_low_threshold and clip_high_threshold for low and high, and beta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.rl.primitives import CROSS_ENTROPY, LossRequest
from rlhf_suite.serving.http_server import BadRequest

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
RATIO_MASK = "sequence_ratio_mask"
# What a sum over positions takes of the suite's terms: no other terms, and weights of 1.
PLAIN = {"loss_agg_mode": "token-mean", "entropy_coef": None, "dual_clip": None}


@dataclass(frozen=True)
class NamedLoss:
    """A loss of the protocol: the numbers of each position that it reads, and its settings with their defaults."""

    name: str
    needs: frozenset[str] = frozenset({"advantages", "logprobs"})
    optional: frozenset[str] = frozenset()
    settings: Mapping[str, float] = field(default_factory=dict)

    @property
    def reads(self) -> frozenset[str]:
        """Return all numbers that a datum may have."""
        return self.needs | self.optional

    def request(self, given: Mapping[str, float | str]) -> LossRequest:
        """Return what the ranks are asked for.

        Raises:
            BadRequest: a setting is not one of this loss, or has a wrong value.
        """
        if unknown := sorted({*given} - {*self.settings}):
            known = f"It has {', '.join(self.settings)}" if self.settings else "It has none"
            raise BadRequest(f"loss_fn_config: {self.name} has no setting {unknown[0]}. {known}")
        values: dict[str, float] = {**self.settings}
        for key, value in given.items():
            if isinstance(value, str) or not np.isfinite(value) or value < 0:
                raise BadRequest(f"loss_fn_config: {key}={spell(value)} is not a number of at least 0")
            values[key] = float(value)
        changes: dict[str, Any] = {**PLAIN}
        if CLIP.keys() <= values.keys():
            low, high = (values[key] for key in CLIP)
            if not low <= 1 <= high:
                raise BadRequest(f"loss_fn_config: the clip from {low:g} to {high:g} does not contain 1")
            changes["eps_clip_low_high"] = [1 - low, high - 1]
        if "beta" in values:
            changes["dro_beta"] = values["beta"]
        return LossRequest(self.name, 0.0, None, changes, 1.0)

    def mask(self, follows: NDArray[np.bool_], numbers: Mapping[str, NDArray[Any]], where: str) -> NDArray[np.bool_]:
        """Return the positions that count, [N]: those whose target is the next token, and of these in gspo those of the
        sequence's ratio.

        Raises:
            BadRequest: a position that would not count has a gradient.
        """
        trained = numbers.get("weights", np.ones(len(follows))) if self.name == CROSS_ENTROPY else numbers["advantages"]
        if self.name == "dro":
            trained = np.ones(len(follows))
        if (bad := ~follows & (trained != 0)).any():
            raise BadRequest(
                f"{where}: the target at position {int(bad.argmax())} is not the next input token, and it is trained "
                "on. This server trains on the next token: give weight or advantage 0 there"
            )
        if RATIO_MASK not in numbers:
            return follows
        counted = follows & (numbers[RATIO_MASK] != 0)
        if (bad := ~counted & (trained != 0)).any():
            raise BadRequest(
                f"{where}: position {int(bad.argmax())} has an advantage, but it is not in {RATIO_MASK}. Give 0 there"
            )
        return counted


POLICY = frozenset({"advantages", "logprobs"})
LOSSES = {
    loss.name: loss
    for loss in (
        NamedLoss(CROSS_ENTROPY, frozenset(), frozenset({"weights"})),
        NamedLoss("importance_sampling"),
        NamedLoss("ppo", settings=CLIP),
        NamedLoss("cispo", settings=CLIP),
        NamedLoss("gspo", POLICY | {RATIO_MASK}, settings=CLIP),
        NamedLoss("dro", settings={"beta": 0.05}),
    )
}
UNPUBLISHED = "stable_reinforce"


def named_loss(name: str) -> NamedLoss:
    """Return the loss with a name; raise BadRequest if there is none."""
    if name == UNPUBLISHED:
        raise BadRequest(
            f"loss_fn={name}: its formula is not published, so this server does not have it. Choose another one, such "
            "as loss_fn=importance_sampling or ppo"
        )
    if name not in LOSSES:
        raise BadRequest(f"loss_fn={name}: there is no such loss. There are {', '.join(LOSSES)}")
    return LOSSES[name]
