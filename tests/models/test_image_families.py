"""Families of models that read images: packed and padded rows are each sequence alone in transformers."""

from __future__ import annotations

import pytest
import torch
from image_errors import alone, answers, batch_of, ours, scorer, scores_alone

from image_families import SHAPES
from rlhf_suite.config.declarations.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.data.batch import TokenBatch, collate, take
from rlhf_suite.data.images import expand_placeholders, open_image
from rlhf_suite.models.forward import sequence_scores, token_log_probs
from rlhf_suite.models.load import load_model, vision_processor
from rlhf_suite.models.prepare import make_trainable
from rlhf_suite.models.save import save_hf
from rlhf_suite.models.vision import VIDEO_FILE, reads_videos
from rlhf_suite.models.weights import iterate_weights
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
    return batch_of(seeing)


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
def test_packed_and_padded_rows_are_each_sequence_alone(seeing, record_property):
    loss = answers(seeing)
    expected, gradients = alone(seeing, loss)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for packed in (True, False):
        log_probs, found = ours(seeing, packed, loss)
        largest = float((log_probs - expected).abs().max() / expected.abs().max())
        record_property(f"largest difference, {'packed' if packed else 'padded'}", largest)
        assert largest <= SAME
        assert any(name.startswith(seeing.processor.family.tower) for name in found)
        for name, gradient in gradients.items():
            assert (found[name] - gradient).abs().max() <= 2 * SAME * scale, name


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
    for packed in (True, False):
        model = scorer(seeing.folder, packed)
        scores = sequence_scores(model, batch)
        assert (sequence_scores(model, take(batch, [1, 0])) - scores[[1, 0]]).abs().max() <= 2 * SAME
        expected = scores_alone(model, seeing)
        assert (scores - expected).abs().max() <= 2 * SAME * expected.abs().max()
    assert save_hf(model, seeing.tokenizer, tmp_path / "saved") == []
    again = scorer(tmp_path / "saved", packed)
    assert not again.head_is_new
    tensors = again.state_dict()  # their places in memory differ, by which kernels round otherwise
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())
    assert (sequence_scores(again, batch) - scores).abs().max() <= 2 * SAME


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
    make_trainable(model, ActorConfig.of("dpo", freeze_visual_encoder=True), LoRAConfig())
    token_log_probs(model, batch).log_probs.sum().backward()
    trained = {name for name, p in model.model.named_parameters() if p.grad is not None}
    visual = {name for name, _ in model.model.named_parameters() if "language_model" not in name} - {"lm_head.weight"}
    assert visual and trained and not trained & visual
    save_hf(model, seeing.tokenizer, tmp_path / "saved")
    assert (tmp_path / "saved" / VIDEO_FILE).is_file() == reads_videos(seeing.processor.config), "engines look for it"
    ds = DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=True)
    again = load_model(str(tmp_path / "saved"), head="lm", ds=ds)
    assert torch.equal(token_log_probs(again, batch).log_probs, token_log_probs(model.eval(), batch).log_probs)
    reader = vision_processor(str(tmp_path / "saved"), "images")
    assert reader is not None and reader.tokens(PICTURES[0]) == seeing.processor.tokens(PICTURES[0])


@pytest.mark.notices(
    "the experts of Qwen3-VL-MoE are saved as transformers has them in memory",
    "models/weights.py",
    "tensor.transpose(1, 2).contiguous() if is_turned else tensor",
    "tensor",
)
def test_experts_of_qwen3_vl_moe_are_saved_as_its_checkpoints_have_them(tmp_path):
    """vLLM reads [E, size of an expert, H]; transformers reads that too, and would write [E, H, size of an expert]."""
    seeing = Seeing(tmp_path, "qwen3_vl_moe")
    model = seeing.model(noise=0)
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    memory = dict(model.model.named_parameters())[name]
    stored = dict(iterate_weights(model))[name]
    assert memory.shape == (4, 64, 48) and torch.equal(stored, memory.transpose(1, 2))
    save_hf(model, seeing.tokenizer, tmp_path / "saved")
    again = load_model(str(tmp_path / "saved"), head="lm", ds=DeepSpeedConfig.of("sft", param_dtype="fp32"))
    assert torch.equal(dict(again.model.named_parameters())[name], memory)
