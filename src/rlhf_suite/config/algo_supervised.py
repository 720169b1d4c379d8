"""`algo` of the supervised and preference tasks: which loss, and its constants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_suite import registry
from rlhf_suite.config.flags import flag
from rlhf_suite.config.problems import Problem, rule

if TYPE_CHECKING:
    from rlhf_suite.config.runs import DPORun, PRMRun


@dataclass
class RMAlgoConfig:
    """The reward model's loss"""

    loss: str = flag("sigmoid", "Loss of a pair", algorithms=registry.reward_loss)


@dataclass
class DPOAlgoConfig:
    """The preference loss"""

    loss: str = flag("sigmoid", "Loss of a pair", algorithms=registry.preference_loss)
    beta: float = flag(
        0.1, "How strongly the reference is preferred; simpo: scale of the margin; orpo: weight of the odds ratio", gt=0
    )
    label_smoothing: float = flag(
        0.0,
        "Share of labels that are taken to be wrong (cDPO)",
        ge=0,
        lt=0.5,
        strict="this loss takes every label to be right",
    )
    nll_loss_coef: float = flag(0.0, "Weight of the mean token loss of the chosen answer", ge=0)
    simpo_gamma: float = flag(0.5, "Target margin of simpo", ge=0)

    def needs(self, need: str) -> bool:
        """Return whether the loss needs the reference model, or the loss of the chosen answer beside it."""
        return registry.preference_loss.needs(self.loss, need)


@dataclass
class KTOAlgoConfig:
    """The loss of single answers, desirable or not"""

    loss: str = flag(
        "kto",
        "What the KL reference point is estimated from: mismatched answers, or (vanilla) answers of the other class",
        choices=("kto", "vanilla"),
    )
    beta: float = flag(0.1, "How strongly the reference is preferred", gt=0)
    desirable_loss_weight: float = flag(1.0, "Weight of desirable answers", ge=0)
    undesirable_loss_weight: float = flag(1.0, "Weight of undesirable answers", ge=0)


@dataclass
class PRMAlgoConfig:
    """What stands for the reward of a step"""

    placeholder_token: str = flag(
        "<|reward|>", "The token in the text that stands for the reward of the step before it"
    )
    reward_tokens: list[str] | None = flag(
        None, "The tokens that a reward is chosen from, the best first; null: the whole vocabulary"
    )


@dataclass
class DistillAlgoConfig:
    """How far the student is from its teacher"""

    kd_coef: float = flag(0.4, "Weight of the divergence; the loss on the data has the rest", ge=0, le=1)
    divergence: str = flag(
        "forward_kl", "How far the student's distribution is from the teacher's", algorithms=registry.divergence
    )
    temperature: float = flag(1.0, "Both distributions are softmax(logits / temperature)", gt=0)
    top_k: int | None = flag(
        None, "Compare the teacher's k likeliest tokens and one bucket for all others; null: the whole vocabulary", ge=1
    )


@rule
def preference_loss_fits(run: DPORun) -> Iterator[Problem]:
    loss = run.algo.loss
    if run.algo.needs("chosen_loss") and run.algo.nll_loss_coef == 0:
        what = f"algo.loss={loss} is one of two terms; the other, the loss of the chosen answer, is off"
        yield Problem("algo.nll_loss_coef", what, "write algo.nll_loss_coef=1")
    if not run.algo.needs("reference"):
        for key in ("model_name_or_path", "cache_enable", "offload"):
            if getattr(run.ref, key):
                what = f"algo.loss={loss} has no reference"
                yield Problem(
                    f"ref.{key}",
                    what,
                    f"remove it, or write algo.loss={' or '.join(registry.preference_loss.that_need('reference'))}",
                )


@rule
def reward_tokens_differ(run: PRMRun) -> Iterator[Problem]:
    if run.algo.reward_tokens is not None:
        names = run.algo.reward_tokens
        if len(names) < 2 or len(set(names)) < len(names):
            what = f"{', '.join(names) or 'nothing'}: a reward is a choice between two or more tokens that differ"
            yield Problem("algo.reward_tokens", what, "write 'algo.reward_tokens=[+,-]', or null")
