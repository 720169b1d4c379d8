"""The trajectory: an append-only ledger of tokens, each with its owner, the engine's log-prob and the weight version.

Text becomes tokens once, at the first prompt; from then on ids are appended as they were sampled or given, and text is
for display. Masks, lengths and turn boundaries are views of the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_suite.data.batch import PerRow, PerToken, TokenBatch
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.images import Image

if TYPE_CHECKING:
    from rlhf_suite.data.text_encoders import Prompt

PROMPT, MODEL, ENVIRONMENT = 0, 1, 2


@dataclass
class CallRecord:
    """A tool call in a turn, for people to read."""

    name: str
    arguments: str  # as JSON
    problem: str | None = None  # why it was not executed
    answer: str | None = None  # what the tool said; None: nobody has answered it in this ledger


@dataclass
class TurnRecord:
    """How a turn of an episode went, for people to read: nothing is trained on it."""

    end: int  # tokens of the ledger up to the end of the turn
    sampling_s: float  # from the request to the last token, waits for an engine included
    answer_s: float = 0.0  # from there until the next turn was asked for, or the episode ended
    calls: list[CallRecord] = field(default_factory=list)


@dataclass
class Trajectory:
    """One sample of the policy: its prompt, and the T tokens so far, in order.

    An episode has one ledger, or several when its history was rewritten on the way. These have the same `group` and
    `sample` and stand next to each other, with `fork` from 0 on; the one with the last turn is the last. Each token
    that the model wrote is the model's in exactly one of them, and in others part of the prompt. Each `role` of an
    episode has such ledgers, and counts as an episode of its own.
    """

    prompt: Prompt  # the prompt that it answers: one object for all samples of a prompt
    group: int  # the number of that prompt among those of the step, from 0; samples of one prompt share it
    sample: int  # its number among the samples of the group, from 0
    ids: NDArray[np.int64]  # [T] the tokens
    owner: NDArray[np.int8]  # [T] who wrote each token: PROMPT, MODEL or ENVIRONMENT
    engine_log_probs: NDArray[np.float32]  # [T] nats, by the engine that sampled it; 0 where the model did not write
    version: NDArray[np.int32]  # [T] the weight version that wrote each token; -1 where the model did not write
    turn_rewards: NDArray[np.float32]  # [T] an environment's reward of a turn, at the turn's last token; 0 elsewhere
    ending: Ending = Ending.FINISHED  # why the episode has no further turn; in a ledger before the last, why its turn
    fork: int = 0  # its number among the ledgers of the episode, from 0
    images: tuple[Image, ...] = ()  # the images whose tokens are among `ids`, in order
    # [T, M, K] the experts to which the engine sent each token (`data.batch.TokenBatch.routes`); None: not asked for
    routes: NDArray[np.signedinteger[Any]] | None = None
    # The following are of the whole episode, and stand in its last ledger.
    reward: float | None = None  # by its environment, besides its turns; None: the run's reward sources score it
    score: float | None = None  # how good the episode was, 0 to 1, where its environment says so; evaluations count it
    failure: str = ""  # why its environment could not score it; empty where it could
    role: str = ""  # whom the model plays in it, in an episode with roles; each has ledgers and a reward of its own
    greedy: bool = False  # sampled with the likeliest token at every place: a baseline, never trained on
    extra: dict[str, float] = field(default_factory=dict)  # further numbers that its agent gave, by name
    # How each turn that an agent's session sampled into this ledger went; empty without an agent.
    turn_records: list[TurnRecord] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        prompt: Prompt,
        group: int,
        sample: int,
        ids: Sequence[int] | None = None,
        images: tuple[Image, ...] = (),
    ) -> Trajectory:
        """Return a ledger that begins with its prompt, or with the `ids` that an agent writes in place of it, and their
        `images`."""
        if ids is None:
            ids, images = prompt.ids, prompt.images or ()
        owner, version = np.full(len(ids), PROMPT, np.int8), np.full(len(ids), -1, np.int32)
        own = np.asarray(ids, dtype=np.int64)
        return cls(prompt, group, sample, own, owner, zeros(ids), version, zeros(ids), images=images)

    def append_model(
        self,
        ids: NDArray[np.integer[Any]],
        log_probs: NDArray[np.float32],
        versions: int | NDArray[np.int32],
        routes: NDArray[np.signedinteger[Any]] | None = None,
    ) -> None:
        """Append tokens that the model sampled, with the engine's log-prob and the weight version of each.

        `routes` are of all tokens but the last one, as the model read them for this turn, and replace those of earlier
        turns. So the last token of a turn gets its route from the turn after it.
        """
        self._append(ids, MODEL, log_probs, versions)
        if routes is not None:
            assert len(routes) == len(self.ids) - 1, f"{len(routes)} routes of {len(self.ids)} tokens"
            self.routes = pad_routes(routes, len(self.ids))

    @property
    def image_files(self) -> tuple[bytes, ...]:
        """Return the files of its images, in order."""
        return tuple(image.data for image in self.images)

    def append_environment(self, ids: Sequence[int], images: tuple[Image, ...] = ()) -> None:
        """Append tokens that an environment or a tool wrote, `images` among them; they are never trained on."""
        self.images += images
        self._append(np.asarray(ids), ENVIRONMENT, zeros(ids), -1)

    def cut(self, length: int) -> Trajectory:
        """Return the ledger as it was when it had `length` tokens, the last of which ended a turn."""
        names = ("ids", "owner", "engine_log_probs", "version", "turn_rewards")
        cut = {name: getattr(self, name)[:length] for name in names}
        cut["routes"] = None if self.routes is None else self.routes[:length]
        cut["turn_records"] = [record for record in self.turn_records if record.end <= length]
        images = tuple(image for image in self.images if image.start < length)
        return replace(self, **cut, images=images, ending=Ending.FINISHED)

    def reward_turn(self, reward: float) -> None:
        """Add a reward to the last token that the model wrote."""
        self.turn_rewards[np.flatnonzero(self.model_mask)[-1]] += reward

    def _append(
        self,
        ids: NDArray[np.integer[Any]],
        owner: int,
        log_probs: NDArray[np.float32],
        versions: int | NDArray[np.int32],
    ) -> None:
        count = len(ids)
        assert len(log_probs) == count, f"{count} ids with {len(log_probs)} log-probs"
        self.ids = np.concatenate([self.ids, ids.astype(np.int64)])
        self.owner = np.concatenate([self.owner, np.full(count, owner, np.int8)])
        self.engine_log_probs = np.concatenate([self.engine_log_probs, log_probs.astype(np.float32)])
        self.version = np.concatenate([self.version, np.full(count, versions, np.int32)])
        self.turn_rewards = np.concatenate([self.turn_rewards, zeros(ids)])
        self.routes = None if self.routes is None else pad_routes(self.routes, len(self.ids))

    @property
    def model_mask(self) -> NDArray[np.bool_]:
        """Which tokens the model wrote, [T]."""
        return self.owner == MODEL

    @property
    def turns(self) -> list[NDArray[np.int64]]:
        """The tokens of each turn of the model, in order: what it wrote between two texts of others."""
        mask = np.concatenate([[False], self.model_mask, [False]])
        borders = np.flatnonzero(mask[1:] != mask[:-1]).reshape(-1, 2)
        return [self.ids[start:end] for start, end in borders]

    @property
    def response_length(self) -> int:
        """Tokens the model wrote; what environments wrote does not count."""
        return int(self.model_mask.sum())

    @property
    def truncated(self) -> bool:
        """Whether the length limit ended it."""
        return self.ending is Ending.CUT

    @property
    def response_ids(self) -> NDArray[np.int64]:
        """Everything after the first prompt."""
        return self.ids[int((self.owner == PROMPT).sum()) :]


def zeros(ids: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.float32]:
    """Return a zero for each token."""
    return np.zeros(len(ids), dtype=np.float32)


def pad_routes(routes: NDArray[np.signedinteger[Any]], length: int) -> NDArray[np.signedinteger[Any]]:
    """Return routes [n, M, K] of the first n of `length` tokens as those of all of them; -1 where none is known."""
    return np.concatenate([routes, np.full((length - len(routes), *routes.shape[1:]), -1, routes.dtype)])


def routes_of(trajectories: Sequence[Trajectory]) -> NDArray[np.signedinteger[Any]] | None:
    """Return the routes of ledgers laid end to end; None where none of them has any."""
    first = next((t.routes for t in trajectories if t.routes is not None), None)
    if first is None:
        return None
    own = [first[:0] if t.routes is None else t.routes for t in trajectories]
    return np.concatenate([pad_routes(part, len(t.ids)) for part, t in zip(own, trajectories, strict=True)])


def group_numbers(trajectories: Sequence[Trajectory]) -> NDArray[np.int64]:
    """Return a number for each ledger, [B], which those of the same prompt and role have in common: what rewards are
    compared within. Without roles it is the number of the prompt."""
    roles = sorted({trajectory.role for trajectory in trajectories})
    return np.array([t.group * len(roles) + roles.index(t.role) for t in trajectories], np.int64)


@dataclass(frozen=True)
class EpisodeRows:
    """Which of B ledgers belong to each of E episodes. Each role of an episode counts as one."""

    starts: NDArray[np.int64]  # [E] the first ledger of each
    numbers: NDArray[np.int64]  # [B] the episode of each ledger

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> EpisodeRows:
        """Return the episodes of ledgers, all those of an episode next to each other."""
        begins = np.array([trajectory.fork == 0 for trajectory in trajectories], bool)
        assert not len(begins) or begins[0], "the first ledger of an episode comes first"
        return cls(np.flatnonzero(begins), begins.cumsum() - 1)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lasts(self) -> NDArray[np.int64]:
        """The last ledger of each episode, [E]."""
        return np.append(self.starts, len(self.numbers))[1:] - 1

    def parts(self, trajectories: Sequence[Trajectory]) -> list[Sequence[Trajectory]]:
        """Return the ledgers of each episode."""
        return [trajectories[start : last + 1] for start, last in zip(self.starts, self.lasts, strict=True)]

    @property
    def have_forks(self) -> bool:
        """Whether an episode has several ledgers."""
        return len(self.starts) < len(self.numbers)


@dataclass(frozen=True)
class Experience(TokenBatch):
    """B ledgers laid end to end, T tokens in all, with what a step of reinforcement learning computes about them.

    A column is None where the run does not need it. Log-probs and entropies are in nats; where the model did not write
    a token, they mean nothing (`mask` is 0). The order of the columns is that of the files of rollouts.
    """

    owner: PerToken = None  # [T] int8, who wrote each token: PROMPT, MODEL or ENVIRONMENT
    weight_version: PerToken = None  # [T] int32, of the weights that wrote each token; -1 where the model did not
    engine_log_probs: PerToken = None  # [T] log-prob of each token by the engine, with the weights that wrote it
    old_log_probs: PerToken = None  # [T] log-prob of each token by the policy before the update
    entropies: PerToken = None  # [T] entropy of the policy before the update, where each token was chosen
    ref_log_probs: PerToken = None  # [T] log-prob of each token by the reference model
    teacher_log_probs: PerToken = None  # [T] log-prob of each token by the teacher
    values: PerToken = None  # [T] the critic's estimate of the return, before each token
    turn_rewards: PerToken = None  # [T] the part of `reward` that an environment gave for turns; None: it gave none
    correction: PerToken = None  # [T] weight of each token's loss, for the difference between engine and trainer
    advantages: PerToken = None  # [T] how much better than the baseline each token is, in units of the reward
    chosen: PerToken = None  # [T] bool, tokens that the policy loss treats otherwise, by their covariances
    returns: PerToken = None  # [T] the value that the critic is trained towards, in units of the reward
    group: PerRow = None  # [B] int64, which samples are compared: those of one prompt (`group_numbers`)
    role: PerRow = None  # [B] int64, the role of each ledger; None: no episode has roles
    episode: PerRow = None  # [B] int64, the episode, or role of it, that each ledger belongs to; None: each is one
    game: PerRow = None  # [B] int64, the whole episode that each ledger belongs to, with all roles; None: as `episode`
    episode_tokens: PerRow = None  # [B] float32, tokens that the model wrote in the whole episode; None: in the ledger
    reward: PerRow = None  # [B] the reward of the whole episode, after shaping
    greedy: PerRow = None  # [B] the reward of the greedy response to the same prompt, the baseline of remax

    @property
    def num_episodes(self) -> int:
        """The number of episodes, E."""
        return len(self) if self.episode is None else int(self.episode[-1]) + 1

    @property
    def num_games(self) -> int:
        """The number of whole episodes: all roles of one count once."""
        return self.num_episodes if self.game is None else int(self.game.max()) + 1

    def ledgers_of(self, games: Sequence[int]) -> list[int]:
        """Return the ledgers of whole episodes, in the order of `games`."""
        owners = self.episode if self.game is None else self.game
        if owners is None:
            return list(games)
        places = torch.full((int(owners.max()) + 1,), len(games))  # of each game among `games`; others come last
        places[list(games)] = torch.arange(len(games))
        of_ledgers = places[owners]  # [B]
        chosen: list[int] = of_ledgers.argsort(stable=True)[: int((of_ledgers < len(games)).sum())].tolist()
        return chosen

    def episode_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` [B] over all ledgers of each ledger's episode, [B]."""
        if self.episode is None:
            return values
        return values.new_zeros(self.num_episodes).index_add(0, self.episode, values)[self.episode]


def to_batch(trajectories: Sequence[Trajectory]) -> Experience:
    """Return ledgers laid end to end, with `owner`, `mask` (model tokens), `weight_version`, `engine_log_probs`,
    `group`, `index` and, where there are any, `turn_rewards`, `episode` with `episode_tokens` where an episode has
    several, and `role` with `game` where there are roles."""

    def together(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(trajectory, name) for trajectory in trajectories]))

    rows = EpisodeRows.of(trajectories)
    forks: dict[str, Any] = {}
    names = sorted({trajectory.role for trajectory in trajectories})
    if names != [""]:
        games = {key: number for number, key in enumerate(dict.fromkeys((t.group, t.sample) for t in trajectories))}
        forks["role"] = torch.tensor([names.index(t.role) for t in trajectories])
        forks["game"] = torch.tensor([games[t.group, t.sample] for t in trajectories])
    if rows.have_forks:
        tokens = np.add.reduceat([trajectory.response_length for trajectory in trajectories], rows.starts)
        forks["episode"] = torch.from_numpy(rows.numbers)
        forks["episode_tokens"] = torch.from_numpy(tokens[rows.numbers].astype(np.float32))
    owner, routes = together("owner"), routes_of(trajectories)
    has_turn_rewards = any(trajectory.turn_rewards.any() for trajectory in trajectories)
    files = tuple(trajectory.image_files for trajectory in trajectories)
    return Experience(
        ids=together("ids"),
        lengths=torch.tensor([len(trajectory.ids) for trajectory in trajectories]),
        mask=(owner == MODEL).float(),
        index=torch.arange(len(trajectories)),
        owner=owner,
        weight_version=together("version"),
        engine_log_probs=together("engine_log_probs"),
        turn_rewards=together("turn_rewards") if has_turn_rewards else None,
        images=files if any(files) else None,
        routes=None if routes is None else torch.from_numpy(routes),
        group=torch.from_numpy(group_numbers(trajectories)),
        **forks,
    )
