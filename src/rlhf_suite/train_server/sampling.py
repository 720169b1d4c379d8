"""Samples for clients: a request in the protocol's form becomes requests to the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_suite.config.plan.run_plan import ACTOR
from rlhf_suite.data.generation import SamplingSettings
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.rl.client import Started, as_prompt
from rlhf_suite.rl.datum import token_ids
from rlhf_suite.rl.sampling import TRAINING, Sampler, new_ledgers, stop_token_ids
from rlhf_suite.serving.http_server import BadRequest
from rlhf_suite.train_server.bodies import table
from rlhf_suite.train_server.messages import PromptScores

# What a request may ask for beside samples, and this server does not have.
UNSERVED = ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n")
MAX_SAMPLES, MAX_LIKELIEST = 1024, 20
PARAMETERS = {"max_tokens": None, "seed": None, "stop": None, "temperature": 1.0, "top_k": -1, "top_p": 1.0}


@dataclass(frozen=True)
class SampleRequest:
    """What a client asks for: `count` samples of a prompt, the log-probs of the prompt, and its `likeliest` tokens at
    each place."""

    prompt: list[int]
    count: int
    parameters: Mapping[str, Any]
    scores_prompt: bool
    likeliest: int

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> SampleRequest:
        """Return the request in a body; raise BadRequest if it is not one that this server can answer."""
        if asked := [name for name in UNSERVED if body.get(name)]:
            raise BadRequest(f"asample: this server does not have {asked[0]}. Remove it")
        chunks = table(body, "prompt").get("chunks") or []
        if not isinstance(chunks, list) or not all(
            isinstance(chunk, dict) and isinstance(chunk.get("tokens"), list) for chunk in chunks
        ):
            raise BadRequest("asample: the prompt has a part that is not tokens. This server reads text")
        given = table(body, "sampling_params")
        if unknown := sorted({*given} - {*PARAMETERS}):
            raise BadRequest(f"asample: there is no sampling parameter {unknown[0]}")
        count = body.get("num_samples", 1)
        if not isinstance(count, int) or not 1 <= count <= MAX_SAMPLES:
            raise BadRequest(f"asample: num_samples={count!r:.40} is not between 1 and {MAX_SAMPLES}")
        likeliest = body.get("topk_prompt_logprobs") or 0
        if not isinstance(likeliest, int) or not 0 <= likeliest <= MAX_LIKELIEST:
            raise BadRequest(f"asample: topk_prompt_logprobs={likeliest!r:.40} is not between 0 and {MAX_LIKELIEST}")
        prompt = [token for chunk in chunks for token in chunk["tokens"]]
        return cls(prompt, count, {**PARAMETERS, **given}, bool(body.get("prompt_logprobs")), likeliest)

    def number(self, name: str, least: float, most: float) -> Any:
        """Return a sampling parameter; raise BadRequest unless it is a number in a range."""
        value = self.parameters[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise BadRequest(f"asample: {name}={value!r:.40} is not a number from {least:g} to {most:g}")
        return value

    def settings(self, stop_ids: tuple[int, ...]) -> SamplingSettings:
        """Return how tokens are sampled. `stop_ids` end a response unless the request says what does."""
        stop = self.parameters["stop"]
        given = [stop] if isinstance(stop, str) else stop
        kinds = {type(part) for part in given} if isinstance(given, list) else set()
        is_known = given is None or (isinstance(given, list) and (kinds <= {str} or kinds <= {int}) and "" not in given)
        if not is_known:
            raise BadRequest(
                f"asample: stop={stop!r:.40} is not a text, a list of texts or one of token ids; no text may be empty"
            )
        texts = [text for text in given or () if isinstance(text, str)]
        ids = [token for token in given or () if isinstance(token, int)]
        top_k = int(self.number("top_k", -1, 2**31))
        return SamplingSettings(
            temperature=float(self.number("temperature", 0, 2)),
            top_p=float(self.number("top_p", 1e-6, 1)),
            top_k=top_k if top_k > 0 else -1,
            stop=tuple(texts),
            stop_token_ids=stop_ids if given is None or texts else tuple(ids),
        )


class Engines:
    """The engines of a server: samples, and log-probs of prompts."""

    def __init__(self, started: Started) -> None:
        self.started = started
        self.stop_ids = tuple(stop_token_ids(started.plan.models[ACTOR].path, started.tokenizer))
        self.requests = 0

    async def sample(self, asked: SampleRequest) -> list[Trajectory]:
        """Return samples as ledgers. With the same seed a request gives the same samples."""
        run = self.started.run
        token_ids(asked.prompt, "the prompt", len(self.started.tokenizer), run.data.max_len - 1)
        limit = asked.parameters["max_tokens"]
        limit = None if limit is None else int(asked.number("max_tokens", 1, 2**31))
        rollout = replace(run.rollout, max_new_tokens=limit)
        self.requests += 1
        seed, stream = run.train.seed, [TRAINING, self.requests]
        if asked.parameters["seed"] is not None:
            seed, stream = int(asked.number("seed", 0, 2**63)), [TRAINING]
        sampler = Sampler(rollout, self.started.engines, self.stop_ids, seed=seed, max_len=run.data.max_len)
        settings = asked.settings(self.stop_ids)
        plan = [(ledger, settings) for ledger in new_ledgers(as_prompt(asked.prompt, 0), 0, asked.count)]
        return await asyncio.wrap_future(self.started.engines.start(sampler.write(plan, tuple(stream))))

    def score_prompt(self, asked: SampleRequest) -> PromptScores:
        """Return what a request asks for beside samples."""
        log_probs = self.score(asked.prompt) if asked.scores_prompt else None
        likeliest = self.started.engines.score_likeliest(asked.prompt, asked.likeliest) if asked.likeliest else None
        return PromptScores(log_probs, likeliest)

    def score(self, tokens: list[int]) -> NDArray[np.float32]:
        """Return the log-prob of each token of a prompt, [n]; 0 for the first."""
        (scores,), *_ = self.started.engines.score([tokens])
        return scores
