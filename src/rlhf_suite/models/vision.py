"""Models that read images: how an image becomes tokens and pixels, and what a batch with
images adds to the inputs of the forward pass.

The processor of a family is that of transformers, with its Pillow back end where torchvision is not installed. It is
imported when the first image is read, so a run of text alone does not pay for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlhf_suite.config.launch import trusts_code
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.data.images import image_file, open_image
from rlhf_suite.errors import UserError
from rlhf_suite.models.families import IMAGE_TYPES, family_of

READ_IMAGES = 64  # images whose pixels are kept: the models of a step read the same ones
BLANK = (56, 56)  # the size of the image that stands in where a batch has none


@dataclass(frozen=True)
class ReadImage:
    """An image as a model reads it."""

    tokens: list[int]
    pixels: dict[str, Tensor]  # by the names of `Images.pixels`; the first dimension is laid end to end


class VisionProcessor:
    """Reads images for the model in `folder`. `flag` and its value `path` are named in error messages."""

    def __init__(self, folder: str, flag: str, path: str) -> None:
        from transformers import AutoConfig

        self.folder, self.flag, self.path = folder, flag, path
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusts_code())
        images = family_of(config.to_dict()).images
        if images is None:
            raise UserError(
                f"{flag}={path}: data.image_key needs a model of a family that reads images here "
                f"({', '.join(IMAGE_TYPES)}), and this one is {config.model_type}. Choose another model, or write "
                "data.image_key=null"
            )
        self.family = images
        self.recent: OrderedDict[bytes, ReadImage] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return VisionProcessor, (self.folder, self.flag, self.path)

    @cached_property
    def processor(self) -> Any:
        """The processor of transformers."""
        from transformers import AutoProcessor

        try:
            return AutoProcessor.from_pretrained(self.folder, trust_remote_code=trusts_code())
        except (OSError, ValueError, ImportError) as error:
            raise UserError(f"{self.flag}={self.path}: its image processor cannot be loaded ({error})") from error

    @property
    def placeholder(self) -> int:
        """The token that stands for an image before it is expanded, and for each of its features afterwards."""
        return int(self.processor.image_token_id)

    @cached_property
    def never_sampled(self) -> tuple[int, ...]:
        """The special tokens of images: a response with one would claim an image that is not there."""
        special = set(self.processor.tokenizer.all_special_ids)
        return tuple(sorted({self.placeholder} | (special & set(self.tokens(self.blank)))))

    @cached_property
    def blank(self) -> bytes:
        """The file of an image that stands in where a batch has none."""
        from PIL import Image

        return image_file(Image.new("RGB", BLANK, (255, 0, 0)))

    def tokens(self, image: bytes) -> list[int]:
        """Return the tokens that stand for an image in a sequence.

        Raises:
            ValueError: the model cannot read this image, with the reason.
        """
        return self.read(image).tokens

    def read(self, data: bytes) -> ReadImage:
        """Return tokens and pixels of an image file."""
        if data in self.recent:
            self.recent.move_to_end(data)
            return self.recent[data]
        result = self.process(open_image(data))
        self.recent[data] = result
        if len(self.recent) > READ_IMAGES:
            self.recent.popitem(last=False)
        return result

    def process(self, image: Any) -> ReadImage:
        """Return tokens and pixels of an image of Pillow."""
        inputs = self.processor(
            text=[self.processor.image_token], images=[[image]], return_tensors="pt", add_special_tokens=False
        )
        pixels = {name: inputs[name] for name in self.family.pixels}
        if self.family.has_tile_rows:
            pixels = {name: values[0] for name, values in pixels.items()}
            if not pixels["pixel_values"].flatten(1).any(1).all():
                raise ValueError("an image is zero everywhere after normalisation, which the model takes for padding")
            assert bool(inputs["pixel_attention_mask"].all()), "a tile with a margin"
        return ReadImage(inputs["input_ids"][0].tolist(), pixels)

    def inputs(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return what the images of a batch, at least one, add to the inputs of the model."""
        assert batch.images is not None
        per_row = [[self.read(data) for data in files] for files in batch.images]
        self.check_places(batch, per_row)
        images = [image for row in per_row for image in row]
        joined = {name: torch.cat([image.pixels[name] for image in images]) for name in self.family.pixels}
        device = batch.ids.device
        return {k: (v[None] if self.family.has_tile_rows else v).to(device) for k, v in joined.items()}

    def check_places(self, batch: TokenBatch, images: Sequence[Sequence[ReadImage]]) -> None:
        """Check that every sequence has as many placeholders as its images have features: models would shift the
        features of later images without a word."""
        expected = [sum(image.tokens.count(self.placeholder) for image in row) for row in images]
        places = (batch.ids == self.placeholder).long()
        counts = torch.zeros_like(batch.lengths).index_add_(0, batch.segments, places).tolist()
        assert counts == expected, f"placeholders of images per sequence: {counts}, features: {expected}"

    def with_an_image(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch; where it has no image, with one more sequence at its end, which has a blank one.

        Under ZeRO all ranks must run the same modules, and some rank may have images.
        """
        assert batch.images is not None
        if any(batch.images):
            return batch
        ids = batch.ids.new_tensor(self.tokens(self.blank))
        return TokenBatch(
            torch.cat([batch.ids, ids]),
            torch.cat([batch.lengths, batch.lengths.new_tensor([len(ids)])]),
            torch.cat([batch.mask, batch.mask.new_zeros(len(ids))]),
            images=(*batch.images, (self.blank,)),
        )
