"""Engines of the families that read images have the numbers of the trainer, packed and padded, and every tensor of the
tower, before and after a weight sync."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import ray
import torch

from rlhf_suite.config.ds import DeepSpeedConfig
from rlhf_suite.config.rollout import VLLMConfig
from rlhf_suite.data.batch import Example, TokenBatch, collate
from rlhf_suite.data.generation import Generation, GenerationRequest, SamplingSettings
from rlhf_suite.data.images import expand_placeholders
from rlhf_suite.engines.actor import Engine
from rlhf_suite.engines.spec import EngineSpec
from rlhf_suite.engines.start import engine_env
from rlhf_suite.models.forward import LanguageModel, token_log_probs
from rlhf_suite.models.load import load_model
from rlhf_suite.models.weights import iterate_weights
from rlhf_suite.weight_sync.sender import ShmSender
from vision import PICTURES, Seeing

pytestmark = pytest.mark.proof
MAX_LEN, MAX_IMAGES = 96, 2
SAME = 1e-6  # of log-probs in fp32, on average
TEXTS = ("", "x", "xx", "\n", "\n\nx")  # of requests; the newlines are behind images
NOISE = 0.06  # in bf16, on average
WIDE_STATES = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
# For each type: the type of its numbers in vLLM's kernels for the CPU, and settings that they need.
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava", "gemma3"), ("fp32", {})),
    "qwen3_5": ("bf16", WIDE_STATES),
}


# The tower of LLaVA ends before its last layer, which vLLM does not have.
UNUSED = re.compile(r"vision_tower\.(?:encoder\.layers\.1|post_layernorm)\.")


@ray.remote(num_cpus=0.1, max_restarts=-1, runtime_env={"env_vars": engine_env("cpu")})
class Engines:
    """A process that builds one engine after the other; a crash of one does not end the others."""

    async def answer(
        self, spec: EngineSpec, weights: list[dict[str, torch.Tensor]], requests: list[GenerationRequest]
    ) -> list[tuple[Any, list[Generation]]]:
        """Sync each weights; return what was read back, and the answers to the requests under these weights."""
        engine = Engine(spec)
        results = []
        for version, tensors in enumerate(weights, 1):
            sender = ShmSender(next(iter(tensors.values())).dtype, check=True)
            try:
                report = await engine.update_weights(sender.send(version, tensors.items()))
            finally:
                sender.release()
            await engine.submit("test", [*enumerate(requests)])
            answers: dict[int, Generation] = {}
            while len(answers) < len(requests):
                answers |= dict(await engine.wait_for_finished("test"))
            results.append((report, [answers[number] for number in range(len(requests))]))
        await engine.close()
        return results


@pytest.fixture(scope="module")
def engines(cluster):
    return Engines.remote()


def spec_of(seeing: Seeing, dtype: str, **images: Any) -> EngineSpec:
    numbers = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    return EngineSpec(
        str(seeing.folder), numbers, "cpu", MAX_LEN, 0, VLLMConfig(kv_cache_mb=32), load_weights=False, **images
    )


def requests(seeing: Seeing) -> list[GenerationRequest]:
    """Requests with one image, two, none, and two that are the same."""
    settings, asked = SamplingSettings(never=seeing.processor.never_sampled), []
    for number, files in enumerate((PICTURES[:1], PICTURES[1:3], [], [PICTURES[3]], [PICTURES[0], PICTURES[0]])):
        ids, images = expand_placeholders(seeing.ids(len(files), TEXTS[number]), files, seeing.processor)
        asked.append(GenerationRequest(number, ids, 8, number, settings, images=images))
    return asked


def trained(seeing: Seeing, dtype: str, seed: int, packed: bool) -> LanguageModel:
    """The model after a training that moved every weight, also those of the tower."""
    ds = DeepSpeedConfig(param_dtype=dtype, packing_samples=packed)
    model = load_model(str(seeing.folder), head="lm", ds=ds)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    model.never_sample_images()
    return model


@torch.no_grad()
def gap(model: LanguageModel, asked: list[GenerationRequest], answers: list[Generation]) -> np.ndarray:
    """|log-prob of the engine - of the trainer| of each sampled token."""
    examples = []
    for request, answer in zip(asked, answers, strict=True):
        prompt, written = list(request.prompt_ids), answer.ids.tolist()
        mask = [0] * len(prompt) + [1] * len(written)
        examples.append(Example(prompt + written, mask, images=request.images))
    batch = collate(examples, TokenBatch)
    ours = token_log_probs(model, batch).log_probs[batch.mask > 0].numpy()
    return np.abs(ours - np.concatenate([answer.log_probs for answer in answers]))


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
@pytest.mark.parametrize("kind", TYPES)
def test_engine_packed_and_padded_rows_agree_after_each_sync(engines, kind, tmp_path, record_property):
    dtype, settings = TYPES[kind]
    seeing = Seeing(tmp_path, kind, **settings)
    spec = spec_of(seeing, dtype, image_token=seeing.processor.placeholder, max_images=MAX_IMAGES)
    weights = [dict(iterate_weights(trained(seeing, dtype, seed, True))) for seed in (1, 2)]
    asked = requests(seeing)
    results = ray.get(engines.answer.remote(spec, weights, asked), timeout=300)
    for seed, (report, answers) in enumerate(results, 1):
        assert report.received == len(weights[0]) == report.read_back + len(report.not_readable)
        assert all(UNUSED.search(name) for name in report.not_readable)
        for packed in (True, False):
            errors = gap(trained(seeing, dtype, seed, packed), asked, answers)
            record_property(f"sync {seed}, {'packed' if packed else 'padded'}", float(errors.mean()))
            assert errors.mean() <= (SAME if dtype == "fp32" else NOISE)
    assert gap(trained(seeing, dtype, 1, True), asked, results[1][1]).max() > 1e-2


@pytest.mark.notices(
    "an engine of text alone asks for the processor of images",
    "engines/build.py",
    '{"language_model_only": True}',
    '{"language_model_only": False}',
    cases="gemma3",
)
@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3"])
def test_text_alone_is_served_by_the_language_model_of_a_checkpoint_with_a_tower(engines, kind, tmp_path):
    """Every tensor of the language model is proved; the engine has no tower."""
    dtype, settings = TYPES.get(kind, ("fp32", {}))
    seeing = Seeing(tmp_path, kind, **settings)
    asked = [request for request in requests(seeing) if not request.images]
    weights = [dict(iterate_weights(trained(seeing, dtype, seed, True))) for seed in (1, 2)]
    results = ray.get(engines.answer.remote(spec_of(seeing, dtype), weights, asked), timeout=300)
    tower = {name for name in weights[0] if "visual" in name or "vision_tower" in name or "projector" in name}
    for seed, (report, answers) in enumerate(results, 1):
        assert set(report.not_readable) == tower and report.read_back == len(weights[0]) - len(tower)
        errors = gap(trained(seeing, dtype, seed, True), asked, answers)
        assert errors.mean() <= (SAME if dtype == "fp32" else NOISE)
