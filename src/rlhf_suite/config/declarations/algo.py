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
    "this loss has a second term, the loss of the chosen answer",
    at=algorithm_needs("", registry.preference_loss, "chosen_loss"),
)
LOSS_OF_KTO = (
    "Answers from which the KL reference point is estimated. kto: mismatched answers; vanilla: those of the other class"
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
    """Advantage estimator: the formula that turns rewards into advantages"""
    gamma: float = flag(1.0, ge=0, le=1, needs=of_estimator("gamma", "does not discount"))
    """Discount factor per model token"""
    lambd: float = flag(1.0, "Lambda of GAE", ge=0, le=1, needs=of_estimator("lambd", "has no lambda"))
    no_std_norm: bool = flag(False)
    """Do not divide advantages by their standard deviation; whitening then only subtracts the mean"""
    reward_parts: list[str] = flag([])
    """Parts of the reward that are standardised separately. A part has the name of its metric without reward/: a named
    part of a reward file, <source>/mean of reward.sources, overlong_penalty and so on"""
    reward_part_weights: list[float] | None = flag(None, "Weight of each entry of reward_parts; null: 1 for each", ge=0)
    pass_k: int = flag(4, "The k of the objective: pass@k, or the largest reward of k samples", ge=2)
    clip_range: list[float] | None = flag(None)
    """Clip the advantage of each token to [low, high], after whitening and after the teacher's term; null: no
    clipping"""
    is_correction_level: str = flag("off", choices=IS_LEVELS)
    """Correct for the difference between the probabilities of engine and trainer. token: one weight per token; seq:
    keep or drop whole sequences; geo: one weight per sequence; off: no correction"""
    is_correction_mode: str = flag("mask", algorithms=registry.correction, when=CORRECTED)
    """What happens to tokens or sequences outside the band. mask: drop them; clip: bound their weight"""
    is_correction_gating: str = flag("ratio", algorithms=registry.gating, when=CORRECTED)
    """Quantity that is compared with the band: the ratio of the two policies, or a divergence between them"""
    is_correction_threshold: list[float] = flag([0.5, 5.0], ge=0, when=CORRECTED)
    """The band [low, high], or a list with only an upper bound. Divergences take only an upper bound"""

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
    """KL penalty against the reference model"""

    init_coef: float = flag(0.01, ge=0)
    """Coefficient beta of the KL penalty; 0: no penalty, and no reference model is loaded"""
    estimator: str = flag("k1", algorithms=registry.kl_estimator, when=is_positive(".init_coef"))
    """KL estimator (J. Schulman, Approximating KL Divergence)"""
    use_loss: bool = flag(
        False,
        needs=Need(is_positive(".init_coef", "0.01"), "without a reference there is no KL to add to the loss"),
    )
    """Add the KL as a term of the loss. false: subtract it from the reward of each token"""
    unbiased_gradient: bool = flag(False, when=is_true(".use_loss"))
    """Use an unbiased gradient of the KL: that of importance-weighted k2. The value is still that of
    algo.kl.estimator"""
    target: float | None = flag(
        None,
        gt=0,
        resume=FIXED,
        needs=Need(is_positive(".init_coef", "0.01"), "without a reference there is no KL to control"),
    )
    """Target KL of the adaptive controller, which changes beta during training; null: beta is fixed"""
    horizon: int = flag(10000, ge=1, when=is_set(".target", "<number>"))
    """Horizon of the adaptive controller, in samples. A larger horizon changes beta more slowly"""


@dataclass
class DistillTermConfig:
    """On-policy distillation: a teacher rates every token that the policy samples"""

    coef: float = flag(0.0, ge=0)
    """Weight of log p(teacher) - log p(policy) of each sampled token. The weighted term is added to the advantage of
    the token; 0: no teacher"""


@dataclass
class AlgoConfig(Section):
    """The algorithm: advantages, KL penalty and filters of task=ppo, or the loss of the task"""

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
    """Train only on groups whose samples have different scores. Sampling continues until a step has rollout.batch_size
    such groups"""
    dynamic_filtering_range: list[float] = flag([0.0, 1.0], when=FILTERED, tasks=RL)
    """Keep a group only if the mean of its scores is strictly between these two numbers"""
    dynamic_filtering_min_std: float = flag(0.0, ge=0, when=FILTERED, tasks=RL)
    """Keep a group only if the standard deviation of its scores is above this number"""
    dynamic_filtering_max_rounds: int = flag(
        10, ge=1, when=FILTERED | is_set(".group_filter", OWN) | is_set(".prompt_filter", OWN), tasks=RL
    )
    """Largest number of sampling rounds in a step. After the last round, the step trains on the groups that were kept;
    if there are none, the run ends"""
    group_filter: str | None = flag(None, algorithms=registry.group_filter, when=is_null("rollout.replay"), tasks=RL)
    """Your own function, file.py:function, that decides whether a group is trained on. It returns None to keep the
    group, or the reason to leave it out. Other groups are sampled to replace the groups that are left out"""
    prompt_filter: str | None = flag(None, algorithms=registry.prompt_filter, when=is_null("rollout.replay"), tasks=RL)
    """Your own function, file.py:function, that chooses the prompts to sample in each round. It gets the scores of the
    earlier groups of each prompt"""
    mismatch_max: float | None = flag(None, gt=0, tasks=RL)
    """Stop the run if the mean |log-prob difference| between engine and trainer exceeds this number, in nats. null:
    1e-4 in fp32 (1e-2 on GPUs), 0.1 in bf16"""
    loss: str = flag(
        "sigmoid",
        "Loss of a pair of answers",
        tasks=("rm", "kto", *BY_PREFERENCE),
        defaults={"kto": "kto"},
        of_tasks={
            "rm": {"algorithms": registry.reward_loss},
            "kto": {"listed": ("kto", "vanilla"), "help": LOSS_OF_KTO},
            **{task: {"algorithms": registry.preference_loss, "needs": OF_TWO_TERMS} for task in BY_PREFERENCE},
        },
    )
    beta: float = flag(
        0.1,
        gt=0,
        tasks=(*BY_PREFERENCE, "kto"),
        of_tasks={"kto": {"help": "How strongly the model is held to the reference"}},
    )
    """How strongly the model is held to the reference: a larger beta keeps it closer. simpo: scale of the margin; orpo:
    weight of the odds-ratio term"""
    label_smoothing: float = flag(
        0.0,
        ge=0,
        lt=0.5,
        needs=Need(
            algorithm_reads(".loss", registry.preference_loss, "label_smoothing"),
            "this loss assumes that every label is right",
        ),
        tasks=BY_PREFERENCE,
    )
    """Assumed share of pairs whose label is wrong (cDPO)"""
    nll_loss_coef: float = flag(0.0, "Weight of the mean token loss of the chosen answer", ge=0, tasks=BY_PREFERENCE)
    simpo_gamma: float = flag(0.5, "Target margin of simpo", ge=0, tasks=BY_PREFERENCE)
    desirable_loss_weight: float = flag(1.0, "Weight of desirable answers", ge=0, tasks=("kto",))
    undesirable_loss_weight: float = flag(1.0, "Weight of undesirable answers", ge=0, tasks=("kto",))
    placeholder_token: str = flag("<|reward|>", tasks=("prm",))
    """Token in the text after each step. The reward of the step is predicted at this token"""
    reward_tokens: list[str] | None = flag(None, tasks=("prm",))
    """Tokens that are possible rewards of a step, the best one first; null: the whole vocabulary"""
    kd_coef: float = flag(
        0.4,
        "Weight of the divergence from the teacher. The loss on the data has the weight 1 - kd_coef",
        ge=0,
        le=1,
        tasks=("distill",),
    )
    divergence: str = flag("forward_kl", algorithms=registry.divergence, tasks=("distill",))
    """Divergence that measures the distance between the distributions of student and teacher"""
    temperature: float = flag(1.0, gt=0, tasks=("distill",))
    """Temperature of both distributions: softmax(logits / temperature)"""
    top_k: int | None = flag(None, ge=1, tasks=("distill",))
    """Compare only the teacher's k most likely tokens, and all other tokens together as one; null: compare the whole
    vocabulary"""

    @property
    def filters(self) -> bool:
        """Whether prompts or groups are left out, and a step samples until it has enough groups."""
        return self.dynamic_filtering_enable or self.group_filter is not None or self.prompt_filter is not None

    def needs(self, need: str) -> bool:
        """Return whether the preference loss needs the reference model, or the loss of the chosen answer beside it."""
        return registry.preference_loss.needs(self.loss, need)
