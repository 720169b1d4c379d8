"""`score`: what is written of scored rows."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import FREE, flag, is_set, is_true
from rlhf_suite.config.generate import OutputConfig


@dataclass
class ScoreConfig(OutputConfig):
    """What is written of scored rows"""

    pairs: bool = flag(
        False, "Write the best and the worst response of each prompt as chosen and rejected, where their scores differ"
    )
    chunk_size: int = flag(1024, "Rows scored and written at a time", ge=1, resume=FREE)
    max_tokens_per_gpu: int = flag(
        16384,
        "Token budget of a reward model's forward",
        ge=1,
        when=is_set("reward.model_name_or_path", "<reward model>") | is_true("reward.process.enable"),
    )

    @property
    def needs_groups(self) -> bool:
        """Whether the rows of one prompt are looked at together."""
        return self.pairs or self.best_of_n
