"""Pass rates of held-out prompts: what is sampled for them, and every number by hand."""

from __future__ import annotations

import asyncio
import math
from itertools import chain

import numpy as np
import pyarrow.parquet as pq
import pytest

from given import prompt
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.config.declarations.rollout import RolloutConfig
from rlhf_suite.data.generation import Generation
from rlhf_suite.errors import RunError
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.rewards.base import RewardFailure, Scored
from rlhf_suite.rl.evaluation import Evaluator, table_of_calls
from rlhf_suite.rl.rollout_file import SampleFiles
from rlhf_suite.rl.sampling import Sampler
from rlhf_suite.rl.scoring import Scorer
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.journal import Journal

HELD_OUT = [prompt(n, [1, n], f"p{n}", kind) for n, kind in enumerate(("math", "math", "code"))]
# Scores of four samples of each prompt; one half is not above one half. The reward is ten times the score.
SCORES = [[1.0, 0.0, 0.5, 0.5], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


class Engines:
    """In place of vLLM: a response has one token more than the one before it, and every fourth is cut off. Those to the
    prompts `late` wait until something is scored."""

    def __init__(self, late=()):
        self.asked, self.loop, self.late, self.has_scored = [], LoopThread("engines"), late, asyncio.Event()
        self.start = self.loop.start

    async def generate(self, request):
        self.asked.append(request)
        number = len(self.asked) - 1
        if request.prompt_ids[1] in self.late:
            await asyncio.wait_for(self.has_scored.wait(), 60)
        return self.answer(request, number)

    def answer(self, request, number):
        ids = np.full(number + 1, 4, np.int32)
        reason = "length" if number % 4 == 3 else "stop"
        return Generation(request.id, ids, np.zeros(len(ids), np.float32), reason, np.zeros(len(ids), np.int32))


class Scores(Scorer):
    """Scores by the table above. `parts` has the prompts of each call; those of `broken` fail."""

    reads_text_alone = True

    def __init__(self, folder, engines, broken=(), **config):
        journal = Journal(LoggerConfig(progress=False), RunFolder(folder), "ppo")
        super().__init__(
            RewardConfig.of("generate", **config), load_tokenizer("builtin:tiny", DataConfig.of("ppo")), None, journal
        )
        self.engines, self.broken, self.parts = engines, broken, []

    def outcomes(self, episodes, samples):
        places = [(ledgers[0].prompt.index, ledgers[0].sample) for ledgers in episodes]
        self.parts.append(list(dict.fromkeys(prompt for prompt, _ in places)))
        return [self.outcome(*place) for place in places], {}

    def outcome(self, prompt, sample):
        score = SCORES[prompt][sample]
        return RewardFailure("no", "error") if prompt in self.broken else Scored(10 * score, score)

    def score(self, groups):
        result = super().score(groups)
        self.engines.loop.loop.call_soon_threadsafe(self.engines.has_scored.set)
        return result


def evaluate(folder, late=(), reads_text_alone=True, **scorer):
    """The metrics of an evaluation, what the engines were asked, and what was scored together."""
    rollout, engines = RolloutConfig.of("ppo", temperature=1.0, max_new_tokens=50), Engines(late)
    scores, files = Scores(folder, engines, **scorer), SampleFiles()
    scores.reads_text_alone = reads_text_alone
    sampler = Sampler(rollout, engines, [2], seed=42, max_len=2048, adds_greedy=False, sleeps=False)
    config = EvalConfig.of("ppo", dataset="held out", n_samples_per_prompt=4, temperature=0.25)
    metrics = Evaluator(config, HELD_OUT, sampler, scores, folder, files).evaluate(3)
    files.finish()
    return metrics, engines.asked, scores.parts


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
    "pass_at_k(count, c, k)",
    "pass_at_k(k, min(c, k), k)",
)
@pytest.mark.notices(
    "a score of exactly one half passes", "rl/evaluation.py", "scored.scores > PASS", "scored.scores >= PASS"
)
def test_pass_rates_are_means_over_prompts_of_unbiased_estimates(evaluated):
    """1, 3 and 0 of 4 samples pass. pass@2 = 1 - C(4 - c, 2) / C(4, 2): 1/2, 1 and 0; pass@4: 1, 1 and 0."""
    metrics, *_ = evaluated
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
    metrics, *_ = evaluated
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
    metrics, *_ = evaluate(tmp_path)
    assert metrics["eval/math/reward"] == pytest.approx(10 * 5 / 8) and metrics["eval/code/reward"] == 0
    assert metrics["eval/math/pass1"] == pytest.approx((1 / 4 + 3 / 4) / 2) and metrics["eval/code/pass1"] == 0
    assert metrics["eval/math/num_samples"] == 8 and metrics["eval/code/num_samples"] == 4
    assert metrics["eval/reward"] == pytest.approx(10 * (2 + 3) / 12)


def table(folder):
    return pq.read_table(folder / "step_000003.parquet").to_pylist()


@pytest.mark.notices(
    "an evaluation is scored when all of it is sampled",
    "rl/evaluation.py",
    "if not self.scorer.reads_text_alone:",
    "if True:",
)
@pytest.mark.notices(
    "the groups of an evaluation are in the order in which they were scored",
    "rl/evaluation.py",
    "return [group.result(0) for group in groups]",
    "return [group.result(0) for group in groups[1:] + groups[:1]]",
)
@pytest.mark.notices(
    "every group of a part has the scores of its first one",
    "rl/scoring.py",
    "return (await part)[group[0].group]",
    "return next(iter((await part).values()))",
)
def test_prompts_are_scored_while_the_engines_write_and_the_numbers_are_those_of_all_at_once(tmp_path):
    """The second prompt is scored first. What is written is the same, in the same order."""
    at_once, _, (whole,) = evaluate(tmp_path / "whole", reads_text_alone=False)
    in_parts, _, parts = evaluate(tmp_path / "parts", late=(0, 2))
    assert whole == [0, 1, 2] and parts[0] == [1] and sorted(chain(*parts)) == whole
    assert in_parts == at_once
    assert table(tmp_path / "parts") == table(tmp_path / "whole")
    assert [row["prompt_index"] for row in table(tmp_path / "parts")] == [0] * 4 + [1] * 4 + [2] * 4


def test_a_reward_that_fails_ends_an_evaluation_before_the_engines_have_written_all(tmp_path):
    """The engines would wait until something is scored."""
    with pytest.raises(RunError, match=r"no\); repair the reward, or drop such groups with reward\.on_error=drop"):
        evaluate(tmp_path, late=(0, 2), broken=[1])


def test_the_share_of_failures_is_that_of_the_whole_evaluation(tmp_path):
    """A part of which all fail is not the end: a third of all prompts is left out."""
    limits = {"broken": [1], "on_error": "drop", "late": (0, 2)}
    metrics, _, parts = evaluate(tmp_path, max_error_rate=0.4, **limits)
    assert parts[0] == [1] and metrics["eval/num_samples"] == 8
    assert metrics["eval/pass1"] == pytest.approx((1 / 4 + 0) / 2)
    with pytest.raises(RunError, match=r"4 of 12 samples have no reward .*max_error_rate=0\.3"):
        evaluate(tmp_path / "more", max_error_rate=0.3, **limits)
