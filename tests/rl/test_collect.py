"""What is asked of the engines for each prompt: how many samples, which seeds, how many tokens, at what temperature."""

from __future__ import annotations

import numpy as np

from rlhf_suite.config.algo import AdvantageConfig, AlgoConfig
from rlhf_suite.config.rollout import RolloutConfig
from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.engines.generation import Generation
from rlhf_suite.rl.sampling import EVALUATION, Collector

PROMPTS = [Prompt([1] * length, "p" * length, "", "default", f"rows:{length}") for length in (3, 5, 17)]


class Engines:
    """In place of vLLM: keeps the requests, and answers each with two tokens."""

    def __init__(self) -> None:
        self.asked = []

    def generate(self, requests):
        self.asked = list(requests)
        answer = np.array([4, 5], np.int32)
        log_probs = np.array([-1.0, -2.0], np.float32)
        return [Generation(r.id, answer, log_probs, "stop", np.array([6, 7], np.int32)) for r in requests]


def collector(estimator: str = "rloo", **rollout) -> Collector:
    config = PPORun(
        rollout=RolloutConfig(n_samples_per_prompt=3, temperature=0.7, **rollout),
        algo=AlgoConfig(advantage=AdvantageConfig(estimator=estimator)),
    )
    config.data.max_len = 20
    return Collector(config, PROMPTS, Engines(), [2])


def seeds(one: Collector) -> list[int]:
    return [request.seed for request in one.engines.asked]


def test_no_two_samples_share_a_seed_neither_in_a_step_nor_across_steps():
    one = collector()
    drawn = []
    for stream in (0, 1):
        one.collect([0, 2], stream)
        drawn += seeds(one)
    one.sample(PROMPTS, [0, 2], 3, one.sampling(0.6), (EVALUATION, 0))
    drawn += seeds(one)
    assert len(drawn) == len(set(drawn)) == 3 * 2 * 3


def test_the_seed_of_a_sample_depends_on_its_prompt_and_not_on_its_place():
    one = collector()
    one.collect([0, 2], 4)
    first = seeds(one)
    one.collect([2, 1], 4)
    assert seeds(one)[:3] == first[3:]


def test_samples_of_a_prompt_are_a_group_side_by_side():
    made = collector().collect([2, 0], 0)
    assert [(t.prompt, t.group, t.sample) for t in made] == [
        (2, 0, 0),
        (2, 0, 1),
        (2, 0, 2),
        (0, 1, 0),
        (0, 1, 1),
        (0, 1, 2),
    ]
    assert not any(t.greedy for t in made)
    assert made[0].ids.tolist() == [1] * 17 + [4, 5]
    assert made[0].finish_reason == "stop"


def test_remax_asks_for_one_greedy_sample_of_each_prompt():
    one = collector("remax")
    made = one.collect([2, 0], 0)
    assert [t.greedy for t in made] == [False] * 6 + [True] * 2
    assert [t.group for t in made][-2:] == [0, 1]
    assert [request.sampling.temperature for request in one.engines.asked] == [0.7] * 6 + [0.0] * 2


def test_a_response_has_what_its_prompt_leaves_of_max_len_and_no_more_than_max_new_tokens():
    one = collector()
    one.collect([0, 2], 0)
    assert [request.max_new_tokens for request in one.engines.asked] == [17] * 3 + [3] * 3
    capped = collector(max_new_tokens=8)
    capped.collect([0, 2], 0)
    assert [request.max_new_tokens for request in capped.engines.asked] == [8] * 3 + [3] * 3


def test_a_response_that_a_sync_divides_counts_as_of_the_older_weights():
    made = collector().collect([0], 0)
    assert made[0].version.tolist() == [-1, -1, -1, 6, 6]
