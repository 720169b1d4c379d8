"""Benchmarks in the evaluations of a run: fixed prompts, their own rules and sampling, intervals, and a digest with
which two numbers can be compared (`eval.benchmark`)."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.data.benchmarks import Questions
from rlhf_suite.disk import write_text
from rlhf_suite.rewards.sources import Rewards
from rlhf_suite.rl.evaluation import Evaluator
from rlhf_suite.rl.rollout_file import SampleFiles
from rlhf_suite.rl.sampling import Sampler
from rlhf_suite.rl.scoring import REWARD_LOG, Scorer
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.metrics import read_rows

Z = 1.959963984540054  # two-sided 95 % of the normal distribution


class Measure(Protocol):
    """What an evaluation measures after a step."""

    def evaluate(self, step: int) -> dict[str, float]: ...


class All:
    """Several measures, one after the other."""

    def __init__(self, measures: Sequence[Measure]) -> None:
        self.measures = measures

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of all of them."""
        return {name: value for measure in self.measures for name, value in measure.evaluate(step).items()}


class BenchmarkEvaluator:
    """Asks every question of a benchmark, scores the answers by its rule, and records what the number depends on."""

    def __init__(
        self,
        config: EvalConfig,
        questions: Questions,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        journal: Journal,
        files: SampleFiles,
    ) -> None:
        self.questions, self.tokenizer, self.journal, self.files = questions, tokenizer, journal, files
        benchmark = questions.benchmark
        self.config = replace(
            config, n_samples_per_prompt=benchmark.samples, temperature=benchmark.temperature, max_calls=None
        )
        self.sampler = sampler.with_sampling(
            max_new_tokens=benchmark.max_new_tokens, top_p=benchmark.top_p, top_k=-1, min_p=0.0, stop=None,
            repetition_penalty=1.0,
        )  # fmt: skip
        self.reward = RewardConfig.of("ppo", rule=benchmark.rule)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return `eval/<benchmark>/pass1` and the like, and write a line to benchmarks.jsonl."""
        name, folder = self.questions.name, self.journal.folder
        with closing(Rewards(self.reward, folder.logs / REWARD_LOG)) as rewards:
            scorer = Scorer(self.reward, self.tokenizer, rewards, self.journal)
            place = folder.evaluations / name
            evaluator = Evaluator(self.config, self.questions.prompts, self.sampler, scorer, place, self.files)
            scored, lengths = evaluator.measure(self.sampler, place, step)
        metrics = evaluator.summary(scored, lengths, np.ones(len(lengths), bool), f"eval/{name}")
        sums = Counter[str]()
        for numbers in scored.extra:
            sums.update(numbers)
        shares = self.questions.benchmark.shares
        for number in sorted(sums.keys() - {"unreadable"} - {part for pair in shares.values() for part in pair}):
            metrics[f"eval/{name}/{number}"] = sums[number] / len(scored.extra)
        for share, (part, whole) in shares.items():
            metrics[f"eval/{name}/{share}"] = sums[part] / sums[whole] if sums[whole] else 0.0
        low, high = interval(
            metrics[f"eval/{name}/pass1"],
            len(self.questions.prompts),
            metrics.get(f"eval/{name}/pass1_stderr"),
            self.config.n_samples_per_prompt,
        )
        metrics |= {f"eval/{name}/pass1_low": low, f"eval/{name}/pass1_high": high}
        self.record(step, metrics)
        return metrics

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line with the result and all that it depends on, in place of those that were written before the run
        was resumed."""
        line = {
            "step": step,
            "benchmark": self.questions.name,
            "fingerprint": self.questions.fingerprint,
            "seed": self.sampler.seed,
            "questions": len(self.questions.prompts),
            **asdict(self.questions.benchmark),
            "metrics": {name.rpartition("/")[2]: value for name, value in metrics.items()},
        }
        path = self.journal.folder.benchmarks
        earlier = [row for row in read_rows(path) if is_earlier(row, line)]  # a resumed run measures some steps again
        write_text(path, "".join(json.dumps(row) + "\n" for row in (*earlier, line)))


def is_earlier(row: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    """Return whether a row stands before a line: it is of an earlier step, or of another benchmark at the same step."""
    return row["step"] < line["step"] or (row["step"] == line["step"] and row.get("benchmark") != line["benchmark"])


def interval(share: float, questions: int, standard_error: float | None, samples: int) -> tuple[float, float]:
    """Return the 95 % interval of the mean over questions of the share of samples that pass.

    With one sample of each question that is Wilson's interval (1927, Journal of the American Statistical Association
    22, 209-212), which is right near 0 and 1 too. With several it is share +- Z * standard error, where the questions
    are the clusters of their samples (Miller 2024, arXiv:2411.00640, section 2.2), cut at 0 and 1.
    """
    if samples > 1:
        reach = Z * (standard_error or 0.0)
        return max(0.0, share - reach), min(1.0, share + reach)
    scale = 1 + Z**2 / questions
    middle = (share + Z**2 / (2 * questions)) / scale
    reach = Z / scale * math.sqrt(share * (1 - share) / questions + Z**2 / (4 * questions**2))
    return max(0.0, middle - reach), min(1.0, middle + reach)
