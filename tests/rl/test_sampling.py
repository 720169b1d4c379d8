"""What is asked of the engines for each prompt: how many samples, which seeds, how many tokens, at what temperature."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from given import prompt
from rlhf_suite.config.declarations.rollout import RolloutConfig
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.generation import Generation
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.rl.sampling import EVALUATION, Sampler
from rlhf_suite.rl.scoring import place_of

PROMPTS = [prompt(index, [1] * length, "p" * length) for index, length in enumerate((3, 5, 17))]


class Engines:
    """In place of vLLM: keeps the requests, and answers each with two tokens."""

    def __init__(self) -> None:
        self.asked, self.start = [], LoopThread("engines").start

    async def generate(self, request):
        self.asked.append(request)
        answer = np.array([4, 5], np.int32)
        log_probs = np.array([-1.0, -2.0], np.float32)
        return Generation(request.id, answer, log_probs, "stop", np.array([6, 7], np.int32))


def sampler(adds_greedy: bool = False, **rollout) -> Sampler:
    config = RolloutConfig.of("ppo", n_samples_per_prompt=3, temperature=0.7, **rollout)
    return Sampler(config, Engines(), [2], seed=42, max_len=20, adds_greedy=adds_greedy, sleeps=False)


def rollout(one: Sampler, indices: list[int], stream: int = 0) -> list[Trajectory]:
    """Sample a rollout, and return its samples as they are trained on."""
    groups = [one.start(group, PROMPTS[index], stream) for group, index in enumerate(indices)]
    return sorted(chain.from_iterable(each.result(60) for each in groups), key=place_of)


def seeds(one: Sampler) -> list[int]:
    """Those of the requests since the last call."""
    asked, one.engines.asked = one.engines.asked, []
    return [request.seed for request in asked]


@pytest.mark.notices(
    "every step draws with the same seeds",
    "rl/sampling.py",
    "[(self.seed, *stream, t.prompt.index, ",
    "[(self.seed, t.prompt.index, ",
)
@pytest.mark.notices(
    "every sample of a group has the same seed", "rl/sampling.py", "t.prompt.index, t.sample)", "t.prompt.index)"
)
@pytest.mark.notices(
    "an evaluation draws with the seeds of training",
    "rl/sampling.py",
    "TRAINING, EVALUATION = 0, 1",
    "TRAINING, EVALUATION = 0, 0",
)
def test_no_two_samples_share_a_seed_neither_in_a_step_nor_across_steps():
    one = sampler()
    drawn = []
    for stream in (0, 1):
        rollout(one, [0, 2], stream)
        drawn += seeds(one)
    for group, index in enumerate((0, 2)):
        one.begin(group, PROMPTS[index], 3, one.settings(0.6), (EVALUATION, 0)).result(60)
    drawn += seeds(one)
    assert len(drawn) == len(set(drawn)) == 3 * 2 * 3


def test_the_seed_of_a_sample_depends_on_its_prompt_and_not_on_its_place():
    one = sampler()
    rollout(one, [0, 2], 4)
    first = seeds(one)
    rollout(one, [2, 1], 4)
    assert seeds(one)[:3] == first[3:]


def test_samples_of_a_prompt_are_a_group_side_by_side():
    made = rollout(sampler(), [2, 0])
    assert [(t.prompt.index, t.group, t.sample) for t in made] == [
        (2, 0, 0),
        (2, 0, 1),
        (2, 0, 2),
        (0, 1, 0),
        (0, 1, 1),
        (0, 1, 2),
    ]
    assert not any(t.greedy for t in made)
    assert made[0].ids.tolist() == [1] * 17 + [4, 5]
    assert made[0].ending is Ending.FINISHED


@pytest.mark.notices(
    "the greedy baseline is drawn", "rl/sampling.py", "self.settings(0.0)", "self.settings(self.config.temperature)"
)
def test_an_estimator_with_greedy_baselines_gets_one_greedy_sample_of_each_prompt():
    one = sampler(adds_greedy=True)
    made = rollout(one, [2, 0], 0)
    assert [t.greedy for t in made] == [False] * 6 + [True] * 2
    assert [t.group for t in made][-2:] == [0, 1]
    assert [request.sampling.temperature for request in one.engines.asked] == ([0.7] * 3 + [0.0]) * 2


@pytest.mark.notices(
    "a response may be longer than data.max_len allows",
    "rl/sampling.py",
    "self.max_len - prompt_tokens",
    "self.max_len",
)
def test_a_response_has_what_its_prompt_leaves_of_max_len_and_no_more_than_max_new_tokens():
    one = sampler()
    rollout(one, [0, 2], 0)
    assert [request.max_new_tokens for request in one.engines.asked] == [17] * 3 + [3] * 3
    capped = sampler(max_new_tokens=8)
    rollout(capped, [0, 2], 0)
    assert [request.max_new_tokens for request in capped.engines.asked] == [8] * 3 + [3] * 3


@pytest.mark.notices(
    "all tokens of a response have the version of its first one",
    "rl/sampling.py",
    "log_probs, generation.versions, generation.routes)",
    "log_probs, generation.versions[:1], generation.routes)",
)
def test_each_token_has_the_version_of_the_weights_that_wrote_it():
    made = rollout(sampler(), [0])
    assert made[0].version.tolist() == [-1, -1, -1, 6, 7]
