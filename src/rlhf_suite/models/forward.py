"""The one forward pass: a TokenBatch in, log-probs or values per token out, packed or padded.

T tokens, B sequences, L longest length, H hidden size. Every output stands at the token it describes: the log-prob of
token t, and the value of the state in which token t was chosen, are read from the hidden state at t-1. The first token
of a sequence has neither, and its entries are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_suite.config.declarations.ds import ATTENTION, is_flash
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.errors import UserError
from rlhf_suite.losses.reduce import sequence_sums
from rlhf_suite.models import attention
from rlhf_suite.models.attention import SequenceLayout
from rlhf_suite.models.experts import ExpertBalance
from rlhf_suite.models.families import CARRIES, PACKED, SEQUENCE, Family, family_of
from rlhf_suite.models.head import DeferredLogits, Read, ScoringHead, logit_rule
from rlhf_suite.models.mixers import masks_of, prepare_mixers
from rlhf_suite.models.prefixes import find_prefixes, may_share
from rlhf_suite.models.routing import ARGUMENT, Routes, arrange, prepare_routers, rerouted_share
from rlhf_suite.models.sequence_parallel import SequenceGroup
from rlhf_suite.models.vision import ImageInputs, VisionProcessor
from rlhf_suite.models.wrapped import WrappedModel
from rlhf_suite.waits import sign_of_life


class TokenOutputs(NamedTuple):
    """The outputs of a language model for the tokens of a batch. A tuple, so that the hooks of ZeRO
    find the tensors."""

    log_probs: Tensor  # [T] fp32
    entropy: Tensor | None  # [T] fp32: the entropy of the distribution that the token was drawn from, if requested
    aux_loss: Tensor | None  # scalar: the MoE load-balancing loss with weight 1, in no other output; None if off
    # [T] of the layers whose route was replayed, the share in which the router chose other experts; None: no replay
    rerouted: Tensor | None = None


class ScalarOutputs(NamedTuple):
    """One number per token or per sequence."""

    values: Tensor  # [T], [B] or, of N chosen tokens, [N, ...], fp32
    aux_loss: Tensor | None  # as in `TokenOutputs`


class LanguageModel(WrappedModel):
    """A causal language model of transformers with the one forward pass."""

    def __init__(self, model: PreTrainedModel, packed: bool, vision: VisionProcessor | None = None) -> None:
        super().__init__(model, check_layout(model, packed), packed, vision)
        prepare_mixers(model, self.family)
        prepare_routers(model, self.family)
        rule = logit_rule(model.config.get_text_config(), self.family.head)
        model.set_output_embeddings(ScoringHead.of(model.get_output_embeddings(), rule))
        self.balance: ExpertBalance | None = None

    def forward(
        self,
        batch: TokenBatch,
        temperature: float = 1.0,
        entropy: bool = False,
        masked: bool = False,
        reader: tuple[Tensor, Read | None] | None = None,
        count_experts: bool = False,
    ) -> TokenOutputs | ScalarOutputs | DeferredLogits:
        """Return log-probs under softmax(logits / temperature). With `masked` only the tokens of the
        mask: the rows of others skip the head and are 0.

        With `reader` (tokens [N], function) return instead the function's value for the logits at these tokens' own
        hidden states; if the function is None, return the logits as `DeferredLogits`. With `count_experts` return
        `expert_counts`.
        """
        sequences = lay_out(self, batch)
        routes = None
        if batch.routes is not None:  # those of a prefix are not the same in all sequences
            sequences = replace(sequences, prefixes=None)
            routes = Routes(arrange(batch.routes, sequences))
        hidden, router_logits = compute_token_states(self, batch, sequences, routes)
        if count_experts:
            assert self.balance is not None
            return ScalarOutputs(self.balance.counts(router_logits, batch, sequences), None)
        aux_loss = self.balance.loss(router_logits, batch, sequences) if self.balance else None
        if reader is not None:
            read_outputs = self._read(hidden, sequences, *reader)
            return read_outputs if isinstance(read_outputs, DeferredLogits) else ScalarOutputs(read_outputs, aux_loss)
        tokens = scored_tokens(batch, sequences, masked)  # [N]
        which, rows = sequences.select_held(tokens - 1)
        tokens = tokens[which]
        head: nn.Module = self.model.get_output_embeddings()
        log_probs, entropies = head(
            hidden.index_select(0, rows), batch.ids[tokens], temperature=temperature, entropy=entropy
        )
        return TokenOutputs(
            sequences.whole(_spread(log_probs, tokens, batch.num_tokens)),
            sequences.whole(_spread(entropies, tokens, batch.num_tokens)) if entropy else None,
            aux_loss,
            None if routes is None else rerouted_share(routes, sequences, batch.num_tokens),
        )

    def never_sample_images(self) -> None:
        """Give tokens that stand for images no probability, as the engines of a run with images do."""
        assert self.vision is not None, "a model that reads no images"
        head: ScoringHead = self.model.get_output_embeddings()
        head.never_sample(self.vision.never_sampled)

    def _read(self, hidden: Tensor, sequences: SequenceLayout, at: Tensor, read: Read | None) -> Any:
        """Return the values of `read` at the tokens `at` [N], or without it the logits as `DeferredLogits`."""
        head: nn.Module = self.model.get_output_embeddings()
        if sequences.shard is None:
            rows = hidden.index_select(0, at)
            return head(rows, later=True) if read is None else head(rows, read=read)
        which, places = sequences.select_held(at)
        rows = hidden.index_select(0, places)
        if read is None:
            order = torch.arange(len(which), device=which.device)
            return head(rows, later=True)._replace(places=torch.zeros_like(at).index_copy_(0, which, order))
        values = head(rows, read=lambda logits, part: read(logits, which[part]))
        return sequences.whole(_spread(values, which, len(at)))


class ScalarModel(WrappedModel):
    """A transformers model with one number per token: a critic or a reward model."""

    def __init__(
        self,
        model: PreTrainedModel,
        packed: bool,
        *,
        head_name: str = "score",
        head_is_new: bool = False,
        vision: VisionProcessor | None = None,
    ) -> None:
        super().__init__(model, check_layout(model, packed), packed, vision)
        prepare_mixers(model, self.family)
        self.head_name = head_name  # its name in checkpoints; in memory transformers calls it `score`
        self.head_is_new = head_is_new  # the head is random, since the checkpoint has none of that name
        self.balance: ExpertBalance | None = None

    def forward(self, batch: TokenBatch, count_experts: bool = False) -> ScalarOutputs:
        """Return the head's output at every token's own hidden state, [T]. Read it through the functions below."""
        sequences = lay_out(self, batch)
        hidden, router_logits = compute_token_states(self, batch, sequences)
        if count_experts:
            assert self.balance is not None
            return ScalarOutputs(self.balance.counts(router_logits, batch, sequences), None)
        aux_loss = self.balance.loss(router_logits, batch, sequences) if self.balance else None
        values = self.model.score(hidden).squeeze(-1).float()
        if sequences.shard is not None:
            values = sequences.whole(_spread(values, sequences.shard.tokens, len(sequences.positions)))
        return ScalarOutputs(values[: batch.num_tokens], aux_loss)


def token_log_probs(
    model: Callable[..., Any],
    batch: TokenBatch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    masked: bool = False,
) -> TokenOutputs:
    """Return `LanguageModel.forward` of a model that an engine may wrap."""
    outputs: TokenOutputs = model(batch, temperature=temperature, entropy=entropy, masked=masked)
    return outputs


def map_logits(model: Callable[..., Any], batch: TokenBatch, at: Tensor, read: Read) -> ScalarOutputs:
    """Return the values of `read` for the logits at the tokens `at` [N], which predict the token after each.

    The logits exist only for a chunk of tokens at a time; the backward pass calls `read` again.
    """
    outputs: ScalarOutputs = model(batch, reader=(at, read))
    return outputs


@torch.no_grad()
def defer_logits(model: Callable[..., Any], batch: TokenBatch, at: Tensor) -> DeferredLogits:
    """Return the logits at the tokens `at` [N] in a form that computes a few rows at a time.

    It is meant for a frozen model, if the `read` of another model needs the same rows.
    """
    outputs: DeferredLogits = model(batch, reader=(at, None))
    return outputs


def expert_counts(model: Callable[..., Any], batch: TokenBatch) -> Tensor:
    """Return how many tokens of the batch, summed over layers, go to each expert, [E]. The model must
    have `balance`."""
    counts: Tensor = model(batch, count_experts=True).values
    return counts


def token_values(model: Callable[..., Any], batch: TokenBatch) -> Tensor:
    """Return V(state in which token t was chosen), [T]: the head at t-1, and 0 at the first token of a sequence."""
    return value_outputs(model, batch).values


def value_outputs(model: Callable[..., Any], batch: TokenBatch) -> ScalarOutputs:
    """Return `token_values` with the auxiliary loss of the same forward pass."""
    outputs: ScalarOutputs = model(batch)
    own = outputs.values  # [T]
    shifted = F.pad(own[:-1], (1, 0))
    first = torch.zeros(batch.num_tokens, dtype=torch.bool, device=own.device).index_fill(0, batch.starts, True)
    return ScalarOutputs(shifted.masked_fill(first, 0.0), outputs.aux_loss)


def sequence_scores(model: Callable[..., Any], batch: TokenBatch) -> Tensor:
    """Return the head at the last token of each sequence, [B]. The lengths say which token that is,
    not a padding id."""
    return sequence_outputs(model, batch).values


def sequence_outputs(model: Callable[..., Any], batch: TokenBatch) -> ScalarOutputs:
    """Return `sequence_scores` with the auxiliary loss of the same forward pass."""
    outputs: ScalarOutputs = model(batch)
    return ScalarOutputs(outputs.values[batch.starts + batch.lengths - 1], outputs.aux_loss)


def response_log_probs(model: Callable[..., Any], batch: TokenBatch) -> ScalarOutputs:
    """Return log p(response | prompt) of each sequence, [B]: the sum over its masked tokens."""
    mask = batch.mask
    outputs = token_log_probs(model, batch, masked=True)
    return ScalarOutputs(sequence_sums(outputs.log_probs * mask, batch.segments, len(batch)), outputs.aux_loss)


def carries_unknown_state(model: PreTrainedModel, family: Family) -> bool:
    """Return whether a model has layers with a state that its family does not declare, so that nothing resets it."""
    return bool(model._is_stateful) and not family.mixers


def check_layout(model: PreTrainedModel, packed: bool, group: SequenceGroup | None = None) -> Family:
    """Return the family of a model.

    Raises:
        UserError: its attention would silently compute something else in this layout, or if a group of ranks splits
            the tokens.
    """
    config = model.config.get_text_config()
    family, implementation = family_of(model.config.to_dict()), config._attn_implementation
    if group is not None:
        assert packed and implementation == attention.NAME, "checked with the flags"
        group.check_heads(config)
        if (why := family.why_not(SEQUENCE)) is not None:
            raise UserError(f"ds.ring_attn_size={group.size}: {family.title} {why}. Set ds.ring_attn_size=1")
    why = family.why_not(PACKED)
    if packed and why is None and carries_unknown_state(model, family):
        why = CARRIES
    if packed and why is not None:
        raise UserError(f"ds.packing_samples=true: {family.title} {why}. Set ds.packing_samples=false")
    if packed and implementation != attention.NAME and not is_flash(implementation):
        raise UserError(
            f"ds.packing_samples=true needs ds.attn_implementation={attention.NAME} or a flash kernel, not "
            f"{implementation}: the others let packed sequences see each other"
        )
    if not family.computes(implementation) and implementation in ATTENTION:
        raise UserError(
            f"ds.attn_implementation={implementation} does not compute the attention of {family.title}. Set "
            f"ds.attn_implementation={family.attention[0]}"
        )
    return family


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return the model without its head. For some classes of transformers the base model is the model itself."""
    return model.model if model.base_model is model else model.base_model


def lay_out(module: LanguageModel | ScalarModel, batch: TokenBatch) -> SequenceLayout:
    """Return the layout of a batch as a model reads it."""
    sequences = SequenceLayout.of(batch.lengths, module.packed, module.sequence_group, batch.host_lengths)
    return replace(sequences, prefixes=find_prefixes(batch) if may_share(module, batch) else None)


def scored_tokens(batch: TokenBatch, sequences: SequenceLayout, masked: bool) -> Tensor:
    """Return the tokens that have a log-prob, [N]: all but the first of each sequence, or with `masked` those of them
    in the mask. Their number is counted in host memory, so that nothing waits for the device."""
    wanted = sequences.positions[: batch.num_tokens] > 0  # [T]
    lengths = batch.host_lengths
    starts = (lengths.cumsum(0) - lengths)[lengths > 0]
    counted = batch.host_mask.bool() if masked else torch.ones(batch.num_tokens, dtype=torch.bool)
    count = int(counted.sum()) - int(counted[starts].sum())
    return torch.nonzero_static(wanted & batch.mask.bool() if masked else wanted, size=count).squeeze(1)


def compute_token_states(
    module: LanguageModel | ScalarModel, batch: TokenBatch, sequences: SequenceLayout, routes: Routes | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the last hidden states [T, H] of a batch, perhaps with images, and the router logits if the model has
    `balance`. `routes`: those that its routers take."""
    if batch.images is None:
        return compute_hidden_states(module, batch, sequences, module.balance is not None, routes=routes)
    assert module.vision is not None, "images for a model that cannot take them"
    assert module.balance is None and routes is None, "checked with the flags"
    assert module.sequence_group is None, "checked with the flags"
    whole = module.vision.with_an_image(batch)
    images = module.vision.inputs(whole)
    sequences = replace(lay_out(module, whole), images=images.numbers)
    states, _ = compute_hidden_states(module, whole, sequences, False, images)
    return states[: batch.num_tokens], ()


def compute_hidden_states(
    module: LanguageModel | ScalarModel,
    batch: TokenBatch,
    sequences: SequenceLayout,
    router_logits: bool,
    images: ImageInputs | None = None,
    routes: Routes | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the last hidden states [T, H] and, if requested, the router logits [rows, experts] of each MoE layer.
    `routes`: those that its routers take."""
    sign_of_life()
    inputs = _pack_inputs(batch, sequences) if sequences.packed else _pad_inputs(batch, sequences)
    if images is not None:
        add_images(inputs, images, sequences)
    implementation = module.model.config.get_text_config()._attn_implementation
    if implementation == attention.NAME:
        inputs |= {"attention_mask": None, "sequences": sequences}
    elif sequences.packed:
        borders, longest = sequences.cu_lengths, sequences.max_length
        inputs |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}
    if sequences.packed and module.family.mixers:
        inputs["attention_mask"] = masks_of(sequences)
    if router_logits:
        inputs["output_router_logits"] = True
    if routes is not None:
        inputs[ARGUMENT] = routes
    # With a cache, transformers would ignore where packed sequences end.
    outputs = backbone(module.model)(**inputs, use_cache=False)
    assert routes is None or routes.taken == routes.experts.shape[1], f"{routes.taken} routers took routes"
    states: Tensor = outputs.last_hidden_state.flatten(0, 1)
    states = states if sequences.rows is None else states.index_select(0, sequences.rows)
    return states, outputs.router_logits if router_logits else ()


def add_images(inputs: dict[str, Any], images: ImageInputs, sequences: SequenceLayout) -> None:
    """Add to the inputs of a model those of images. Of several rows of positions the first are those in the text;
    without them transformers would look for the borders of sequences in the others."""
    inputs |= images.pixels
    if images.positions is not None:
        axes = [sequences.lay_out(positions) for positions in images.positions]
        inputs["position_ids"] = torch.stack([inputs["position_ids"], *axes])  # [4, rows, length]
    if sequences.images is not None:
        inputs["token_type_ids"] = (sequences.lay_out(sequences.images) > 0).int()


def _pack_inputs(batch: TokenBatch, sequences: SequenceLayout) -> dict[str, Any]:
    """Return the inputs of one row with all sequences, [1, T], or this rank's tokens of it; positions restart at each
    sequence. A 2-D mask would hide the borders."""
    ids, positions = batch.ids, sequences.positions
    if sequences.shard is not None:
        own = sequences.shard.tokens
        ids, positions = F.pad(ids, (0, len(positions) - len(ids)))[own], positions[own]
    if sequences.prefixes is not None:
        ids, positions = ids[sequences.prefixes.computed], positions[sequences.prefixes.computed]
    return {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": None}


def _pad_inputs(batch: TokenBatch, sequences: SequenceLayout) -> dict[str, Any]:
    """Return the inputs of right-padded rows, [B, L]; the padding is token 0, masked."""
    ids, longest = sequences.lay_out(batch.ids), sequences.max_length
    positions = torch.arange(longest, device=ids.device).expand(len(batch), longest)
    mask = (positions < batch.lengths[:, None]).long()
    return {"input_ids": ids, "position_ids": positions, "attention_mask": mask}


def _spread(values: Tensor, tokens: Tensor, total: int) -> Tensor:
    """Return zeros [total, ...] with `values` [N, ...] at the positions `tokens` [N]."""
    return values.new_zeros(total, *values.shape[1:]).index_copy(0, tokens, values)
