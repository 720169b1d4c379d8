"""The worker that scores sequences by a reward model or a process reward model; each rank takes a part of a chunk."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlhf_suite.config.ds import DeepSpeedConfig, RewardModelConfig
from rlhf_suite.config.plan import ModelPlan
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.distributed.mesh import Rank
from rlhf_suite.distributed.worker import Worker
from rlhf_suite.models.forward import sequence_scores
from rlhf_suite.models.load import checkpoint_precision
from rlhf_suite.models.process_reward_model import step_probabilities
from rlhf_suite.rl.sharding import Division, forward_groups, in_micro_batches
from rlhf_suite.train.strategy import join_world, load_frozen


class ScoreWorker(Worker):
    """Holds a whole copy of the model. Sequences are packed without padding, up to the token budget."""

    def __init__(self, rank: Rank, model: ModelPlan, ds: RewardModelConfig, max_tokens_per_gpu: int) -> None:
        super().__init__(rank)
        self.world, self.budget = join_world(rank), max_tokens_per_gpu
        held = DeepSpeedConfig(
            zero_stage=0,
            param_dtype=ds.param_dtype or checkpoint_precision(model.path, model.flag),
            packing_samples=True,
            value_head_prefix=ds.value_head_prefix,
        )
        self.model = load_frozen(model, held, self.world)

    def scores(self, batch: TokenBatch) -> torch.Tensor:
        """Return the scores at the last token of each sequence, [B]."""
        division, results = self.forward(batch, lambda part: sequence_scores(self.model, part))
        return division.per_row(results)

    def probabilities(self, batch: TokenBatch, columns: list[int]) -> torch.Tensor:
        """Return P(good) at the masked tokens, [T], read from the given columns of the logits."""
        division, results = self.forward(batch, lambda part: step_probabilities(self.model, part, columns))
        return division.per_token(results)

    @torch.no_grad()
    def forward(
        self, batch: TokenBatch, compute: Callable[[TokenBatch], torch.Tensor]
    ) -> tuple[Division, list[torch.Tensor]]:
        """Return how this rank's sequences are divided into micro-batches, and the result of `compute` for each."""
        groups = forward_groups(batch, 1, self.budget)
        results = in_micro_batches(batch, groups, len(groups), lambda part: compute(part.to(self.world.device)))
        return Division(batch.lengths, groups), results
