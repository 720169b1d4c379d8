"""Images whose tokens see each other, as those of Gemma 3: what vLLM 0.32 lacks for them.

Without a GPU its attention would let each token of an image see the earlier ones alone. On every device, its Gemma 3
would join the newlines around an image with others of the prompt, also with those that the model itself has sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)


@dataclass(frozen=True)
class ImageRows:
    """The tokens of images that a step computes, in each image one run of them."""

    rows: list[int]  # where they are among the tokens of the step
    requests: list[int]  # the request of each run
    counts: list[int]  # how many tokens a run has
    ends: list[int]  # how many tokens of the request a run sees: all up to the last one of the image


def image_rows(images: Mapping[int, Sequence[tuple[int, int]]], starts: list[int], lengths: list[int]) -> ImageRows:
    """Return the tokens of images in a step.

    `images`: for each request the first and the last token of its images; `starts`: where the tokens of each request
    begin in the step, and their number at the end; `lengths`: the tokens of each request up to the end of the step.
    """
    result = ImageRows([], [], [], [])
    for request, ranges in images.items():
        offset = lengths[request] - starts[request + 1]  # of a token in its request, from its row
        for first, last in ranges:
            rows = range(max(first - offset, starts[request]), min(last + 1 - offset, starts[request + 1]))
            if rows:
                result.rows.extend(rows)
                result.requests.append(request)
                result.counts.append(len(rows))
                result.ends.append(min(last + 1, lengths[request]))
    return result


class ImageMetadata(CPUAttentionMetadata):
    """What the kernel needs for a step, and for the images in it."""

    images: CPUAttentionMetadata
    image_rows: Tensor


class ImageMetadataBuilder(CPUAttentionMetadataBuilder):
    """Takes each run of tokens of an image for a request of its own, which sees all of its tokens."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        images = common_attn_metadata.mm_req_doc_ranges
        if not images or not any(images.values()):
            return plain
        runs = image_rows(images, plain.query_start_loc.tolist(), plain.seq_lens.tolist())
        if not runs.rows:
            return plain
        result = ImageMetadata(**vars(plain))
        result.image_rows = torch.tensor(runs.rows)
        starts, lengths = torch.tensor([[0, *accumulate(runs.counts)], [0, *runs.ends]], dtype=torch.int32)
        lengths = lengths[1:].contiguous()
        result.images = CPUAttentionMetadata(
            num_actual_tokens=len(runs.rows),
            max_query_len=max(runs.counts),
            query_start_loc=starts,
            max_seq_len=max(runs.ends),
            seq_lens=lengths,
            block_table=plain.block_table[torch.tensor(runs.requests)].contiguous(),
            slot_mapping=plain.slot_mapping,
            scheduler_metadata=self.schedule(starts, lengths),
            causal=False,
        )
        return result

    def schedule(self, starts: Tensor, lengths: Tensor) -> Tensor:
        """Return how the kernel divides its work on the images of a step."""
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=False,
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=False,
            kv_cache_dtype=self.kv_cache_dtype,
        )


class ImageAttention(CPUAttentionBackendImpl):
    """Computes the tokens of images once more, with all that they see. A window is as long as an image, or longer, so
    it hides no token of the same image."""

    def forward(self, layer: Any, query: Tensor, *states: Any, output: Tensor, **scales: Any) -> Tensor:
        """Compute attention; `states`: keys, values, their cache, and the metadata of the step."""
        super().forward(layer, query, *states, output=output, **scales)
        if isinstance(states[-1], ImageMetadata):
            rows = states[-1].image_rows
            seen = torch.empty_like(output[rows])
            super().forward(layer, query[rows], *states[:-1], states[-1].images, output=seen)
            output[rows] = seen
        return output


class ImageBackend(CPUAttentionBackend):
    """vLLM's attention without a GPU, for models with and without such images."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return ImageAttention

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return ImageMetadataBuilder


def keep_newlines() -> None:
    """Let Gemma 3 in this process leave the newlines of a prompt as they are, with none added around an image: the
    prompt has them already, joined by `data.images.Newlines`."""
    from vllm.model_executor.models.gemma3_mm import Gemma3MultiModalProcessor, Gemma3ProcessingInfo
    from vllm.multimodal.processing import BaseMultiModalProcessor, PromptUpdateDetails

    if hasattr(Gemma3ProcessingInfo, "plain_image_repl"):
        return
    Gemma3ProcessingInfo.plain_image_repl = plain = Gemma3ProcessingInfo.get_image_repl

    def get_image_repl(info: Gemma3ProcessingInfo, **image: Any) -> PromptUpdateDetails:
        tokenizer = image["processor"].tokenizer
        text = tokenizer.decode(plain(info, **image).full)
        ids = tokenizer.encode(text.strip("\n"), add_special_tokens=False)
        return PromptUpdateDetails.select_token_id(ids, tokenizer.image_token_id)

    Gemma3ProcessingInfo.get_image_repl = get_image_repl
    for name in ("_apply_token_matches", "_apply_token_matches_with_placeholders", "_find_mm_placeholders"):
        setattr(Gemma3MultiModalProcessor, name, getattr(BaseMultiModalProcessor, name))
