"""`algo`: advantages, the KL term, distillation and filtering of RL; the losses of the other tasks."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite import registry
from rlhf_suite.config.flags import FIXED, flag, group, is_not, is_null, is_positive, is_set, is_true

IS_LEVELS = ("off", "token", "seq", "geo")
IS_MODES = ("mask", "clip")
CORRECTED = is_not(".is_correction_level", "off", "token")
FILTERED = is_true(".dynamic_filtering_enable")
OWN = "<file.py>:<function>"
IS_GATINGS = ("ratio", "binary_kl", "tv")


@dataclass
class AdvantageConfig:
    """Advantages"""

    estimator: str = flag(
        "gae", "Advantage estimator: what becomes of rewards", algorithms=registry.estimator, resume=FIXED
    )
    gamma: float = flag(1.0, "Discount per model token", ge=0, le=1, strict="this estimator does not discount")
    lambd: float = flag(1.0, "GAE lambda", ge=0, le=1, strict="this estimator has no lambda")
    no_std_norm: bool = flag(False, "Whitening subtracts the mean only")
    clip_range: list[float] | None = flag(
        None, "Each token's advantage is clamped to [low, high], after whitening and the teacher's term; null: off"
    )
    is_correction_level: str = flag(
        "off",
        "Correct for the difference of engine and trainer: per token, by keeping or dropping whole sequences (seq), or "
        "with one weight per sequence (geo)",
        choices=IS_LEVELS,
    )
    is_correction_mode: str = flag(
        "mask", "Outside the band: drop (mask), or bound the weight (clip)", choices=IS_MODES, when=CORRECTED
    )
    is_correction_gating: str = flag(
        "ratio",
        "What is compared with the band: the ratio or a divergence of the two policies",
        choices=IS_GATINGS,
        when=CORRECTED,
    )
    is_correction_threshold: list[float] = flag(
        [0.5, 5.0], "The band [low, high], or one upper bound; divergences take one upper bound", ge=0, when=CORRECTED
    )

    def needs(self, need: str) -> bool:
        """Return whether the estimator needs rewards, values, a greedy sample, groups of samples, a teacher, or
        the entropies of tokens."""
        return registry.estimator.needs(self.estimator, need)


@dataclass
class KLConfig:
    """KL to the reference policy"""

    init_coef: float = flag(0.01, "Coefficient beta; 0: there is no reference model", ge=0)
    estimator: str = flag(
        "k1",
        "Estimator of Schulman's note on approximating KL",
        algorithms=registry.kl_estimator,
        when=is_positive(".init_coef"),
    )
    use_loss: bool = flag(
        False,
        "KL as a loss term instead of a per-token reward",
        when=is_positive(".init_coef", "0.01"),
        strict="there is no reference, and so no KL to make a loss of",
    )
    unbiased_gradient: bool = flag(
        False,
        "The estimator's value, and the gradient of importance-weighted k2, which is unbiased",
        when=is_true(".use_loss"),
    )
    target: float | None = flag(
        None,
        "The KL that the adaptive controller aims at; null: beta is fixed",
        gt=0,
        resume=FIXED,
        when=is_positive(".init_coef", "0.01"),
        strict="there is no reference, and so no KL to control",
    )
    horizon: int = flag(
        10000, "Horizon of the adaptive controller in samples", ge=1, when=is_set(".target", "<number>")
    )


@dataclass
class DistillTermConfig:
    """On-policy distillation: a teacher judges every token that the policy samples"""

    coef: float = flag(
        0.0,
        "Weight of log p(teacher) - log p(policy) of a sampled token in its advantage, beside what the estimator makes "
        "of rewards; 0: there is no teacher",
        ge=0,
    )


@dataclass
class AlgoConfig:
    """The algorithm"""

    advantage: AdvantageConfig = group(AdvantageConfig)
    kl: KLConfig = group(KLConfig)
    distill: DistillTermConfig = group(DistillTermConfig)
    dynamic_filtering_enable: bool = flag(
        False, "Train only on groups whose scores differ; sample until a step has rollout.batch_size of them"
    )
    dynamic_filtering_range: list[float] = flag(
        [0.0, 1.0], "A group's mean score must be strictly between these two", when=FILTERED
    )
    dynamic_filtering_min_std: float = flag(
        0.0, "The deviation of a group's scores must be above this", ge=0, when=FILTERED
    )
    dynamic_filtering_max_rounds: int = flag(
        10,
        "Rounds of sampling per step at most; after them the step trains on the groups that it has",
        ge=1,
        when=FILTERED | is_set(".group_filter", OWN) | is_set(".prompt_filter", OWN),
    )
    group_filter: str | None = flag(
        None,
        "A function of your own, file.py:function, that says why a group is not trained on, or None for one that is; "
        "others are sampled in place of those that are left out",
        algorithms=registry.group_filter,
        when=is_null("rollout.replay"),
    )
    prompt_filter: str | None = flag(
        None,
        "A function of your own, file.py:function, that says which prompts of a round are sampled, by what earlier "
        "groups of each scored",
        algorithms=registry.prompt_filter,
        when=is_null("rollout.replay"),
    )
    mismatch_max: float | None = flag(
        None,
        "Stop when the mean |log-prob difference| of engine and trainer passes this, in nats; null: 1e-4 in fp32 "
        "(1e-2 on GPUs), 0.1 in bf16",
        gt=0,
    )

    @property
    def filters(self) -> bool:
        """Whether prompts or groups are left out, and a step samples until it has enough groups."""
        return self.dynamic_filtering_enable or self.group_filter is not None or self.prompt_filter is not None


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
