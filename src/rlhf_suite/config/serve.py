"""`serve` and the model that task=serve_rm answers with."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import flag


@dataclass
class ServedRewardConfig:
    """The reward model"""

    model_name_or_path: str | None = flag(None, "HF folder or hub name of a reward model; its own tokenizer is used")
    normalize_enable: bool = flag(False, "(score - mean) / std with the constants stored in the reward model's config")


@dataclass
class ServeConfig:
    """The server"""

    host: str = flag("127.0.0.1", "Address to listen at; other machines need a token (RLHF_SUITE_REWARD_TOKEN)")
    port: int = flag(5000, "Port; 0: a free one, see server.json in the run folder", ge=0, le=65535)
    batch_size: int = flag(64, "Texts of all waiting requests in one forward at most", ge=1)
    max_tokens: int = flag(16384, "Tokens in one forward at most", ge=1)
    max_len: int = flag(4096, "Longest text in tokens; a longer one is not scored", ge=1)
    max_request_mb: float = flag(16.0, "Largest request in MiB", gt=0)
