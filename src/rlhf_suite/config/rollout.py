"""`rollout`: how much is sampled each step, and how."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import flag, is_true


@dataclass
class SamplingConfig:
    """Sampling"""

    n_samples_per_prompt: int = flag(1, "Samples per prompt (the group)", ge=1)
    max_new_tokens: int | None = flag(None, "Cap of a response in tokens; null: data.max_len less the prompt", ge=1)
    temperature: float = flag(1.0, "Sampling temperature; 0: always the likeliest token", ge=0)
    top_p: float = flag(1.0, "Nucleus sampling", gt=0, le=1)
    top_k: int = flag(-1, "Sample among the k most likely tokens; -1: all", ge=-1)
    min_p: float = flag(0.0, "Drop tokens below this share of the most likely one's probability", ge=0, lt=1)
    stop: list[str] | None = flag(None, "Strings that end a response (kept in it)")


@dataclass
class GenerationConfig(SamplingConfig):
    """Sampling, of the same tokens every time"""

    seed: int = flag(42, "A sample's random numbers depend on this, on its prompt's row and on its own number alone")


@dataclass
class RolloutConfig(SamplingConfig):
    """Sampling of what is trained on"""

    batch_size: int = flag(1024, "Prompts per RL step", ge=1)
    vllm_generate_batch_size: int | None = flag(
        None,
        "Prompts per round of sampling; null: rollout.batch_size",
        ge=1,
        when=is_true("algo.dynamic_filtering_enable"),
    )
    temperature: float = flag(1.0, "Sampling temperature; training log-probs use it too", gt=0)
    micro_batch_size: int = flag(1, "Sequences per forward when making experience", ge=1)
    max_tokens_per_gpu: int | None = flag(
        None,
        "Token budget of a forward pass; null: train.max_tokens_per_gpu",
        ge=1,
        when=is_true("train.dynamic_batch_enable"),
    )
