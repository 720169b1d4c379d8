"""What sequences begin with in common is computed once, and no result changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import families
from alike import begin_alike
from rlhf_suite.config.declarations.ds import LoRAConfig
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.data.batch import TokenBatch, take
from rlhf_suite.data.packing import micro_batches
from rlhf_suite.models import attention
from rlhf_suite.models.experts import ExpertBalance
from rlhf_suite.models.forward import (
    LanguageModel,
    compute_hidden_states,
    lay_out,
    sequence_scores,
    token_log_probs,
    token_values,
)
from rlhf_suite.models.prefixes import SHORTEST, find_neighbours, find_prefixes, may_share
from rlhf_suite.models.prepare import make_trainable

# Answers to one prompt, two branches of an answer, one sequence twice, one that is the beginning of another, others.
LENGTHS = [60, 5, 71, 59, 90, 40, 30, 30, 1, 9]
ALIKE = [(2, 0, 40), (3, 0, 41), (4, 2, 66), (5, 0, 40), (7, 6, 30)]
CLOSE = {"atol": 2e-6, "rtol": 1e-5}


@pytest.fixture
def alike() -> TokenBatch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 256, (sum(LENGTHS),), generator=generator)
    mask = (torch.rand(sum(LENGTHS), generator=generator) < 0.7).float()
    return TokenBatch(begin_alike(ids, LENGTHS, ALIKE), torch.tensor(LENGTHS), mask)


def results(model, batch: TokenBatch, share: bool) -> list[torch.Tensor]:
    """Every output of a model, and the gradient of a weighted sum of them."""
    model.share_prefixes = share
    assert (lay_out(model, batch).prefixes is not None) == share
    if isinstance(model, LanguageModel):
        found = token_log_probs(model, batch, temperature=0.7, entropy=True)
        outputs = [found.log_probs, found.entropy, token_log_probs(model, batch, masked=True).log_probs]
    else:
        outputs = [sequence_scores(model, batch), token_values(model, batch)]
    total = sum((output * torch.linspace(-1, 2, len(output))).sum() for output in outputs)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return [*(output.detach() for output in outputs), *torch.autograd.grad(total, weights)]


@pytest.mark.notices(
    "the keys of a prefix are those of the tokens that happen to stand at its place",
    "models/prefixes.py",
    "places[starts[row] : starts[row] + common] = places[starts[before] : starts[before] + common]",
    "pass",
)
@pytest.mark.notices(
    "ends of sequences see the first keys alone",
    "models/attention.py",
    "queries = keys[length - query.shape[2] :, None]",
    "queries = keys[: query.shape[2], None]",
)
@pytest.mark.notices(
    "positions start again after a prefix",
    "models/forward.py",
    "positions[sequences.prefixes.computed]",
    "positions[: len(sequences.prefixes.computed)]",
)
@pytest.mark.parametrize("head", ["lm", "value"])
def test_outputs_and_gradients_are_those_of_whole_sequences(load, alike, head):
    model = load(head=head)
    for shared, whole in zip(results(model, alike, True), results(model, alike, False), strict=True):
        assert float((shared - whole).norm() / whole.norm()) < 1e-5


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "gemma2"])
def test_long_ends_of_sequences_are_attended_to_in_parts(load, alike, monkeypatch, tmp_path, kind):
    """So no mask of all their queries and keys is in memory."""
    families.make_typed(tmp_path / kind, kind)
    model = load(path=tmp_path / kind)
    whole = results(model, alike, True)
    monkeypatch.setattr(attention, "LARGEST_MASK", 7 * 90)
    for parts, at_once in zip(results(model, alike, True), whole, strict=True):
        assert float((parts - at_once).norm() / at_once.norm()) < 1e-5


def test_tokens_of_a_prefix_pass_through_the_model_once(load, alike):
    model, seen = load(), []
    hook = model.model.get_input_embeddings().register_forward_hook(lambda *call: seen.append(call[1][0].numel()))
    compute_hidden_states(model, alike, lay_out(model, alike), False)
    hook.remove()
    answers = 60 + (71 - 40) + (59 - 41) + (90 - 66)  # the row of 40 tokens is a beginning of theirs
    assert seen == [answers + 5 + 30 + 1 + 1 + 9], "of a sequence that comes twice, the last token is computed twice"


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=9))
def test_each_token_has_the_state_of_one_with_the_same_tokens_before_it(rows):
    ids = torch.tensor([token for row in rows for token in row])
    batch = TokenBatch(ids, torch.tensor([len(row) for row in rows]), torch.ones(len(ids)))
    prefixes = find_prefixes(batch)
    before = [tuple(row[: place + 1]) for row in rows for place in range(len(row))]
    if prefixes is None:
        assert len(set(before)) > (1 - 1 / 16) * len(before) - SHORTEST * len(rows)
        return
    computed = prefixes.computed.tolist()
    assert [before[computed[place]] for place in prefixes.places.tolist()] == before
    assert {int(end) - 1 for end in batch.lengths.cumsum(0)} <= {*computed}, "the last of each sequence is its own"
    assert len(computed) < len(before) and prefixes.cu_lengths.tolist()[-1] == len(computed)


def test_neighbours_share_a_micro_batch(load, alike):
    """Of two prompts with four answers each, each micro-batch has one prompt."""
    rows = [row for _ in range(4) for row in (0, 4)]
    batch = take(alike, rows)
    order = find_neighbours(load(), batch)
    groups = micro_batches(batch.lengths.tolist(), token_budget=4 * 90, order=order)
    assert [len({rows[row] for row in group}) for group in groups] == [1, 1]
    assert find_neighbours(load(), take(alike, [1, 8, 9])) is None, "nothing in common"


def test_bins_are_filled_in_an_order_and_never_above_the_budget():
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 50, 40).tolist()
    order = generator.permutation(40).tolist()
    groups = micro_batches(lengths, token_budget=60, order=order)
    assert sorted(row for group in groups for row in group) == list(range(40))
    assert all(sum(lengths[row] for row in group) <= 60 for group in groups)
    places = {row: place for place, row in enumerate(order)}
    assert all(np.ptp([places[row] for row in group]) == len(group) - 1 for group in groups), "neighbours in the order"


def test_where_results_could_change_sequences_are_computed_whole(load, alike):
    model = load()
    assert may_share(model, alike), "null: on a CPU"
    assert not may_share(model, replace(alike, images=((),) * len(alike)))
    assert not may_share(load(packed=False), alike)
    model.model.config.attention_dropout = 0.1
    assert may_share(model.eval(), alike) and not may_share(model.train(), alike)


def test_dropout_of_adapters_is_drawn_for_each_sequence(load, alike):
    model = load()
    config = TrainedModelConfig.of("sft", model_name_or_path="builtin:tiny")
    make_trainable(model, config, LoRAConfig(rank=2, dropout=0.1))
    assert not may_share(model.train(), alike) and may_share(model.eval(), alike)


@pytest.mark.notices(
    "experts are balanced over the tokens that are computed",
    "models/experts.py",
    "rows = tokens if sequences.rows is None else sequences.rows[tokens]",
    "rows = tokens[tokens < len(router_logits[0])]",
)
def test_experts_are_balanced_over_the_tokens_of_all_sequences(load, alike):
    model, losses = load("qwen3_moe"), []
    model.balance = ExpertBalance(model.model.config.num_experts_per_tok)
    for share in (True, False):
        model.share_prefixes = share
        losses.append(token_log_probs(model, alike).aux_loss)
    torch.testing.assert_close(*losses, **CLOSE)
