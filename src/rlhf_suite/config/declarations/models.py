"""The models of a run: the trained ones (`actor`, `critic`) and the frozen ones (`ref`, `teacher`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rlhf_suite import registry
from rlhf_suite.config.declarations.conditions import (
    ON_GPUS,
    Need,
    algorithm_needs,
    is_false,
    is_null,
    is_one_of,
    is_set,
    is_true,
)
from rlhf_suite.config.declarations.flags import FIXED, SHAPE, flag, group
from rlhf_suite.config.declarations.sections import Section
from rlhf_suite.config.declarations.task_groups import BY_PREFERENCE, RL, SEEING, TEXTS, TRAINING

ADAPTS = is_set(".entropy_target", "<nats>")
NO_LORA, WHOLE_WEIGHTS = is_one_of("ds.lora.rank", 0), is_one_of("ds.tensor_parallel_size", 1)
MUON = is_one_of("", "muon")
# A ratio of whole sequences is not weighed by their tokens. What an aggregation of the user's own does is not known.
OF_SEQUENCES = replace(
    algorithm_needs(".loss_agg_mode", registry.aggregation, "sequences"),
    is_met=lambda mode: registry.is_own(mode) or registry.aggregation.needs(mode, "sequences"),
)
TO_A_GPU = Need(ON_GPUS, "without a GPU the weights are in host memory already")
OFFLOADED = (
    TO_A_GPU,
    Need(WHOLE_WEIGHTS, "offloaded weights have not been tested with tensor parallelism"),
)
SEEING_MODEL = "builtin:vision"  # the built-in model that reads images
RATES = {
    "sft": 5e-6,
    "rm": 9e-6,
    "dpo": 1e-5,
    "kto": 1e-5,
    "distill": 5e-6,
    "rejection_sampling": 2e-6,
    "iterative_dpo": 5e-7,
    "conditional_sft": 5e-6,
}
# Of what is about the reference of a preference loss.
HAS_REFERENCE = Need(algorithm_needs("algo.loss", registry.preference_loss, "reference"), "this loss has no reference")
IF_THE_LOSS_HAS_ONE: Any = {"when": HAS_REFERENCE.condition, "needs": HAS_REFERENCE}
WITH_DROPOUT = ("sft", "distill", "rejection_sampling", "conditional_sft")


@dataclass
class AdamConfig:
    """AdamW"""

    lr: float = flag(1e-6, ge=0)
    """Peak learning rate. With optim=muon it is the peak rate of the parameters that AdamW trains: embeddings, heads
    and vectors"""
    betas: list[float] = flag([0.9, 0.95], "Decay rates of the first and the second moment", ge=0, lt=1)
    eps: float = flag(1e-8, "Small number that is added to the denominator of the update", gt=0)
    weight_decay: float = flag(0.0, "Decoupled weight decay. Biases, norms and other vectors have none", ge=0)


@dataclass
class MuonConfig:
    """Muon: orthogonalised momentum for matrices. Embeddings, heads and vectors use AdamW"""

    lr: float = flag(0.02, "Peak learning rate of the Muon group", ge=0)
    momentum: float = flag(0.95, "Momentum of Muon", ge=0, lt=1)


@dataclass
class ModelConfig(Section):
    """A model that has a name"""

    model_name_or_path: str | None = flag(None)
    """Model to load: a folder in Hugging Face format, a name on the Hugging Face hub, or builtin:<name>"""


@dataclass
class TrainedModelConfig(ModelConfig, tasks=TRAINING):
    """A model that is trained: its initial weights, its optimiser, and its number of ranks"""

    num_nodes: int = flag(1, "Number of nodes on which this model runs", ge=1, resume=SHAPE)
    num_gpus_per_node: int = flag(1, ge=1, resume=SHAPE)
    """Number of ranks (processes) of this model on each node. A rank uses one GPU, or the CPU on a machine without
    GPUs"""
    optim: str = flag(
        "adam",
        "The optimiser",
        choices=("adam", "muon"),
        resume=FIXED,
        needs=(
            Need(
                is_one_of(".max_norm", 0),
                "clipping would change the orthogonalised update of muon, not its gradient",
                MUON,
            ),
            Need(NO_LORA, "muon orthogonalises whole weight matrices, but LoRA trains only factors of them", MUON),
            Need(WHOLE_WEIGHTS, "muon orthogonalises whole matrices", MUON),
            Need(is_false("ds.deepcompile"), "muon has not been tested with compiled graphs", MUON),
        ),
    )
    adam: AdamConfig = group(AdamConfig, of_tasks={task: {"values": {"lr": rate}} for task, rate in RATES.items()})
    muon: MuonConfig = group(MuonConfig, when=is_one_of(".optim", "muon"))
    lr_scheduler: str = flag("cosine_with_min_lr", "Schedule of the learning rate", algorithms=registry.schedule)
    lr_warmup_ratio: float = flag(0.03, ge=0, le=1)
    """Share of the optimiser steps in which the learning rate rises linearly to its peak; 0: no warm-up"""
    min_lr_ratio: float = flag(0.1, "Final learning rate, as a share of the peak rate", ge=0, le=1)
    lr_cycles: int = flag(1, "Number of times that the learning rate falls from its peak to 0", ge=1)
    lr_decay_ratio: float = flag(0.1, gt=0, le=1)
    """Share of all optimiser steps, at the end of training, in which the learning rate decays"""
    max_norm: float = flag(1.0, "Clip the gradient to this global norm; 0: no clipping", ge=0)
    freeze: list[str] = flag(
        [],
        resume=FIXED,
        needs=Need(
            NO_LORA,
            "LoRA trains only its adapters; everything else is frozen already",
            fix="remove it, and choose with ds.lora.target_modules",
        ),
    )
    """Regular expressions for modules or parameters that are not trained. An expression must match the whole name"""
    freeze_router: bool = flag(
        False,
        resume=FIXED,
        needs=(
            Need(NO_LORA, "LoRA trains only its adapters, and routers are frozen already"),
            Need(is_one_of(".aux_loss_coef", 0), "it is a loss of the routers"),
        ),
    )
    """Freeze the routers of a mixture of experts"""
    disable_dropout: bool = flag(True, defaults=dict.fromkeys(WITH_DROPOUT, False))
    """Disable the dropout of the model's own configuration. The dropout of LoRA adapters is a separate flag,
    ds.lora.dropout"""
    aux_loss_coef: float = flag(
        0.0,
        ge=0,
        needs=Need(is_null("data.image_key", ""), "the load of experts is not balanced in batches with images"),
    )
    """Weight of the load-balancing loss of mixture-of-experts models; 0: no such loss"""
    gradient_checkpointing_enable: bool | None = flag(None)
    """Do not store activations, but recompute them in the backward pass. This saves memory and takes more time. null:
    only if the plan estimates that the activations do not fit into memory"""
    gradient_checkpointing_reentrant: bool = flag(
        False,
        when=is_true(".gradient_checkpointing_enable"),
        needs=Need(is_one_of(".aux_loss_coef", 0), "re-entrant checkpointing keeps no gradient of the router"),
    )
    """Use the re-entrant variant of gradient checkpointing"""


@dataclass
class ActorConfig(TrainedModelConfig, tasks=RL):
    """The model of the task: the model that it trains (in task=ppo the policy), or the model that answers"""

    freeze_visual_encoder: bool = flag(False, resume=FIXED, when=is_set("data.image_key", "<column>"), tasks=SEEING)
    """Freeze all modules that only images pass through, and train only the language model"""
    pretrain_mode_enable: bool = flag(False, tasks=TEXTS)
    """Continue pre-training: compute the loss on every token, without a template and without an end-of-sequence
    token"""
    routing_replay: bool = flag(
        False,
        resume=FIXED,
        needs=(
            Need(
                is_one_of("vllm.pipeline_parallel_size", 1),
                "an engine that is split by layers does not return the routes of all layers",
            ),
            Need(is_null("data.image_key"), "it has not been tested with images"),
        ),
    )
    """For a mixture of experts: in training, send each token to the same experts to which the engine sent it (R3,
    docs/rl_correction.md)"""
    policy_loss_type: str = flag(
        "ppo",
        algorithms=registry.policy_loss,
        needs=Need(
            OF_SEQUENCES,
            "this loss has one ratio per sequence, and this aggregation would weight sequences by their tokens",
            at=algorithm_needs("", registry.policy_loss, "sequences"),
        ),
    )
    """The policy loss: how it limits the ratio of new to old probabilities"""
    eps_clip: float = flag(0.2, gt=0, when=is_null(".eps_clip_low_high"))
    """The probability ratio is clipped to [1 - eps_clip, 1 + eps_clip]"""
    eps_clip_low_high: list[float] | None = flag(None, "Asymmetric clip [low, high]; overrides eps_clip", gt=0)
    dual_clip: float | None = flag(None, gt=1)
    """Constant of dual clipping. It bounds the loss of tokens with a negative advantage; null: no dual clipping"""
    sapo_tau_pos: float = flag(1.0, "Temperature of SAPO's gate for tokens with a positive advantage", gt=0)
    sapo_tau_neg: float = flag(1.05, "Temperature of SAPO's gate for all other tokens", gt=0)
    dro_beta: float = flag(0.05, "Weight of DRO's penalty on the distance from the old policy", gt=0)
    dppo_tv_max: float = flag(0.15, gt=0, le=1)
    """Largest change of a token's probability from its old value. DPPO drops a token that has moved further, if the
    update would move it further away"""
    dppo_kl_max: float = flag(0.05, gt=0)
    """Largest KL divergence from the old policy at a token, in nats. The divergence is that of two outcomes: this token
    and all others. DPPO drops a token beyond this limit, if the update would move it further away"""
    dppo_ratio_max: float = flag(20.0, "Upper bound of the probability ratio by which DPPO weights a token", ge=1)
    clip_cov_ratio: float = flag(2e-4, "Share of a rollout's tokens that clip_cov leaves out", gt=0, le=1)
    clip_cov_range: list[float] = flag([1.0, 5.0])
    """Range [low, high] of the covariance of log-prob and advantage. clip_cov draws the tokens that it leaves out from
    the tokens in this range"""
    kl_cov_ratio: float = flag(2e-3, "Share of a rollout's tokens on which kl_cov puts its KL penalty", gt=0, le=1)
    kl_cov_coef: float = flag(1.0, "Weight of the KL penalty of kl_cov", gt=0)
    entropy_coef: float | None = flag(None, ge=0)
    """Coefficient of the entropy bonus; 0: the entropy is logged, but there is no bonus; null: the entropy is not
    computed"""
    entropy_target: float | None = flag(None, gt=0, resume=FIXED, when=is_set(".entropy_coef", "0"))
    """Target entropy in nats of an adaptive entropy bonus. The coefficient starts at entropy_coef. After each RL step
    it rises by entropy_coef_step if the entropy is below the target, and falls by it if the entropy is above. There is
    no bonus while the entropy is above the target. null: the coefficient is fixed"""
    entropy_coef_step: float = flag(0.005, gt=0, when=ADAPTS)
    """Change per RL step of the adaptive coefficient of the entropy bonus"""
    entropy_coef_max: float = flag(1.0, "Upper limit of the adaptive coefficient", gt=0, when=ADAPTS)
    loss_agg_mode: str = flag("token-mean", "What the policy loss averages over", algorithms=registry.aggregation)
    ptx_coef: float = flag(0.05, gt=0, when=is_set("data.pretrain_dataset", "<source>"))
    """Weight of the mean next-token loss on the documents of data.pretrain_dataset"""

    @property
    def pretrains(self) -> bool:
        """Whether it is trained on every token of plain text."""
        return self.has("pretrain_mode_enable") and self.pretrain_mode_enable

    @property
    def chooses_tokens(self) -> bool:
        """Whether the policy loss singles out tokens of a rollout by their covariances."""
        return chooses_tokens(self.policy_loss_type)


def chooses_tokens(loss: str) -> bool:
    """Return whether a policy loss singles out tokens of a rollout by their covariances."""
    return any(registry.policy_loss.needs(loss, need) for need in ("covariance_band", "largest_covariances"))


@dataclass
class CriticConfig(TrainedModelConfig, tasks=RL):
    """The value model. Its path defaults to that of the reward model, or without one to that of the actor"""

    adam: AdamConfig = group(AdamConfig, {"lr": 9e-6})
    value_clip: float = flag(0.5, "Largest change of a value from its old value; the loss clips a larger change", gt=0)
    value_clip_high: float | None = flag(None, gt=0)
    """Largest increase of a value. value_clip is then the largest decrease. null: value_clip limits both"""
    freezing_steps: int = flag(0, "Number of RL steps at the start in which only the critic is trained", ge=0)
    save_value_network: bool = flag(False, "Save the critic in Hugging Face format at the end of the run")


@dataclass
class ReferenceConfig(Section):
    """The frozen reference model. The KL term or the loss measures the distance of the policy from it"""

    model_name_or_path: str | None = flag(None)
    """Model to load: a folder in Hugging Face format or a name on the hub. null: the initial weights of the actor (with
    LoRA: the actor without its adapters)"""
    offload: bool = flag(
        False,
        resume=SHAPE,
        needs=(
            *OFFLOADED,
            Need(is_false("ds.load_in_4bit"), "weights in 4 bits stay on the GPU"),
        ),
    )
    """Keep the weights in host memory. In each step they are copied to the GPU once, for all of the model's
    computations"""
    cache_enable: bool = flag(False, tasks=(*BY_PREFERENCE, "kto"))
    """Compute the log-probs of the reference once before training and keep them on disk. No reference model is loaded
    during training"""
    num_nodes: int = flag(1, "Number of nodes on which the reference model runs", ge=1, resume=SHAPE, tasks=RL)
    num_gpus_per_node: int = flag(1, ge=1, resume=SHAPE, tasks=RL)
    """Number of ranks (processes) of the reference model on each node"""
