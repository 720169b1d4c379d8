"""The models of a run: those that are trained (`actor`, `critic`), those that are only read (`ref`, `teacher`)."""

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
TO_A_GPU = Need(ON_GPUS, "there is no GPU to bring the weights to")
OFFLOADED = (
    TO_A_GPU,
    Need(WHOLE_WEIGHTS, "weights in host memory have not been tried with split matrices"),
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
    """Peak learning rate; with optim=muon, the rate of the parameters that Muon does not train"""
    betas: list[float] = flag([0.9, 0.95], "Decay rates of the two moments", ge=0, lt=1)
    eps: float = flag(1e-8, "Added to the denominator", gt=0)
    weight_decay: float = flag(0.0, "Decoupled weight decay; biases, norms and other vectors are exempt", ge=0)


@dataclass
class MuonConfig:
    """Muon: orthogonalised momentum for matrices; embeddings, heads and vectors use AdamW"""

    lr: float = flag(0.02, "Peak learning rate of the Muon group", ge=0)
    momentum: float = flag(0.95, "Momentum of Muon", ge=0, lt=1)


@dataclass
class ModelConfig(Section):
    """A model that has a name"""

    model_name_or_path: str | None = flag(None, "HF folder or hub name, or builtin:<name>")


@dataclass
class TrainedModelConfig(ModelConfig, tasks=TRAINING):
    """A model that is trained: where it starts, how it is optimised, on how many ranks"""

    num_nodes: int = flag(1, "Nodes of this model's worker group", ge=1, resume=SHAPE)
    num_gpus_per_node: int = flag(1, ge=1, resume=SHAPE)
    """Ranks per node: GPUs, or CPU processes on a machine without GPUs"""
    optim: str = flag(
        "adam",
        "The optimiser",
        choices=("adam", "muon"),
        resume=FIXED,
        needs=(
            Need(is_one_of(".max_norm", 0), "muon's orthogonalised update would be clipped, not the gradient", MUON),
            Need(NO_LORA, "muon orthogonalises whole weight matrices, and LoRA trains factors of them", MUON),
            Need(WHOLE_WEIGHTS, "muon orthogonalises whole matrices", MUON),
            Need(is_false("ds.deepcompile"), "compiled graphs have not been tried with muon", MUON),
        ),
    )
    adam: AdamConfig = group(AdamConfig, of_tasks={task: {"values": {"lr": rate}} for task, rate in RATES.items()})
    muon: MuonConfig = group(MuonConfig, when=is_one_of(".optim", "muon"))
    lr_scheduler: str = flag("cosine_with_min_lr", "Schedule of the learning rate", algorithms=registry.schedule)
    lr_warmup_ratio: float = flag(0.03, "Share of the optimiser steps in which the rate rises to its peak", ge=0, le=1)
    min_lr_ratio: float = flag(0.1, "Final rate as a share of the peak rate", ge=0, le=1)
    lr_cycles: int = flag(1, "How often the rate falls from the peak", ge=1)
    lr_decay_ratio: float = flag(0.1, "Share of the optimiser steps at the end in which the rate falls", gt=0, le=1)
    max_norm: float = flag(1.0, "Global gradient-norm clip; 0 switches clipping off", ge=0)
    freeze: list[str] = flag(
        [],
        resume=FIXED,
        needs=Need(
            NO_LORA,
            "LoRA trains only its adapters; everything else is frozen already",
            fix="remove it, and choose with ds.lora.target_modules",
        ),
    )
    """Regular expressions for the whole names of modules or parameters that are not trained"""
    freeze_router: bool = flag(
        False,
        resume=FIXED,
        needs=(
            Need(NO_LORA, "LoRA trains only its adapters, and routers are frozen already"),
            Need(is_one_of(".aux_loss_coef", 0), "it is a loss of the routers"),
        ),
    )
    """Do not train the routers of a mixture of experts"""
    disable_dropout: bool = flag(True, defaults=dict.fromkeys(WITH_DROPOUT, False))
    """Switch off the dropout that the model's own configuration asks for; that of LoRA is ds.lora.dropout"""
    aux_loss_coef: float = flag(
        0.0,
        ge=0,
        needs=Need(is_null("data.image_key", ""), "the load of experts is not balanced in batches with images"),
    )
    """Weight of the load-balancing loss of mixture-of-experts models; 0 switches it off"""
    gradient_checkpointing_enable: bool | None = flag(None)
    """Recompute activations in the backward pass; null: where they do not fit by the plan"""
    gradient_checkpointing_reentrant: bool = flag(
        False,
        when=is_true(".gradient_checkpointing_enable"),
        needs=Need(is_one_of(".aux_loss_coef", 0), "re-entrant checkpointing keeps no gradient of the router"),
    )
    """Use the re-entrant variant of checkpointing"""


@dataclass
class ActorConfig(TrainedModelConfig, tasks=RL):
    """The model of the task: the one that is trained (in task=ppo the policy), or that answers"""

    freeze_visual_encoder: bool = flag(False, resume=FIXED, when=is_set("data.image_key", "<column>"), tasks=SEEING)
    """Train the language model alone, not the modules that only images pass through"""
    pretrain_mode_enable: bool = flag(False, tasks=TEXTS)
    """Continue pre-training: loss on every token, without template and end-of-sequence token"""
    routing_replay: bool = flag(
        False,
        resume=FIXED,
        needs=(
            Need(
                is_one_of("vllm.pipeline_parallel_size", 1),
                "no engine that is split by layers returns the routes of all of them",
            ),
            Need(is_null("data.image_key"), "it has not been tried with images"),
        ),
    )
    """Train a mixture of experts on the routes of the engines: each token goes to the experts to which the engine sent
    it (R3, docs/rl_correction.md)"""
    policy_loss_type: str = flag(
        "ppo",
        algorithms=registry.policy_loss,
        needs=Need(
            OF_SEQUENCES,
            "the ratio of this loss is one of whole sequences, which would be weighed by their tokens",
            at=algorithm_needs("", registry.policy_loss, "sequences"),
        ),
    )
    """The policy loss: how the ratio of new to old probabilities is bounded"""
    eps_clip: float = flag(0.2, "Clip range of the probability ratio", gt=0, when=is_null(".eps_clip_low_high"))
    eps_clip_low_high: list[float] | None = flag(None, "Asymmetric clip [low, high]; overrides eps_clip", gt=0)
    dual_clip: float | None = flag(None, "Dual-clip constant: it bounds the loss of negative advantages", gt=1)
    sapo_tau_pos: float = flag(1.0, "Temperature of SAPO's gate where the advantage is positive", gt=0)
    sapo_tau_neg: float = flag(1.05, "Temperature of SAPO's gate elsewhere", gt=0)
    dro_beta: float = flag(0.05, "Weight of DRO's penalty on the distance from the old policy", gt=0)
    dppo_tv_max: float = flag(0.15, gt=0, le=1)
    """How far DPPO lets the probability of a token move from its old one before the token is dropped"""
    dppo_kl_max: float = flag(0.05, "The same as a KL divergence of the token against all others, in nats", gt=0)
    dppo_ratio_max: float = flag(20.0, "Largest weight that DPPO gives to a token by its ratio", ge=1)
    clip_cov_ratio: float = flag(2e-4, "Share of a rollout's tokens that clip_cov leaves out", gt=0, le=1)
    clip_cov_range: list[float] = flag([1.0, 5.0])
    """The covariances [low, high] of log-prob and advantage among which clip_cov draws the tokens that it leaves out"""
    kl_cov_ratio: float = flag(2e-3, "Share of a rollout's tokens that kl_cov holds back", gt=0, le=1)
    kl_cov_coef: float = flag(1.0, "Weight of kl_cov's pull back to the old policy", gt=0)
    entropy_coef: float | None = flag(None, ge=0)
    """Entropy bonus; 0: the entropy is only logged; null: it is not computed"""
    entropy_target: float | None = flag(None, gt=0, resume=FIXED, when=is_set(".entropy_coef", "0"))
    """Entropy in nats at or below which there is a bonus, whose coefficient starts at entropy_coef, grows by
    entropy_coef_step in every RL step below it, and falls above it; null: the coefficient is fixed"""
    entropy_coef_step: float = flag(0.005, gt=0, when=ADAPTS)
    """How much the adaptive coefficient of the entropy bonus changes in an RL step"""
    entropy_coef_max: float = flag(1.0, "Its largest value", gt=0, when=ADAPTS)
    loss_agg_mode: str = flag("token-mean", "What the policy loss averages over", algorithms=registry.aggregation)
    ptx_coef: float = flag(0.05, gt=0, when=is_set("data.pretrain_dataset", "<source>"))
    """Weight of the mean next-token loss on data.pretrain_dataset"""

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
    """The value model; its path defaults to the reward model's, else the actor's"""

    adam: AdamConfig = group(AdamConfig, {"lr": 9e-6})
    value_clip: float = flag(0.5, "How far the value may move from its old value before it is clipped", gt=0)
    value_clip_high: float | None = flag(None, gt=0)
    """How far the value may rise; value_clip is then how far it may fall. null: value_clip for both"""
    freezing_steps: int = flag(0, "RL steps at the start in which only the critic is trained", ge=0)
    save_value_network: bool = flag(False, "Save the critic in HF format at the end")


@dataclass
class ReferenceConfig(Section):
    """The frozen reference, from which the KL term or the loss measures the distance"""

    model_name_or_path: str | None = flag(None)
    """HF folder or hub name; null: the actor's starting weights (with LoRA: the actor without its adapters)"""
    offload: bool = flag(
        False,
        resume=SHAPE,
        needs=(
            *OFFLOADED,
            Need(is_false("ds.load_in_4bit"), "weights in 4 bits stay on the GPU"),
        ),
    )
    """Keep its weights in host memory, and bring them to the GPU once for all that it computes in a step"""
    cache_enable: bool = flag(False, tasks=(*BY_PREFERENCE, "kto"))
    """Compute its log-probs once before training, keep them on disk, and load no reference model during training"""
    num_nodes: int = flag(1, "Nodes of the reference's worker group", ge=1, resume=SHAPE, tasks=RL)
    num_gpus_per_node: int = flag(1, "Ranks per node", ge=1, resume=SHAPE, tasks=RL)
