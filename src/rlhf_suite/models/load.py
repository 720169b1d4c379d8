"""Tokenizers and models from a folder, the hub, or a built-in name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig, wanted_packing
from rlhf_suite.config.declarations.launch import trusts_code
from rlhf_suite.data.render import NUM_EMBEDDINGS
from rlhf_suite.data.template import UNRENDERED
from rlhf_suite.errors import FixableError, UserError
from rlhf_suite.models.builtin import PREFIX, builtin_folder
from rlhf_suite.models.classes import auto_class
from rlhf_suite.models.dropout import switch_off_dropout
from rlhf_suite.models.families import NO_IMAGES, Family, family_of, find_unread_images, undeclared_head_setting
from rlhf_suite.models.forward import LanguageModel, ScalarModel, carries_unknown_state
from rlhf_suite.models.load_errors import explain_load_errors, find_misfit, quiet_transformers
from rlhf_suite.models.quantize import four_bit, keep_exact
from rlhf_suite.models.vision import VisionProcessor
from rlhf_suite.models.weights import Gather, whole

Tokenizer: TypeAlias = PreTrainedTokenizerBase
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def model_folder(path: str, flag: str) -> str:
    """Return the folder or hub name of a flag's value. A built-in model is written to the user's cache first.

    Raises:
        UserError: there is no such folder, or it holds no model.
    """
    if path.startswith(PREFIX):
        return str(builtin_folder(path, flag))
    folder = Path(path)
    if not folder.is_dir():
        if path.startswith(("/", ".", "~")) or path.count("/") > 1:
            raise UserError(f"{flag}={path}: there is no such folder. Give a model folder, a hub name or builtin:tiny")
        return path
    if not (folder / "config.json").exists():
        adapter = (folder / "adapter_config.json").exists()
        reason = "is a LoRA adapter, not a model: merge it with task=merge_lora and give that folder" if adapter else (
            "has no config.json: give the folder that holds the model's weights"
        )  # fmt: skip
        raise UserError(f"{flag}={path}: {reason}")
    return str(folder)


def read_config(path: str, flag: str) -> PretrainedConfig:
    """Return the configuration of the model that a flag names.

    Raises:
        UserError: there is no such model, or its configuration cannot be read.
    """
    folder = model_folder(path, flag)
    with explain_load_errors(flag, path):
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trusts_code())
    return config


def count_positions(path: str, flag: str) -> int | None:
    """Return how many tokens a model was made for; None if its configuration does not say."""
    limit = getattr(read_config(path, flag).get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def model_digest(path: str, flag: str) -> str:
    """Return a digest that is equal for two models only if their settings, weights and own code are equal.

    The settings are those of the model, its tokenizer and its image processor. It is a digest of a folder's files, or
    the revision name of a hub model.
    """
    folder = Path(model_folder(path, flag))
    if not folder.is_dir():
        return f"{path}@{read_config(path, flag)._commit_hash}"
    digest = hashlib.sha256()
    for file in sorted(file for kind in ("*.json", "*.safetensors", "*.bin", "*.py") for file in folder.glob(kind)):
        with file.open("rb") as content:
            digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def load_tokenizer(path: str, data: DataConfig, flag: str = "actor.model_name_or_path") -> Tokenizer:
    """Return the tokenizer of a model, with the chat template of `data` if given, and a padding token other than EOS.

    Nothing here pads with that token: sequences are ragged and know their lengths. It only goes into saved folders, in
    which transformers finds the last token of a row by it, so it must be a token that never ends a sequence.
    """
    tokenizer = tokenizer_of(model_folder(path, flag), path, flag)
    check_rows(tokenizer, getattr(read_config(path, flag).get_text_config(), "vocab_size", None), f"{flag}={path}")
    if data.tokenizer_chat_template is not None:
        tokenizer.chat_template = chat_template(data.tokenizer_chat_template)
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        except UNRENDERED as error:
            raise UserError(
                f"data.tokenizer_chat_template: it cannot render a message of a user ({error}). Give a Jinja chat "
                "template, or correct it"
            ) from error
    return tokenizer


def check_rows(tokenizer: Tokenizer, rows: object, model: str) -> None:
    """Note in a tokenizer how many tokens its `model` has embeddings of, where that are not all; texts that need others
    are refused then.

    Raises:
        UserError: the model would not even read common texts: a token of the vocabulary, or the EOS token, has no row.
    """
    if not isinstance(rows, int) or len(tokenizer) <= rows:
        return
    setattr(tokenizer, NUM_EMBEDDINGS, rows)
    if tokenizer.vocab_size > rows or tokenizer.eos_token_id >= rows:
        raise UserError(
            f"{model}: the tokenizer has {len(tokenizer)} tokens, and the model has embeddings of {rows} "
            "(vocab_size in config.json). Give the tokenizer of this model, or enlarge the model: "
            f"model.resize_token_embeddings({len(tokenizer)})"
        )


def tokenizer_of(folder: str, path: str, flag: str) -> Tokenizer:
    """Return the tokenizer in a folder, with EOS and padding token. Error messages name the flag and
    its value `path`."""
    with explain_load_errors(flag, path):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_code())
    if tokenizer.eos_token_id is None:
        raise UserError(f"{flag}={path}: the tokenizer has no EOS token. Set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.pad_token = choose_padding_token(tokenizer)
    return tokenizer


def checkpoint_precision(path: str, flag: str) -> str:
    """Return the ds.param_dtype that holds a checkpoint exactly: bf16 for one in bf16, fp32 for any other."""
    return "bf16" if read_config(path, flag).dtype == torch.bfloat16 else "fp32"


def choose_padding_token(tokenizer: Tokenizer, rows: int | None = None) -> str | None:
    """Return an existing special token to pad with: one made for padding, else unknown, else BOS, else any other than
    EOS. With `rows` it is one of the first so many tokens."""
    special = [token for token in tokenizer.all_special_tokens if token != tokenizer.eos_token]
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content != tokenizer.eos_token]
    named = [token for token in added if "pad" in token.lower()]
    candidates: list[str | None] = [*named, tokenizer.unk_token, tokenizer.bos_token, *special]
    known = [token for token in candidates if token is not None and token != tokenizer.eos_token]
    return next((token for token in known if rows is None or tokenizer.convert_tokens_to_ids(token) < rows), None)


def chat_template(value: str) -> str:
    """Return template text as it is, or the content of the file that it names."""
    if "{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: the file is not UTF-8, or its name has a zero byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(
            f"data.tokenizer_chat_template={value}: neither Jinja text (it has no braces) nor a file that can be read "
            f"({reason}). Give the template, or the name of a file with it in UTF-8"
        ) from None


@overload
def load_model(
    path: str,
    *,
    head: Literal["lm"],
    ds: DeepSpeedConfig,
    seed: int = ...,
    flag: str = ...,
    writable: Gather = ...,
    dropout: bool = ...,
    device: torch.device | None = ...,
) -> LanguageModel: ...
@overload
def load_model(
    path: str,
    *,
    head: Literal["value"],
    ds: DeepSpeedConfig,
    seed: int = ...,
    flag: str = ...,
    writable: Gather = ...,
    dropout: bool = ...,
    device: torch.device | None = ...,
) -> ScalarModel: ...
def load_model(  # noqa: PLR0913 - what a model is loaded from and for
    path: str,
    *,
    head: Literal["lm", "value"],
    ds: DeepSpeedConfig,
    seed: int = 0,
    flag: str = "actor.model_name_or_path",
    writable: Gather = whole,
    dropout: bool = True,
    device: torch.device | None = None,
) -> LanguageModel | ScalarModel:
    """Return a model in evaluation mode.

    A `value` head that the checkpoint lacks is drawn from N(0, 1/(hidden + 1)^2). Under ZeRO-3 parameters are
    partitioned while they load; `writable` makes the given ones whole and keeps changes to them. Without `dropout`, the
    dropout of the model's configuration is off in training mode. `device`: where tensors are read to; None: the host.
    """
    folder = model_folder(path, flag)
    with explain_load_errors(flag, path), quiet_transformers():
        config = model_config(folder, head, ds)
        dropout_off, head_name = {} if dropout else switch_off_dropout(config), head_prefix(config, ds)
        family = family_of(config.to_dict())
        attention = ds.attn_implementation or family.attention[0]
        settings = build_load_arguments(ds, head, head_name, device) | {"config": config}
        sees = family.images is not None  # packed images need no kernel of their own
        settings["attn_implementation"] = {"text_config": attention, "vision_config": "sdpa"} if sees else attention
        if head == "lm":
            check_head(config, family, flag, path)
        model, info = auto_class(head, sees, config).from_pretrained(folder, **settings)
    new = {key for key in info["missing_keys"] if head == "value" and key == "score.weight"}
    if (problem := find_misfit(info, may_lack=new)) is not None:
        raise UserError(f"{flag}={path}: {problem}. Give a complete {head} checkpoint with its own config.json")
    check_experts(model, ds, flag, path)
    keep_exact(model)
    # An embedding takes no gradient for its padding row; here every row is a token like any other.
    model.get_input_embeddings().padding_idx = None
    vision = VisionProcessor(folder, flag, path) if sees else None
    packed = packs_rows(model, family, ds)
    result: LanguageModel | ScalarModel
    if head == "lm":
        result = LanguageModel(model, packed, vision)
    else:
        if new:
            with writable([model.score.weight]):
                _init_scalar_head(model, seed)
        result = ScalarModel(model, packed, head_name=head_name, head_is_new=bool(new), vision=vision)
    result.dropout_off, result.share_prefixes = dropout_off, ds.share_prefixes
    return result.eval()


def packs_rows(model: PreTrainedModel, family: Family, ds: DeepSpeedConfig) -> bool:
    """Return whether the sequences of a batch are laid end to end for a model."""
    wanted = False if ds.packing_samples is None and carries_unknown_state(model, family) else wanted_packing(ds)
    return family.packs(wanted, ds.attn_implementation)


def model_config(folder: str, head: Literal["lm", "value"], ds: DeepSpeedConfig) -> PretrainedConfig:
    """Return the configuration with which a model is loaded."""
    labels = {"num_labels": 1} if head == "value" else {}
    config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trusts_code(), **labels)
    if ds.experts_implementation is not None:
        config._experts_implementation = ds.experts_implementation
    return config


def vision_processor(
    path: str, image_key: str | None, flag: str = "actor.model_name_or_path"
) -> VisionProcessor | None:
    """Return what reads images for a model; None for a run without images.

    Raises:
        UserError: the model reads no images.
    """
    if image_key is None:
        return None
    config = read_config(path, flag)
    with explain_load_errors(flag, path):
        if (problem := find_unread_images(path, config.to_dict())) is not None:
            raise FixableError(f"{flag}: {problem}", NO_IMAGES)
        return VisionProcessor(model_folder(path, flag), flag, path)


def head_prefix(config: PretrainedConfig, ds: DeepSpeedConfig) -> str:
    """Return the name of the scalar head in a checkpoint: OpenRLHF writes it into config.json, which wins."""
    name: str = getattr(config, "value_head_prefix", ds.value_head_prefix)
    return name


def check_head(config: PretrainedConfig, family: Family, flag: str, path: str) -> None:
    """Raise UserError for a head that changes its logits in a way that is not declared for its family."""
    text = config.get_text_config()
    undeclared = undeclared_head_setting(family.head, lambda name: getattr(text, name, None))
    if undeclared is not None:
        raise UserError(
            f"{flag}={path}: the head of this model has {undeclared[0]} ({undeclared[1]}), whose meaning is not known "
            f"for models of type {config.model_type}. Choose another model"
        )


def check_experts(model: PreTrainedModel, ds: DeepSpeedConfig, flag: str, path: str) -> None:
    """Raise UserError for ds.experts_implementation if the actor has no experts whose computation can be chosen. The
    models beside it may be of another kind."""
    is_actor = flag.startswith("actor.")
    if ds.experts_implementation is not None and is_actor and not model._can_set_experts_implementation():
        raise UserError(
            f"ds.experts_implementation={ds.experts_implementation}: {flag}={path} ({type(model).__name__}) has no "
            "experts whose computation can be chosen. Remove the flag"
        )


def build_load_arguments(
    ds: DeepSpeedConfig, head: Literal["lm", "value"], head_name: str, device: torch.device | None
) -> dict[str, Any]:
    """Return the keyword arguments that every model is loaded with."""
    settings: dict[str, Any] = {
        "dtype": DTYPES[ds.precision],
        "trust_remote_code": trusts_code(),
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # `find_misfit` names them
    }
    if ds.load_in_4bit:
        settings["quantization_config"] = four_bit(DTYPES[ds.precision])
    if device is not None:
        settings["device_map"] = {"": device}
    if head == "value" and head_name != "score":
        settings["key_mapping"] = {rf"^{head_name}\.": "score."}
    return settings


def _init_scalar_head(model: PreTrainedModel, seed: int) -> None:
    """Draw the scalar head at random."""
    weight = model.score.weight
    hidden = model.config.get_text_config().hidden_size
    noise = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed)) / (hidden + 1)
    with torch.no_grad():
        weight.copy_(noise)


def check_teacher(student: Tokenizer, path: str, data: DataConfig, flag: str = "teacher.model_name_or_path") -> None:
    """Raise UserError unless the teacher's own tokenizer has the vocabulary of the student."""
    teacher = load_tokenizer(path, data, flag)
    check_same_vocabulary(student, teacher, path, flag)
    if (rows := getattr(teacher, NUM_EMBEDDINGS, None)) is not None:  # the teacher reads the texts of the student
        setattr(student, NUM_EMBEDDINGS, min(rows, getattr(student, NUM_EMBEDDINGS, rows)))


def check_same_vocabulary(
    student: Tokenizer, teacher: Tokenizer, path: str, flag: str = "teacher.model_name_or_path"
) -> None:
    """Raise UserError if the token ids of the teacher mean other tokens than those of the student."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return
    other = next(token for token in [*ours, *theirs] if ours.get(token) != theirs.get(token))
    raise UserError(
        f"{flag}={path}: its vocabulary is not that of the student ({len(theirs)} and {len(ours)} "
        f"tokens; {other!r} is {theirs.get(other)} and {ours.get(other)}), so their probabilities cannot be compared. "
        "Choose a teacher of the same family"
    )
