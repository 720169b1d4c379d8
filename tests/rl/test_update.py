"""Which sequences each optimiser step of a rollout takes, and what each rank gets of it."""

from __future__ import annotations

from itertools import chain

import torch

from rlhf_suite.config.rollout import RolloutConfig
from rlhf_suite.config.runs import PPORun
from rlhf_suite.config.train import RLTrainConfig
from rlhf_suite.data.batch import TokenBatch, take
from rlhf_suite.rl.update import split, step_indices, steps_per_rollout


def rollout(*lengths: int) -> TokenBatch:
    total = sum(lengths)
    plain = TokenBatch(torch.arange(total), torch.tensor(lengths))
    mask = torch.ones(total).index_fill(0, plain.starts, 0)
    return TokenBatch(plain.ids, plain.lengths, {"mask": mask}, {"index": torch.arange(len(lengths))})


def test_every_epoch_takes_every_sequence_once():
    steps = step_indices(10, 4, 2, (0, 0))
    assert [len(step) for step in steps] == [4, 4, 2] * 2
    assert sorted(chain(*steps[:3])) == sorted(chain(*steps[3:])) == list(range(10))
    assert steps[:3] != steps[3:]


def test_the_order_is_a_function_of_seed_and_rollout():
    assert step_indices(10, 4, 1, (1, 5)) == step_indices(10, 4, 1, (1, 5))
    assert step_indices(10, 4, 1, (1, 5)) != step_indices(10, 4, 1, (1, 6)) != step_indices(10, 4, 1, (2, 6))


def test_steps_per_rollout_counts_what_step_indices_gives():
    config = PPORun(
        rollout=RolloutConfig(batch_size=5, n_samples_per_prompt=3), train=RLTrainConfig(batch_size=4, max_epochs=2)
    )
    assert steps_per_rollout(config) == len(step_indices(15, 4, 2, (0, 0))) == 8


def test_the_ranks_share_every_step_evenly():
    batches = [rollout(9, 3, 4, 8), rollout(7, 5, 2)]
    first, second = split(batches, 2)
    for batch, one, other in zip(batches, first, second, strict=True):
        assert one.num_tokens == other.num_tokens
        together = sorted(one.rows["index"].tolist() + other.rows["index"].tolist())
        assert together == list(range(len(batch)))
    assert split(batches, 1)[0][0].ids.equal(batches[0].ids)


def test_a_rank_beyond_the_sequences_gets_one_without_weight():
    shares = [rank[0] for rank in split([take(rollout(6, 5), [1])], 3)]
    assert sorted(float(share.tokens["mask"].sum()) for share in shares) == [0, 0, 4]
    assert all(share.num_tokens == 5 for share in shares)
