"""`algo` of reinforcement learning: advantages, the KL term, distillation, filtering."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_suite import registry
from rlhf_suite.config.flags import FIXED, flag, group, is_not, is_positive, is_set, is_true
from rlhf_suite.config.problems import Problem, rule
from rlhf_suite.registry import aggregation, is_own, policy_loss

if TYPE_CHECKING:
    from rlhf_suite.config.runs import PPORun


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
    gamma: float = flag(1.0, "Discount per model token", ge=0, le=1, strict="this estimator does not discount")
    lambd: float = flag(1.0, "GAE lambda", ge=0, le=1, strict="this estimator has no lambda")
    no_std_norm: bool = flag(False, "Whitening subtracts the mean only")
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
        """Return whether the estimator needs rewards, values, a greedy sample, groups of samples, or a teacher."""
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
        when=FILTERED,
    )
    mismatch_max: float | None = flag(
        None,
        "Stop when the mean |log-prob difference| of engine and trainer passes this, in nats; null: 1e-4 in fp32 "
        "(1e-2 on GPUs), 0.1 in bf16",
        gt=0,
    )


CORRECTION = "algo.advantage.is_correction"


@rule
def aggregation_fits(run: PPORun) -> Iterator[Problem]:
    loss, mode = run.actor.policy_loss_type, run.actor.loss_agg_mode
    if policy_loss.needs(loss, "sequences") and not (is_own(mode) or aggregation.needs(mode, "sequences")):
        what = f"{mode} would weigh sequences by their tokens, and the ratio of {loss} is one of whole sequences"
        yield Problem("actor.loss_agg_mode", what, f"write actor.loss_agg_mode={aggregation.that_need('sequences')[0]}")


@rule
def correction_band_is_one(run: PPORun) -> Iterator[Problem]:
    config = run.algo.advantage
    if config.is_correction_level == "off":
        return
    given, key = config.is_correction_threshold, f"{CORRECTION}_threshold"
    if config.is_correction_gating != "ratio" and len(given) != 1:
        what = f"{given}: a divergence has no lower bound"
        yield Problem(key, what, f"write '{key}=[0.05]', or {CORRECTION}_gating=ratio")
    elif len(given) not in (1, 2) or given[0] >= [*given, float("inf")][1]:
        what = f"{given} is neither [low, high] with low < high nor [high]"
        yield Problem(key, what, f"write '{key}=[0.5,5.0]'")


@rule
def correction_fits(run: PPORun) -> Iterator[Problem]:
    config, loss = run.algo.advantage, run.actor.policy_loss_type
    level, mode, gating = config.is_correction_level, config.is_correction_mode, config.is_correction_gating
    if level == "off":
        return
    if mode == "clip" and gating != "ratio":
        what = f"a weight cannot be bounded by a band of another quantity ({CORRECTION}_gating={gating})"
        yield Problem(f"{CORRECTION}_mode", what, f"write {CORRECTION}_mode=mask, or {CORRECTION}_gating=ratio")
    elif mode == "clip" and level == "seq":
        what = "level seq keeps or drops whole sequences, so there is no single weight to bound"
        yield Problem(f"{CORRECTION}_mode", what, f"write {CORRECTION}_mode=mask, or {CORRECTION}_level=geo")
    if policy_loss.needs(loss, "sequences") and level == "token":
        what = f"token would weigh single tokens, and the ratio of {loss} is one of whole sequences"
        yield Problem(f"{CORRECTION}_level", what, f"write {CORRECTION}_level=geo")


@rule
def filtering_can_work(run: PPORun) -> Iterator[Problem]:
    algo = run.algo
    if not algo.dynamic_filtering_enable:
        return
    if run.rollout.n_samples_per_prompt < 2:
        what = "dynamic filtering compares the samples of a prompt, and there is only one"
        yield Problem("rollout.n_samples_per_prompt", what, "write rollout.n_samples_per_prompt=8")
    band = algo.dynamic_filtering_range
    if len(band) != 2 or band[0] >= band[1]:
        fix = "write 'algo.dynamic_filtering_range=[0,1]'"
        yield Problem("algo.dynamic_filtering_range", f"{band} is not [low, high] with low < high", fix)


@rule
def warm_up_ends(run: PPORun) -> Iterator[Problem]:
    steps, frozen = run.train.max_steps, run.critic.freezing_steps
    if steps is not None and run.algo.advantage.needs("values") and frozen >= steps:
        what = f"{frozen} leaves no step of train.max_steps={steps} for the policy"
        yield Problem("critic.freezing_steps", what, f"write critic.freezing_steps={steps // 10}")


@rule
def group_is_large_enough(run: PPORun) -> Iterator[Problem]:
    estimator = run.algo.advantage.estimator
    if run.algo.advantage.needs("groups") and run.rollout.n_samples_per_prompt < 2:
        what = f"algo.advantage.estimator={estimator} compares the samples of a prompt, and there is only one"
        yield Problem("rollout.n_samples_per_prompt", what, "write rollout.n_samples_per_prompt=8")


@rule
def kl_pulls(run: PPORun) -> Iterator[Problem]:
    kl, samples = run.algo.kl, run.rollout.batch_size * run.rollout.n_samples_per_prompt
    pulls = kl.unbiased_gradient or not registry.kl_estimator.needs(kl.estimator, "reward")
    if kl.use_loss and kl.init_coef > 0 and not pulls:
        what = f"{kl.estimator} as a loss has a gradient of mean zero, so it has no effect on average"
        fix = "write algo.kl.estimator=k3, algo.kl.unbiased_gradient=true or algo.kl.use_loss=false"
        yield Problem("algo.kl.estimator", what, fix)
    if kl.target is not None and kl.horizon <= 0.2 * samples:
        what = f"{kl.horizon} is too short for {samples} samples per step: the coefficient could fall to 0"
        yield Problem("algo.kl.horizon", what, f"write algo.kl.horizon={10 * samples}")


@rule
def teacher_is_there(run: PPORun) -> Iterator[Problem]:
    if run.algo.distill.coef > 0 and run.teacher.model_name_or_path is None:
        key = "teacher.model_name_or_path"
        yield Problem(key, "algo.distill needs a teacher, and none is named", f"add {key}=<HF folder or hub name>")
    if run.algo.distill.coef == 0 and run.algo.advantage.needs("teacher"):
        what = f"0 means no teacher, and estimator={run.algo.advantage.estimator} learns from one"
        yield Problem("algo.distill.coef", what, "write algo.distill.coef=1, or another estimator")
    if run.algo.dynamic_filtering_enable and not run.algo.advantage.needs("rewards"):
        key = "algo.dynamic_filtering_enable"
        what = f"drops groups by their scores, and estimator={run.algo.advantage.estimator} learns nothing from scores"
        yield Problem(key, what, f"write {key}=false")
