"""`algo` of the supervised and preference tasks: which loss, and its constants."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import flag

REWARD_LOSSES = ("sigmoid", "logexp")
PREFERENCE_LOSSES = ("sigmoid", "ipo", "hinge", "simpo", "orpo")
REFERENCE_FREE = ("simpo", "orpo")


@dataclass
class RMAlgoConfig:
    """The reward model's loss"""

    loss: str = flag("sigmoid", "Loss of a pair; sigmoid takes margins", choices=REWARD_LOSSES)


@dataclass
class DPOAlgoConfig:
    """The preference loss"""

    loss: str = flag("sigmoid", "Loss of a pair; simpo and orpo have no reference", choices=PREFERENCE_LOSSES)
    beta: float = flag(0.1, "Strength of the pull to the reference; simpo: scale; orpo: weight of the odds ratio", gt=0)
    label_smoothing: float = flag(0.0, "Share of labels taken to be wrong (sigmoid: cDPO)", ge=0, lt=0.5)
    nll_loss_coef: float = flag(0.0, "Weight of the chosen answer's mean token loss", ge=0)
    simpo_gamma: float = flag(0.5, "Target margin of simpo", ge=0)
