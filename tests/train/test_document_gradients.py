"""A step on samples and documents has the gradient of the policy loss + coef x that of the mean next-token loss."""

from __future__ import annotations

import gradients
import pytest
import torch
from gradients import BUDGET, kept_model, train_config, written
from plain_models import relative_error
from policy_matrix import Case, experience, first_step, objective, references, rewarded
from splits import Split

from rlhf_suite.data.batch import take
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.rl.documents import WithDocuments
from rlhf_suite.rl.sharding import balanced_parts, shards
from rlhf_suite.train.loader import micro_groups
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.task import SupervisedBatch

pytestmark = pytest.mark.stack
COEF, LIMIT = 0.3, 1e-5
CASES = [Case("ppo", "group_norm", "token-mean"), Case("gspo", "group_norm", "seq-mean-token-mean")]
SPLITS = [
    Split("one micro-batch", micro=99),
    Split("2 ranks", ranks=2, zero=2, micro=2),
    Split("2 ranks, token budget", ranks=2, zero=3, budget=True),
    Split("2 ranks that split the tokens", ranks=2, zero=2, micro=2, sequence=2),
]


def documents(count):
    """Windows in which every token but the first is trained on."""
    lengths = torch.tensor([33, 7, 21, 12, 50][:count])
    ids = torch.randint(0, 256, (int(lengths.sum()),), generator=torch.Generator().manual_seed(3))
    batch = SupervisedBatch(ids, lengths, torch.ones(len(ids)), torch.arange(count))
    batch.mask[batch.starts] = 0
    return batch


def gradient(world, folder, case, split, samples, texts):
    """The gradient that the optimiser is given; runs on the ranks."""
    model, config = kept_model(world, folder, "lm", split), train_config(split, BUDGET)
    micro_batches = []
    for batch in (samples, texts):
        mine = shards(batch, balanced_parts(batch, model.world.mesh.data))[model.world.data_index]
        groups = micro_groups(mine.lengths.tolist(), config, model.world.mesh)
        micro_batches += [take(mine, group) for group in groups]
    optimizer_step(model, WithDocuments(objective(case), COEF), micro_batches, 0, "stop")
    return written(model)


def plain(batch):
    """Documents as the formulas read them."""
    return Experience(batch.ids, batch.lengths, batch.mask, batch.index)


@pytest.mark.parametrize("count", [5, 1])  # with one document the other rank has none
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_gradient_is_the_sum_of_both(ranks, folder, case, count):
    texts = documents(count)
    ((_, policy),) = references(folder, [case], lora=False)
    language = gradients.reference(folder, "next token", plain(texts))
    wanted = {name: policy[name] + COEF * language[name] for name in policy}
    step = first_step(experience(case, rewarded(folder, case)))
    for split in SPLITS:
        found = ranks(split.ranks).call(gradient, folder, case, split, step, texts)[0]
        assert relative_error(found, wanted) <= LIMIT, split
        assert relative_error(found, policy) > 100 * LIMIT, "documents are seen"
