"""`reward`: where the score of a rollout comes from, and how it is shaped."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import flag


@dataclass
class RewardConfig:
    """One source of reward: a rule, a .py file or a reward model"""

    rule: str | None = flag(None, "Built-in verifiable reward", choices=("exact_match", "math"))
    remote_url: str | None = flag(
        None, "A .py file with reward_func(queries, prompts, labels), called with whole batches"
    )
    model_name_or_path: str | None = flag(None, "HF folder or hub name of a reward model that shares the tokenizer")
    normalize_enable: bool = flag(False, "(score - mean) / std with the constants stored in the reward model's config")
    clip_range: list[float] = flag([-10.0, 10.0], "Clamp of the raw score, before any baseline")
    num_nodes: int = flag(1, "Nodes of the reward model's worker group", ge=1)
    num_gpus_per_node: int = flag(1, "Ranks per node", ge=1)
    timeout_s: float = flag(60.0, "Deadline for scoring one batch with a rule or a file", gt=0)
    on_error: str = flag(
        "stop",
        "A sample whose reward fails or times out: end the run, or drop its whole group",
        choices=("stop", "drop"),
    )
