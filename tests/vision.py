"""What the tests of images share: picture files, a small model that reads images, sequences with and without images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Pillow

from image_families import make_seeing
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.data.batch import Example
from rlhf_suite.data.images import expand_placeholders
from rlhf_suite.models.builtin import SHAPES, create
from rlhf_suite.models.forward import LanguageModel
from rlhf_suite.models.load import load_model, load_tokenizer, vision_processor


def picture(colour: tuple[int, int, int] = (200, 30, 40), size: tuple[int, int] = (40, 56), kind: str = "PNG") -> bytes:
    """Return the file of an image whose right half is white."""
    image = Pillow.new("RGB", size, colour)
    image.paste((255, 255, 255), (size[0] // 2, 0, size[0], size[1]))
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


PICTURES = [picture((40 * n, 200 - 30 * n, 30 + 20 * n), (40 + 8 * n, 56)) for n in range(5)]

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}  # values of ds.param_dtype


class Seeing:
    """A small model that reads images, in a folder of its own."""

    def __init__(self, folder: Path, model_type: str = "idefics3", **text: Any) -> None:
        self.folder = folder / "model"
        if model_type == "idefics3":
            create(self.folder, SHAPES["vision"])
        else:
            make_seeing(self.folder, model_type, **text)
        self.tokenizer = load_tokenizer(str(self.folder), DataConfig.of("sft"))
        processor = vision_processor(str(self.folder), "images")
        assert processor is not None
        self.processor = processor

    def ids(self, num_images: int, text: str = "digit?") -> list[int]:
        """Return the tokens of a message with so many images, before they are expanded."""
        content = [*[{"type": "image"}] * num_images, {"type": "text", "text": text}]
        message = {"role": "user", "content": content}
        rendered = self.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def example(self, files: list[bytes], answer: list[int], text: str = "digit?") -> Example:
        """Return an example whose answer is trained on."""
        ids, images = expand_placeholders(self.ids(len(files), text), files, self.processor)
        return Example(ids + answer, [0] * len(ids) + [1] * len(answer), images=images)

    def examples(self) -> list[Example]:
        """Return sequences with one image, none, two and one."""
        files = [PICTURES[:1], [], PICTURES[1:3], PICTURES[3:4]]
        return [self.example(each, [65 + n, 70, 66], "ab" * n) for n, each in enumerate(files)]

    @torch.no_grad()
    def model(
        self, packed: bool | None = True, noise: float = 0.1, dtype: str = "fp32", seed: int = 7
    ) -> LanguageModel:
        """Return the model, with weights large enough for images and attention to matter."""
        model = load_model(
            str(self.folder), head="lm", ds=DeepSpeedConfig.of("sft", param_dtype=dtype, packing_samples=packed)
        )
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
        return model
