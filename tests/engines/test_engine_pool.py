"""How requests are distributed over engines."""

from __future__ import annotations

from rlhf_suite.data.generation import GenerationRequest, SamplingSettings
from rlhf_suite.engines.pool import assign_requests
from rlhf_suite.engines.start import engine_env


def _requests(prompts):
    return [GenerationRequest(i, [prompt], 1, 0, SamplingSettings()) for i, prompt in enumerate(prompts)]


def test_groups_stay_together_and_engines_get_equal_shares():
    shares = assign_requests(_requests([5, 5, 6, 6, 7, 7, 8, 8]), 2)
    assert shares == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_group_keeps_together_when_its_samples_are_apart():
    assert assign_requests(_requests([5, 6, 5, 6]), 2) == [[0, 2], [1, 3]]


def test_a_large_group_is_balanced_by_smaller_ones():
    assert assign_requests(_requests([5, 5, 5, 6, 7, 8]), 2) == [[0, 1, 2], [3, 4, 5]]


def test_an_engine_may_get_nothing():
    assert assign_requests(_requests([5]), 3) == [[0], [], []]


def test_only_the_cpu_profile_switches_compilation_off():
    assert "TORCHDYNAMO_DISABLE" in engine_env("cpu")
    assert "TORCHDYNAMO_DISABLE" not in engine_env("cuda")
