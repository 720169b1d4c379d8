"""Models that read images: packed and padded rows against transformers, image order, gradients, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from PIL import Image as Pillow
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rlhf_suite.config.declarations.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.data.batch import TokenBatch, collate, take
from rlhf_suite.data.images import collapse_images, image_file, open_image
from rlhf_suite.errors import UserError
from rlhf_suite.models.attention import SequenceLayout
from rlhf_suite.models.forward import compute_token_states, token_log_probs
from rlhf_suite.models.load import load_model, vision_processor
from rlhf_suite.models.prepare import make_trainable
from rlhf_suite.models.save import save_hf
from vision import PICTURES, Seeing


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Seeing:
    return Seeing(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def batch(seeing) -> TokenBatch:
    return collate(seeing.examples(), TokenBatch)


def plain_log_probs(model, example, processor) -> torch.Tensor:
    """log p of each token, by transformers' own forward pass of one sequence."""
    inner = model.model
    inner.set_attn_implementation("sdpa")
    pixels = [processor.read(image.data).pixels["pixel_values"] for image in example.images]
    more = {"pixel_values": torch.cat(pixels)[None]} if pixels else {}
    ids = torch.tensor([example.ids])
    hidden = inner.base_model(input_ids=ids, use_cache=False, **more).last_hidden_state[0]
    logits = F.linear(hidden, inner.lm_head.weight).log_softmax(-1)
    return F.pad(logits[:-1].gather(1, ids[0, 1:, None])[:, 0], (1, 0))


@pytest.mark.notices(
    "a batch without an image leaves the tower out",
    "models/vision.py",
    "        if any(batch.images):\n",
    "        if True:\n",
)
@pytest.mark.parametrize("packed", [True, False])
@torch.no_grad()
def test_a_batch_with_images_is_each_sequence_alone(seeing, batch, packed, record_property):
    model = seeing.model(packed)
    found = token_log_probs(model, batch).log_probs
    alone = [token_log_probs(model, take(batch, [row])).log_probs for row in range(len(batch))]
    assert (found - torch.cat(alone)).abs().max() <= 2e-6
    plain = [plain_log_probs(model, example, seeing.processor) for example in seeing.examples()]
    largest = float((found - torch.cat(plain)).abs().max())
    record_property("largest difference from each sequence alone in transformers", float(largest))
    assert largest <= 2e-6


@torch.no_grad()
def test_images_in_another_order_are_another_batch(seeing, batch):
    model = seeing.model()
    images = (batch.images[3], (), batch.images[2], batch.images[0])
    found = token_log_probs(model, replace(batch, images=images)).log_probs
    assert (found - token_log_probs(model, batch).log_probs).abs().max() > 1e-2


@pytest.mark.notices(
    "more features than placeholders are not noticed",
    "models/vision.py",
    "assert counts == expected,",
    "assert counts,",
)
def test_more_or_fewer_images_than_places_are_noticed(seeing, batch):
    """Idefics3 takes too many images without a word, and the features of one in the place of another."""
    model = seeing.model()
    for images in ((*batch.images[:3], tuple(PICTURES[:2])), ((), tuple(PICTURES[:1]), *batch.images[2:])):
        with pytest.raises(AssertionError, match="placeholders of images"):
            token_log_probs(model, replace(batch, images=images))


def gradients(model, batch: TokenBatch) -> dict[str, torch.Tensor]:
    (-(token_log_probs(model, batch).log_probs * batch.mask).sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_do_not_depend_on_the_micro_batches(seeing, batch, packed):
    whole = gradients(seeing.model(), batch)
    model = seeing.model(packed)
    for rows in ([0, 1], [2], [3]):
        parts = gradients(model, take(batch, rows))
    assert parts.keys() == whole.keys()
    assert any("vision_model" in name for name in whole) and any("connector" in name for name in whole)
    for name, gradient in whole.items():
        close = 2e-5 * float(gradient.abs().max()) + 1e-7  # that of a bias of keys is 0, and rounding alone
        assert torch.allclose(parts[name], gradient, rtol=2e-4, atol=close), name


def test_a_batch_without_an_image_still_runs_the_tower(seeing, batch):
    """Under ZeRO every rank takes part in gathering the tower's weights, also one whose sequences have no image."""
    model = seeing.model()
    text = take(batch, [1])
    with torch.no_grad():
        assert (
            token_log_probs(model, text).log_probs - token_log_probs(model, replace(text, images=None)).log_probs
        ).abs().max() < 1e-6
    found = gradients(model, text)
    tower = [gradient for name, gradient in found.items() if "vision_model" in name or "connector" in name]
    assert len(tower) == sum("vision_model" in n or "connector" in n for n, _ in model.named_parameters())
    assert all(float(gradient.abs().max()) == 0 for gradient in tower)


@pytest.mark.notices(
    "a saved model has no processor",
    "models/save.py",
    "        if self.vision is not None:",
    "        if self.vision is None:",
)
@pytest.mark.notices(
    "a frozen tower is trained",
    "models/prepare.py",
    "config.freeze_visual_encoder:",
    "config.freeze_visual_encoder and config.freeze:",
)
def test_a_frozen_tower_is_not_trained_and_is_saved_whole(seeing, batch, tmp_path):
    model = seeing.model()
    config = ActorConfig.of("dpo", freeze_visual_encoder=True)
    make_trainable(model, config, LoRAConfig())
    found = gradients(model, batch)
    assert found and not any("vision_model" in name or "connector" in name for name in found)
    save_hf(model, seeing.tokenizer, tmp_path / "saved")
    again = load_model(
        str(tmp_path / "saved"), head="lm", ds=DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=True)
    )
    assert (token_log_probs(again, batch).log_probs - token_log_probs(model.eval(), batch).log_probs).abs().max() == 0
    assert vision_processor(str(tmp_path / "saved"), "images").tokens(PICTURES[0]) == seeing.processor.tokens(
        PICTURES[0]
    )


@pytest.mark.notices(
    "the trainer gives the tokens of images a probability",
    "models/head.py",
    "self.never = penalty.index_fill_(0,",
    "self.never = penalty.index_fill(0, torch.tensor([], dtype=torch.int64), NEVER) + 0 * penalty.index_fill_(0,",
)
@torch.no_grad()
def test_tokens_of_images_get_no_probability_where_engines_never_sample_them(seeing, batch):
    model = seeing.model()
    before = token_log_probs(model, batch).log_probs
    hidden_logits = (
        compute_token_states(model, batch, SequenceLayout.of(batch.lengths, True))[0] @ model.model.lm_head.weight.T
    )
    model.never_sample_images()
    after = token_log_probs(model, batch, entropy=True)
    never = list(seeing.processor.never_sampled)
    assert seeing.processor.placeholder in never
    kept = hidden_logits.log_softmax(-1).index_fill(1, torch.tensor(never), float("-inf")).logsumexp(-1)
    places = (batch.mask > 0).nonzero()[:, 0]
    expected = before[places] - kept[places - 1]
    assert (after.log_probs[places] - expected).abs().max() <= 2e-6
    assert (expected - before[places]).abs().max() > 1e-4, "or this test would see nothing"
    assert after.entropy.isfinite().all()


@pytest.mark.notices(
    "an image of zeros is taken for padding",
    "models/vision.py",
    'if not pixels["pixel_values"].flatten(1).any(1).all():',
    'if not pixels["pixel_values"].numel():',
)
def test_an_image_of_zeros_is_refused(seeing):
    """Idefics3 drops a tile that is zero everywhere as padding, and fails later."""
    processor = seeing.processor.processor.image_processor
    before, processor.do_normalize = processor.do_normalize, False
    try:
        with pytest.raises(ValueError, match="takes for padding"):
            seeing.processor.tokens(image_file(Pillow.new("RGB", (56, 56), (0, 0, 0))))
    finally:
        processor.do_normalize = before


def test_the_processor_and_the_folder_agree_about_places(seeing):
    example = seeing.examples()[2]
    short = collapse_images(example.ids, example.images, seeing.processor.placeholder)
    assert short.count(seeing.processor.placeholder) == 2
    assert example.ids.count(seeing.processor.placeholder) == 2 * 4
    text = seeing.tokenizer.decode(short[:-3])
    whole = seeing.processor.processor(
        text=[text], images=[[open_image(i.data) for i in example.images]], add_special_tokens=False
    )
    assert whole["input_ids"][0] == example.ids[:-3], "as transformers expands the whole text"


def test_a_text_model_reads_no_images(folder):
    with pytest.raises(UserError, match=r"data.image_key needs a model that reads images .*idefics3.* is a qwen3"):
        vision_processor(str(folder()), "images")
    assert vision_processor(str(folder()), None) is None


def test_qwen_2_5_vl_with_one_position_per_token_computes_other_log_probs_without_a_word():
    """Why the trainer computes positions along all axes: a packed row with one per token raises no error."""
    image, start = 90, 92
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    tiny = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = tiny | {"vocab_size": 100, "num_key_value_heads": 2, "rope_parameters": rope, "max_position_embeddings": 64}
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=tower, image_token_id=image, video_token_id=91, vision_start_token_id=start
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data = 0.08 * torch.randn_like(parameter) + (parameter.dim() == 1)
    ids = torch.tensor([[5, 6, start, *[image] * 8, 7, 8, 9]])
    pixels = {"pixel_values": torch.randn(32, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 4, 8]])}
    with torch.no_grad():
        right, wrong = (
            model(input_ids=ids, **pixels, **more).logits.log_softmax(-1)
            for more in ({"mm_token_type_ids": (ids == image).int()}, {"position_ids": torch.arange(14)[None]})
        )
    assert (right - wrong).abs().max() > 1e-2
