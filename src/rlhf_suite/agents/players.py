"""Who takes part in an episode: each role with its conversation, and with what it has gained.

An episode has one player, or one for each of the roles of its environment. All are played by the policy; each has
ledgers, a reward and a baseline of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlhf_suite.agents.base import Episode, Start, Step, Turn
from rlhf_suite.agents.calls import EnvironmentFailure, check_answer
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.messages import Message, add_text
from rlhf_suite.rewards.base import Choice, Outcome, PartsError, Scored

if TYPE_CHECKING:
    from rlhf_suite.agents.compaction import Compaction
    from rlhf_suite.agents.session import Session

ONE = ""  # the role of an episode without roles


@dataclass
class Progress:
    """What an episode has gained so far."""

    choice: Choice = field(default_factory=Choice)  # of the parts of a reward
    rewards: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)  # sums over the steps
    score: float | None = None
    extra: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    problems: int = 0  # calls that could not be read
    summaries: list[int] | None = None  # the tokens of each; None: the agent asks for none

    def add_turn(self, turn: Turn, step: Step) -> float:
        """Take the numbers of a turn and the step that answers it. Return the reward of the step, 0 without one."""
        self.calls += len(turn.calls)
        self.problems += sum(call.problem is not None for call in turn.calls)
        return self.add_step(step)

    def add_step(self, step: Step) -> float:
        """Take the numbers of a step. Return its reward, 0 without one."""
        reward = self.reward(step)
        if reward is not None:
            self.add_reward(reward)
        self.score = float(step.score) if step.score is not None else self.score
        self.extra |= {name: float(value) for name, value in step.extra.items()}
        return float(reward or 0.0)

    def add_reward(self, reward: float) -> None:
        """Take a reward."""
        self.rewards.append(float(reward))

    def reward(self, step: Step) -> float | None:
        """Return the reward of a step, and add its named parts to those of the episode."""
        if not isinstance(step.reward, Mapping):
            if step.reward is not None and self.choice.key is not None:
                problem = "but the reward of the environment is a number without named parts"
                raise EnvironmentFailure(f"reward.reward_key={self.choice.key}, {problem}")
            return step.reward
        for name, value in step.reward.items():
            self.parts[name] = self.parts.get(name, 0.0) + float(value)
        if not step.reward or (self.choice.key is not None and self.choice.key not in step.reward):
            return None
        try:
            return self.choice.reward(step.reward, {})
        except PartsError as error:
            raise EnvironmentFailure(str(error)) from error

    def outcome(self, last: float) -> Outcome | None:
        """Return the outcome whose reward is `last`, that of the last step; None if no step had a reward."""
        if not self.rewards:
            return None
        return Scored(last, sum(self.rewards) if self.score is None else self.score, dict(self.extra))

    def metrics(self, turns: int) -> dict[str, float]:
        """Return the metrics of the episode."""
        counts = {"turns": turns, "calls": self.calls, "malformed_calls": self.problems}
        if self.summaries is not None:
            counts |= {"compactions": len(self.summaries), "summary_tokens": sum(self.summaries)}
        return self.parts | self.extra | {f"agent/{name}": float(value) for name, value in counts.items()}


@dataclass
class Player:
    """One role of an episode, or the only one."""

    role: str
    session: Session
    progress: Progress
    compaction: Compaction | None = None  # None: its conversation has no summaries
    start: Start = field(default_factory=Start)  # its prompt, until its first turn
    last: float = 0.0  # its reward that belongs to no turn: that of the last step

    def begin(self, step: Step | None = None) -> None:
        """Set the prompt, after which stands what the player is told before its first turn."""
        messages, text, session = self.start.messages, self.start.text, self.session
        if step is not None and step.messages:
            messages = tuple(session.open.messages) if messages is None else messages
            for message in session.cutter.cut_all(step.messages):
                messages = join(messages, message)
        if step is not None and step.text:
            if step.images:
                raise EnvironmentFailure(f"the role {self.role} has no turn yet: show it images in messages")
            before = session.open.ledger.prompt.text if text is None else text
            text = before + session.cutter.cut(step.text)
        whose = f"role {self.role}" if self.role else "environment"
        if messages == ():
            raise EnvironmentFailure(f"the {whose} has no prompt: give it messages in reset, or in a step")
        try:
            fits = session.set_prompt(messages, text, self.start.tools)
        except ValueError as error:
            raise EnvironmentFailure(f"the prompt of the {whose} cannot be used: {error}") from error
        if not fits:
            raise EnvironmentFailure(f"the prompt of the {whose} leaves no room for a turn in data.max_len")

    def tell(self, step: Step) -> tuple[bool, bool]:
        """Append what the player is told before its next turn, with the request for a summary where the conversation is
        long. Return whether a turn fits after it, and whether that is the summary."""
        session = self.session
        try:
            if not session.num_turns:
                self.begin(step)
                return True, False
            if not step.messages:
                return session.observe_text(step.text or "", images=step.images), False
            if self.compaction is None or not self.compaction.is_due(session, step.messages):
                return session.observe(step.messages), False
            return session.observe(step.messages, self.compaction.prompt), True
        except ValueError as error:
            raise EnvironmentFailure(f"the answer of the environment cannot be used: {error}") from error

    async def write_summary(self) -> Ending | None:
        """Let the conversation go on from a summary. Return why the episode ends; None if another turn follows."""
        assert self.compaction is not None and self.progress.summaries is not None, "a summary was asked for"
        ending, tokens = await self.compaction.write_summary(self.session)
        self.progress.summaries.append(tokens)
        return ending

    def episode(self, outcome: Outcome | None, ending: Ending) -> Episode:
        """Return the episode as this player has it."""
        metrics = self.progress.metrics(self.session.num_turns)
        if self.role:
            metrics[self.role] = sum(self.progress.rewards)
        return self.session.episode(outcome, ending, metrics)


class Players:
    """The players of an episode, by their roles, in the order of these."""

    def __init__(
        self, session: Session, choice: Choice, compaction: Compaction | None, roles: Sequence[str] = ()
    ) -> None:
        def player(role: str, of_role: Session) -> Player:
            progress = Progress(choice, summaries=None if compaction is None else [])
            return Player(role, of_role, progress, compaction)

        self.roles = tuple(roles)
        self.by_role = {role: player(role, session_of(role, session, number)) for number, role in enumerate(roles, 1)}
        if not roles:
            self.by_role = {ONE: player(ONE, session)}
        self.stopped: Player | None = None  # whose limit ended the episode

    @property
    def num_turns(self) -> int:
        """The turns of all of them."""
        return sum(player.session.num_turns for player in self.by_role.values())

    @property
    def spoken(self) -> list[Player]:
        """Those who have written a turn, or the first one."""
        players = [*self.by_role.values()]
        return [player for player in players if player.session.latest.ends] or players[:1]

    def find(self, role: object, opening: str) -> Player:
        """Return the player of a role. `opening` begins the reason of a failure.

        Raises:
            EnvironmentFailure: there is no such role.
        """
        if not isinstance(role, str) or role not in self.by_role or not self.roles:
            known = f"its roles are {', '.join(self.roles)}" if self.roles else "its class has no roles"
            raise EnvironmentFailure(f"{opening} {role!r}, and {known}")
        return self.by_role[role]

    def begin(self, started: object) -> Player:
        """Take what `reset` returned, set the prompt of the one who speaks first, and return that one."""
        if not self.roles:
            player = self.by_role[ONE]
            player.start = check_answer(started, Start, "reset", "")
        else:
            if not isinstance(started, Mapping) or not started:
                problem = f"reset returned {type(started).__name__}, not a dict with a Start for each role"
                raise EnvironmentFailure(f"{problem}: {', '.join(self.roles)}")
            for role, start in started.items():
                self.find(role, "reset returned a Start of").start = check_answer(start, Start, "reset", "")
            if missing := [role for role in self.roles if role not in started]:
                raise EnvironmentFailure(f"reset returned no Start for the role {missing[0]}")
            player = self.by_role[next(iter(started))]
        player.begin()
        return player

    def share(self, step: Step, where: str) -> None:
        """Take the rewards that a step has for the roles."""
        for role, reward in step.rewards.items():
            player = self.find(role, f"{where}there are rewards of the role")
            player.progress.add_reward(reward)
            player.last += reward

    def end(self, player: Player, reward: float, stopped: Player | None) -> None:
        """Take the reward of the last step, which answers a turn of `player`. `stopped`: whose limit ends the
        episode."""
        player.last += reward
        self.stopped = stopped

    def next_after(self, player: Player, step: Step, where: str) -> Player:
        """Return who speaks after a step that answers the turn of `player`."""
        if not self.roles and step.role is None:
            return player
        if step.role is None:
            raise EnvironmentFailure(f"{where}the step does not say who speaks next: write Step(..., role=<role>)")
        chosen = self.find(step.role, f"{where}the step lets the role speak")
        if chosen.session.num_turns and not (step.messages or step.text):
            raise EnvironmentFailure(f"{where}the role {chosen.role} speaks again, and the step tells it nothing")
        return chosen

    def episode(self, outcomes: Mapping[str, Outcome | None], ending: Ending) -> Episode:
        """Return the episode. Those who did not speak have no part in it, and a limit that one of them met is none of
        the others."""
        first, *others = [
            player.episode(outcomes[player.role], ending if self.stopped in (None, player) else Ending.FINISHED)
            for player in self.spoken
        ]
        return replace(first, others=tuple(others))


def session_of(role: str, session: Session, number: int) -> Session:
    """Return a session for a role of the episode that `session` is of, before its first turn. `number`: what its random
    numbers depend on beside those of the episode."""
    assert not session.num_turns, "the first turn has been sampled"
    result, first = copy(session), session.open
    ledger = replace(first.ledger, role=role, extra=dict(first.ledger.extra), turn_records=[])
    result.open = result.latest = replace(first, ledger=ledger, messages=list(first.messages), ends=[])
    result.branches, result.seed = [result.open], (*session.seed, number)
    return result


def join(messages: Sequence[Message], message: Message) -> tuple[Message, ...]:
    """Return messages with another one, which joins the last one where both are texts of the user."""
    if message["role"] == "user" and isinstance(message["content"], str):
        return tuple(add_text(messages, message["content"]))
    return (*messages, message)


def roles_of(environment: object) -> tuple[str, ...]:
    """Return the roles that the class of an environment names; none where it has no attribute `roles`.

    Raises:
        EnvironmentFailure: they cannot be roles.
    """
    given = getattr(type(environment), "roles", ())
    if (problem := problem_of_roles(given)) is not None:
        raise EnvironmentFailure(problem)
    return tuple(given)


def problem_of_roles(roles: object) -> str | None:
    """Return why the attribute `roles` of a class cannot name the roles of an episode, or None."""
    if not isinstance(roles, tuple | list) or not all(isinstance(role, str) and role.isidentifier() for role in roles):
        return f'roles is {roles!r}, not a tuple of names, such as ("proposer", "solver")'
    twice = [role for place, role in enumerate(roles) if role in roles[:place]]
    return f"roles has {twice[0]!r} twice" if twice else None
