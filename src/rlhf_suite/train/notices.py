"""What a run says once at its start, because it can go on but is probably not what its user means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from transformers import AutoConfig, PreTrainedTokenizerBase

from rlhf_suite.config.data import RenderConfig
from rlhf_suite.config.ds import wanted_packing
from rlhf_suite.config.launch import trusts_code
from rlhf_suite.config.micro_batches import trained_micro_batches
from rlhf_suite.config.runs import AnyTrainedRun
from rlhf_suite.data.render import NUM_EMBEDDINGS
from rlhf_suite.models.builtin import CHAT_TEMPLATE
from rlhf_suite.models.families import PACKED, family_of
from rlhf_suite.models.load import explain_load_errors, model_folder

SHOWN = 5  # tokens that a notice lists


def chat_template_notices(tokenizer: PreTrainedTokenizerBase, data: RenderConfig, model: str) -> Iterator[str]:
    """Say that the chat template of `model` is not used. The built-in models have one, but are not tuned on it."""
    if not data.apply_chat_template and tokenizer.chat_template not in (None, CHAT_TEMPLATE):
        yield (
            f"actor.model_name_or_path={model} has a chat template, but data.apply_chat_template=false: prompts are "
            "given as plain text. If this is a chat model and not a base model, add data.apply_chat_template=true"
        )


def embedding_notices(tokenizer: PreTrainedTokenizerBase, model: str) -> Iterator[str]:
    """Say that `model` has no embeddings of some tokens of its tokenizer, so that no text may have these tokens."""
    rows = getattr(tokenizer, NUM_EMBEDDINGS, None)
    decoded = tokenizer.added_tokens_decoder if rows is not None else {}
    beyond = [str(token) for number, token in decoded.items() if number >= (rows or 0)]
    beyond = [token for token in beyond if token != tokenizer.pad_token]  # no sequence is padded with it
    if beyond:
        shown = ", ".join(beyond[:SHOWN]) + (f" and {len(beyond) - SHOWN} more" if len(beyond) > SHOWN else "")
        yield (
            f"actor.model_name_or_path={model} has embeddings of {rows} tokens, its tokenizer has {len(tokenizer)}: "
            f"texts with {shown} cannot be used. If they are needed, enlarge the model: "
            f"model.resize_token_embeddings({len(tokenizer)})"
        )


def pass_notices(models: Mapping[str, str], limit: float) -> Iterator[str]:
    """Say that the scores of reward models, whose scale is their own, are counted by the same limit as others."""
    for key, path in models.items():
        yield (
            f"{key}={path}: a sample passes where its score is above {limit:g}, and the scores of a reward model have "
            "no such limit, so pass_rate and pass@k say little here. Look at reward instead, e.g. "
            "ckpt.best_metric_key=eval/reward"
        )


def describe_rows(key: str, path: str, run: AnyTrainedRun) -> str:
    """Return how the model that the flag `key` names takes its batches: what the defaults of ds.packing_samples,
    ds.attn_implementation and train.micro_batch_size are for it."""
    with explain_load_errors(key, path):
        config = AutoConfig.from_pretrained(model_folder(path, key), trust_remote_code=trusts_code())
    family, limit = family_of(config.to_dict()), trained_micro_batches(run.train)
    packed = family.packs(wanted_packing(run.ds), run.ds.attn_implementation)
    attention = run.ds.attn_implementation or family.attention[0]
    rows = "packed rows" if packed else "padded rows"
    if not packed and run.ds.packing_samples is None:
        why = "ds.deepcompile=true" if run.ds.deepcompile else f"attention by {attention}"
        rows += f" ({family.why_not(PACKED) or why})"
    size = f"{limit.rows} rows" if limit.tokens is None else f"{limit.tokens} tokens"
    return f"{key}={path} ({family.title}): {rows}, {attention} attention, micro-batches of at most {size}"


def batch_notices(flag: str, size: int, count: int, unit: str) -> Iterator[str]:
    """Say that a batch of `size` is larger than all the data."""
    if size > count:
        yield f"{flag}={size} is larger than the data: each step takes all {count} {unit}"
