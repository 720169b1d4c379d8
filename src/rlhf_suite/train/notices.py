"""What a run says once at its start, because it can go on but is probably not what its user means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from transformers import AutoConfig, PreTrainedTokenizerBase

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import ALL_LINEAR
from rlhf_suite.config.declarations.launch import trusts_code
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR, WorkerPlan
from rlhf_suite.data.render import NUM_EMBEDDINGS
from rlhf_suite.errors import UserError
from rlhf_suite.models.adapters import unadapted_matrices, unquantised_matrices
from rlhf_suite.models.builtin import CHAT_TEMPLATE
from rlhf_suite.models.classes import family_with_code
from rlhf_suite.models.load import model_folder
from rlhf_suite.models.load_errors import explain_load_errors
from rlhf_suite.models.rows import rows_of

SHOWN = 5  # tokens that a notice lists


def chat_template_notices(tokenizer: PreTrainedTokenizerBase, data: DataConfig, model: str) -> Iterator[str]:
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


def describe_rows(run: Run, plan: WorkerPlan) -> Iterator[str]:
    """Say how the actor takes its batches, and which of the other models are padded because they cannot be packed.

    Raises:
        UserError: examples are to fill rows, and the actor pads them.
    """
    for name, model in plan.models.items():
        with explain_load_errors(model.flag, model.path):
            folder = model_folder(model.path, model.flag)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trusts_code())
            family = family_with_code(folder, config)
        rows = rows_of(family, run)
        if name == ACTOR and not rows.packed and getattr(run.data, "pack_to_max_len", False):
            raise UserError(
                f"data.pack_to_max_len=true needs packed rows, and those of {model.flag}={model.path} are padded "
                f"({rows.why_padded}). Write data.pack_to_max_len=false"
            )
        if name == ACTOR or (rows.why_padded and model.path != plan.models[ACTOR].path):
            yield f"{model.flag}={model.path} ({family.title}): {rows}"


def describe_matrices(run: Run, plan: WorkerPlan) -> Iterator[str]:
    """Say which matrices of the actor have no adapter where all linear layers are to have one, and which are not in 4
    bits: this depends on how its family computes its experts and its layers."""
    model, ds = plan.models[ACTOR], run.ds
    named = f"of {model.flag}={model.path} these matrices"
    with explain_load_errors(model.flag, model.path):
        adapts_all = ds.lora.rank > 0 and ds.lora.target_modules == [ALL_LINEAR]
        if adapts_all and (names := unadapted_matrices(model.path, model.flag, ds)):
            setting = f"ds.lora.target_modules=[{ALL_LINEAR}]"
            yield f"{setting}: {named} have no adapter and stay as they are: {', '.join(names)}"
        if ds.load_in_4bit and (names := unquantised_matrices(model.path, model.flag, ds)):
            yield f"ds.load_in_4bit=true: {named} keep {ds.param_dtype}: {', '.join(names)}"


def batch_notices(flag: str, size: int, count: int, unit: str) -> Iterator[str]:
    """Say that a batch of `size` is larger than all the data."""
    if size > count:
        yield f"{flag}={size} is larger than the data: each step takes all {count} {unit}"
