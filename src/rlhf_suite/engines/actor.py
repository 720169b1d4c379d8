"""One vLLM engine in one Ray actor: prompts in, tokens and log-probs out, and new weights between two steps.

The engine runs in the actor's own process; with several devices there is a worker process for each, which holds its
part of the weights: started by vLLM, or on several nodes by Ray (`nodes.py`). The actor is asynchronous: while it
generates, it takes further requests, and new weights between two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray

from rlhf_suite.data.generation import NEVER, Generation, GenerationRequest, SamplingSettings
from rlhf_suite.data.images import collapse_images, open_image
from rlhf_suite.engines.build import build_engine, end_with_a_worker, name_cause
from rlhf_suite.engines.routes import RouteSource
from rlhf_suite.engines.spec import EngineInfo, EngineSpec, Likeliest, caches_prefixes, sleep_level
from rlhf_suite.engines.speculation import Guesses
from rlhf_suite.engines.step_loop import Job, StepLoop
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.actor_log import redirect_output
from rlhf_suite.launch.address import use_interface_to
from rlhf_suite.launch.placement import Slot, show_own_gpus
from rlhf_suite.weight_sync.digests import ADAPTER, BASE, WHOLE, Manifest, SyncReport, combine_reports

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest

T = TypeVar("T")
Outbox = asyncio.Queue[tuple[int, Future[Generation]]]  # the finished requests of a client, by number


class Engine:
    """A rollout engine: `ray.remote(Engine).options(runtime_env={"env_vars": engine_env(device)}, ...)`.

    `gpus`: the GPUs that it uses, where they are more than those that Ray gives it. `workers`: the slots of its
    workers, where they are on several nodes.
    """

    def __init__(
        self, spec: EngineSpec, log: Path | None = None, gpus: Sequence[str] = (), workers: Sequence[Slot] = ()
    ) -> None:
        if log is not None:
            redirect_output(log)
        show_own_gpus(gpus)
        use_interface_to(ray.util.get_node_ip_address())
        self._spec, self._log, self._workers = spec, log, workers
        self._has_weights = spec.load_weights
        self._loop = StepLoop(self._build, partial(_add, spec.image_token), end_with_a_worker)
        self._outboxes: dict[str, Outbox] = {}  # of each client
        self._guesses = Guesses()

    async def ready(self) -> EngineInfo:
        """Return once the engine is running. Raise its error if it cannot start."""
        cache = await self._call(lambda engine: engine.vllm_config.cache_config)
        blocks = cache.num_gpu_blocks
        takes_adapter = await self._call(_takes_adapter)
        node = ray.util.get_node_ip_address()
        caches = caches_prefixes(self._spec.vllm, self._spec.device)
        tokens, devices = blocks * cache.block_size, self._spec.vllm.devices
        return EngineInfo(self._startup_s, devices, blocks, tokens, node, takes_adapter, caches)

    async def submit(self, client: str, requests: Sequence[tuple[int, GenerationRequest]]) -> None:
        """Begin requests of a client, each with a number. The sample of a request depends only on its seed, not on
        other requests."""
        for _, request in requests:
            self._check(request)
        await self._wait_until_usable()
        loop, outbox = asyncio.get_running_loop(), self._outboxes.setdefault(client, asyncio.Queue())
        jobs = []
        for number, request in requests:
            params, images = _sampling_params(request), request.images
            job = Job(
                request.prompt_ids,
                params,
                _GenerationReader(request, self._routes, self._guesses),
                is_divisible=True,
                images=images,
            )
            job.result.add_done_callback(partial(_hand_over, loop, outbox, number))
            jobs.append(job)
        self._loop.run(jobs)

    async def wait_for_finished(self, client: str) -> list[tuple[int, Generation]]:
        """Wait until a request of the client is finished. Return the responses of all that are, with their numbers."""
        outbox = self._outboxes[client]
        done = [await outbox.get()]
        while not outbox.empty():
            done.append(outbox.get_nowait())
        return [(number, result.result()) for number, result in done]  # no-limit: they are done

    async def interrupt(self) -> None:
        """End all requests that are under way: their responses are what they have so far, finished by INTERRUPTED."""
        await self._call(self._loop.interrupt)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Return log p(token | earlier tokens) of each sequence at temperature 1; the first token has 0.

        A sequence may have at most max_len - 1 tokens, since the engine needs room for one more.
        """
        return await self._read_prompts(sequences, 0, _read_scores)

    async def score_likeliest(self, sequences: Sequence[Sequence[int]], k: int) -> list[Likeliest]:
        """Return of each sequence the k likeliest tokens at each place but the first, by what stands before it, and
        their log-probs at temperature 1, [T - 1, k] each; k is at most 20."""
        return await self._read_prompts(sequences, k, partial(_read_likeliest, k=k))

    async def _read_prompts(
        self, sequences: Sequence[Sequence[int]], k: int, read: Callable[[RequestOutput], T]
    ) -> list[T]:
        """Return what `read` finds in the log-probs of each sequence, of its tokens and the k likeliest ones."""
        await self._wait_until_usable()
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=k,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        jobs = [Job(ids, params, read) for ids in sequences]
        self._loop.run(jobs)
        return await asyncio.gather(*(asyncio.wrap_future(job.result) for job in jobs))

    async def weight_version(self) -> int:
        """Return the version of the last completed weight sync; 0 before the first."""
        return int(await self._call(lambda engine: engine.get_weight_version()))

    async def ping(self) -> None:
        """Return at once, whatever the engine is doing."""

    async def connect(self, host: str, port: int, rank: int, world_size: int, meeting: int) -> None:
        """Join the trainer's weight stream (gloo, nccl, ipc). This engine's first worker is `rank` of `world_size` in
        the group of number `meeting`."""
        info = {"host": host, "port": port, "first_rank": rank, "world_size": world_size, "meeting": meeting}
        await self._call(lambda engine: engine.collective_rpc("init_weight_transfer_engine", args=(info,)))

    async def update_weights(self, manifest: Manifest) -> SyncReport:
        """Load the weights that the trainer sends, verify them, clear the prefix cache, and record their version.

        Requests in flight keep their tokens. Their KV cache is computed again, so later tokens follow the new weights.

        Raises:
            WeightSyncError: a tensor that arrived, or that the model holds after loading, differs from what the trainer
            sent.
        """
        return await self._call(lambda engine: self._update(engine, manifest))

    async def attest(self) -> SyncReport:
        """Compare the weights in the model now with the last sync, and so the adapter if there is one."""
        report = await self._call(_attest)
        return await self._call(partial(_attest, part=ADAPTER)) if await self._call(_takes_adapter) else report

    async def sleep(self) -> None:
        """Free the GPU memory for the trainer: drop the KV cache, and move weights to host memory, or discard them
        where a sync brings all of them before anything is generated.

        No request may be under way: vLLM would drop it without a response.
        """
        assert not self._loop.unfinished, f"{self._loop.unfinished} requests are unfinished"
        if (level := sleep_level(self._spec)) is not None:
            await self._call(lambda engine: engine.sleep(level=level))

    async def wake(self, part: str | None = None) -> None:
        """Take the GPU memory back: that of a part ("weights", "kv_cache"), or all."""
        assert part is not None or sleep_level(self._spec) != 2, "discarded weights come back by a sync alone"
        if sleep_level(self._spec) is not None:
            await self._call(lambda engine: engine.wake_up(None if part is None else [part]))

    async def close(self) -> None:
        """Stop the engine and its workers."""
        await asyncio.to_thread(self._loop.close)

    def _build(self) -> LLMEngine:
        """Build the engine and measure how long that takes."""
        began = time.perf_counter()
        with name_cause(self._log):
            engine = build_engine(self._spec, self._log, self._workers)
        self._routes = RouteSource(engine) if self._spec.returns_routes else None
        self._startup_s = time.perf_counter() - began
        return engine

    async def _wait_until_usable(self) -> None:
        """Wait until vLLM is imported and the engine is running, and check that it does not have random weights."""
        await self._call(lambda engine: None)
        assert self._has_weights, "the engine has random weights until the first sync"

    async def _call(self, function: Callable[[LLMEngine], T]) -> T:
        """Run `function(engine)` between two steps and return its result."""
        return await asyncio.wrap_future(self._loop.call(function))

    def _check(self, request: GenerationRequest) -> None:
        """Raise UserError if a request does not fit the engine."""
        total = len(request.prompt_ids) + request.max_new_tokens
        if not request.prompt_ids or request.max_new_tokens < 1 or total > self._spec.max_len:
            raise UserError(
                f"request {request.id}: a prompt of {len(request.prompt_ids)} tokens and {request.max_new_tokens} new "
                f"ones do not fit data.max_len={self._spec.max_len}; raise it or remove the prompt"
            )
        if len(request.images) > self._spec.max_images:
            raise UserError(
                f"request {request.id}: {len(request.images)} images, and data.max_images_per_prompt="
                f"{self._spec.max_images} allows fewer; raise it"
            )
        if request.sampling.stop and not self._spec.detokenize:
            raise AssertionError("stop strings need EngineSpec.detokenize")

    def _update(self, engine: LLMEngine, manifest: Manifest) -> SyncReport:
        """Load and verify weights; if that fails, the engine is unusable, since it may have some of the new weights."""
        began = time.perf_counter()
        try:
            _load(engine, manifest)
            report = _attest(engine, manifest.part)
        except BaseException as error:
            end_with_a_worker(engine, error)
            raise self._loop.fail(error, "loading weights") from None
        engine.reset_prefix_cache(reset_running_requests=True)
        if self._spec.image_token is not None:
            # The worker has forgotten the features of images; the scheduler would still count on them.
            engine.reset_mm_cache()
            engine.reset_encoder_cache()
        engine.set_weight_version(str(manifest.version))
        self._has_weights = manifest.part != BASE
        seconds, (guessed, accepted) = time.perf_counter() - began, self._guesses.take()
        return SyncReport(report.received, report.read_back, report.not_readable, seconds, guessed, accepted)


def _hand_over(loop: asyncio.AbstractEventLoop, outbox: Outbox, number: int, result: Future[Generation]) -> None:
    """Put a result into the outbox of its client. This runs on the thread of the engine."""
    loop.call_soon_threadsafe(outbox.put_nowait, (number, result))


def _takes_adapter(engine: LLMEngine) -> bool:
    """Return whether the engine gets an adapter beside the weights of the model."""
    return engine.vllm_config.lora_config is not None


def _load(engine: LLMEngine, manifest: Manifest) -> None:
    """Load what was sent into the model of every worker."""
    if manifest.part == ADAPTER:
        from rlhf_suite.weight_sync.receiver import receive_adapter

        engine.collective_rpc(receive_adapter, args=(manifest.as_update_info(),))
        return
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", args=(manifest.as_update_info(),))
    engine.collective_rpc("finish_weight_update")


def _attest(engine: LLMEngine, part: str = WHOLE) -> SyncReport:
    """Return what all workers together verified."""
    from rlhf_suite.weight_sync import receiver

    return combine_reports(engine.collective_rpc(receiver.attest_adapter if part == ADAPTER else receiver.attest))


def _adapter_of(engine: LLMEngine) -> LoRARequest | None:
    """Return what tells vLLM to apply the adapter to a request. It has no file: the last sync has installed it."""
    if not _takes_adapter(engine):
        return None
    from vllm.lora.request import LoRARequest

    from rlhf_suite.weight_sync.adapter import NUMBER

    return LoRARequest("policy", NUMBER, "/installed by weight syncs")


def _add(image_token: int | None, engine: LLMEngine, name: str, job: Job[Any]) -> None:
    """Add a request to the engine. vLLM gets one placeholder for each image: tokens that stand for an image already
    would be expanded a second time."""
    from vllm import TokensPrompt

    adapter = _adapter_of(engine)
    if not job.images:
        engine.add_request(name, TokensPrompt(prompt_token_ids=list(job.prompt_ids)), job.params, lora_request=adapter)
        return
    assert image_token is not None
    prompt = TokensPrompt(
        prompt_token_ids=collapse_images(job.prompt_ids, job.images, image_token),
        multi_modal_data={"image": [open_image(image.data) for image in job.images]},
    )
    engine.add_request(name, prompt, job.params, lora_request=adapter)


def _sampling_params(request: GenerationRequest) -> SamplingParams:
    """Return a request's settings as vLLM's SamplingParams."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling: SamplingSettings = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=request.seed,
        max_tokens=request.max_new_tokens,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the ids above end a response, not the model's configuration
        logprobs=0 if sampling.log_probs else None,  # 0: only the log-prob of the sampled token
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        logit_bias=dict.fromkeys(sampling.never, NEVER) or None,
        allowed_token_ids=list(sampling.only) or None,
    )


class _GenerationReader:
    """Converts vLLM's output of a request to a Generation."""

    def __init__(self, request: GenerationRequest, routes: RouteSource | None, guesses: Guesses) -> None:
        self._id, self._guesses = request.id, guesses
        self._routes = routes if request.sampling.log_probs else None
        self._prompt_ids = request.prompt_ids if request.images else None

    def __call__(self, output: RequestOutput) -> Generation:
        if self._prompt_ids is not None and list(output.prompt_token_ids or ()) != list(self._prompt_ids):
            raise RunError(
                f"request {self._id}: vLLM reads its images as other tokens ({len(output.prompt_token_ids or ())} in "
                f"all) than the trainer ({len(self._prompt_ids)}). Compare the versions of vLLM and transformers"
            )
        done = output.outputs[0]
        self._guesses.count(done.spec_decode_metrics)
        ids = np.array(done.token_ids, dtype=np.int32)
        given = done.logprobs.logprobs if done.logprobs is not None else []
        log_probs = np.array(given, dtype=np.float32)
        assert len(log_probs) in (len(ids), 0), f"{len(ids)} tokens with {len(log_probs)} log-probs"
        versions = np.empty(len(ids), dtype=np.int32)
        for span in done.weight_versions:
            versions[span.start : span.end] = int(span.version)
        routes = self._routes.take(output) if self._routes is not None and len(ids) else None
        return Generation(self._id, ids, log_probs, done.finish_reason, versions, output.num_cached_tokens or 0, routes)


def _read_scores(output: RequestOutput) -> NDArray[np.float32]:
    """Return the log-probs of a prompt's tokens, [T]; the first token has 0."""
    log_probs = np.array(output.prompt_logprobs.logprobs, dtype=np.float32)
    return np.concatenate([np.zeros(1, dtype=np.float32), log_probs])


def _read_likeliest(output: RequestOutput, k: int) -> Likeliest:
    """Return the likeliest tokens and their log-probs, [T - 1, k]; at each place the prompt's token stands first."""
    scores = output.prompt_logprobs
    ids, log_probs = np.array(scores.token_ids, np.int32), np.array(scores.logprobs, np.float32)
    return ids.reshape(-1, k + 1)[:, 1:], log_probs.reshape(-1, k + 1)[:, 1:]
