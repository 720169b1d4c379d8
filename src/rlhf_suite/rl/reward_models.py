"""The reward model and the process reward model of a run as sources of rewards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch

from rlhf_suite.algo.scores import normalize_scores
from rlhf_suite.data.batch import TokenBatch, collate
from rlhf_suite.data.steps import SolutionEncoder
from rlhf_suite.models.process_reward_model import StepScores, split_step_scores
from rlhf_suite.rewards.base import Outcome, RewardFailure, Sample, Scored
from rlhf_suite.rl.model_groups import ProcessRewardGroup, RewardGroup
from rlhf_suite.rl.sharding import ForwardBatch


class RewardModelSource:
    """A reward model. It reads the tokens of a sample.

    The score is what the model says, the reward is that standardised by `constants` (mean and deviation).
    """

    def __init__(self, group: RewardGroup, constants: tuple[float, float] | None) -> None:
        self.group, self.constants = group, constants
        self.lock = threading.Lock()  # all ranks must get their calls in the same order

    def score(self, samples: list[Sample]) -> list[Outcome]:
        """Return one outcome per sample; the ranks of the model share the work."""
        unique, places = once(samples, lambda sample: (bytes(np.asarray(sample.ids, np.int64)), *sample.images))
        with self.lock:
            scores = self.group.scores(ForwardBatch(tokens_of(unique))).result()[places]
        rewards = scores if self.constants is None else normalize_scores(scores, *self.constants)
        return [Scored(reward, score) for reward, score in zip(rewards.tolist(), scores.tolist(), strict=True)]

    def close(self) -> None:
        """The model ends with the run."""


class ProcessRewardSource:
    """A process reward model. It reads the text of prompt and response with its own tokenizer, so that policies of any
    vocabulary can be scored. The reward is the `aggregate` of P(good) of the steps."""

    def __init__(self, group: ProcessRewardGroup, encoder: SolutionEncoder, aggregate: str) -> None:
        self.group, self.encoder, self.aggregate = group, encoder, aggregate
        self.lock = threading.Lock()  # all ranks must get their calls in the same order

    def score(self, samples: list[Sample]) -> list[Outcome]:
        """Return one outcome per sample, with the scores of its steps; the ranks of the model share the work."""
        unique, places = once(samples, lambda sample: (sample.prompt, sample.response))
        examples = [self.encoder.encode(sample.prompt, sample.response, is_rendered=True) for sample in unique]
        batch = collate(examples, TokenBatch)
        with self.lock:
            probabilities = self.group.probabilities(ForwardBatch(batch), self.encoder.columns).result()
        steps = split_step_scores(batch, probabilities, [example.truncated for example in examples])
        outcomes = [outcome(step_scores, self.aggregate, self.encoder.form.max_len) for step_scores in steps]
        return [outcomes[place] for place in places]

    def close(self) -> None:
        """The model ends with the run."""


def once(samples: Sequence[Sample], key: Callable[[Sample], Hashable]) -> tuple[list[Sample], list[int]]:
    """Return the samples without those of an equal key, and which of them each sample equals. A model gives equal texts
    in other batches other scores, by rounding, and estimators would take that for a difference."""
    known: dict[Hashable, tuple[int, Sample]] = {}
    numbers = [known.setdefault(key(sample), (len(known), sample))[0] for sample in samples]
    return [sample for _, sample in known.values()], numbers


def tokens_of(samples: list[Sample]) -> TokenBatch:
    """Return the tokens of samples laid end to end, with their images; none of them is trained on."""
    lengths = torch.tensor([len(sample.ids) for sample in samples])
    ids = torch.from_numpy(np.concatenate([np.asarray(sample.ids, np.int64) for sample in samples]))
    images = tuple(tuple(sample.images) for sample in samples)
    return TokenBatch(ids, lengths, torch.zeros(len(ids)), images=images if any(images) else None)


def outcome(steps: StepScores, aggregate: str, max_len: int) -> Outcome:
    """Return the reward of a response from P(good) of its steps; a response that does not fit has none."""
    if steps.truncated:
        reason = f"a response is longer than the {max_len} tokens that the process reward model was trained with"
        return RewardFailure(reason, "error")
    reward = steps.aggregate(aggregate)
    extra = {f"step_{name}": steps.aggregate(name) for name in ("min", "mean")}
    return Scored(reward, reward, extra | {"num_steps": float(len(steps.scores))}, steps=steps.scores)
