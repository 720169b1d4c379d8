"""The sections of `task=chat`: how turns become text, and how answers are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.data import RenderConfig
from rlhf_suite.config.flags import flag, is_false, is_positive

SAMPLED = is_positive(".temperature", "1")


@dataclass
class ChatTextConfig(RenderConfig):
    """How turns become text"""

    apply_chat_template: bool = flag(True, "Render the conversation with the tokenizer's chat template, if it has one")
    input_template: str | None = flag(
        "User: {}\nAssistant: ", "Template of a turn with one {}", when=is_false(".apply_chat_template")
    )


@dataclass
class ChatConfig:
    """The conversation"""

    system: str | None = flag(None, "System message; /system changes it")
    max_new_tokens: int = flag(512, "Cap of an answer in tokens", ge=1)
    max_len: int = flag(
        2048, "Longest conversation in tokens, with max_new_tokens for its next answer; the oldest turns are dropped"
    )
    temperature: float = flag(1.0, "Sampling temperature; 0: always the likeliest token", ge=0)
    top_p: float = flag(1.0, "Nucleus sampling", gt=0, le=1, when=SAMPLED)
    top_k: int = flag(-1, "Sample among the k most likely tokens; -1: all", ge=-1, when=SAMPLED)
