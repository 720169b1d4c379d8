"""Engines of tiny models that read images: weights are synced twice, and the log-probs of what is sampled are compared
with the trainer's, in packed and in padded rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from family_engines import STATES, Served

from image_families import SHAPES
from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.data.batch import Example, TokenBatch, collate
from rlhf_suite.data.generation import Generation, GenerationRequest, SamplingSettings
from rlhf_suite.data.images import expand_placeholders
from rlhf_suite.engines.actor import Engine
from rlhf_suite.engines.spec import EngineSpec
from rlhf_suite.engines.start import engine_env
from rlhf_suite.models.families import BY_TYPE, ENGINE
from rlhf_suite.models.forward import LanguageModel, token_log_probs
from rlhf_suite.models.weights import iterate_weights
from rlhf_suite.weight_sync.sender import ShmSender
from vision import DTYPES, PICTURES, Seeing

MAX_LEN, MAX_IMAGES = 96, 2
FILES = (PICTURES[:1], PICTURES[1:3], [], [PICTURES[3]], [PICTURES[0], PICTURES[0]], PICTURES[4:])
TEXTS = ("", "x", "xx", "\n", "\n\nx", "xxx")  # the newlines are after images
# What vLLM's kernels without a GPU need of the types that read images, and that it serves.
SERVED = {kind: Served() for kind in ("idefics3", *SHAPES) if BY_TYPE[kind].why_not(ENGINE) is None} | {
    "qwen3_5": STATES,
    "qwen3_5_moe": STATES,
}
# The tower of LLaVA ends before its last layer, which vLLM does not have.
UNUSED = re.compile(r"vision_tower\.(?:encoder\.layers\.1|post_layernorm)\.")


class Synced(NamedTuple):
    """How far the log-probs of an engine are off after a weight sync, [T]."""

    packed: np.ndarray
    padded: np.ndarray


@ray.remote(num_cpus=0.1, max_restarts=-1, runtime_env={"env_vars": engine_env("cpu")})
class ImageEngines:
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


def spec_of(seeing: Seeing, dtype: torch.dtype = torch.float32, sees: bool = True) -> EngineSpec:
    """Return what an engine is built from; without `sees`, one of text alone."""
    images: dict[str, Any] = {"image_token": seeing.processor.placeholder, "max_images": MAX_IMAGES} if sees else {}
    return EngineSpec(
        str(seeing.folder),
        str(dtype).removeprefix("torch."),
        "cpu",
        MAX_LEN,
        0,
        VLLMConfig.of("ppo", kv_cache_mb=32),
        load_weights=False,
        **images,
    )


def requests(seeing: Seeing, count: int = len(FILES), tokens: int = 8) -> list[GenerationRequest]:
    """Return requests with one image, two, none, and two that are the same."""
    settings, asked = SamplingSettings(never=seeing.processor.never_sampled), []
    for number in range(count):
        files = FILES[number % len(FILES)]
        text = TEXTS[number % len(TEXTS)] + "y" * (number // len(TEXTS))
        ids, images = expand_placeholders(seeing.ids(len(files), text), files, seeing.processor)
        asked.append(GenerationRequest(number, ids, tokens, number, settings, images=images))
    return asked


def trained(seeing: Seeing, seed: int, packed: bool = True, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Return the model after a training that moved every weight, also those of the tower."""
    model = seeing.model(packed, 0.03, DTYPES[dtype], seed)
    model.never_sample_images()
    return model


@torch.no_grad()
def gaps(model: LanguageModel, asked: list[GenerationRequest], answers: list[Generation]) -> np.ndarray:
    """Return |log-prob of the engine - of the trainer| of each sampled token."""
    examples = []
    for request, answer in zip(asked, answers, strict=True):
        prompt, written = list(request.prompt_ids), answer.ids.tolist()
        mask = [0] * len(prompt) + [1] * len(written)
        examples.append(Example(prompt + written, mask, images=request.images))
    batch = collate(examples, TokenBatch)
    ours = token_log_probs(model, batch).log_probs[batch.mask > 0].numpy()
    return np.abs(ours - np.concatenate([answer.log_probs for answer in answers]))


def sync_errors(engines: Any, folder: Path, kind: str) -> tuple[list[Synced], float]:
    """Return how far an engine is off after each of two syncs, and the largest difference from the weights of the
    sync before. Every tensor that vLLM has is read back."""
    served = SERVED[kind]
    seeing = Seeing(folder, kind, **served.settings)
    weights = [dict(iterate_weights(trained(seeing, seed, dtype=served.dtype))) for seed in (1, 2)]
    asked = requests(seeing)
    results = ray.get(engines.answer.remote(spec_of(seeing, served.dtype), weights, asked), timeout=300)
    errors = []
    for seed, (report, answers) in enumerate(results, 1):
        assert report.received == len(weights[0]) == report.read_back + len(report.not_readable)
        assert all(UNUSED.search(name) for name in report.not_readable), report.not_readable
        both = (gaps(trained(seeing, seed, packed, served.dtype), asked, answers) for packed in (True, False))
        errors.append(Synced(*both))
    return errors, float(gaps(trained(seeing, 1, dtype=served.dtype), asked, results[1][1]).max())
