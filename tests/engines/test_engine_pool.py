"""Which engine a request goes to, what travels together, and what each engine's environment says."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rlhf_suite.data.generation import Generation, GenerationRequest, SamplingSettings, continue_request, whole
from rlhf_suite.engines.requests import EngineClient
from rlhf_suite.engines.start import engine_env


def asked(prompt: int, affinity: int | None = None) -> GenerationRequest:
    return GenerationRequest(0, [prompt], 1, 0, SamplingSettings(), affinity)


def homes(client: EngineClient, requests: list[GenerationRequest]) -> list[int]:
    """The engine of each request, when no response has come yet."""

    async def place() -> list[int]:
        found = []
        for number, request in enumerate(requests):
            link = client.home(request)
            link.pending[number] = asyncio.get_running_loop().create_future()
            found.append(client.links.index(link))
        return found

    return asyncio.run(place())


def client(engines: int) -> EngineClient:
    nothing: Any = [None] * engines
    return EngineClient(nothing, nothing, 1, lambda *_: None)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([5, 5, 6, 6, 7, 7, 8, 8], [0, 0, 1, 1, 0, 0, 1, 1]),
        ([5, 6, 5, 6], [0, 1, 0, 1]),
        ([5, 5, 5, 6, 7, 8], [0, 0, 0, 1, 1, 1]),
    ],
)
def test_samples_of_a_prompt_share_an_engine_and_engines_get_equal_shares(prompts, expected):
    assert homes(client(2), [asked(prompt) for prompt in prompts]) == expected


def test_the_turns_of_an_episode_share_an_engine_though_their_prompts_differ():
    found = homes(client(3), [asked(prompt, affinity=prompt % 3) for prompt in range(30)])
    assert found == [prompt % 3 for prompt in range(30)]


def test_a_response_is_continued_from_its_tokens_by_other_random_numbers():
    request = GenerationRequest(3, [7, 8], 10, 42, SamplingSettings())
    parts = [part([4, 5], version=1), part([], version=1), part([6], version=2)]
    rest = continue_request(request, parts)
    assert (rest.prompt_ids, rest.max_new_tokens) == ([7, 8, 4, 5, 6], 7)
    assert len({request.seed, continue_request(request, parts[:1]).seed, rest.seed}) == 3
    assert continue_request(request, [part([], version=1)]) == request
    joined = whole([*parts, part([9], version=2, finish_reason="stop")])
    assert (joined.ids.tolist(), joined.versions.tolist()) == ([4, 5, 6, 9], [1, 1, 2, 2])
    assert (joined.id, joined.finish_reason, len(joined.log_probs)) == (3, "stop", 4)


def part(ids: list[int], version: int, finish_reason: str = "abort") -> Generation:
    tokens, versions = np.array(ids, np.int32), np.full(len(ids), version, np.int32)
    return Generation(3, tokens, np.zeros(len(ids), np.float32), finish_reason, versions)


def test_only_the_cpu_profile_switches_compilation_off():
    assert "TORCHDYNAMO_DISABLE" in engine_env("cpu")
    assert "TORCHDYNAMO_DISABLE" not in engine_env("cuda")
