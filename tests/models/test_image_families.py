"""Families of models that read images: packed and padded rows are each sequence alone in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText

from image_families import SHAPES
from rlhf_suite.config.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.models import SeeingActorConfig
from rlhf_suite.data.batch import Example, TokenBatch, collate, take
from rlhf_suite.data.images import expand_placeholders, open_image
from rlhf_suite.models.forward import sequence_scores, token_log_probs
from rlhf_suite.models.load import load_model, vision_processor
from rlhf_suite.models.prepare import make_trainable
from rlhf_suite.models.save import save_hf
from rlhf_suite.models.vision import VIDEO_FILE, reads_videos
from vision import PICTURES, Seeing

SAME = 1e-6  # relative to the largest value
# Of these CI runs the tests: positions on three axes and a grid, and tokens of an image that see all of it.
IN_CI = ("qwen2_5_vl", "gemma3")
TYPES = [kind if kind in IN_CI else pytest.param(kind, marks=pytest.mark.proof) for kind in SHAPES]


@pytest.fixture(scope="module", params=TYPES)
def seeing(request, tmp_path_factory) -> Seeing:
    return Seeing(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def batch(seeing) -> TokenBatch:
    return collate(seeing.examples(), TokenBatch)


def inputs_alone(seeing: Seeing, example: Example) -> dict[str, Any]:
    """Return the inputs of transformers for a sequence."""
    ids = torch.tensor([example.ids])
    pixels = [seeing.processor.read(image.data).pixels for image in example.images or ()]
    more: dict[str, Any] = {name: torch.cat([p[name] for p in pixels]) for name in (pixels[0] if pixels else ())}
    family = seeing.processor.family
    if family.has_axes or family.sees_whole:
        name = "mm_token_type_ids" if family.has_axes else "token_type_ids"
        more[name] = (ids == seeing.processor.feature).int()
    return more | {"input_ids": ids, "use_cache": False}


def alone(seeing: Seeing) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log p of each token and gradients, by transformers alone, one sequence after the other."""
    model = AutoModelForImageTextToText.from_pretrained(seeing.folder, dtype=torch.float32, attn_implementation="sdpa")
    log_probs = []
    for example in seeing.examples():
        inputs = inputs_alone(seeing, example)
        logits = model(**inputs).logits[0].log_softmax(-1)
        log_probs.append(F.pad(logits[:-1].gather(1, inputs["input_ids"][0, 1:, None])[:, 0], (1, 0)))
    total = torch.cat(log_probs)
    mask = torch.cat([torch.tensor(example.mask) for example in seeing.examples()])
    (-(total * mask).sum()).backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.notices(
    "the tokens of an image have no rows",
    "models/vision.py",
    "    axes[1, places] += within // columns[image]\n",
    "",
    cases="qwen2_5_vl",
)
@pytest.mark.notices(
    "the tokens of an image do not see later ones",
    "models/attention.py",
    "if mask is not None and images is not None:",
    "if mask is None and images is not None:",
    cases="gemma3",
)
def test_packed_and_padded_rows_are_each_sequence_alone(seeing, batch, record_property):
    expected, gradients = alone(seeing)
    for packed in (True, False):
        model = seeing.model(packed, noise=0)
        log_probs = token_log_probs(model, batch).log_probs
        largest = float((log_probs.detach() - expected).abs().max() / expected.abs().max())
        record_property(f"largest difference, {'packed' if packed else 'padded'}", largest)
        assert largest <= SAME
        (-(log_probs * batch.mask).sum()).backward()
        ours = {name: p.grad for name, p in model.model.named_parameters() if p.grad is not None}
        assert any(name.startswith(seeing.processor.family.tower) for name in ours)
        scale = max(float(gradient.abs().max()) for gradient in gradients.values())
        for name, gradient in gradients.items():
            assert (ours[name] - gradient).abs().max() <= 2 * SAME * scale, name


@pytest.mark.notices(
    "images of Gemma 3 have no newlines of their own beside the text",
    "models/families.py",
    "sees_whole=True, has_newlines=True)",
    "sees_whole=True)",
    cases="gemma3",
)
@pytest.mark.parametrize("text", ["digit?", "\ndigit", "\n\n\n\ndigit\n"])
def test_tokens_are_those_of_the_processor_for_the_whole_text(seeing, text):
    ids, images = expand_placeholders(seeing.ids(2, text), PICTURES[:2], seeing.processor)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": text}]
    message = {"role": "user", "content": content}
    rendered = seeing.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    pictures = [open_image(data) for data in PICTURES[:2]]
    whole = seeing.processor.processor(text=[rendered], images=[pictures], add_special_tokens=False)
    assert ids == list(whole["input_ids"][0])
    assert sum(image.length for image in images) < len(ids)


def test_rows_with_images_are_packed_by_default(seeing):
    assert seeing.model(packed=None).packed


@torch.no_grad()
def test_scores_of_packed_and_padded_rows_are_those_of_each_sequence_alone(seeing, batch, tmp_path):
    plain = AutoModelForImageTextToText.from_pretrained(seeing.folder, dtype=torch.float32, attn_implementation="sdpa")
    states = [plain.model(**inputs_alone(seeing, example)).last_hidden_state[0, -1] for example in seeing.examples()]
    for packed in (True, False):
        ds = DeepSpeedConfig(param_dtype="fp32", packing_samples=packed)
        model = load_model(str(seeing.folder), head="value", ds=ds)
        scores = sequence_scores(model, batch)
        expected = torch.stack(states) @ model.model.score.weight[0]
        assert (scores - expected).abs().max() <= 2 * SAME * expected.abs().max()
        assert (sequence_scores(model, take(batch, [1, 0])) - scores[[1, 0]]).abs().max() <= 2 * SAME
    assert save_hf(model, seeing.tokenizer, tmp_path / "saved") == []
    again = load_model(str(tmp_path / "saved"), head="value", ds=ds)
    assert not again.head_is_new and torch.equal(sequence_scores(again, batch), scores)


def test_sequences_of_text_alone_need_no_images(seeing):
    """Also in training, where transformers would ask some types for the kinds of tokens."""
    text = seeing.examples()[1]
    one, two = (
        token_log_probs(seeing.model(packed, noise=0).train(), collate([text] * count, TokenBatch)).log_probs
        for count, packed in ((1, False), (2, True))
    )
    assert (two - one.repeat(2)).abs().max() <= SAME * one.abs().max()


def test_a_frozen_tower_gets_no_gradient_and_is_saved_whole(seeing, batch, tmp_path):
    model = seeing.model(noise=0)
    make_trainable(model, SeeingActorConfig(freeze_visual_encoder=True), LoRAConfig())
    token_log_probs(model, batch).log_probs.sum().backward()
    trained = {name for name, p in model.model.named_parameters() if p.grad is not None}
    visual = {name for name, _ in model.model.named_parameters() if "language_model" not in name} - {"lm_head.weight"}
    assert visual and trained and not trained & visual
    save_hf(model, seeing.tokenizer, tmp_path / "saved")
    assert (tmp_path / "saved" / VIDEO_FILE).is_file() == reads_videos(seeing.processor.config), "engines look for it"
    ds = DeepSpeedConfig(param_dtype="fp32", packing_samples=True)
    again = load_model(str(tmp_path / "saved"), head="lm", ds=ds)
    assert torch.equal(token_log_probs(again, batch).log_probs, token_log_probs(model.eval(), batch).log_probs)
    reader = vision_processor(str(tmp_path / "saved"), "images")
    assert reader is not None and reader.tokens(PICTURES[0]) == seeing.processor.tokens(PICTURES[0])
