"""`critic`: the value model of estimator gae."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import flag, group
from rlhf_suite.config.optim import AdamConfig, TrainedModelConfig


@dataclass
class CriticConfig(TrainedModelConfig):
    """The value model; its path defaults to the reward model's, else the actor's"""

    adam: AdamConfig = group(AdamConfig, {"lr": 9e-6})
    value_clip: float = flag(0.5, "Clip range of the value around its old value", gt=0)
    freezing_steps: int = flag(0, "RL steps at the start in which the critic alone is trained", ge=0)
    save_value_network: bool = flag(False, "Save the critic in HF format at the end")
