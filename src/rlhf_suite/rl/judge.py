"""The one host of models that score: of rollouts, of the responses in files, and of texts that come over HTTP."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import HALF_PRECISION, DeepSpeedConfig, load_settings
from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.config.plan.micro_batches import MicroBatches
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.data.render import begin_ids, tokens
from rlhf_suite.distributed.group import LocalGroup
from rlhf_suite.distributed.mesh import Rank
from rlhf_suite.errors import UserError
from rlhf_suite.models.forward import sequence_scores
from rlhf_suite.models.load import checkpoint_precision, count_positions, load_tokenizer
from rlhf_suite.models.process_reward_model import step_probabilities
from rlhf_suite.rewards.base import Sample, Scored
from rlhf_suite.rl.model_groups import RewardGroup
from rlhf_suite.rl.reward_models import RewardModelSource
from rlhf_suite.rl.roles import Role
from rlhf_suite.train.strategy import load_frozen


class Judge(Role):
    """A reward model or a process reward model on one rank."""

    def __init__(
        self,
        rank: Rank,
        model: ModelPlan,
        ds: DeepSpeedConfig,
        micro_batches: MicroBatches,
        train: TrainConfig | None = None,
    ) -> None:
        super().__init__(rank, ds, micro_batches, train)
        self.model = load_frozen(model, ds, self.world)

    def scores(self, batch: TokenBatch) -> torch.Tensor:
        """Return what a reward model says of each sequence at its last token, [B]."""
        division, results = self.forward(batch, lambda part: sequence_scores(self.model, part))
        return division.per_row(results)

    def probabilities(self, batch: TokenBatch, columns: list[int]) -> torch.Tensor:
        """Return P(good) of each step at the masked tokens, [T] in the order of the shard; the batch holds the model's
        own tokens, and `columns` are those of the reward tokens."""
        division, results = self.forward(batch, lambda part: step_probabilities(self.model, part, columns))
        return division.per_token(results)


def alone(model: ModelPlan, ds: DeepSpeedConfig) -> DeepSpeedConfig:
    """Return how a judge is held that scores a file: whole on each rank. The default precision is that
    of its checkpoint."""
    precision = ds.param_dtype or checkpoint_precision(model.path, model.flag)
    return load_settings(zero_stage=0, param_dtype=precision, value_head_prefix=ds.value_head_prefix)


class TextJudge:
    """A reward model in this process that scores texts, of at most `batch_size` at a time. `constants`: the mean and
    the deviation by which scores are standardised, or None."""

    def __init__(
        self,
        model: ModelPlan,
        ds: DeepSpeedConfig,
        device: str,
        constants: tuple[float, float] | None,
        batch_size: int,
    ) -> None:
        self.model, self.tokenizer = model, load_tokenizer(model.path, DataConfig.of("rm"), model.flag)
        self.begin = begin_ids(self.tokenizer)
        worker = (model, judge_settings(model, ds), MicroBatches(rows=batch_size))
        self.source = RewardModelSource(RewardGroup(LocalGroup(Judge, model.name, device, worker)), constants)

    @property
    def positions(self) -> int | None:
        """Return how many tokens the model was made for; None if its configuration does not say."""
        return count_positions(self.model.path, self.model.flag)

    @property
    def longest_token(self) -> int:
        """Return the number of characters of the longest token. A text with more than n times as many has more than n
        tokens."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; special tokens in the text are read as such."""
        return tokens(self.tokenizer, text, self.begin)

    def scores(self, sequences: Sequence[list[int]]) -> list[float]:
        """Return one score per sequence of token ids."""
        outcomes = self.source.score([Sample("", "", "", "", "", ids=ids) for ids in sequences])
        return [outcome.reward for outcome in outcomes if isinstance(outcome, Scored)]


def judge_settings(model: ModelPlan, ds: DeepSpeedConfig) -> DeepSpeedConfig:
    """Return how a served model is held: on one device, without DeepSpeed. The default precision is that of its
    checkpoint."""
    precision = ds.param_dtype or checkpoint_precision(model.path, model.flag)
    if HALF_PRECISION.concerns(ds.attn_implementation, None) and not HALF_PRECISION.condition.is_met(precision):
        # Flags alone do not say so: this precision may be that of the checkpoint.
        raise UserError(
            f"ds.attn_implementation={ds.attn_implementation}: {HALF_PRECISION.why}, and {model.flag}={model.path} is "
            f"not in bf16. Write ds.param_dtype=bf16, or ds.attn_implementation={HALF_PRECISION.off}"
        )
    return load_settings(
        zero_stage=None,
        param_dtype=precision,
        attn_implementation=ds.attn_implementation,
        experts_implementation=ds.experts_implementation,
        packing_samples=ds.packing_samples,
        value_head_prefix=ds.value_head_prefix,
    )
