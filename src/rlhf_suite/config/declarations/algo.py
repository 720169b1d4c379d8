"""`algo`: advantages, the KL term, distillation and filtering of RL; the losses of the other tasks."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite import registry
from rlhf_suite.config.declarations.conditions import (
    Condition,
    Need,
    algorithm_needs,
    algorithm_reads,
    is_above,
    is_not,
    is_null,
    is_positive,
    is_set,
    is_true,
)
from rlhf_suite.config.declarations.flags import FIXED, flag, group
from rlhf_suite.config.declarations.sections import Section
from rlhf_suite.config.declarations.task_groups import BY_PREFERENCE, RL

IS_LEVELS = ("off", "token", "seq", "geo")
CORRECTED = is_not(".is_correction_level", "off", "token")
FILTERED = is_true(".dynamic_filtering_enable")
OWN = "<file.py>:<function>"
LEARNS_FROM_SCORES = Condition(
    "algo.advantage.estimator",
    lambda name: registry.estimator.needs(name, "rewards"),
    " learns from scores",
    "",
    " to learn from scores",
)
ANOTHER_ESTIMATOR = "choose another estimator"
OF_TWO_TERMS = Need(
    is_positive(".nll_loss_coef", "1"),
    "it is one of two terms; the other is the loss of the chosen answer",
    at=algorithm_needs("", registry.preference_loss, "chosen_loss"),
)
LOSS_OF_KTO = (
    "What the KL reference point is estimated from: mismatched answers, or (vanilla) answers of the other class"
)


def of_estimator(flag: str, why: str) -> Need:
    """Return the need of a flag that only some estimators read."""
    return Need(algorithm_reads(".estimator", registry.estimator, flag), f"this estimator {why}")


@dataclass
class AdvantageConfig:
    """Advantages"""

    estimator: str = flag(
        "gae",
        algorithms=registry.estimator,
        resume=FIXED,
        needs=(
            Need(
                is_above("rollout.n_samples_per_prompt", 1, "8"),
                "it compares the samples of a prompt",
                algorithm_needs("", registry.estimator, "groups"),
                fix=f"write rollout.n_samples_per_prompt=8, or {ANOTHER_ESTIMATOR}",
            ),
            Need(
                is_positive("algo.distill.coef", "1"),
                "it learns from a teacher",
                algorithm_needs("", registry.estimator, "teacher"),
                fix=f"write algo.distill.coef=1, or {ANOTHER_ESTIMATOR}",
            ),
        ),
    )
    """Advantage estimator: what becomes of rewards"""
    gamma: float = flag(1.0, "Discount per model token", ge=0, le=1, needs=of_estimator("gamma", "does not discount"))
    lambd: float = flag(1.0, "GAE lambda", ge=0, le=1, needs=of_estimator("lambd", "has no lambda"))
    no_std_norm: bool = flag(False, "Whitening subtracts the mean only")
    reward_parts: list[str] = flag([])
    """The parts of the reward that are standardised one by one, by the names of their metrics without reward/: named
    parts of a reward file, <source>/mean of reward.sources, overlong_penalty and the like"""
    reward_part_weights: list[float] | None = flag(None, "What each of reward_parts counts; null: 1", ge=0)
    pass_k: int = flag(4, "k of the largest reward of k samples, or pass@k", ge=2)
    clip_range: list[float] | None = flag(None)
    """Each token's advantage is clamped to [low, high], after whitening and the teacher's term; null: off"""
    is_correction_level: str = flag("off", choices=IS_LEVELS)
    """Correct for the difference of engine and trainer: per token, by keeping or dropping whole sequences (seq), or
    with one weight per sequence (geo)"""
    is_correction_mode: str = flag("mask", algorithms=registry.correction, when=CORRECTED)
    """What becomes of units outside of the band: drop (mask), or bound the weight (clip)"""
    is_correction_gating: str = flag("ratio", algorithms=registry.gating, when=CORRECTED)
    """What is compared with the band: the ratio or a divergence of the two policies"""
    is_correction_threshold: list[float] = flag([0.5, 5.0], ge=0, when=CORRECTED)
    """The band [low, high], or one upper bound; divergences take one upper bound"""

    def needs(self, need: str) -> bool:
        """Return whether the estimator needs rewards, values, a greedy sample, groups of samples, a teacher, or
        the entropies of tokens."""
        return registry.estimator.needs(self.estimator, need)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The numbers of samples that the estimator needs, by the names that rewards and agents give them."""
        return registry.estimator.numbers(self.estimator) + self.parts

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the reward that the estimator reads in place of the whole."""
        return tuple(self.reward_parts) if self.needs("parts") else ()


@dataclass
class KLConfig:
    """KL to the reference policy"""

    init_coef: float = flag(0.01, "Coefficient beta; 0: there is no reference model", ge=0)
    estimator: str = flag("k1", algorithms=registry.kl_estimator, when=is_positive(".init_coef"))
    """Estimator of Schulman's note on approximating KL"""
    use_loss: bool = flag(
        False,
        needs=Need(is_positive(".init_coef", "0.01"), "there is no reference, and so no KL to make a loss of"),
    )
    """KL as a loss term instead of a per-token reward"""
    unbiased_gradient: bool = flag(False, when=is_true(".use_loss"))
    """The estimator's value, and the gradient of importance-weighted k2, which is unbiased"""
    target: float | None = flag(
        None,
        gt=0,
        resume=FIXED,
        needs=Need(is_positive(".init_coef", "0.01"), "there is no reference, and so no KL to control"),
    )
    """The KL that the adaptive controller aims at; null: beta is fixed"""
    horizon: int = flag(10000, ge=1, when=is_set(".target", "<number>"))
    """Horizon of the adaptive controller in samples"""


@dataclass
class DistillTermConfig:
    """On-policy distillation: a teacher judges every token that the policy samples"""

    coef: float = flag(0.0, ge=0)
    """Weight of log p(teacher) - log p(policy) of a sampled token in its advantage, beside what the estimator makes of
    rewards; 0: there is no teacher"""


@dataclass
class AlgoConfig(Section):
    """The algorithm: advantages, KL and filters of task=ppo, or the loss of the task"""

    advantage: AdvantageConfig = group(AdvantageConfig, tasks=RL)
    kl: KLConfig = group(KLConfig, tasks=RL)
    distill: DistillTermConfig = group(DistillTermConfig, tasks=RL)
    dynamic_filtering_enable: bool = flag(
        False,
        needs=(
            Need(is_above("rollout.n_samples_per_prompt", 1, "8"), "it compares the samples of a prompt"),
            Need(LEARNS_FROM_SCORES, "it drops groups by their scores"),
        ),
        tasks=RL,
    )
    """Train only on groups whose scores differ; sample until a step has rollout.batch_size of them"""
    dynamic_filtering_range: list[float] = flag([0.0, 1.0], when=FILTERED, tasks=RL)
    """A group's mean score must be strictly between these two"""
    dynamic_filtering_min_std: float = flag(0.0, ge=0, when=FILTERED, tasks=RL)
    """The deviation of a group's scores must be above this"""
    dynamic_filtering_max_rounds: int = flag(
        10, ge=1, when=FILTERED | is_set(".group_filter", OWN) | is_set(".prompt_filter", OWN), tasks=RL
    )
    """Rounds of sampling per step at most; after them the step trains on the groups that it has"""
    group_filter: str | None = flag(None, algorithms=registry.group_filter, when=is_null("rollout.replay"), tasks=RL)
    """A function of your own, file.py:function, that says why a group is not trained on, or None for one that is;
    others are sampled in place of those that are left out"""
    prompt_filter: str | None = flag(None, algorithms=registry.prompt_filter, when=is_null("rollout.replay"), tasks=RL)
    """A function of your own, file.py:function, that says which prompts of a round are sampled, by what earlier groups
    of each scored"""
    mismatch_max: float | None = flag(None, gt=0, tasks=RL)
    """Stop when the mean |log-prob difference| of engine and trainer passes this, in nats; null: 1e-4 in fp32 (1e-2 on
    GPUs), 0.1 in bf16"""
    loss: str = flag(
        "sigmoid",
        "Loss of a pair",
        tasks=("rm", "kto", *BY_PREFERENCE),
        defaults={"kto": "kto"},
        of_tasks={
            "rm": {"algorithms": registry.reward_loss},
            "kto": {"listed": ("kto", "vanilla"), "help": LOSS_OF_KTO},
            **{task: {"algorithms": registry.preference_loss, "needs": OF_TWO_TERMS} for task in BY_PREFERENCE},
        },
    )
    beta: float = flag(
        0.1, gt=0, tasks=(*BY_PREFERENCE, "kto"), of_tasks={"kto": {"help": "How strongly the reference is preferred"}}
    )
    """How strongly the reference is preferred; simpo: scale of the margin; orpo: weight of the odds ratio"""
    label_smoothing: float = flag(
        0.0,
        ge=0,
        lt=0.5,
        needs=Need(
            algorithm_reads(".loss", registry.preference_loss, "label_smoothing"),
            "this loss takes every label to be right",
        ),
        tasks=BY_PREFERENCE,
    )
    """Share of labels that are taken to be wrong (cDPO)"""
    nll_loss_coef: float = flag(0.0, "Weight of the mean token loss of the chosen answer", ge=0, tasks=BY_PREFERENCE)
    simpo_gamma: float = flag(0.5, "Target margin of simpo", ge=0, tasks=BY_PREFERENCE)
    desirable_loss_weight: float = flag(1.0, "Weight of desirable answers", ge=0, tasks=("kto",))
    undesirable_loss_weight: float = flag(1.0, "Weight of undesirable answers", ge=0, tasks=("kto",))
    placeholder_token: str = flag("<|reward|>", tasks=("prm",))
    """The token in the text that stands for the reward of the step before it"""
    reward_tokens: list[str] | None = flag(None, tasks=("prm",))
    """The tokens that a reward is chosen from, the best first; null: the whole vocabulary"""
    kd_coef: float = flag(
        0.4, "Weight of the divergence; the loss on the data has the rest", ge=0, le=1, tasks=("distill",)
    )
    divergence: str = flag("forward_kl", algorithms=registry.divergence, tasks=("distill",))
    """How far the student's distribution is from the teacher's"""
    temperature: float = flag(1.0, "Both distributions are softmax(logits / temperature)", gt=0, tasks=("distill",))
    top_k: int | None = flag(None, ge=1, tasks=("distill",))
    """Compare the teacher's k likeliest tokens and one bucket for all others; null: the whole vocabulary"""

    @property
    def filters(self) -> bool:
        """Whether prompts or groups are left out, and a step samples until it has enough groups."""
        return self.dynamic_filtering_enable or self.group_filter is not None or self.prompt_filter is not None

    def needs(self, need: str) -> bool:
        """Return whether the preference loss needs the reference model, or the loss of the chosen answer beside it."""
        return registry.preference_loss.needs(self.loss, need)
