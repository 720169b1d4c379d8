"""Engines of the families that read images have the numbers of the trainer, packed and padded, and every tensor of the
tower, before and after a weight sync."""

from __future__ import annotations

import pytest
import ray
import torch
from family_engines import NOISE
from image_engines import SERVED, ImageEngines, gaps, requests, spec_of, sync_errors, trained

from rlhf_suite.models.weights import iterate_weights
from vision import Seeing

pytestmark = pytest.mark.proof
SAME = 1e-6  # of log-probs in fp32, on average


@pytest.fixture(scope="module")
def engines(cluster):
    return ImageEngines.remote()


def bound(kind: str) -> float:
    return SAME if SERVED[kind].dtype == torch.float32 else NOISE


@pytest.mark.notices(
    "what a model has computed is random until the first sync",
    "weight_sync/receiver.py",
    "                buffer.copy_(computed[name])\n",
    "                pass\n",
    cases="qwen2_vl",
)
@pytest.mark.notices(
    "an engine of images makes room for videos",
    "engines/build.py",
    '{"image": spec.max_images, "video": 0}',
    '{"image": spec.max_images}',
    cases="internvl",
)
@pytest.mark.notices(
    "the tokens of an image in an engine without a GPU do not see later ones",
    "engines/whole_images.py",
    "            output[rows] = seen\n",
    "",
    cases="gemma3",
)
@pytest.mark.notices(
    "an engine joins newlines of its own with those around an image",
    "engines/build.py",
    "        keep_newlines()\n",
    "        pass\n",
    cases="gemma3",
)
@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind != "idefics3"])
def test_engine_packed_and_padded_rows_agree_after_each_sync(engines, kind, tmp_path, record_property):
    syncs, stale = sync_errors(engines, tmp_path, kind)
    for number, errors in enumerate(syncs, 1):
        for layout, values in errors._asdict().items():
            record_property(f"sync {number}, {layout}", float(values.mean()))
            assert values.mean() <= bound(kind)
    assert stale > 1e-2


@pytest.mark.notices(
    "an engine of text alone asks for the processor of images",
    "engines/build.py",
    '{"language_model_only": True}',
    '{"language_model_only": False}',
    cases="gemma3",
)
@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3", "glm4v", "qwen3_vl_moe", "qwen3_5_moe"])
def test_text_alone_is_served_by_the_language_model_of_a_checkpoint_with_a_tower(engines, kind, tmp_path):
    """Every tensor of the language model is proved; the engine has no tower."""
    served = SERVED[kind]
    seeing = Seeing(tmp_path, kind, **served.settings)
    asked = [request for request in requests(seeing) if not request.images]
    weights = [dict(iterate_weights(trained(seeing, seed, dtype=served.dtype))) for seed in (1, 2)]
    results = ray.get(engines.answer.remote(spec_of(seeing, served.dtype, sees=False), weights, asked), timeout=300)
    tower = {name for name in weights[0] if "visual" in name or "vision_tower" in name or "projector" in name}
    for seed, (report, answers) in enumerate(results, 1):
        assert set(report.not_readable) == tower and report.read_back == len(weights[0]) - len(tower)
        errors = gaps(trained(seeing, seed, dtype=served.dtype), asked, answers)
        assert errors.mean() <= bound(kind)
