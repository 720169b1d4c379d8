"""`actor`: the trained model of every task."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import flag, group
from rlhf_suite.config.optim import AdamConfig, TrainedModelConfig


@dataclass
class SupervisedActorConfig(TrainedModelConfig):
    """The model that a supervised task trains"""


@dataclass
class SFTActorConfig(SupervisedActorConfig):
    """The model that SFT trains"""

    adam: AdamConfig = group(AdamConfig, lr=5e-6)
    pretrain_mode_enable: bool = flag(False, "Continued pre-training: loss on every token, no template, no EOS")


@dataclass
class PolicyConfig(TrainedModelConfig):
    """The policy that PPO trains"""

    eps_clip: float = flag(0.2, "PPO clip range of the probability ratio", gt=0)
    eps_clip_low_high: list[float] | None = flag(None, "Asymmetric clip [low, high]; overrides eps_clip", gt=0)
    dual_clip: float | None = flag(None, "Dual-clip constant, bounds the loss of negative advantages", gt=1)
    entropy_coef: float | None = flag(None, "null: entropy not computed; 0: logged only; > 0: bonus", ge=0)
    loss_agg_mode: str = flag(
        "token-mean", "What the policy loss averages over", choices=("token-mean", "seq-mean-token-mean")
    )


@dataclass
class RMActorConfig(SupervisedActorConfig):
    """The reward model"""

    adam: AdamConfig = group(AdamConfig, lr=9e-6)


@dataclass
class DPOActorConfig(SupervisedActorConfig):
    """The policy that preferences train"""

    adam: AdamConfig = group(AdamConfig, lr=1e-5)


@dataclass
class KTOActorConfig(SupervisedActorConfig):
    """The policy that labelled answers train"""

    adam: AdamConfig = group(AdamConfig, lr=1e-5)


@dataclass
class PRMActorConfig(SupervisedActorConfig):
    """The process reward model, a language model that says a reward token at every placeholder"""

    adam: AdamConfig = group(AdamConfig, lr=1e-6)


@dataclass
class StudentConfig(SupervisedActorConfig):
    """The student"""

    adam: AdamConfig = group(AdamConfig, lr=5e-6)
