"""Pass@1 and unbiased pass@k on held-out prompts, by sampling from the engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from rlhf_suite.algo.scores import over_prompts, pass_at_k
from rlhf_suite.background import Ended
from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import group_numbers
from rlhf_suite.rl.rollout_file import SampleFiles, write_evaluation
from rlhf_suite.rl.sample_metrics import PASS, by_source, response_lengths
from rlhf_suite.rl.samples import ScoredTrajectories, concatenate_samples
from rlhf_suite.rl.sampling import EVALUATION, Sampler
from rlhf_suite.rl.scoring import ScoredGroup, Scorer, ScoringInParts

T = TypeVar("T")
CALLS = "calls_"  # begins the names of metrics of eval.max_calls, before the number
NOT_IN_TABLE = ("pass1_stderr", "truncated_rate", "num_samples")


class Evaluator:
    """Samples every held-out prompt and scores the samples; a sample passes when its score is above `PASS`."""

    def __init__(
        self,
        config: EvalConfig,
        prompts: Sequence[Prompt],
        sampler: Sampler,
        scorer: Scorer,
        folder: Path,
        files: SampleFiles,
    ) -> None:
        self.config, self.prompts, self.sampler, self.scorer = config, prompts, sampler, scorer
        self.folder, self.files = folder, files

    def evaluate(self, step: int) -> dict[str, float]:
        """Return `eval/pass1` and the like over all prompts, and `eval/<source>/...` where there are several sources:
        sets of eval.dataset, or values of the column `datasource`."""
        scored, lengths = self.measure(self.sampler, self.folder, step)
        result = self.summary(scored, lengths, np.ones(len(lengths), bool), "eval")
        for source, chosen in by_source(scored).items():
            result |= self.summary(scored, lengths, chosen, f"eval/{source}")
        return result | self.by_allowed_calls(step)

    def by_allowed_calls(self, step: int) -> dict[str, float]:
        """Return `eval/calls_<n>/pass1` and the like for each number of eval.max_calls, and print a table of them."""
        result: dict[str, float] = {}
        for calls in self.config.max_calls or ():
            name = f"{CALLS}{calls}"
            scored, lengths = self.measure(self.sampler.limit_turns(calls + 1), self.folder / name, step)
            result |= self.summary(scored, lengths, np.ones(len(lengths), bool), f"eval/{name}")
        if result:
            self.scorer.journal.info(table_of_calls(result))
        return result

    def measure(self, sampler: Sampler, folder: Path, step: int) -> tuple[ScoredTrajectories, np.ndarray]:
        """Return the scored episodes of every prompt, and how many tokens the model wrote in each."""
        groups = self.score(sampler)
        self.scorer.check(groups)
        scored = concatenate_samples([group.samples for group in groups if group.samples is not None])
        self.files.write(partial(write_evaluation, folder, step, scored))
        return scored.episodes(), response_lengths(scored.trajectories)

    def score(self, sampler: Sampler) -> Sequence[ScoredGroup]:
        """Sample every prompt, and score the groups: sources that read text while the engines write others, and models
        all of them at once, as `Scorer.reads_text_alone` says."""
        samples, settings = self.config.n_samples_per_prompt, sampler.settings(self.config.temperature)
        # the same seeds every time: what changes between evaluations is the policy, or the number of allowed calls
        responses = [
            sampler.begin(group, prompt, samples, settings, (EVALUATION, 0))
            for group, prompt in enumerate(self.prompts)
        ]
        if not self.scorer.reads_text_alone:
            sampled = self.wait_for(responses)
            return [*self.scorer.score(sampled).groups.values()]
        parts = ScoringInParts(self.scorer, sampler.engines.loop)
        return self.wait_for([parts.start(group) for group in responses])

    def wait_for(self, groups: Sequence[Future[T]]) -> list[T]:
        """Return what the groups come to, in their order, and show how many have ended. What fails first is raised at
        once."""
        ended = Ended[T]("the groups of an evaluation")
        for group in groups:
            ended.add(group)
        deque(self.scorer.journal.track(ended.results(len(groups)), len(groups), "evaluated prompts"), maxlen=0)
        return [group.result(0) for group in groups]

    def summary(
        self, scored: ScoredTrajectories, lengths: np.ndarray, chosen: np.ndarray, prefix: str
    ) -> dict[str, float]:
        """Return means over prompts of pass@1 (with its standard error) and pass@n, and over samples of reward and
        length, of the chosen samples [B] bool. `lengths`: tokens that the model wrote in each, [B]."""
        groups = group_numbers(scored.trajectories)[chosen]
        passed = (scored.scores > PASS)[chosen]
        truncated = np.array([t.truncated for t in scored.trajectories])[chosen]
        n = self.config.n_samples_per_prompt
        correct = np.array([passed[groups == g].sum() for g in np.unique(groups)])
        counts = np.array([(groups == g).sum() for g in np.unique(groups)])
        first = over_prompts((correct / counts).tolist())
        result = {f"{prefix}/pass1": first.mean}
        if len(correct) > 1:
            result[f"{prefix}/pass1_stderr"] = first.standard_error
        for k in powers_of_two(n):
            pairs = [(int(count), int(c)) for count, c in zip(counts, correct, strict=True)]
            # A role that did not speak in some of the episodes has fewer samples.
            if estimates := [pass_at_k(count, c, k) for count, c in pairs if count >= k]:
                result[f"{prefix}/pass{k}"] = float(np.mean(estimates))
        return result | {
            f"{prefix}/reward": float(scored.rewards[chosen].mean()),
            f"{prefix}/response_length_mean": float(lengths[chosen].mean()),
            f"{prefix}/truncated_rate": float(truncated.mean()),
            f"{prefix}/num_samples": float(len(passed)),
        }


def table_of_calls(metrics: Mapping[str, float]) -> str:
    """Return a table of pass@k, reward and tokens by the number of allowed calls."""
    parts = [name.removeprefix("eval/").split("/") for name in metrics]
    rows = list(dict.fromkeys(calls for calls, _ in parts))
    columns = [name for name in dict.fromkeys(name for _, name in parts) if name not in NOT_IN_TABLE]
    lines = ["  ".join(["allowed calls", *columns])]
    for calls in rows:
        numbers = [f"{metrics[f'eval/{calls}/{name}']:>{len(name)}.3g}" for name in columns]
        lines.append("  ".join([f"{calls.removeprefix(CALLS):>13}", *numbers]))
    return "\n".join(lines)


def powers_of_two(n: int) -> list[int]:
    """Return 2, 4, 8, ... below `n`, and `n` itself when it is more than one sample."""
    below = [2**i for i in range(1, n.bit_length()) if 2**i < n]
    return [*below, n] if n > 1 else below
