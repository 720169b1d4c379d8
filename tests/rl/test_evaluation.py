"""Pass rates of held-out prompts: what is sampled for them, and every number by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from given import prompt
from rlhf_suite.config.eval import RLEvalConfig
from rlhf_suite.config.logger import LoggerConfig
from rlhf_suite.config.rollout import RolloutConfig
from rlhf_suite.data.generation import Generation
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.rl.evaluation import Evaluator, table_of_calls
from rlhf_suite.rl.rollout_file import SampleFiles
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.rl.sampling import Sampler
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.run_folder import RunFolder

HELD_OUT = [prompt(n, [1, n], f"p{n}", kind) for n, kind in enumerate(("math", "math", "code"))]
# Scores of four samples of each prompt; one half is not above one half. The reward is ten times the score.
SCORES = [[1.0, 0.0, 0.5, 0.5], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


class Engines:
    """In place of vLLM: a response has one token more than the one before it, and every fourth is cut off."""

    def __init__(self):
        self.asked, self.start = [], LoopThread("engines").start

    async def generate(self, request):
        self.asked.append(request)
        return self.answer(request, len(self.asked) - 1)

    def answer(self, request, number):
        ids = np.full(number + 1, 4, np.int32)
        reason = "length" if number % 4 == 3 else "stop"
        return Generation(request.id, ids, np.zeros(len(ids), np.float32), reason, np.zeros(len(ids), np.int32))


class Scores:
    """In place of a reward."""

    journal = Journal(LoggerConfig(progress=False), RunFolder(Path("none")), "ppo")

    def score(self, trajectories):
        scores = np.array([SCORES[t.prompt.index][t.sample] for t in trajectories], np.float32)
        texts = [t.prompt.text for t in trajectories]
        return ScoredTrajectories(trajectories, 10 * scores, scores, texts, texts), {}


def evaluate(folder):
    """The metrics of an evaluation, and what the engines were asked."""
    rollout, engines = RolloutConfig(temperature=1.0, max_new_tokens=50), Engines()
    sampler = Sampler(rollout, engines, [2], seed=42, max_len=2048, adds_greedy=False, sleeps=False)
    config = RLEvalConfig(dataset="held out", n_samples_per_prompt=4, temperature=0.25)
    return Evaluator(config, HELD_OUT, sampler, Scores(), folder, SampleFiles()).evaluate(3), engines.asked


@pytest.fixture
def evaluated(tmp_path):
    return evaluate(tmp_path)


@pytest.mark.notices(
    "an evaluation draws with the temperature of training",
    "rl/evaluation.py",
    "self.config.temperature",
    "self.sampler.config.temperature",
)
def test_the_held_out_prompts_are_sampled_at_the_temperature_of_evaluations(evaluated):
    asked = evaluated[1]
    assert [request.prompt_ids for request in asked] == [[1, prompt] for prompt in range(3) for _ in range(4)]
    assert {request.sampling.temperature for request in asked} == {0.25}


@pytest.mark.notices(
    "pass@k is that of k samples, not of n",
    "rl/evaluation.py",
    "pass_at_k(int(count), int(c), k)",
    "pass_at_k(k, min(int(c), k), k)",
)
@pytest.mark.notices(
    "a score of exactly one half passes", "rl/evaluation.py", "scored.scores > PASS", "scored.scores >= PASS"
)
def test_pass_rates_are_means_over_prompts_of_unbiased_estimates(evaluated):
    """1, 3 and 0 of 4 samples pass. pass@2 = 1 - C(4 - c, 2) / C(4, 2): 1/2, 1 and 0; pass@4: 1, 1 and 0."""
    metrics, _ = evaluated
    assert metrics["eval/pass1"] == pytest.approx((1 / 4 + 3 / 4 + 0) / 3)
    assert metrics["eval/pass2"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert metrics["eval/pass4"] == pytest.approx(2 / 3)
    spread = ((1 / 4 - 1 / 3) ** 2 + (3 / 4 - 1 / 3) ** 2 + (1 / 3) ** 2) / 2
    assert metrics["eval/pass1_stderr"] == pytest.approx(math.sqrt(spread / 3))


def test_the_table_has_a_row_for_each_number_of_allowed_calls():
    metrics = {
        f"eval/calls_{calls}/{name}": value
        for calls, values in ((0, (0.25, 0.1, 0.5, 12)), (10, (1.0, 0.1, 1.0, 1234.5)))
        for name, value in zip(("pass1", "pass1_stderr", "pass16", "response_length_mean"), values, strict=True)
    }
    assert table_of_calls(metrics).splitlines() == [
        "allowed calls  pass1  pass16  response_length_mean",
        "            0   0.25     0.5                    12",
        "           10      1       1              1.23e+03",
    ]


def test_rewards_lengths_and_truncation_are_means_over_samples(evaluated):
    metrics, _ = evaluated
    assert metrics["eval/reward"] == pytest.approx(10 * (2 + 3) / 12)
    assert metrics["eval/response_length_mean"] == pytest.approx(6.5)
    assert metrics["eval/truncated_rate"] == pytest.approx(1 / 4)
    assert metrics["eval/num_samples"] == 12


@pytest.mark.notices(
    "rewards of an evaluation are of all sources",
    "rl/evaluation.py",
    "float(scored.rewards[chosen].mean())",
    "float(scored.rewards.mean())",
)
def test_each_source_has_means_of_its_own_samples(tmp_path):
    metrics, _ = evaluate(tmp_path)
    assert metrics["eval/math/reward"] == pytest.approx(10 * 5 / 8) and metrics["eval/code/reward"] == 0
    assert metrics["eval/math/pass1"] == pytest.approx((1 / 4 + 3 / 4) / 2) and metrics["eval/code/pass1"] == 0
    assert metrics["eval/math/num_samples"] == 8 and metrics["eval/code/num_samples"] == 4
    assert metrics["eval/reward"] == pytest.approx(10 * (2 + 3) / 12)
