"""The one forward pass: a TokenBatch in, per-token log-probs or values out, packed or padded.

T tokens, B sequences, L longest length, H hidden size. Everything that comes out stands at the token it describes: the
log-prob of token t, and the value of the state token t was chosen in, are read from the hidden state at t-1. A
sequence's first token has neither: both are 0 there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.errors import UserError
from rlhf_suite.losses.reduce import sequence_sums
from rlhf_suite.models import attention
from rlhf_suite.models.attention import SequenceLayout
from rlhf_suite.models.experts import ExpertBalance
from rlhf_suite.models.head import DeferredLogits, Read, ScoringHead

if TYPE_CHECKING:
    from peft import PeftConfig

PACKING = (attention.NAME, "flash_attention_2")


class TokenOutputs(NamedTuple):
    """What a language model says about the tokens of a batch. A tuple, so that ZeRO's hooks find the tensors."""

    log_probs: Tensor  # [T] fp32
    entropy: Tensor | None  # [T] fp32: of the distribution the token was drawn from; where asked for
    aux_loss: Tensor | None  # scalar: the MoE load-balancing loss, weight 1, not part of anything else; where asked for


class ScalarOutputs(NamedTuple):
    """Numbers of tokens or of sequences."""

    values: Tensor  # [T], [B] or, of N chosen tokens, [N, ...], fp32
    aux_loss: Tensor | None  # as in `TokenOutputs`


class LanguageModel(nn.Module):
    """A causal language model of transformers behind the one forward pass."""

    def __init__(self, model: PreTrainedModel, packed: bool) -> None:
        super().__init__()
        check_layout(model, packed)
        model.set_output_embeddings(ScoringHead.of(model.get_output_embeddings()))
        self.model = model
        self.packed = packed
        self.balance: ExpertBalance | None = None
        self.lora: PeftConfig | None = None
        self.dropout_off: dict[str, float] = {}  # rates of the saved configuration that were switched off

    def forward(
        self,
        batch: TokenBatch,
        temperature: float = 1.0,
        entropy: bool = False,
        needed: Tensor | None = None,
        reader: tuple[Tensor, Read | None] | None = None,
        count_experts: bool = False,
    ) -> TokenOutputs | ScalarOutputs | DeferredLogits:
        """Log-probs under softmax(logits / temperature). Rows outside `needed` [T] bool skip the head and are 0.

        With `reader` (tokens [N], read) instead what `read` makes of the logits at those tokens' own hidden states, or
        with read None what they can be computed from; with `count_experts` what `expert_counts` says of the batch.
        """
        sequences = SequenceLayout.of(batch.lengths, self.packed)
        hidden, router_logits = hidden_states(self.model, batch, sequences, self.balance is not None)
        if count_experts:
            assert self.balance is not None
            return ScalarOutputs(self.balance.counts(router_logits, batch, sequences), None)
        aux_loss = self.balance.loss(router_logits, batch, sequences) if self.balance else None
        if reader is not None:
            at, read = reader
            if read is None:
                unread: DeferredLogits = self.model.get_output_embeddings()(hidden.index_select(0, at), later=True)
                return unread
            return ScalarOutputs(self.model.get_output_embeddings()(hidden.index_select(0, at), read=read), aux_loss)
        wanted = sequences.positions > 0
        tokens = (wanted if needed is None else wanted & needed).nonzero().squeeze(1)  # [N]
        head: nn.Module = self.model.get_output_embeddings()
        log_probs, entropies = head(
            hidden.index_select(0, tokens - 1), batch.ids[tokens], temperature=temperature, entropy=entropy
        )
        return TokenOutputs(
            _spread(log_probs, tokens, batch.num_tokens),
            _spread(entropies, tokens, batch.num_tokens) if entropy else None,
            aux_loss,
        )


class ScalarModel(nn.Module):
    """A transformers model with one number per token: critic, reward model."""

    def __init__(
        self, model: PreTrainedModel, packed: bool, *, head_name: str = "score", head_is_new: bool = False
    ) -> None:
        super().__init__()
        check_layout(model, packed)
        self.model = model
        self.packed = packed
        self.head_name = head_name  # in checkpoints; in memory it is transformers' `score`
        self.head_is_new = head_is_new  # drawn at random because the checkpoint had none of that name
        self.balance: ExpertBalance | None = None
        self.lora: PeftConfig | None = None
        self.dropout_off: dict[str, float] = {}  # rates of the saved configuration that were switched off

    def forward(self, batch: TokenBatch, count_experts: bool = False) -> ScalarOutputs:
        """The head's output at every token's own hidden state, [T]. Read through the functions below."""
        sequences = SequenceLayout.of(batch.lengths, self.packed)
        hidden, router_logits = hidden_states(self.model, batch, sequences, self.balance is not None)
        if count_experts:
            assert self.balance is not None
            return ScalarOutputs(self.balance.counts(router_logits, batch, sequences), None)
        aux_loss = self.balance.loss(router_logits, batch, sequences) if self.balance else None
        return ScalarOutputs(self.model.score(hidden).squeeze(-1).float(), aux_loss)


def token_log_probs(
    model: Callable[..., Any],
    batch: TokenBatch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    needed: Tensor | None = None,
) -> TokenOutputs:
    """`LanguageModel.forward`, through whatever engine wraps the model."""
    outputs: TokenOutputs = model(batch, temperature=temperature, entropy=entropy, needed=needed)
    return outputs


def map_logits(model: Callable[..., Any], batch: TokenBatch, at: Tensor, read: Read) -> ScalarOutputs:
    """What `read` makes of the logits at the tokens `at` [N]: those of the token that follows each. They exist for a
    chunk of tokens at a time; `read` is called again in the backward pass."""
    outputs: ScalarOutputs = model(batch, reader=(at, read))
    return outputs


@torch.no_grad()
def deferred_logits(model: Callable[..., Any], batch: TokenBatch, at: Tensor) -> DeferredLogits:
    """The logits at the tokens `at` [N], to be computed a few rows at a time: for a frozen model, of which another
    model's `read` needs the same rows."""
    outputs: DeferredLogits = model(batch, reader=(at, None))
    return outputs


def expert_counts(model: Callable[..., Any], batch: TokenBatch) -> Tensor:
    """How many tokens of the batch, layer by layer, go to each expert, [E]. Needs a model with `balance`."""
    counts: Tensor = model(batch, count_experts=True).values
    return counts


def token_values(model: Callable[..., Any], batch: TokenBatch) -> Tensor:
    """V(state token t was chosen in), [T]: the head at t-1; 0 at the first token of a sequence."""
    return value_outputs(model, batch).values


def value_outputs(model: Callable[..., Any], batch: TokenBatch) -> ScalarOutputs:
    """`token_values`, with the auxiliary loss of the same forward."""
    outputs: ScalarOutputs = model(batch)
    own = outputs.values  # [T]
    shifted = F.pad(own[:-1], (1, 0))
    first = torch.zeros(batch.num_tokens, dtype=torch.bool, device=own.device).index_fill(0, batch.starts, True)
    return ScalarOutputs(shifted.masked_fill(first, 0.0), outputs.aux_loss)


def sequence_scores(model: Callable[..., Any], batch: TokenBatch) -> Tensor:
    """The head at each sequence's last token, [B]; which one that is follows from its length, not from a padding id."""
    return sequence_outputs(model, batch).values


def sequence_outputs(model: Callable[..., Any], batch: TokenBatch) -> ScalarOutputs:
    """`sequence_scores`, with the auxiliary loss of the same forward."""
    outputs: ScalarOutputs = model(batch)
    return ScalarOutputs(outputs.values[batch.starts + batch.lengths - 1], outputs.aux_loss)


def response_log_probs(model: Callable[..., Any], batch: TokenBatch) -> ScalarOutputs:
    """log p(answer | prompt) of each sequence, [B]: the sum over its masked tokens."""
    mask = batch.mask
    outputs = token_log_probs(model, batch, needed=mask.bool())
    return ScalarOutputs(sequence_sums(outputs.log_probs * mask, batch.segments, len(batch)), outputs.aux_loss)


def check_layout(model: PreTrainedModel, packed: bool) -> None:
    """Refuse a combination of attention and layout that would compute something else without saying so."""
    implementation = model.config._attn_implementation
    if packed and implementation not in PACKING:
        raise UserError(
            f"ds.packing_samples=true needs ds.attn_implementation={' or '.join(PACKING)}, not {implementation}: "
            "the others let packed sequences see each other"
        )
    other = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other and (packed or implementation == attention.NAME):
        raise UserError(
            f"this model has layers of type {', '.join(sorted(other))}, which run neither packed nor with varlen "
            "attention. Set ds.packing_samples=false and ds.attn_implementation=sdpa"
        )
    if packed and model._is_stateful:
        raise UserError(
            f"ds.packing_samples=true: {type(model).__name__} carries a state from token to token, also from one "
            "packed sequence into the next. Set ds.packing_samples=false"
        )


def hidden_states(
    model: PreTrainedModel, batch: TokenBatch, sequences: SequenceLayout, router_logits: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The last hidden states [T, H]; where asked for, each MoE layer's router logits [rows, experts] as well."""
    inputs = _packed_inputs(batch, sequences) if sequences.packed else _padded_inputs(batch, sequences)
    implementation = model.config._attn_implementation
    if implementation == attention.NAME:
        inputs |= {"attention_mask": None, "sequences": sequences}
    elif sequences.packed:
        borders, longest = sequences.cu_lengths, sequences.max_length
        inputs |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}
    if router_logits:
        inputs["output_router_logits"] = True
    # A cache would make transformers forget where packed sequences end.
    outputs = model.base_model(**inputs, use_cache=False)
    states: Tensor = outputs.last_hidden_state.flatten(0, 1)
    if not sequences.packed:
        states = states.index_select(0, sequences.slots)
    return states, outputs.router_logits if router_logits else ()


def _packed_inputs(batch: TokenBatch, sequences: SequenceLayout) -> dict[str, Any]:
    """One row of all sequences, [1, T]; positions start again at each. A 2-D mask would switch the borders off."""
    return {"input_ids": batch.ids[None], "position_ids": sequences.positions[None], "attention_mask": None}


def _padded_inputs(batch: TokenBatch, sequences: SequenceLayout) -> dict[str, Any]:
    """Right-padded rows, [B, L]; the padding is token 0, masked."""
    rows, longest = len(batch), sequences.max_length
    ids = batch.ids.new_zeros(rows * longest).index_copy_(0, sequences.slots, batch.ids).view(rows, longest)
    positions = torch.arange(longest, device=ids.device).expand(rows, longest)
    mask = (positions < batch.lengths[:, None]).long()
    return {"input_ids": ids, "position_ids": positions, "attention_mask": mask}


def _spread(values: Tensor, tokens: Tensor, total: int) -> Tensor:
    """`values` [N] at positions `tokens` [N] of a zero vector [total]."""
    return values.new_zeros(total).index_copy(0, tokens, values)
