"""A reward model that scores given text: one instance per rank, each with a share of every chunk."""

from __future__ import annotations

import torch

from rlhf_suite.config.ds import DeepSpeedConfig
from rlhf_suite.config.runs import ScoreRun
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.models.forward import sequence_scores
from rlhf_suite.rl.sharding import forward_groups, in_micro_batches, reassemble_rows
from rlhf_suite.train.strategy import join_world, load_frozen
from rlhf_suite.train.workers import Worker


class ScoreWorker(Worker):
    """The model, whole on every rank; sequences are packed up to the token budget, without padding."""

    def __init__(self, rank: int, world_size: int, addr: str, port: int, device: str, config: ScoreRun) -> None:
        super().__init__(rank, world_size, addr, port, device)
        path = config.reward.model_name_or_path
        assert path is not None
        self.world, self.budget = join_world(rank, world_size, device), config.score.max_tokens_per_gpu
        ds = DeepSpeedConfig(
            zero_stage=0,
            param_dtype=config.ds.param_dtype,
            packing_samples=True,
            value_head_prefix=config.ds.value_head_prefix,
        )
        self.model = load_frozen(path, "value", ds, self.world, "reward.model_name_or_path")

    @torch.no_grad()
    def scores(self, batch: TokenBatch) -> torch.Tensor:
        """[B], as the model gives them at each sequence's last token."""
        groups = forward_groups(batch, 1, self.budget)
        results = in_micro_batches(
            batch, groups, len(groups), lambda part: sequence_scores(self.model, part.to(self.world.device))
        )
        return reassemble_rows(groups, results)
