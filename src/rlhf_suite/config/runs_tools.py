"""Root dataclasses of the tasks that train nothing and write no rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlhf_suite.config.chat import ChatConfig, ChatTextConfig
from rlhf_suite.config.data import CheckedDataConfig
from rlhf_suite.config.ds import ServedModelConfig
from rlhf_suite.config.flags import flag, group
from rlhf_suite.config.generate import GeneratorConfig
from rlhf_suite.config.merge import AdapterConfig, BaseModelConfig, MergedConfig, MergedPrecisionConfig
from rlhf_suite.config.reward import TextRewardConfig
from rlhf_suite.config.run import Run
from rlhf_suite.config.serve import ServeConfig, ServedRewardConfig


@dataclass
class CheckRewardRun(Run):
    """The reward over a few rows, told row by row, before any GPU is used"""

    MODEL: ClassVar[str] = "data.dataset"

    task: str = flag("check_reward", "The task; chosen with task=<name>")
    data: CheckedDataConfig = group(CheckedDataConfig)
    reward: TextRewardConfig = group(TextRewardConfig)


@dataclass
class MergeLoRARun(Run):
    """A LoRA adapter merged into its base model; trains nothing"""

    HAS_DEMO: ClassVar[bool] = False

    task: str = flag("merge_lora", "The task; chosen with task=<name>")
    actor: BaseModelConfig = group(BaseModelConfig)
    lora: AdapterConfig = group(AdapterConfig)
    ckpt: MergedConfig = group(MergedConfig)
    ds: MergedPrecisionConfig = group(MergedPrecisionConfig)


@dataclass
class ServeRMRun(Run):
    """A reward model behind HTTP"""

    MODEL = "reward.model_name_or_path"
    HAS_DEMO = False  # there is no built-in reward model

    task: str = flag("serve_rm", "The task; chosen with task=<name>")
    reward: ServedRewardConfig = group(ServedRewardConfig)
    ds: ServedModelConfig = group(ServedModelConfig, {"packing_samples": True})
    serve: ServeConfig = group(ServeConfig)


@dataclass
class ChatRun(Run):
    """A conversation with a model in the terminal; trains nothing"""

    task: str = flag("chat", "The task; chosen with task=<name>")
    actor: GeneratorConfig = group(GeneratorConfig)
    data: ChatTextConfig = group(ChatTextConfig)
    chat: ChatConfig = group(ChatConfig)
