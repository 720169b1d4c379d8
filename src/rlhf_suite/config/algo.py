"""`algo`: advantage estimation and the KL term."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite import registry
from rlhf_suite.config.flags import FIXED, flag, group, is_not, is_positive, is_set, is_true

IS_LEVELS = ("off", "token", "seq", "geo")
IS_MODES = ("mask", "clip")
CORRECTED = is_not(".is_correction_level", "off", "token")
FILTERED = is_true(".dynamic_filtering_enable")
IS_GATINGS = ("ratio", "binary_kl", "tv")


@dataclass
class AdvantageConfig:
    """Advantages"""

    estimator: str = flag(
        "gae", "Advantage estimator: what becomes of rewards", algorithms=registry.estimator, resume=FIXED
    )
    gamma: float = flag(1.0, "Discount per model token", ge=0, le=1)
    lambd: float = flag(1.0, "GAE lambda", ge=0, le=1)
    no_std_norm: bool = flag(False, "Whitening subtracts the mean only")
    is_correction_level: str = flag(
        "off",
        "Correct for what engine and trainer disagree about: per token, whole sequences kept or dropped (seq), or one "
        "weight per sequence (geo)",
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
        """Return whether the estimator needs rewards, values, a greedy sample, groups of samples, or a teacher."""
        return registry.estimator.needs(self.estimator, need)


@dataclass
class KLConfig:
    """KL to the reference policy"""

    init_coef: float = flag(0.01, "Coefficient beta; 0: no reference model at all", ge=0)
    estimator: str = flag(
        "k1",
        "Estimator of Schulman's note on approximating KL",
        algorithms=registry.kl_estimator,
        when=is_positive(".init_coef"),
    )
    use_loss: bool = flag(False, "KL as a loss term instead of a per-token reward")
    unbiased_gradient: bool = flag(
        False,
        "The estimator's value, and the gradient of importance-weighted k2, which is unbiased",
        when=is_true(".use_loss"),
    )
    target: float | None = flag(None, "Adaptive controller: the KL to hold; null: beta is fixed", gt=0, resume=FIXED)
    horizon: int = flag(10000, "Adaptive controller: horizon in samples", ge=1, when=is_set(".target", "<number>"))


@dataclass
class DistillTermConfig:
    """On-policy distillation: a teacher judges every token that the policy samples"""

    coef: float = flag(
        0.0,
        "Weight of log p(teacher) - log p(policy) of a sampled token in its advantage, beside what the estimator makes "
        "of rewards; 0: no teacher at all",
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
        10, "Rounds of sampling per step; then it trains on the groups that it has", ge=1, when=FILTERED
    )
    mismatch_max: float | None = flag(
        None,
        "Stop when the mean |log-prob difference| of engine and trainer passes this, in nats; null: 1e-4 in fp32 "
        "(1e-2 on GPUs), 0.1 in bf16",
        gt=0,
    )
