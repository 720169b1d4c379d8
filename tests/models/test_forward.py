"""Packed = padded = transformers' own forward, one sequence at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rlhf_suite.config.declarations.ds import LoRAConfig
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.errors import UserError
from rlhf_suite.models.attention import SequenceLayout
from rlhf_suite.models.experts import expert_counts, expert_shares, load_balancing_loss
from rlhf_suite.models.forward import (
    ScalarOutputs,
    check_layout,
    compute_hidden_states,
    map_logits,
    sequence_outputs,
    sequence_scores,
    token_log_probs,
    token_values,
)
from rlhf_suite.models.prepare import make_trainable

LAYOUTS = [(True, "varlen"), (False, "varlen"), (False, "sdpa"), (False, "eager")]
CLOSE = {"atol": 2e-6, "rtol": 1e-6}


def reference(model, batch: TokenBatch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [T] from transformers' own logits, each sequence alone, eager attention."""
    hf = model.model
    hf.set_attn_implementation("eager")
    log_probs, entropies = [], []
    for ids in batch.ids.split(batch.lengths.tolist()):
        log_p = F.log_softmax(hf(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / temperature, dim=-1)
        log_probs.append(F.pad(log_p.gather(-1, ids[1:, None]).squeeze(-1), (1, 0)))
        entropies.append(F.pad(-(log_p.exp() * log_p).sum(-1), (1, 0)))
    return torch.cat(log_probs), torch.cat(entropies)


def gradient(model, value: torch.Tensor) -> torch.Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters, materialize_grads=True)])


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.notices(
    "packed sequences see each other",
    "models/attention.py",
    "runs = tuple((len(list(equal)), length) for length, equal in groupby(known))",
    "runs = ((1, total),)",
)
@pytest.mark.notices(
    "positions go on from one packed sequence to the next",
    "models/attention.py",
    "torch.arange(total, device=lengths.device) - starts[segments]  # [T]",
    "torch.arange(total, device=lengths.device)",
)
@pytest.mark.parametrize("family", ["qwen3", "llama", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize(("packed", "attention"), LAYOUTS)
def test_every_layout_gives_transformers_own_log_probs_entropies_and_gradients(load, batch, family, packed, attention):
    model = load(family, tied=family == "qwen3", packed=packed, attention=attention)
    output = token_log_probs(model, batch, temperature=0.7, entropy=True)
    weights = torch.linspace(0.1, 1, batch.num_tokens)
    found = gradient(model, (output.log_probs * weights - 0.1 * output.entropy).mean())
    log_probs, entropies = reference(model, batch, 0.7)
    torch.testing.assert_close(output.log_probs, log_probs, **CLOSE)
    torch.testing.assert_close(output.entropy, entropies, **CLOSE)
    assert relative(found, gradient(model, (log_probs * weights - 0.1 * entropies).mean())) < 1e-5


def test_first_tokens_have_log_prob_zero(load, batch):
    output = token_log_probs(load(), batch)
    assert output.log_probs[batch.starts].tolist() == [0.0] * len(batch)
    assert (output.log_probs < 0).sum() == batch.num_tokens - len(batch)
    assert output.entropy is None and output.aux_loss is None


def test_a_sliding_window_is_respected_in_every_layout(load, folder, batch, tmp_path):
    config = (folder("qwen3") / "config.json").read_text()
    path = tmp_path / "window"
    path.mkdir()
    for file in folder("qwen3").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    config = config.replace('"use_sliding_window": false', '"use_sliding_window": true')
    config = config.replace('"sliding_window": null', '"sliding_window": 7')
    config = config.replace('"full_attention"', '"sliding_attention"')
    (path / "config.json").write_text(config)
    outputs = []
    for packed, attention in LAYOUTS:
        model = load(path=path, packed=packed, attention=attention)
        scale_up(model)
        outputs.append(token_log_probs(model, batch).log_probs)
    for output in outputs[:-1]:
        torch.testing.assert_close(output, outputs[-1], **CLOSE)
    full = load(path=folder("qwen3"))
    scale_up(full)
    assert (token_log_probs(full, batch).log_probs - outputs[0]).abs().max() > 1e-3


@torch.no_grad()
def scale_up(model) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.5)


def test_rows_of_masked_tokens_alone_reach_the_head(load, batch):
    """The mask may have first tokens of sequences, which have no log-prob."""
    model = load()
    rows = []
    model.model.lm_head.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    needed = torch.arange(batch.num_tokens) % 3 == 0
    some = token_log_probs(model, replace(batch, mask=needed.float()), masked=True).log_probs
    every = token_log_probs(model, batch).log_probs
    torch.testing.assert_close(some, every * needed)
    not_first = torch.ones(batch.num_tokens, dtype=torch.bool).index_fill(0, batch.starts, False)
    assert rows == [int((needed & not_first).sum()), int(not_first.sum())]


def test_a_batch_that_needs_nothing_still_backs_up_zeros_through_every_parameter(load, batch):
    model = load()
    output = token_log_probs(model, replace(batch, mask=torch.zeros_like(batch.mask)), masked=True)
    output.log_probs.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_reaches_the_adapters_of_a_frozen_model(load, batch, reentrant):
    plain, checkpointed = load(), load()
    make_trainable(plain, TrainedModelConfig.of("ppo"), LoRAConfig(rank=4))
    config = TrainedModelConfig.of(
        "ppo", gradient_checkpointing_enable=True, gradient_checkpointing_reentrant=reentrant
    )
    make_trainable(checkpointed, config, LoRAConfig(rank=4))
    grads = []
    for model in (plain, checkpointed):
        token_log_probs(model, batch).log_probs.sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    assert grads[0].norm() > 0 and relative(grads[1], grads[0]) < 1e-6


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_checkpointing_changes_no_gradient(load, batch, packed, reentrant):
    model = load(packed=packed)
    expected = gradient(model, token_log_probs(model, batch).log_probs.sum())
    config = TrainedModelConfig.of(
        "ppo", gradient_checkpointing_enable=True, gradient_checkpointing_reentrant=reentrant
    )
    make_trainable(model, config, LoRAConfig())
    forwards = []
    model.model.model.layers[0].self_attn.register_forward_hook(lambda *_: forwards.append(1))
    token_log_probs(model, batch).log_probs.sum().backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert len(forwards) == 2, "the layer ran again in the backward pass"
    assert relative(found, expected) < 1e-6


def test_no_mask_over_all_tokens_is_built_when_packed(load, batch, monkeypatch):
    model = load()
    masks = []
    attention = F.scaled_dot_product_attention

    def recording(query, key, value, **kwargs):
        masks.append((kwargs["attn_mask"], query.shape[2]))
        return attention(query, key, value, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    token_log_probs(model, batch)
    assert all(mask is None for mask, _ in masks)
    assert {length for _, length in masks} == set(batch.lengths.tolist()), "one call per sequence, none of all tokens"


@pytest.mark.notices(
    "a value is read at its own token, one too late",
    "models/forward.py",
    "    shifted = F.pad(own[:-1], (1, 0))",
    "    shifted = own",
)
@pytest.mark.notices(
    "a score is read one token early",
    "models/forward.py",
    "outputs.values[batch.starts + batch.lengths - 1]",
    "outputs.values[batch.starts + batch.lengths - 2]",
)
def test_values_are_read_from_the_token_before_and_scores_from_the_last(load):
    batch = TokenBatch(torch.tensor([5, 6, 7, 8, 9]), torch.tensor([3, 2]), torch.ones(5))
    own = ScalarOutputs(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), None)
    assert token_values(lambda _: own, batch).tolist() == [0, 1, 2, 0, 4]
    assert sequence_scores(lambda _: own, batch).tolist() == [3, 5]


@pytest.mark.parametrize(("packed", "attention"), LAYOUTS)
def test_scores_and_values_equal_transformers_own(load, batch, packed, attention):
    model = load(head="value", packed=packed, attention=attention)
    scores, values = sequence_scores(model, batch), token_values(model, batch)
    hf = model.model
    hf.set_attn_implementation("eager")
    alone = [hf(input_ids=ids[None], use_cache=False).logits[0, 0] for ids in batch.ids.split(batch.lengths.tolist())]
    torch.testing.assert_close(scores, torch.stack(alone), **CLOSE)
    prefix = batch.ids[batch.starts[1] : batch.starts[1] + 40]
    expected = hf(input_ids=prefix[None], use_cache=False).logits[0, 0]
    torch.testing.assert_close(values[batch.starts[1] + 40], expected, **CLOSE)


def test_the_score_is_at_the_last_token_even_when_it_is_the_padding_token(load):
    model = load(head="value")
    pad = model.model.config.pad_token_id
    ids = torch.tensor([1, 2, 3, pad])
    alone = sequence_scores(model, TokenBatch(ids, torch.tensor([4]), torch.ones(4)))
    beside = sequence_scores(model, TokenBatch(torch.cat([ids, ids[:2]]), torch.tensor([4, 2]), torch.ones(6)))
    before = sequence_scores(model, TokenBatch(ids[:3], torch.tensor([3]), torch.ones(3)))
    torch.testing.assert_close(beside[:1], alone, **CLOSE)
    assert (alone - before).abs() > 1e-3


def test_every_token_trains_the_padding_token_too(load):
    model = load(tied=False)
    pad = model.model.config.pad_token_id
    token_log_probs(
        model, TokenBatch(torch.tensor([pad, 5, 6]), torch.tensor([3]), torch.ones(3))
    ).log_probs.sum().backward()
    assert model.model.get_input_embeddings().weight.grad[pad].abs().sum() > 0


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("packed", [False, True])
def test_router_loss_is_transformers_own_and_not_in_the_log_probs(load, batch, family, packed):
    model = load(family, tied=False, packed=packed)
    before = token_log_probs(model, batch)
    make_trainable(model, TrainedModelConfig.of("ppo", aux_loss_coef=1.0), LoRAConfig())
    output = token_log_probs(model, batch)
    assert before.aux_loss is None
    torch.testing.assert_close(output.log_probs, before.log_probs)
    hf = model.model
    hf.set_attn_implementation("eager")
    longest = int(batch.lengths.max())
    ids, mask = torch.zeros(len(batch), longest).long(), torch.zeros(len(batch), longest).long()
    for row, sequence in enumerate(batch.ids.split(batch.lengths.tolist())):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    expected = hf(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    torch.testing.assert_close(output.aux_loss, expected, **CLOSE)
    (router,) = torch.autograd.grad(output.aux_loss, [hf.model.layers[1].mlp.gate.weight])
    assert router.abs().sum() > 0


def test_uniform_routing_has_a_balancing_loss_of_top_k():
    even = torch.eye(4).repeat(3, 1) * 1e-3  # each expert first equally often, probabilities all but equal
    assert load_balancing_loss(even, 1).item() == pytest.approx(1.0, abs=1e-3)
    collapsed = torch.tensor([[50.0, 0, 0, 0]]).repeat(8, 1)
    assert load_balancing_loss(collapsed, 1).item() == pytest.approx(4.0, abs=1e-3)


def test_with_the_shares_of_the_whole_the_balancing_loss_is_a_mean_over_rows():
    logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    first, second = logits[:5], logits[5:]
    shares = expert_shares(expert_counts(first, 2) + expert_counts(second, 2), 2)
    parts = [load_balancing_loss(part, 2, shares) * len(part) for part in (first, second)]
    torch.testing.assert_close(sum(parts) / 12, load_balancing_loss(logits, 2))
    assert abs(sum(load_balancing_loss(p, 2) * len(p) for p in (first, second)) / 12 - sum(parts) / 12) > 0.01
    assert load_balancing_loss(logits[:0], 2) == 0


def test_packing_without_borders_in_the_attention_is_refused(load):
    model = load(packed=False, attention="sdpa").model
    with pytest.raises(UserError, match=r"ds.packing_samples=true needs ds.attn_implementation=varlen"):
        check_layout(model, packed=True)


def test_layers_of_unknown_kinds_are_refused_where_they_might_mix_sequences(load):
    model = load(packed=False).model
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UserError, match=r"ds.attn_implementation=varlen does not compute"):
        check_layout(model, packed=False)
    with pytest.raises(UserError, match="layers of type linear_attention, which are not known here"):
        check_layout(model, packed=True)


def test_recurrent_models_are_refused_where_their_state_would_cross_sequences(load):
    model = load(packed=False).model
    model._is_stateful = True
    check_layout(model, packed=False)
    with pytest.raises(UserError, match="carries a state"):
        check_layout(model, packed=True)


def test_bf16_weights_give_fp32_log_probs_close_to_those_of_fp32_weights(load, batch):
    model = load()
    expected = token_log_probs(model, batch, entropy=True)
    output = token_log_probs(model.to(torch.bfloat16), batch, entropy=True)
    assert output.log_probs.dtype == output.entropy.dtype == torch.float32
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=0.2, rtol=0)
    (output.log_probs.sum() + output.entropy.sum()).backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_router_loss_of_a_scored_model_is_that_of_the_same_layers(load, batch, family):
    scored, language = (load(family, tied=False, head=head) for head in ("value", "lm"))
    language.model.model.load_state_dict(scored.model.model.state_dict())
    for model in (scored, language):
        make_trainable(model, TrainedModelConfig.of("ppo", aux_loss_coef=1.0), LoRAConfig())
    found, expected = sequence_outputs(scored, batch).aux_loss, token_log_probs(language, batch).aux_loss
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_values_read_from_logits_and_their_gradients_do_not_depend_on_the_chunks(load, batch, monkeypatch, chunk):
    model = load()
    at = torch.tensor([0, 4, 7, 8])
    plain = torch.nn.Linear.forward(model.model.get_output_embeddings(), hidden_of(model, batch)[at]).log_softmax(-1)
    weight = model.model.get_input_embeddings().weight
    (expected,) = torch.autograd.grad(plain[:, 5].sum(), weight)
    monkeypatch.setattr("rlhf_suite.models.head.chunk_rows", lambda _: chunk)
    found = map_logits(model, batch, at, lambda logits, rows: logits.log_softmax(-1)[:, 5] * (at[rows] >= 0)).values
    torch.testing.assert_close(found, plain[:, 5], **CLOSE)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), weight)[0], expected, rtol=1e-5, atol=1e-5)
    assert map_logits(model, batch, at[:0], lambda logits, _: logits[:, :2]).values.shape == (0, 2)


def hidden_of(model, batch):
    """The last hidden states, [T, H]."""
    return compute_hidden_states(model, batch, SequenceLayout.of(batch.lengths, model.packed), False)[0]
