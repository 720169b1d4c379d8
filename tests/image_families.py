"""Tiny models of the families that read images, made from configurations of transformers, with their processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from rlhf_suite.models.builtin import IMAGE_TEMPLATE, byte_tokenizer

QWEN_TOKENS = {
    **{"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"},
    **{"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
}
INTERN_TOKENS = {
    **{"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
    "video_token": "<video>",
}
GLM_TOKENS = {
    **{"image_start_token": "<|begin_of_image|>", "image_end_token": "<|end_of_image|>", "image_token": "<|image|>"},
    **{"video_start_token": "<|begin_of_video|>", "video_end_token": "<|end_of_video|>", "video_token": "<|video|>"},
}
GEMMA_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
# For each type: the special tokens of images, and what a template writes for an image.
TOKENS: dict[str, tuple[dict[str, str], str]] = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        (QWEN_TOKENS, "<|vision_start|><|image_pad|><|vision_end|>"),
    ),
    "glm4v": (GLM_TOKENS, "<|begin_of_image|><|image|><|end_of_image|>"),
    "llava": ({"image_token": "<image>"}, "<image>\n"),
    "internvl": (INTERN_TOKENS, "<IMG_CONTEXT>\n"),
    "gemma3": (GEMMA_TOKENS, "<start_of_image>"),
}
# Heads of 32 dimensions, which vLLM's kernels for the CPU have.
TEXT = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "max_position_embeddings": 512, "head_dim": 32},
}
TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
SIGLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
DELTA = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"]},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# For each type: settings of the language model, of the tower, and of the whole.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
        {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
        {},
    ),
    "qwen2_5_vl": (
        {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
        TOWER | {"window_size": 56, "fullatt_block_indexes": [1], "patch_size": 14},
        {},
    ),
    "qwen3_vl": (
        {"rope_parameters": ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}},
        TOWER | {"patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {},
    ),
    "qwen3_5": (
        DELTA | {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}},
        TOWER | {"patch_size": 14, "num_position_embeddings": 16},
        {},
    ),
    "qwen3_vl_moe": (
        EXPERTS  # whose matrices are not square: transformers knows by their shape how a checkpoint has them
        | {"moe_intermediate_size": 48}
        | {"rope_parameters": ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}},
        TOWER | {"patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {},
    ),
    "qwen3_5_moe": (
        DELTA
        | EXPERTS
        | {"shared_expert_intermediate_size": 32}
        | {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}},
        TOWER | {"patch_size": 14, "num_position_embeddings": 16},
        {},
    ),
    "glm4v": (
        {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}},
        TOWER | {"patch_size": 14, "image_size": 56},
        {},
    ),
    "llava": (
        {"model_type": "llama"},
        SIGLIP | {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, "projection_dim": 32},
        {"vision_feature_select_strategy": "default", "vision_feature_layer": -2},
    ),
    "internvl": (
        {"model_type": "qwen2"},
        SIGLIP | {"image_size": [56, 56], "patch_size": [14, 14], "use_absolute_position_embeddings": True},
        {"image_seq_length": 4},
    ),
    "gemma3": (
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
        SIGLIP | {"image_size": 56, "patch_size": 14, "vision_use_head": False},
        {"mm_tokens_per_image": 4},
    ),
}


def image_tokenizer(model_type: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the tokens of images of a type, and a template that writes them."""
    special, written = TOKENS[model_type]
    plain = byte_tokenizer()
    plain.add_special_tokens({"additional_special_tokens": [*special.values()]})
    if model_type == "gemma3":
        plain.add_tokens(["\n" * count for count in range(2, 6)])
    return PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        **{name: getattr(plain, name) for name in ("eos_token", "bos_token", "pad_token")},
        chat_template=IMAGE_TEMPLATE.replace("'<image>'", repr(written)),
        extra_special_tokens=special,
    )


def image_reader(model_type: str) -> Any:
    """Return the image processor of a type, by Pillow, for images of few tokens."""
    square = {"height": 56, "width": 56}
    if model_type == "llava":
        edge = {"shortest_edge": 56}
        return transformers.CLIPImageProcessorPil(size=edge, crop_size=square)
    if model_type == "internvl":
        return transformers.GotOcr2ImageProcessorPil(size=square, crop_to_patches=True, max_patches=2)
    if model_type == "gemma3":
        return transformers.Gemma3ImageProcessorPil(size=square)
    if model_type == "glm4v":
        return transformers.Glm4vImageProcessorPil(size={"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 84 * 84})
    return transformers.Qwen2VLImageProcessorPil(
        patch_size=14, temporal_patch_size=2, merge_size=2, min_pixels=28 * 28, max_pixels=84 * 84
    )


def token_settings(model_type: str, tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Return the tokens of images under their names in the configuration of a type."""
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS[model_type][0].items()}
    if model_type == "gemma3":
        return {f"{name.removesuffix('_token')}_token_index": value for name, value in ids.items()}
    if model_type == "internvl":
        return {"image_token_id": ids["context_image_token"]}
    return {f"{name}_id": value for name, value in ids.items()}


@torch.no_grad()
def make_seeing(path: Path, model_type: str, **text: Any) -> None:
    """Write the folder of a tiny model of a type that reads images, with weights that are not flat; `text`: further
    settings of its language model."""
    tokenizer = image_tokenizer(model_type)
    language, tower, more = SHAPES[model_type]
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = transformers.CONFIG_MAPPING[model_type](
        text_config=TEXT | tokens | {"vocab_size": len(tokenizer)} | language | text,
        vision_config=tower,
        **token_settings(model_type, tokenizer),
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    reader = image_reader(model_type)
    reader.save_pretrained(path)
    settings = {"processor_class": transformers.PROCESSOR_MAPPING[type(config)].__name__}
    if model_type == "llava":
        settings |= {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    if model_type in ("internvl", "gemma3"):
        settings["image_seq_length"] = 4
    (path / "processor_config.json").write_text(json.dumps(settings))
