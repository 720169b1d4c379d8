"""The sections of the tasks that are tools: chat, merge_lora, and the servers serve_rm and serve_train."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.declarations.conditions import is_positive
from rlhf_suite.config.declarations.flags import flag
from rlhf_suite.config.declarations.reward import NormalizationConfig
from rlhf_suite.config.declarations.sections import Section

TRAIN_TOKEN = "RLHF_SUITE_TRAIN_TOKEN"  # the environment variable with the token of task=serve_train
TRAIN_KEY = "tml-"  # with which the keys of the client package of Tinker begin; it refuses others
THIS_MACHINE = ("127.0.0.1", "localhost", "::1")  # addresses that no other machine can reach
LONGEST = 4096  # tokens of a text or a conversation, where neither the user nor the model sets another limit
SAMPLED = is_positive(".temperature", "1")


@dataclass
class ChatConfig:
    """The conversation"""

    system: str | None = flag(None, "System message; /system changes it")
    max_new_tokens: int = flag(512, "Longest answer in tokens", ge=1)
    max_len: int | None = flag(None, ge=2)
    """Longest conversation in tokens, including max_new_tokens for the next answer; the oldest turns are dropped. null:
    as many as the model was made for, and at most 4096"""
    temperature: float = flag(1.0, "Sampling temperature; 0: always the most likely token", ge=0)
    top_p: float = flag(1.0, gt=0, le=1, when=SAMPLED)
    """Sample among the likeliest tokens that together have this probability (nucleus sampling)"""
    top_k: int = flag(-1, "Sample among the k most likely tokens; -1: all", ge=-1, when=SAMPLED)
    repetition_penalty: float = flag(1.0, gt=0)
    """Divide the logits of tokens that are there already by this (above 0; else multiply them); 1: off"""


@dataclass
class AdapterConfig:
    """The adapter"""

    path: str | None = flag(None, "Folder of a LoRA adapter in peft's format (ckpt.save_adapter writes one)")


@dataclass
class ServedRewardConfig(NormalizationConfig):
    """The reward model"""

    model_name_or_path: str | None = flag(None, "HF folder or hub name of a reward model; its own tokenizer is used")


@dataclass
class ServeConfig(Section):
    """The server"""

    host: str = flag(
        "127.0.0.1",
        "Address to listen at; other machines need a token (RLHF_SUITE_REWARD_TOKEN)",
        of_tasks={
            "serve_train": {"help": "Address to listen at; other machines need a token (RLHF_SUITE_TRAIN_TOKEN)"}
        },
    )
    port: int = flag(
        5000,
        "Port; 0: a free one, which server.json in the run folder names",
        ge=0,
        le=65535,
        defaults={"serve_train": 5001},
    )
    batch_size: int = flag(64, "Most texts, of all waiting requests, in one forward pass", ge=1, tasks=("serve_rm",))
    max_tokens: int = flag(16384, "Most tokens in one forward pass", ge=1, tasks=("serve_rm",))
    max_len: int | None = flag(None, ge=1, tasks=("serve_rm",))
    """Longest text in tokens; a longer one is not scored. null: as many as the model was made for, and at most 4096"""
    max_models: int = flag(8, ge=1, when=is_positive("ds.lora.rank", "<rank>"), tasks=("serve_train",))
    """Most models at a time, each a LoRA adapter with an optimiser of its own"""
    rollouts_mb: float = flag(1024.0, ge=0, tasks=("serve_train",))
    """Room in MiB for samples of clients in rollouts/: the oldest files make room for new ones. 0: none is kept"""
    max_request_mb: float = flag(16.0, "Largest request in MiB", gt=0, defaults={"serve_train": 64.0})
