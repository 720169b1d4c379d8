"""A real engine that reads images: the log-probs of the trainer, before and after a weight sync, and every trap of
requests with images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import ray
import torch
from image_engines import gaps, requests, spec_of, trained

from rlhf_suite.data.generation import GenerationRequest, SamplingSettings
from rlhf_suite.data.images import Image, expand_placeholders
from rlhf_suite.engines.actor import Engine
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.engines.start import engine_env
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.models.weights import iterate_weights
from rlhf_suite.weight_sync.sender import ShmSender
from vision import PICTURES, Seeing

SAME = (
    1e-5  # log-probs in fp32 by other kernels; the largest difference was 2.9e-6, and other weights give more than 1e-2
)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Seeing:
    return Seeing(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def pool(cluster, seeing):
    """An engine with the weights of `trained(seeing, 1)`."""
    member = Member("seeing", seeing.folder.parent / "engine.log")
    engine = ray.remote(Engine).options(num_cpus=0.1, runtime_env={"env_vars": engine_env("cpu")})
    pool = EnginePool([engine.remote(spec_of(seeing), member.log)], [member], timeout_s=300)
    sync(pool, trained(seeing, 1), 1)
    yield pool
    ray.kill(pool._handles[0])


def sync(pool: EnginePool, model, version: int):
    sender = ShmSender(torch.float32, check=True)
    try:
        return pool.update_weights(sender.send(version, iterate_weights(model)))[0]
    finally:
        sender.release()


@pytest.mark.notices(
    "the engine gets tokens of images that are expanded already",
    "engines/actor.py",
    "prompt_token_ids=collapse_images(job.prompt_ids, job.images, image_token),",
    "prompt_token_ids=list(job.prompt_ids),",
)
@pytest.mark.notices(
    "the tokens of images are sampled",
    "engines/actor.py",
    "logit_bias=dict.fromkeys(sampling.never, NEVER) or None,",
    "logit_bias=None,",
)
def test_engine_and_trainer_agree_and_every_tensor_is_proved(pool, seeing, record_property):
    report = sync(pool, trained(seeing, 1), 2)
    names = [name for name, _ in iterate_weights(trained(seeing, 1))]
    assert any("vision_model" in name for name in names) and report.received == len(names)
    assert report.not_readable == ()
    asked = requests(seeing)
    largest = gaps(trained(seeing, 1), asked, pool.generate_all(asked)).max()
    record_property("largest difference between engine and trainer", float(largest))
    assert largest <= SAME


@pytest.mark.notices(
    "the features of images survive a weight sync", "engines/actor.py", "            engine.reset_encoder_cache()\n", ""
)
def test_a_sync_replaces_the_tower_and_the_features_of_images_that_were_seen(pool, seeing):
    """The scheduler counts on features that the worker has forgotten: the next request would kill the engine."""
    asked = requests(seeing)
    pool.generate_all(asked)
    for version, seed in ((3, 2), (4, 3)):
        sync(pool, trained(seeing, seed), version)
        answers = pool.generate_all(asked)
        assert gaps(trained(seeing, seed), asked, answers).max() <= SAME
        assert gaps(trained(seeing, 1), asked, answers).max() > 1e-2
    sync(pool, trained(seeing, 1), 5)


def test_tokens_of_images_are_never_sampled(pool, seeing):
    """Of 268 tokens each has about the same probability, so of 480 some would be one of the two."""
    asked = [replace(each, max_new_tokens=40) for each in requests(seeing, 12)]
    answers = pool.generate_all(asked)
    assert sum(len(answer.ids) for answer in answers) == 480
    assert not {token for answer in answers for token in answer.ids.tolist()} & set(seeing.processor.never_sampled)
    free = [replace(each, sampling=SamplingSettings()) for each in asked]
    assert {t for answer in pool.generate_all(free) for t in answer.ids.tolist()} & set(seeing.processor.never_sampled)


def test_a_continued_request_sees_its_images_again(pool, seeing):
    (request,) = requests(seeing, 1)
    (first,) = pool.generate_all([request])
    longer = replace(request, prompt_ids=[*request.prompt_ids, *first.ids.tolist()])
    (second,) = pool.generate_all([longer])
    assert gaps(trained(seeing, 1), [longer], [second]).max() <= SAME


def test_more_images_than_the_flag_allows_are_refused_and_affect_no_other(pool, seeing):
    files = PICTURES[:3]
    ids, images = expand_placeholders(seeing.ids(3), files, seeing.processor)
    with pytest.raises(UserError, match=r"3 images, and data.max_images_per_prompt=2"):
        pool.generate_all([GenerationRequest(0, ids, 4, 0, SamplingSettings(), images=images)])
    assert len(pool.generate_all(requests(seeing, 2))) == 2


@pytest.mark.notices(
    "an engine that reads other tokens than the trainer is not noticed",
    "engines/actor.py",
    "self._prompt_ids = request.prompt_ids if request.images else None",
    "self._prompt_ids = None",
)
def test_a_prompt_that_the_engine_expands_otherwise_ends_the_run(pool, seeing):
    """Comes last: the engine is not used any more. Two places of one image would be trained on wrong tokens."""
    (request,) = requests(seeing, 1)
    image = request.images[0]
    ids = [*request.prompt_ids[: image.start + image.length], 264, *request.prompt_ids[image.start + image.length :]]
    longer = Image(image.start, image.length + 1, image.data)
    with pytest.raises(RunError, match="vLLM reads its images as other tokens"):
        pool.generate_all([replace(request, prompt_ids=ids, images=(longer,))])
