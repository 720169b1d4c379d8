"""Models that read images: how an image becomes tokens and pixels, and what a batch with
images adds to the inputs of the forward pass.

The processor of a family is that of transformers. Where torchvision is not installed, images are read by its Pillow
back end, and the part for videos, which has no other, is left out. It is imported when the first image is read, so a
run of text alone does not pay for it.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_suite.config.declarations.launch import trusts_code
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.data.images import Newlines, image_file, open_image
from rlhf_suite.errors import UserError
from rlhf_suite.models.families import family_of

READ_IMAGES = 64  # images whose pixels are kept: the models of a step read the same ones
BLANK = (56, 56)  # the size of the image that stands in where a batch has none
MOST_NEWLINES = 32  # that one token may be
VIDEO = "video_processor"  # the part of a processor that needs torchvision
VIDEO_FILE = "video_preprocessor_config.json"
# Settings of config.json that name a token of images or videos.
IMAGE_TOKENS = re.compile(r"(?:(?:image|video|vision)(?:_start|_end)?|[be]oi)_token_(?:id|index)")


@dataclass(frozen=True)
class ReadImage:
    """An image as a model reads it."""

    tokens: list[int]
    pixels: dict[str, Tensor]  # by the names of `Images.pixels`; the first dimension is laid end to end


@dataclass(frozen=True)
class ImageInputs:
    """What the images of a batch add to the inputs of a model."""

    pixels: dict[str, Tensor]  # of all images
    positions: Tensor | None = None  # [3, T] in time, height and width; None: tokens have one position
    # [T] for models whose images see all of themselves the number of a token's image, from 1, and 0 for text
    numbers: Tensor | None = None


class VisionProcessor:
    """Reads images for the model in `folder`. `flag` and its value `path` are named in error messages."""

    def __init__(self, folder: str, flag: str, path: str) -> None:
        from transformers import AutoConfig

        self.folder, self.flag, self.path = folder, flag, path
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusts_code())
        images = family_of(config.to_dict()).images
        assert images is not None, "of a family that reads images"
        self.config, self.family = config, images
        self.recent: OrderedDict[bytes, ReadImage] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return VisionProcessor, (self.folder, self.flag, self.path)

    @cached_property
    def processor(self) -> Any:
        """The processor of transformers."""
        try:
            return load_processor(self.folder, self.config)
        except (OSError, ValueError, ImportError, AttributeError) as error:
            raise UserError(f"{self.flag}={self.path}: its image processor cannot be loaded ({error})") from error

    @property
    def is_complete(self) -> bool:
        """Return whether there is a processor. A run of text alone does without."""
        try:
            return self.processor is not None
        except UserError:
            return False

    def save(self, folder: Path) -> None:
        """Write the files of the processor, also of the part for videos that may not be loaded here."""
        self.processor.save_pretrained(folder)
        video = video_settings(self.folder) if reads_videos(self.config) else {}
        if video and getattr(self.processor, VIDEO, None) is None:
            (folder / VIDEO_FILE).write_text(json.dumps(video, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @property
    def placeholder(self) -> int:
        """The token that stands for an image before it is expanded."""
        return int(self.processor.image_token_id)

    @property
    def feature(self) -> int:
        """The token that stands for each feature of an expanded image; for most models it is the placeholder."""
        return int(getattr(self.processor.tokenizer, "image_token_id", self.placeholder))

    @cached_property
    def newlines(self) -> Newlines | None:
        """The newlines that stand around each image; None: there are none."""
        if not self.family.has_newlines:
            return None

        def encode(count: int) -> list[int]:
            return list(self.processor.tokenizer.encode("\n" * count, add_special_tokens=False))

        tokens = ((encode(count), count) for count in range(1, MOST_NEWLINES + 1))
        return Newlines({ids[0]: count for ids, count in tokens if len(ids) == 1}, encode)

    @cached_property
    def never_sampled(self) -> tuple[int, ...]:
        """The special tokens of images: a response with one would claim an image that is not there."""
        special = set(self.processor.tokenizer.all_special_ids) & set(self.tokens(self.blank))
        named = {value for name, value in vars(self.config).items() if IMAGE_TOKENS.fullmatch(name)}
        rows = self.config.get_text_config().vocab_size
        tokens = {self.placeholder, self.feature} | special | {int(value) for value in named if value is not None}
        return tuple(sorted(token for token in tokens if token < rows))

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

    def inputs(self, batch: TokenBatch) -> ImageInputs:
        """Return what the images of a batch, at least one, add to the inputs of the model."""
        assert batch.images is not None
        per_row = [[self.read(data) for data in files] for files in batch.images]
        self.check_places(batch, per_row)
        images = [image for row in per_row for image in row]
        joined = {name: torch.cat([image.pixels[name] for image in images]) for name in self.family.pixels}
        device = batch.ids.device
        pixels = {k: (v[None] if self.family.has_tile_rows else v).to(device) for k, v in joined.items()}
        if self.family.sees_whole:
            return ImageInputs(pixels, numbers=image_numbers(batch.ids == self.feature))
        if not self.family.has_axes:
            return ImageInputs(pixels)
        merged = self.config.vision_config.spatial_merge_size
        return ImageInputs(pixels, positions_on_axes(batch, self.feature, pixels["image_grid_thw"][:, 1:] // merged))

    def check_places(self, batch: TokenBatch, images: Sequence[Sequence[ReadImage]]) -> None:
        """Check that every sequence has as many placeholders as its images have features: models would shift the
        features of later images without a word."""
        expected = [sum(image.tokens.count(self.feature) for image in row) for row in images]
        places = (batch.ids == self.feature).long()
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


def positions_on_axes(batch: TokenBatch, feature: int, sizes: Tensor) -> Tensor:
    """Return the positions in time, height and width of each token, [3, T]. `sizes` [N, 2]: the rows and columns of
    features of each image.

    Tokens of text have the same position on all axes. Those of an image have one time, and a row and a column that
    count from it. The text after goes on from the largest of them, so an image takes max(rows, columns) positions.
    """
    places = (batch.ids == feature).nonzero().squeeze(1)  # [P]
    counts, columns = sizes.prod(1), sizes[:, 1]  # [N]
    first = counts.cumsum(0) - counts  # [N] the first token of each image among those of all
    image = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), counts, output_size=len(places))
    within = torch.arange(len(places), device=sizes.device) - first[image]  # [P]
    before = places.new_zeros(batch.num_tokens + 1)  # positions that the images before each token save
    before = before.index_add_(0, places[first] + counts, counts - sizes.amax(1))[:-1].cumsum(0)  # [T]
    starts, segments = batch.starts, batch.segments
    text = torch.arange(batch.num_tokens, device=before.device) - before  # [T]
    text -= text[starts][segments]
    axes = text.repeat(3, 1)
    axes[:, places] = text[places[first]][image]
    axes[1, places] += within // columns[image]
    axes[2, places] += within % columns[image]
    return axes


def image_numbers(features: Tensor) -> Tensor:
    """Return the number of the image of each token, from 1, and 0 for text, [T]: an image is a run of `features`."""
    first = features & ~F.pad(features[:-1], (1, 0))
    return first.cumsum(0) * features


def processor_class(config: Any) -> Any:
    """Return the class of the processor of a model; None if transformers does not know it."""
    from transformers import PROCESSOR_MAPPING

    return PROCESSOR_MAPPING.get(type(config), None)


def reads_videos(config: Any) -> bool:
    """Return whether the processor of a model has a part for videos."""
    kind = processor_class(config)
    return kind is not None and VIDEO in kind.get_attributes()


def load_processor(folder: str, config: Any) -> Any:
    """Return the processor in a folder or of a hub name, without its part for videos where torchvision is missing."""
    from transformers import AutoProcessor
    from transformers.utils import is_torchvision_available

    trusted = trusts_code()
    kind = processor_class(config)
    if is_torchvision_available() or not reads_videos(config):
        return AutoProcessor.from_pretrained(folder, trust_remote_code=trusted)
    others = [name for name in kind.get_attributes() if name != VIDEO]
    without: Any = type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda _: others), VIDEO: None})
    return without.from_pretrained(folder, trust_remote_code=trusted)


def video_settings(folder: str) -> dict[str, Any]:
    """Return the settings of the part of a processor that reads videos, which may be those for images, as transformers
    finds them; empty if there are none."""
    files = (VIDEO_FILE, "processor_config.json", "preprocessor_config.json")
    for path in (Path(folder) / name for name in files):
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if video := settings.get(VIDEO) if path.name == files[1] else settings:
            return dict(video)
    return {}
