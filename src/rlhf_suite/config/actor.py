"""`actor`: the trained model of every task."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite import registry
from rlhf_suite.config.flags import flag, group, is_null
from rlhf_suite.config.optim import DISABLE_DROPOUT, AdamConfig, TrainedModelConfig


@dataclass
class SupervisedActorConfig(TrainedModelConfig):
    """The model that a supervised task trains"""


@dataclass
class SFTActorConfig(SupervisedActorConfig):
    """The model that SFT trains"""

    adam: AdamConfig = group(AdamConfig, {"lr": 5e-6})
    disable_dropout: bool = flag(False, DISABLE_DROPOUT)
    pretrain_mode_enable: bool = flag(False, "Continued pre-training: loss on every token, no template, no EOS")


@dataclass
class PolicyConfig(TrainedModelConfig):
    """The policy that PPO trains"""

    policy_loss_type: str = flag(
        "ppo", "The policy loss: how the ratio of new to old probabilities is bounded", algorithms=registry.policy_loss
    )
    eps_clip: float = flag(0.2, "Clip range of the probability ratio", gt=0, when=is_null(".eps_clip_low_high"))
    eps_clip_low_high: list[float] | None = flag(None, "Asymmetric clip [low, high]; overrides eps_clip", gt=0)
    dual_clip: float | None = flag(None, "Dual-clip constant, bounds the loss of negative advantages", gt=1)
    sapo_tau_pos: float = flag(1.0, "Temperature of SAPO's gate where the advantage is positive", gt=0)
    sapo_tau_neg: float = flag(1.05, "Temperature of SAPO's gate elsewhere", gt=0)
    entropy_coef: float | None = flag(None, "null: entropy not computed; 0: logged only; > 0: bonus", ge=0)
    loss_agg_mode: str = flag("token-mean", "What the policy loss averages over", algorithms=registry.aggregation)


@dataclass
class RMActorConfig(SupervisedActorConfig):
    """The reward model"""

    adam: AdamConfig = group(AdamConfig, {"lr": 9e-6})


@dataclass
class DPOActorConfig(SupervisedActorConfig):
    """The policy that preferences train"""

    adam: AdamConfig = group(AdamConfig, {"lr": 1e-5})


@dataclass
class KTOActorConfig(SupervisedActorConfig):
    """The policy that labelled answers train"""

    adam: AdamConfig = group(AdamConfig, {"lr": 1e-5})


@dataclass
class PRMActorConfig(SupervisedActorConfig):
    """The process reward model, a language model that says a reward token at every placeholder"""

    adam: AdamConfig = group(AdamConfig, {"lr": 1e-6})


@dataclass
class StudentConfig(SupervisedActorConfig):
    """The student"""

    adam: AdamConfig = group(AdamConfig, {"lr": 5e-6})
    disable_dropout: bool = flag(False, DISABLE_DROPOUT)
