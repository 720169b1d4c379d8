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

    system: str | None = flag(None, "System message; the command /system changes it")
    max_new_tokens: int = flag(512, "Longest answer in tokens", ge=1)
    max_len: int | None = flag(None, ge=2)
    """Longest conversation in tokens, including max_new_tokens for the next answer. Beyond it, the oldest turns are
    dropped. null: the context length of the model, at most 4096"""
    temperature: float = flag(1.0, "Sampling temperature; 0: always the most likely token", ge=0)
    top_p: float = flag(1.0, gt=0, le=1, when=SAMPLED)
    """Sample only from the most likely tokens that together have this probability (nucleus sampling); 1: from all"""
    top_k: int = flag(-1, "Sample only from the k most likely tokens; -1: from all", ge=-1, when=SAMPLED)
    repetition_penalty: float = flag(1.0, gt=0)
    """Penalty on tokens that are already in the conversation. Their logits are divided by this number if they are
    positive, and multiplied by it if they are negative. 1: no penalty"""


@dataclass
class AdapterConfig:
    """The LoRA adapter to merge"""

    path: str | None = flag(None, "Folder of a LoRA adapter in the format of peft (ckpt.save_adapter writes one)")


@dataclass
class ServedRewardConfig(NormalizationConfig):
    """The reward model"""

    model_name_or_path: str | None = flag(None)
    """Reward model: a folder in Hugging Face format or a name on the hub. It is used with its own tokenizer"""


@dataclass
class ServeConfig(Section):
    """The server"""

    host: str = flag(
        "127.0.0.1",
        "Address to listen on. Access from other machines needs a token (RLHF_SUITE_REWARD_TOKEN)",
        of_tasks={
            "serve_train": {
                "help": "Address to listen on. Access from other machines needs a token (RLHF_SUITE_TRAIN_TOKEN)"
            }
        },
    )
    port: int = flag(
        5000,
        "Port of the server; 0: a free port, which is written to server.json in the run folder",
        ge=0,
        le=65535,
        defaults={"serve_train": 5001},
    )
    batch_size: int = flag(64, ge=1, tasks=("serve_rm",))
    """Largest number of texts in one forward pass, over all waiting requests"""
    max_tokens: int = flag(16384, "Largest number of tokens in one forward pass", ge=1, tasks=("serve_rm",))
    max_len: int | None = flag(None, ge=1, tasks=("serve_rm",))
    """Longest text in tokens. A longer text is not scored. null: the context length of the model, at most 4096"""
    max_models: int = flag(8, ge=1, when=is_positive("ds.lora.rank", "<rank>"), tasks=("serve_train",))
    """Largest number of models at the same time. Each is a LoRA adapter with its own optimiser"""
    rollouts_mb: float = flag(1024.0, ge=0, tasks=("serve_train",))
    """Size limit in MiB for the samples of clients in the folder rollouts/. The oldest files are deleted to make room
    for new ones. 0: no samples are kept"""
    max_request_mb: float = flag(16.0, "Largest size of a request in MiB", gt=0, defaults={"serve_train": 64.0})
