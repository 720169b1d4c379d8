"""A step on samples and documents has the gradient of the policy loss + coef x that of the mean next-token loss."""

from __future__ import annotations

from dataclasses import replace

import gradients
import pytest
import torch
from gradients import BUDGET, kept_model, train_config, written
from plain_models import relative_error
from policy_formulas import OBJECTIVES
from policy_matrix import Case, experience, first_step, objective, references, rewarded
from splits import Split

from rlhf_suite.config.plan.micro_batches import trained_micro_batches
from rlhf_suite.data.batch import collate, take
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.rl.documents import WithDocuments
from rlhf_suite.rl.sharding import balanced_parts, shards
from rlhf_suite.train.loader import micro_groups
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.task import SupervisedBatch
from vision import PICTURES, Seeing

pytestmark = pytest.mark.stack
COEF, LIMIT = 0.3, 1e-5
ENTROPY = "ppo, token-mean"  # with a bonus for entropy, and the KL as a loss
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
        limit, packed = trained_micro_batches(config), model.module.packed
        groups = micro_groups(mine.lengths.tolist(), limit, model.world.mesh, packed)
        micro_batches += [take(mine, group) for group in groups]
    optimizer_step(model, WithDocuments(objective(case), COEF), micro_batches, 0, "stop")
    return written(model)


def plain(batch):
    """Documents as the formulas read them."""
    return Experience(batch.ids, batch.lengths, batch.mask, batch.index)


@pytest.mark.notices(
    "documents count as much as samples", "rl/documents.py", "self.coef * language.total", "language.total"
)
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


UNEVEN = [  # ranks that hold as many micro-batches of each kind as their tokens make
    Split("2 ranks, ZeRO-3", ranks=2, zero=3, micro=1),
    Split("2 ranks, ZeRO-3, checkpointing", ranks=2, zero=3, micro=2, checkpointing="plain"),
    Split("2 ranks, ZeRO-3, padded, LoRA", ranks=2, zero=3, micro=1, packed=False, lora=True),
    Split("2 ranks, ZeRO-2", ranks=2, zero=2, micro=1),
]


def gradient_with_entropy(world, folder, split, samples, texts):
    """The gradient of a step on documents and on samples that have entropy and KL terms, and how many micro-batches of
    both kinds this rank has."""
    model, config = kept_model(world, folder, "lm", split), train_config(split, BUDGET)
    micro_batches, counts = [], []
    for batch in (samples, texts):
        mine = shards(batch, balanced_parts(batch, model.world.mesh.data))[model.world.data_index]
        limit, packed = trained_micro_batches(config), model.module.packed
        groups = micro_groups(mine.lengths.tolist(), limit, model.world.mesh, packed)
        micro_batches += [take(mine, group) for group in groups]
        counts.append(len(groups))
    optimizer_step(model, WithDocuments(OBJECTIVES[ENTROPY], COEF), micro_batches, 0, "stop")
    return written(model), counts


@pytest.mark.parametrize("count", [5, 1])
@pytest.mark.parametrize("split", UNEVEN, ids=lambda split: split.name)
def test_ranks_run_the_same_modules_whatever_they_hold(ranks, folder, batch, split, count):
    """Samples have an entropy, whose backward pass uses the head once more, and documents have none."""
    texts = documents(count)
    policy = gradients.reference(folder, ENTROPY, batch, lora=split.lora)
    language = gradients.reference(folder, "next token", plain(texts), lora=split.lora)
    wanted = {name: policy[name] + COEF * language[name] for name in policy}
    found = ranks(2).call(gradient_with_entropy, folder, split, batch, texts, deadline_s=60)
    assert found[0][1] != found[1][1], "the ranks hold different numbers of micro-batches"
    assert relative_error(found[0][0], wanted) <= LIMIT


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """The folder of a model that reads images, as `kept_model` wants it, and a batch of which one sequence has one."""
    model = Seeing(tmp_path_factory.mktemp("seeing"))
    (model.folder.parent / "lm").symlink_to(model.folder)
    examples = [
        model.example(files, [65 + n] * (20 if files else 60)) for n, files in enumerate([PICTURES[:1], [], []])
    ]
    batch = collate(examples, Experience)
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    index = torch.arange(len(batch))
    return model.folder.parent, replace(batch, index=index, advantages=noise, old_log_probs=-noise.abs())


def test_images_on_one_rank_and_documents_on_both(ranks, seeing):
    """Documents pass no tower of images, samples of a run with images do, whether they have one or not. The
    bias of keys has no gradient but rounding."""
    folder, samples = seeing
    samples = replace(samples, ref_log_probs=samples.old_log_probs)
    texts = replace(documents(1), ids=documents(1).ids % 97)
    ((wanted, _),) = ranks(1).call(gradient_with_entropy, folder, Split("one", micro=99), samples, texts)
    for zero in (2, 3):
        split = Split("2 ranks", ranks=2, zero=zero, micro=1)
        found = ranks(2).call(gradient_with_entropy, folder, split, samples, texts, deadline_s=60)
        parts = ({n: g for n, g in each.items() if "k_proj.bias" not in n} for each in (found[0][0], wanted))
        assert relative_error(*parts) <= 1e-4, split
