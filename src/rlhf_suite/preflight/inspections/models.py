"""Inspect model folders: whether the files of each model fit its use, without importing what loads models.

A model that a hub name names is inspected if the cache of the hub holds it. Otherwise `inspections/hub.py` tests
whether it can be fetched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhf_suite.config.check.engine_arguments import CPU_BLOCK_SIZE
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR
from rlhf_suite.launch.environment import device_kind
from rlhf_suite.models.families import (
    BLOCKS,
    EAGER,
    ENGINE,
    NO_IMAGES,
    PACKED,
    PREFIXES,
    SDPA,
    SEQUENCE,
    TENSOR,
    VARLEN,
    Family,
    family_of,
    find_unread_images,
    heads_can_be_split,
    num_experts,
    undeclared_head_setting,
    why_not_served,
)
from rlhf_suite.preflight.inspections.hub import find_cached_model
from rlhf_suite.preflight.inspections.model_files import (
    ModelFiles,
    files_of,
    head_sizes_on_cpu,
    read_model_types,
)
from rlhf_suite.preflight.inspections.model_uses import ModelUse, model_uses

NO_LANGUAGE_HEAD = ("ForSequenceClassification", "ForTokenClassification")
UNPACKED_WHEN_LOADED = ("mxfp4",)  # formats that transformers turns into plain weights


def models_fit(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield the problems of each model of a run."""
    for use in model_uses(run):
        model_folder = folder_of(use.path)
        if model_folder is not None:
            yield from model_problems(use, files_of(model_folder))
            if folder is not None and use.is_sampled and device_kind(run.launch) == "cpu":
                yield from heads_have_kernels(use, files_of(model_folder))
                yield from engine_serves(use, files_of(model_folder))


def heads_have_kernels(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Yield a problem if an engine without a GPU has no kernels for the attention heads of a model."""
    sizes, size = head_sizes_on_cpu(files.latent_size is not None), files.latent_size or files.head_size
    if sizes and size is not None and size not in sizes:
        heads = "latent heads (kv_lora_rank + qk_rope_head_dim)" if files.latent_size else "attention heads"
        problem = f"the {heads} of {use.path} have {size} dimensions, for which vLLM has no kernels on the CPU"
        yield Problem(use.key, problem, f"give a model with heads of {', '.join(map(str, sizes))}, or use a GPU")
    chunk = files.setting("attention_chunk_size")
    if isinstance(chunk, int) and chunk % CPU_BLOCK_SIZE:
        blocks = f"vLLM's blocks on the CPU have {CPU_BLOCK_SIZE}"
        problem = f"the attention of {use.path} has chunks of {chunk} tokens, and {blocks}"
        yield Problem(use.key, problem, f"give a model whose chunks are a multiple of {CPU_BLOCK_SIZE}, or use a GPU")


def engine_serves(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Yield a problem if vLLM without a GPU does not serve the family of a model, or not in the type of its weights."""
    title, needed = family(files).title, family(files).kernels.dtype
    why = why_not_served(family(files), files.setting)
    if why is not None:
        problem = f"{title} {why}, so {ENGINE} cannot serve it ({use.key}={use.path})"
        yield Problem(use.key, problem, "give another model, or use a GPU")
    elif needed not in (None, use.dtype):
        problem = f"vLLM's kernels for {title} on the CPU need {needed} weights ({use.key}={use.path})"
        yield Problem("ds.param_dtype", problem, f"write ds.param_dtype={needed}, or use a GPU")


def images_are_read_alike(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem if a model that reads the tokens of the actor reads images as other tokens."""
    uses = {use.key.removesuffix(".model_name_or_path"): use for use in model_uses(run)}
    actor = folder_of(uses[ACTOR].path) if ACTOR in uses and uses[ACTOR].reads_images else None
    for use in uses.values() if actor is not None else ():
        model_folder = folder_of(use.path)
        if actor is None or model_folder is None or family(files_of(model_folder)).images is None:
            continue
        ours, theirs = (files_of(path).setting("model_type") for path in (actor, model_folder))
        if use.reads_images and ours != theirs:
            problem = f"{use.path} is a {theirs} and reads images as other tokens than the actor, a {ours}"
            yield Problem(use.key, problem, f"give a model of type {ours}")


def folder_of(path: str) -> Path | None:
    """Return the folder of a model, on the disk or in the cache of the hub."""
    return Path(path) if Path(path).is_dir() else find_cached_model(path)


def model_problems(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Yield the problems of one model. If it cannot be loaded at all, only that is reported."""
    for check in LOADS:
        problems = [*check(use, files)]
        yield from problems
        if problems:
            return
    for check in FITS:
        yield from check(use, files)


def is_a_model(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check that the folder has a config.json and is not a LoRA adapter."""
    if (files.folder / "config.json").is_file():
        if files.config is None:
            yield Problem(use.key, f"{use.path}/config.json is not a JSON object", "give a complete model folder")
    elif (files.folder / "adapter_config.json").is_file():
        fix = f"merge it first: task=merge_lora lora.path={use.path}, and give that folder"
        yield Problem(use.key, f"{use.path} is a LoRA adapter, not a model", fix)
    else:
        yield Problem(use.key, f"{use.path} has no config.json", "give the folder that holds the model's weights")


def has_weights(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check that all weight files are there and complete. The size shows an interrupted copy or download."""
    if not files.weight_files:
        yield Problem(use.key, f"{use.path} has no weights (*.safetensors)", "copy or download the whole model")
    for file in files.weight_files:
        if not file.is_file():
            problem = f"{use.path} has no file {file.name}, which its index names"
            yield Problem(use.key, problem, "copy or download the whole model")
        elif not files.is_whole(file):
            problem = f"{use.path}/{file.name} is not complete: it has fewer bytes than its header says"
            yield Problem(use.key, problem, "copy or download it again")


def is_known(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check that the installed transformers knows the type of the model."""
    model_type = files.setting("model_type")
    has_code = files.setting("auto_map") is not None
    if has_code and use.is_trusted:
        return
    if isinstance(model_type, str) and f'"{model_type}"' not in read_model_types():
        problem = f"{use.path} is of model_type {model_type!r}, which the installed transformers does not know"
        if has_code:
            fix = "give another model, or read the code that comes with it and add launch.trust_remote_code=true"
            yield Problem(use.key, problem, fix)
        else:
            yield Problem(use.key, problem, "correct its config.json, or upgrade transformers")


def can_be_trained(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check that a model that is trained has no quantised weights."""
    quantised = files.setting("quantization_config")
    if not use.is_trained or not isinstance(quantised, dict):
        return
    method = quantised.get("quant_method", "unknown")
    if method not in UNPACKED_WHEN_LOADED and not (method == "bitsandbytes" and use.in_4bit):
        problem = f"{use.path} holds quantised weights ({method}), which cannot be trained"
        yield Problem(use.key, problem, "give the model in bf16 or fp32")


def has_its_head(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check the head: a reward model needs a score head with one output, a language model needs a language head."""
    names = files.tensors
    architecture = next(iter(files.setting("architectures") or [""]), "")
    if names is None:
        return
    if use.head == "reward":
        prefix = files.setting("value_head_prefix") or use.head_prefix  # OpenRLHF's checkpoints name it
        shape = names.get(f"{prefix}.weight")
        if shape is None:
            kind = f" ({architecture})" if architecture else ""
            problem = f"{use.path} has no tensor {prefix}.weight to score with{kind}"
            fix = "give a reward model (task=rm trains one), or the name of its head: ds.value_head_prefix=<name>"
            yield Problem(use.key, problem, fix)
        elif shape[:1] != [1]:
            problem = f"{use.path} has {shape[0]} outputs in {prefix}.weight, but a reward is one number"
            yield Problem(use.key, problem, "give a reward model with one output")
    elif use.head == "language" and architecture.endswith(NO_LANGUAGE_HEAD) and "lm_head.weight" not in names:
        problem = f"{use.path} is a {architecture}, which scores texts and cannot write them"
        yield Problem(use.key, problem, "give a language model")


def has_tokenizer(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check that the folder has a tokenizer if the run needs it."""
    if use.has_tokenizer and not files.has_tokenizer:
        problem = f"{use.path} has no tokenizer (tokenizer.json, tokenizer.model, vocab.json or vocab.txt)"
        yield Problem(
            use.key, problem, "copy the tokenizer files of the model that it was trained from into the folder"
        )


def has_embeddings(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check that the model has an embedding of each word of its tokenizer."""
    rows = files.setting("vocab_size")
    if use.has_tokenizer and files.has_words_beyond(rows):
        count = max(files.vocabulary.values()) + 1
        problem = f"the tokenizer of {use.path} has {count} tokens, and the model has embeddings of {rows}"
        fix = f"give the tokenizer of this model, or enlarge the model: model.resize_token_embeddings({count})"
        yield Problem(use.key, problem, fix)


def has_chat_template(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check that the tokenizer has a chat template if the run needs it."""
    if use.needs_template and not files.has_chat_template:
        problem = f"the tokenizer of {use.key}={use.path} has no chat template"
        fix = "add data.tokenizer_chat_template=<file>, or write data.apply_chat_template=false"
        yield Problem("data.apply_chat_template", problem, fix)


def head_is_known(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check that the meaning of the settings that change logits is known for the family of a language model."""
    setting = undeclared_head_setting(family(files).head, files.setting)
    if use.head == "language" and setting is not None:
        title = family(files).title
        problem = f"the head of {use.path} has {setting[0]} ({setting[1]}), whose meaning is not known for {title}"
        yield Problem(use.key, problem, "give another model")


def attention_computes(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check that the chosen attention computes that of the family."""
    if use.attention is not None and not family(files).computes(use.attention):
        problem = f"{use.attention} does not compute the attention of {family(files).title} ({use.key}={use.path})"
        key = "ds.attn_implementation"
        yield Problem(key, problem, f"write {key}=null, which is {family(files).attention[0]} for this model")


def family_can(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check that the family of the model can do what the run asks of it."""
    size, mode = use.split
    asked = (
        (PACKED, bool(use.packed), "ds.packing_samples", "false"),
        (PACKED, use.fills_rows, "data.pack_to_max_len", "false"),
        (PREFIXES, bool(use.shares_prefixes), "ds.share_prefixes", "null"),
        (SEQUENCE, size > 1, "ds.ring_attn_size", "1"),
        (BLOCKS, size > 1 and mode != "ulysses", "ds.ring_attn_mode", "ulysses"),
        (TENSOR, use.tensor > 1, "ds.tensor_parallel_size", "1"),
    )
    for feature, is_asked, key, remedy in asked:
        why = family(files).why_not(feature) if is_asked else None
        if why is not None:
            problem = f"{family(files).title} {why}, so {feature} cannot be used ({use.key}={use.path})"
            yield Problem(key, problem, f"write {key}={remedy}")


def family(files: ModelFiles) -> Family:
    """Return the family of the model in a folder."""
    return family_of(files.config or {})


def reads_images(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check that the model is of a family whose images are supported, if the run has images."""
    if not use.reads_images:
        return
    if (unread := find_unread_images(use.path, files.config or {})) is not None:
        yield Problem(use.key, unread, NO_IMAGES)
        return
    images = family(files).images
    assert images is not None  # or its images were unread
    if not any((files.folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json")):
        problem = f"{use.path} has no processor_config.json, which says how it reads images"
        yield Problem(
            use.key, problem, "copy the processor files of the model that it was trained from into the folder"
        )
    elif use.is_sampled and images.sees_whole and (long := image_beyond_window(files)) is not None:
        problem = (
            f"vLLM hides later tokens of an image of {long[0]} tokens, more than its sliding_window={long[1]}, and "
            "training does not"
        )
        yield Problem(
            use.key, problem, "give a model with a window as long as an image, or train it by task=sft or dpo"
        )
    elif images.sees_whole and use.attention is not None and use.attention not in (VARLEN, SDPA, EAGER):
        problem = f"{use.attention} does not let the tokens of an image of {family(files).title} see each other"
        yield Problem("ds.attn_implementation", problem, f"write ds.attn_implementation={VARLEN}")


def image_beyond_window(files: ModelFiles) -> tuple[int, int] | None:
    """Return the tokens of an image and the sliding window of a model if the window is shorter."""
    size, window = files.setting("mm_tokens_per_image"), files.setting("sliding_window")
    return (size, window) if isinstance(size, int) and isinstance(window, int) and size > window else None


def has_positions(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check that the model supports the longest sequence of the run."""
    if use.length_key and files.positions is not None and use.length > files.positions:
        problem = f"{use.length} tokens are more than the {files.positions} positions of {use.key}={use.path}"
        most = files.positions if use.length_key.endswith("max_len") else files.positions // 2
        yield Problem(use.length_key, problem, f"write {use.length_key}={most}, or less")


def splits_over_ranks(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check that sequence parallelism computes the attention of the model: ulysses splits its heads over the ranks, and
    the other modes know no sliding window."""
    (size, mode), key = use.split, "ds.ring_attn_mode"
    heads = files.setting("num_attention_heads")
    if size == 1 or not isinstance(heads, int):
        return
    if mode == "ulysses":
        pairs = files.setting("num_key_value_heads") or heads
        if not heads_can_be_split(heads, pairs, size):
            problem = (
                f"{heads} query and {pairs} key/value heads of {use.key}={use.path} cannot be split over {size} ranks"
            )
            yield Problem(key, problem, f"write {key}=gather")
        return
    window = files.setting("sliding_window")
    if isinstance(window, int) and files.setting("use_sliding_window") is not False and use.length > window:
        problem = f"{mode} does not compute the sliding window of {window} tokens of {use.key}={use.path}"
        yield Problem(key, problem, f"write {key}=ulysses, or data.max_len={window}")


def matrices_divide(use: ModelUse, files: ModelFiles) -> Iterator[Problem]:
    """Check that tensor parallelism can split the layers of the model; the plan of transformers is read when it is
    loaded."""
    key = "ds.tensor_parallel_size"
    if use.tensor == 1:
        return
    experts = num_experts(files.setting)
    if experts is not None or files.setting("vision_config") is not None:
        problem = f"a mixture of experts ({experts[0]})" if experts else "a model that reads images"
        yield Problem(key, f"{use.key}={use.path} is {problem}, whose matrices are not split", f"write {key}=1")
        return
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = files.setting(name)
        if isinstance(size, int) and size % use.tensor:
            problem = f"{use.tensor} ranks cannot split the {name}={size} of {use.key}={use.path}"
            yield Problem(key, problem, f"write {key}={math.gcd(size, use.tensor)}")
            return


Check = Callable[[ModelUse, ModelFiles], Iterator[Problem]]
LOADS: tuple[Check, ...] = (is_a_model, is_known, has_weights)
FITS: tuple[Check, ...] = (
    can_be_trained,
    has_its_head,
    has_tokenizer,
    has_embeddings,
    has_chat_template,
    head_is_known,
    attention_computes,
    family_can,
    reads_images,
    has_positions,
    splits_over_ranks,
    matrices_divide,
)
