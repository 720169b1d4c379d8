"""`algo` of the supervised and preference tasks: which loss, and its constants."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite import registry
from rlhf_suite.config.flags import flag


@dataclass
class RMAlgoConfig:
    """The reward model's loss"""

    loss: str = flag("sigmoid", "Loss of a pair", algorithms=registry.reward_loss)


@dataclass
class DPOAlgoConfig:
    """The preference loss"""

    loss: str = flag("sigmoid", "Loss of a pair", algorithms=registry.preference_loss)
    beta: float = flag(0.1, "Strength of the pull to the reference; simpo: scale; orpo: weight of the odds ratio", gt=0)
    label_smoothing: float = flag(0.0, "Share of labels taken to be wrong (cDPO)", ge=0, lt=0.5)
    nll_loss_coef: float = flag(0.0, "Weight of the chosen answer's mean token loss", ge=0)
    simpo_gamma: float = flag(0.5, "Target margin of simpo", ge=0)

    def needs(self, need: str) -> bool:
        """Return whether the loss needs the reference model, or the loss of the chosen answer beside it."""
        return registry.preference_loss.needs(self.loss, need)


@dataclass
class KTOAlgoConfig:
    """The loss of single answers, desirable or not"""

    loss: str = flag(
        "kto",
        "Where the KL reference point comes from: mismatched answers, or (vanilla) the other class",
        choices=("kto", "vanilla"),
    )
    beta: float = flag(0.1, "Strength of the pull to the reference", gt=0)
    desirable_loss_weight: float = flag(1.0, "Weight of desirable answers", ge=0)
    undesirable_loss_weight: float = flag(1.0, "Weight of undesirable answers", ge=0)


@dataclass
class PRMAlgoConfig:
    """What stands for the reward of a step"""

    placeholder_token: str = flag(
        "<|reward|>", "The token in the text that stands for the reward of the step before it"
    )
    reward_tokens: list[str] | None = flag(
        None, "Tokens between which a reward is chosen, best first; null: the whole vocabulary"
    )


@dataclass
class DistillAlgoConfig:
    """How far the student is from its teacher"""

    kd_coef: float = flag(0.4, "Weight of the divergence; the rest is that of the loss on the data", ge=0, le=1)
    divergence: str = flag(
        "forward_kl", "How far the student's distribution is from the teacher's", algorithms=registry.divergence
    )
    temperature: float = flag(1.0, "Both distributions are softmax(logits / temperature)", gt=0)
    top_k: int | None = flag(
        None, "The teacher's likeliest tokens, and one bucket for all others; null: the whole vocabulary", ge=1
    )
