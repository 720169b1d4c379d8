"""Real engines in real Ray actors: what they sample, and that they have the weights that the trainer sends.

The engines start at once when the module begins; each test waits for the one it needs. The tests of faults come last,
because a fault ends its engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from probed_engines import (
    EOS,
    MAX_LEN,
    PROMPT,
    SHAPE,
    Trainer,
    checkpoint,
    gap,
    log_probs_of,
    make_model,
    requests,
    save_tokenizer,
    start,
    sync,
)
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
)

from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.data.generation import GenerationRequest, SamplingSettings
from rlhf_suite.engines.actor import Engine
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.engines.spec import EngineSpec
from rlhf_suite.engines.start import engine_env
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.wait import ActorDied
from rlhf_suite.weight_sync.digests import WeightSyncError
from rlhf_suite.weight_sync.sender import ShmSender


@pytest.fixture(scope="module")
def pools(cluster, tmp_path_factory):
    """One pool of one engine each, started together."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("tied", "experts"):
        make_model(kind, seed=1).save_pretrained(folder / kind)
    save_tokenizer(folder / "tied")
    cached = VLLMConfig.of("ppo", enable_prefix_caching=True, kv_cache_mb=32)
    pools = {
        "tied": start(folder, "tied", "tied", cached, detokenize=True),
        "experts": start(
            folder, "experts", "experts", VLLMConfig.of("ppo", kv_cache_mb=32), "gloo", load_weights=False
        ),
        "uncured": start(folder, "uncured", "tied", cached),
    }
    yield pools
    for pool in pools.values():
        ray.kill(pool._handles[0])


@pytest.fixture
def tied(pools):
    """The tied engine with its first weights."""
    sync(pools["tied"], make_model("tied", seed=1), version=1)
    return pools["tied"]


def test_engine_and_model_agree_on_log_probs(tied):
    asked = requests(8)
    assert gap(make_model("tied", 1), asked, tied.generate_all(asked)) < 1e-6


def test_log_probs_are_those_of_the_sampling_temperature(tied):
    asked = requests(8, temperature=0.7)
    assert gap(make_model("tied", 1), asked, tied.generate_all(asked), temperature=0.7) < 1e-6


def test_log_probs_are_renormalised_over_the_tokens_that_top_k_keeps(tied):
    (answer,) = tied.generate_all(requests(1, top_k=1))
    assert np.abs(answer.log_probs).max() == 0.0


def test_log_probs_are_those_of_penalised_sampling(tied):
    """The penalty acts on tokens of the prompt and of the response, before the temperature."""
    penalty, model = RepetitionPenaltyLogitsProcessor(3.0), make_model("tied", 1)
    asked = requests(4, temperature=0.7, repetition_penalty=3.0)
    for request, answer in zip(asked, tied.generate_all(asked), strict=True):
        ids, found = list(request.prompt_ids), []
        for token in answer.ids.tolist():
            given = torch.tensor([ids])
            found.append(torch.log_softmax(penalty(given, model(given).logits[:, -1]) / 0.7, -1)[0, token])
            ids.append(token)
        assert np.abs(torch.stack(found).detach().numpy() - answer.log_probs).max() < 1e-5


def test_a_request_samples_the_same_whatever_runs_beside_it(tied):
    together = tied.generate_all(requests(40))
    backwards = tied.generate_all(requests(40)[::-1])[::-1]
    alone = tied.generate_all(requests(40)[7:8])
    for one, other in zip([*together, together[7]], [*backwards, *alone], strict=True):
        assert one.id == other.id
        assert one.ids.tolist() == other.ids.tolist()


def test_samples_of_one_prompt_differ_by_their_seeds(tied):
    group = [GenerationRequest(i, PROMPT, 20, 100 + i, SamplingSettings()) for i in range(8)]
    assert len({tuple(answer.ids.tolist()) for answer in tied.generate_all(group)}) == 8


def test_temperature_zero_is_the_most_likely_token(tied):
    (answer,) = tied.generate_all(requests(1, temperature=0.0))
    model, ids = make_model("tied", 1), requests(1)[0].prompt_ids
    for token in answer.ids:
        assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids = [*ids, token]


def test_the_length_limit_is_the_finish_reason(tied):
    (answer,) = tied.generate_all(requests(1, tokens=MAX_LEN - len(PROMPT)))
    assert (answer.finish_reason, len(answer.ids)) == ("length", MAX_LEN - len(PROMPT))


def test_stop_ids_end_a_response_and_stay_in_it(tied):
    (free,) = tied.generate_all(requests(1, tokens=30))
    stop = int(free.ids[10])
    (answer,) = tied.generate_all(requests(1, tokens=30, stop_token_ids=(stop,)))
    first = free.ids.tolist().index(stop)
    assert answer.ids.tolist() == free.ids[: first + 1].tolist()
    assert answer.finish_reason == "stop"


def test_the_models_own_eos_ends_a_response_only_if_requested(tied):
    answers = tied.generate_all(requests(60, tokens=80))
    assert any(EOS in answer.ids for answer in answers)
    assert {len(answer.ids) for answer in answers} == {80}


def test_stop_strings_end_a_response_and_stay_in_it(tied):
    (free,) = tied.generate_all(requests(1, tokens=30))
    pair = free.ids[9:11].tolist()
    assert min(pair) > 2, "the pair must be two letters"
    text = PreTrainedTokenizerFast.from_pretrained(tied_folder(tied)).convert_ids_to_tokens(pair)
    (answer,) = tied.generate_all(requests(1, tokens=30, stop=("".join(text),)))
    assert answer.ids.tolist() == free.ids[:11].tolist()
    assert answer.finish_reason == "stop"
    assert len(answer.log_probs) == 11


def tied_folder(pool: EnginePool) -> Path:
    return pool.members[0].log.parent / "tied"


def test_a_request_that_does_not_fit_names_the_flag_and_affects_no_other(tied):
    with pytest.raises(UserError, match=r"request 0: .*data.max_len=128"):
        tied.generate_all(requests(1, tokens=MAX_LEN))
    assert len(tied.generate_all(requests(2))) == 2


def test_scores_are_the_models_log_probs(tied):
    sequences = [PROMPT, PROMPT[:2], [*PROMPT, *PROMPT]]
    (scores,) = tied.score(sequences)
    for ids, found in zip(sequences, scores, strict=True):
        assert np.abs(found - log_probs_of(make_model("tied", 1), ids)).mean() < 1e-6


def test_a_sync_replaces_the_weights_of_a_tied_model(tied):
    asked = requests(4)
    for version, seed in ((2, 5), (3, 6)):
        report = sync(tied, make_model("tied", seed), version)
        assert (report.not_readable, report.read_back) == ((), report.received)
        answers = tied.generate_all(asked)
        assert gap(make_model("tied", seed), asked, answers) < 1e-6
        assert {int(v) for answer in answers for v in answer.versions} == {version}
    assert gap(make_model("tied", 5), asked, answers) > 0.1


def test_a_sync_clears_cached_prefixes(tied):
    group = [GenerationRequest(i, PROMPT, 8, i, SamplingSettings()) for i in range(4)]
    tied.generate_all(group)
    sync(tied, make_model("tied", 5), version=2)
    assert gap(make_model("tied", 5), group, tied.generate_all(group)) < 1e-6


def test_the_hits_of_the_prefix_cache_are_counted_between_two_syncs(tied):
    first = GenerationRequest(0, [7 + i % 50 for i in range(96)], 8, 0, SamplingSettings())
    tied.cache_hits()
    (turn,) = tied.generate_all([first])
    assert turn.cached_tokens == tied.cache_hits() == 0
    second = replace(first, prompt_ids=[*first.prompt_ids, *turn.ids.tolist(), 9, 9])
    (answer,) = tied.generate_all([second])
    assert answer.cached_tokens == 96, "three blocks of 32 tokens; the fourth was not full"
    assert tied.cache_hits() == 96 / len(second.prompt_ids)
    sync(tied, make_model("tied", 5), version=3)
    assert tied.generate_all([second])[0].cached_tokens == tied.cache_hits() == 0


def test_a_request_that_nobody_waits_for_any_more_disturbs_no_other(tied):
    async def impatient():
        waiting = [asyncio.ensure_future(tied.generate(request)) for request in requests(4, tokens=60)]
        await asyncio.sleep(0)  # all four are sent
        waiting[0].cancel()
        return await asyncio.gather(*waiting[1:])

    assert all(len(answer.ids) for answer in tied.start(impatient()).result())


def test_tokens_after_a_sync_in_mid_rollout_come_from_the_new_weights(tied):
    asked = requests(64, tokens=80)
    before, after = make_model("tied", 1), make_model("tied", 5)
    others = [tied.submit(request) for request in asked]
    # An engine starts requests in their order: when a short last one ends, all others are under way.
    tied.submit(requests(1, tokens=2)[0]).result()
    assert not any(other.done() for other in others)
    sync(tied, after, version=9)
    answers = [other.result() for other in others]
    assert {answer.versions.min() for answer in answers} == {1}
    for request, answer in zip(asked[:8], answers[:8], strict=True):
        ids, start = [*request.prompt_ids, *answer.ids.tolist()], len(request.prompt_ids)
        switch = int((answer.versions == 1).sum())
        assert 0 < switch < 80
        assert answer.versions.tolist() == [1] * switch + [9] * (80 - switch)
        expected = np.concatenate(
            [log_probs_of(before, ids)[start:][:switch], log_probs_of(after, ids)[start:][switch:]]
        )
        assert np.abs(expected - answer.log_probs).mean() < 1e-6


def pause_when_under_way(pool: EnginePool, asked: list[GenerationRequest]):
    """Start requests and pause when all of them are under way; return who waits for them."""
    waiting = [pool.submit(request) for request in asked]
    pool.submit(requests(1, tokens=2)[0]).result()  # the last one to start, and the first to end
    pool.pause()
    assert not any(each.done() for each in waiting)
    return waiting


def test_paused_responses_keep_their_tokens_and_go_on_with_the_weights_of_the_sync_between(tied):
    asked = requests(32, tokens=80)
    before, after = make_model("tied", 1), make_model("tied", 5)
    waiting = pause_when_under_way(tied, asked)
    late = tied.submit(requests(1, tokens=20)[0])
    tied.sleep()  # refused while a request is under way
    sync(tied, after, version=9)
    assert not late.done() and not any(each.done() for each in waiting)
    tied.resume()
    assert {*late.result().versions} == {9}
    for request, answer in zip(asked[:8], [each.result() for each in waiting], strict=False):
        ids, start = [*request.prompt_ids, *answer.ids.tolist()], len(request.prompt_ids)
        switch = int((answer.versions == 1).sum())
        assert 0 < switch < 80 and answer.finish_reason == "length"
        assert answer.versions.tolist() == [1] * switch + [9] * (80 - switch)
        expected = np.concatenate(
            [log_probs_of(before, ids)[start:][:switch], log_probs_of(after, ids)[start:][switch:]]
        )
        assert np.abs(expected - answer.log_probs).mean() < 1e-6


def test_a_response_that_waits_for_a_stop_string_begins_again_after_a_pause(tied):
    asked = requests(32, tokens=80, stop=("\N{SNOWMAN}",))
    expected = tied.generate_all(asked)
    waiting = pause_when_under_way(tied, asked)
    tied.resume()
    for each, other in zip(waiting, expected, strict=True):
        assert each.result().ids.tolist() == other.ids.tolist()


def test_twenty_syncs_do_not_grow_the_engine(tied):
    (handle,) = tied._handles
    models = [make_model("tied", seed) for seed in (5, 6)]
    for version in range(2, 7):
        sync(tied, models[version % 2], version)
    before = ray.get(handle.rss.remote())
    for version in range(7, 27):
        sync(tied, models[version % 2], version)
    assert ray.get(handle.rss.remote()) - before < 4 << 20


def test_a_changed_parameter_is_found_and_a_sync_repairs_it(tied):
    (handle,) = tied._handles
    assert ray.get(handle.attest.remote()).not_readable == ()
    ray.get(handle.perturb.remote("model.norm.weight"))
    with pytest.raises(WeightSyncError, match=r"tensor model.norm.weight \[64\] float32 differs in .* after loading"):
        ray.get(handle.attest.remote())
    sync(tied, make_model("tied", 1), version=2)
    ray.get(handle.attest.remote())


def test_two_engines_sample_what_one_does(pools, tied):
    handles = [*tied._handles, *pools["uncured"]._handles]  # both hold the first weights
    pair = EnginePool(handles, [*tied.members, *pools["uncured"].members], timeout_s=120)
    asked = requests(12)
    for one, other in zip(tied.generate_all(asked), pair.generate_all(asked), strict=True):
        assert one.id == other.id
        assert one.ids.tolist() == other.ids.tolist()
        assert np.abs(one.log_probs - other.log_probs).max() < 1e-5


def test_an_engine_with_random_weights_gets_real_ones_by_stream(pools):
    """A model with its own head and with experts."""
    pool, trainer = pools["experts"], Trainer.remote()
    member = Member("trainer", Path("trainer.log"))
    pool.connect("127.0.0.1", ray.get(trainer.port.remote()), trainer.connect.remote, member)
    asked = requests(4)
    with pytest.raises(RunError, match="random weights until the first sync"):
        pool.generate_all(asked)
    for version, seed in ((1, 1), (2, 5)):
        model = make_model("experts", seed)
        weights = dict(checkpoint(model))
        publish = partial(trainer.publish.remote, version, weights)
        manifest, (report,) = pool.sync("gloo", version, lambda: [publish()], [member])  # noqa: B023
        assert len(manifest.entries) == len(weights) == report.received == report.read_back, report.not_readable
        answers = pool.generate_all(asked)
        assert gap(model, asked, answers) < 1e-6
        assert set(answers[0].versions) == {version}


def test_the_verification_finds_a_head_that_kept_the_old_embedding(pools):
    (handle,) = pools["uncured"]._handles
    ray.get(handle.without_head_cure.remote())
    with pytest.raises(
        WeightSyncError, match=r"model.embed_tokens.weight .* differs in lm_head.weight \(packed\) after loading"
    ):
        sync(pools["uncured"], make_model("tied", 5), version=1)


@pytest.mark.proof
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
def test_workers_of_a_split_engine_get_their_parts_and_prove_them(cluster, tmp_path, tensor, stages):
    """At last one of the workers is killed: the engine ends with it, so that it can be started again."""
    make_model("split", seed=1).save_pretrained(tmp_path / "split")
    config = VLLMConfig.of("ppo", kv_cache_mb=32, tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    before = {*Path("/dev/shm").glob("psm_*")}
    pool, asked = start(tmp_path, "split", "split", config, timeout_s=300), requests(4)
    (handle,) = pool._handles
    pool.ready()
    assert {*Path("/dev/shm").glob("psm_*")} <= before, "the memory of an engine that is killed would stay"
    for version, seed in ((1, 1), (2, 5)):
        model = make_model("split", seed)
        report = sync(pool, model, version)
        assert report.received == report.read_back == len([*checkpoint(model)]), report.not_readable
        if stages == 1:  # the CPU build of vLLM runs no stages
            assert gap(model, asked, pool.generate_all(asked)) < 1e-6
    for name in ("model.norm.weight", "model.embed_tokens.weight"):  # the head is tied, so the last stage has it too
        ray.get(handle.perturb_last_worker.remote(name))
        with pytest.raises(WeightSyncError, match=rf"tensor {name} .* differs in {name} after loading"):
            ray.get(handle.attest.remote())
        sync(pool, model, version=3)
    os.kill(ray.get(handle.workers.remote())[1], signal.SIGKILL)
    with pytest.raises(ActorDied, match="split died"):
        pool.generate_all(asked)


@pytest.mark.proof
def test_a_model_without_cpu_kernels_is_refused(cluster, tmp_path):
    shape = SHAPE | {"head_dim": 16}
    AutoModelForCausalLM.from_config(LlamaConfig(**shape)).save_pretrained(tmp_path)
    spec = EngineSpec(str(tmp_path), "float32", "cpu", MAX_LEN, 0, VLLMConfig.of("ppo", kv_cache_mb=1), "shm")
    engine = ray.remote(Engine).options(num_cpus=0.1, runtime_env={"env_vars": engine_env("cpu")}).remote(spec)
    with pytest.raises(UserError, match="16 dimensions, and the CPU kernels support"):
        ray.get(engine.ready.remote())
    ray.kill(engine)


def test_engine_methods_are_asynchronous():
    """Ray runs an actor's methods side by side only if they are coroutines."""
    public = [value for name, value in vars(Engine).items() if not name.startswith("_")]
    assert all(asyncio.iscoroutinefunction(value) for value in public)


def test_a_byte_that_changed_on_the_way_stops_the_engine_and_names_the_tensor(pools):
    pool, sender = pools["tied"], ShmSender(torch.float32, check=True)
    manifest = sender.send(3, checkpoint(make_model("tied", 5)))
    (entry,) = [entry for entry in manifest.entries if entry.name == "model.layers.1.self_attn.v_proj.weight"]
    data = np.memmap(manifest.path, dtype=np.uint8, mode="r+")
    data[entry.offset + 5] ^= 4
    data.flush()
    with pytest.raises(WeightSyncError, match=r"tensor model.layers.1.self_attn.v_proj.weight .* arrived changed"):
        pool.update_weights(manifest)
    sender.release()
    with pytest.raises(RunError, match="arrived changed"):
        pool.generate_all(requests(1))
