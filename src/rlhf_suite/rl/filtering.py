"""Which prompts are sampled and which groups are trained on: dynamic filtering, and filters of the user's own.

A round of sampling takes the next prompts as candidates. `algo.prompt_filter` says which of them are sampled, by what
earlier groups of each scored; `algo.group_filter` and dynamic filtering say which groups are trained on. Others are
sampled in place of those that are left out. A filter keeps nothing itself: what it knows is handed to it, and the
record of scores is in checkpoints, so a continued run filters as if nothing had happened.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_suite.algo.scores import teaches
from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.errors import UserError
from rlhf_suite.registry import group_filter, prompt_filter
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.waits import in_thread, runs, waiting

HISTORY = "history.json"
PROMPTS = 2  # a stream of random numbers beside those of training and evaluation
LEFT_OUT = "rollout/left_out/"  # metrics that count groups by the reason of the user's filter
Scores = tuple[float, ...]  # of the samples of a group


@dataclass
class History:
    """The scores of each group that was sampled, by the number of its prompt, the oldest group first.

    What is of a prompt is replaced by a longer tuple and never changed, so that a copy shares all of it.
    """

    scores: dict[int, tuple[Scores, ...]] = field(default_factory=dict)

    def add(self, prompt: int, scores: Scores) -> None:
        self.scores[prompt] = (*self.scores.get(prompt, ()), scores)

    def of(self, prompts: Iterable[int]) -> History:
        """Return the part of the history that is of some prompts, which does not change with this one."""
        return History({prompt: self.scores[prompt] for prompt in prompts if prompt in self.scores})

    def copy(self) -> History:
        """Return a history that does not change with this one. This takes one reference for each prompt."""
        return History(self.scores.copy())

    def save(self, folder: Path) -> None:
        """Write the history into the folder of a checkpoint, if there is any."""
        if self.scores:
            (folder / HISTORY).write_text(json.dumps([*self.scores.items()]), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> History:
        """Read what `save` wrote."""
        file = folder / HISTORY
        read = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
        return cls({prompt: tuple(map(tuple, groups)) for prompt, groups in read})


@dataclass(frozen=True)
class Candidate:
    """A prompt that may be sampled in a round."""

    prompt: Prompt  # its tokens, and what its row says
    history: Sequence[Sequence[float]]  # for each earlier group of this prompt, the oldest first, its samples' scores


class Filters:
    """The filters of a run. `prompts` are those that it samples from."""

    def __init__(self, algo: AlgoConfig, prompts: Sequence[Prompt], seed: int) -> None:
        self.algo, self.prompts, self.seed = algo, prompts, seed
        self.of_groups = None if algo.group_filter is None else group_filter.load(algo.group_filter)
        self.of_prompts = None if algo.prompt_filter is None else prompt_filter.load(algo.prompt_filter)

    def choose(self, indices: Sequence[int], history: History, number: int) -> list[int]:
        """Return the places of the candidates that are sampled, of the prompts `indices` of the round `number`.

        Raises:
            UserError: the user's function raised an error, or did not return places of candidates.
        """
        if self.of_prompts is None:
            return [*range(len(indices))]
        candidates = [Candidate(self.prompts[index], history.scores.get(index, ())) for index in indices]
        generator = np.random.Generator(np.random.PCG64([self.seed, PROMPTS, number]))
        flag = f"algo.prompt_filter={self.algo.prompt_filter}"
        answer = call(flag, self.of_prompts, candidates, generator)
        try:
            places = sorted({int(place) for place in answer})
        except (TypeError, ValueError):
            places = []
        if not places or places[0] < 0 or places[-1] >= len(indices):
            raise UserError(
                f"{flag} returned {answer!r}; return places of one or more of the {len(indices)} candidates"
            )
        return places

    def observe(self, group: ScoredTrajectories, history: History) -> None:
        """Take note of the scores of a group, if the filter of prompts reads them."""
        if self.of_prompts is not None:
            history.add(group.trajectories[0].prompt.index, scores_of(select_sampled(group)))

    def objection(self, group: ScoredTrajectories) -> Objection | None:
        """Return why a group is not trained on, by the samples of it that would be; None for one that is.

        Raises:
            UserError: the user's function raised an error, or returned neither a reason nor None.
        """
        trained = select_sampled(group)
        scores = scores_of(trained)
        if self.algo.dynamic_filtering_enable:
            low, high = self.algo.dynamic_filtering_range
            least = self.algo.dynamic_filtering_min_std
            if not any(teaches(own, low, high, least) for own in scores_by_role(trained)):
                return Objection(f"scores {[*scores]}")
        if self.of_groups is None:
            return None
        flag = f"algo.group_filter={self.algo.group_filter}"
        reason = call(flag, self.of_groups, trained)
        if reason is None:
            return None
        if not isinstance(reason, str) or not reason.strip():
            raise UserError(f"{flag} returned {reason!r}; return a reason in a few words, or None to keep the group")
        return Objection(reason, f"{LEFT_OUT}{'_'.join(reason.split())}")


@dataclass(frozen=True)
class Objection:
    """Why a group is not trained on, and the metric that counts such groups; none for dynamic filtering."""

    reason: str
    metric: str | None = None


def select_sampled(group: ScoredTrajectories) -> ScoredTrajectories:
    """Return one row for each episode of a group, without the greedy response."""
    episodes = group.episodes()
    return episodes.take([place for place, t in enumerate(episodes.trajectories) if not t.greedy])


def scores_of(group: ScoredTrajectories) -> Scores:
    return tuple(float(score) for score in group.scores)


def scores_by_role(group: ScoredTrajectories) -> list[Scores]:
    """Return the scores of the samples of each role, of which there is one unless episodes have several."""
    roles = [t.role for t in group.trajectories]
    return [
        tuple(float(score) for score, own in zip(group.scores, roles, strict=True) if own == role)
        for role in sorted({*roles})
    ]


def call(flag: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a user's function says; an error in it names the flag."""
    try:
        with waiting(flag), runs(partial(in_thread, threading.get_ident())):
            return function(*arguments)
    except Exception as error:
        raise UserError(f"{flag} raised {type(error).__name__}: {error}") from error
