"""The requests to a rollout engine and its responses: plain values that can be sent to other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rlhf_suite.config.declarations.rollout import RolloutConfig
from rlhf_suite.data.images import Image

NEVER = -100.0  # added to the logit of a token that is not sampled; vLLM takes no larger number
INTERRUPTED = "abort"  # vLLM's word for it


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are sampled. One object may serve every request of a rollout."""

    temperature: float = 1.0  # 0: the most likely token, with its log-prob at temperature 1 (evaluation only)
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # of tokens that are in the prompt or the response already
    stop: tuple[str, ...] = ()  # strings that end a response; their tokens stay at its end
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids; the id stays at the end of the response
    log_probs: bool = True  # return the log-prob of each token
    never: tuple[int, ...] = ()  # tokens that are not sampled, as if the model gave them no probability
    only: tuple[int, ...] = ()  # tokens that alone are sampled, and their log-probs are among these; (): all

    @classmethod
    def of(
        cls, config: RolloutConfig, temperature: float, stop_ids: Sequence[int], never: Sequence[int] = ()
    ) -> SamplingSettings:
        """Return the flags of `rollout` with this temperature."""
        return cls(
            temperature=temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
            stop=tuple(config.stop or ()),
            stop_token_ids=tuple(stop_ids),
            never=tuple(never),
        )


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one response. A group of n responses is n requests, each with its own seed."""

    id: int
    prompt_ids: Sequence[int]
    max_new_tokens: int
    seed: int
    sampling: SamplingSettings
    affinity: int | None = None  # requests of one affinity share an engine and its cache; None: those of one prompt
    images: tuple[Image, ...] = ()  # those whose tokens are in `prompt_ids`, in order


def content_number(prompt_ids: Sequence[int], images: Sequence[Image]) -> int:
    """Return a number that equal prompts have in common."""
    return hash((*prompt_ids, *(crc32(image.data) for image in images)))


def sample_seed(*entropy: int) -> int:
    """Return a seed that depends only on these numbers."""
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint32)[0])


@dataclass(frozen=True)
class Generation:
    """One response of n tokens."""

    id: int
    ids: NDArray[np.int32]  # [n]
    # [n], at the sampling temperature, after the penalty and over the tokens that top_p/top_k/min_p keep; [0] with
    # log_probs=False
    log_probs: NDArray[np.float32]
    finish_reason: str  # "stop" or "length"; INTERRUPTED: the engine was paused, and the response is a part
    versions: NDArray[np.int32]  # [n], the weight version of each token; it changes if a sync happened in between
    cached_tokens: int = 0  # of the prompt, that the engine had in its KV cache (vllm.enable_prefix_caching)
    # [P + n - 1, M, K] the experts to which the engine sent each token of the prompt (P) and the response, where asked
    # for; the last token was not read by the model
    routes: NDArray[np.signedinteger[Any]] | None = None


def continue_request(request: GenerationRequest, parts: Sequence[Generation]) -> GenerationRequest:
    """Return the request for what follows the parts of a response: its prompt holds their tokens, and its seed depends
    on their number too, since a seed that is used again gives the same random numbers again."""
    written = [token for part in parts for token in part.ids.tolist()]
    if not written:
        return request
    return replace(
        request,
        prompt_ids=[*request.prompt_ids, *written],
        max_new_tokens=request.max_new_tokens - len(written),
        seed=sample_seed(request.seed, len(written)),
    )


def whole(parts: Sequence[Generation]) -> Generation:
    """Return the response that consists of these parts, in order. Its routes are those of the last part that has some:
    the model has read all tokens before it again, maybe with newer weights."""
    if len(parts) == 1:
        return parts[0]
    return Generation(
        parts[-1].id,
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.log_probs for part in parts]),
        parts[-1].finish_reason,
        np.concatenate([part.versions for part in parts]),
        parts[0].cached_tokens,
        next((part.routes for part in reversed(parts) if part.routes is not None), None),
    )
