"""The agent of an environment: turns of the model and steps of the environment alternate until one of them ends it.

An environment with roles says after each turn which role the model plays in the next one (`players`).

Tools, Python sessions and environments of other libraries are environments too (`tools`, `python_tool`, `compat`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

from rlhf_suite.agents.base import Environment, Episode, Step, Task, Turn
from rlhf_suite.agents.calls import EnvironmentFailure, call_within_limit, check_answer, close_environment
from rlhf_suite.agents.players import ONE, Player, Players, roles_of
from rlhf_suite.data.ending import Ending
from rlhf_suite.rewards.base import Choice, Outcome, RewardFailure, Scored

if TYPE_CHECKING:
    from rlhf_suite.agents.compaction import Compaction
    from rlhf_suite.agents.session import Session


class EnvironmentAgent:
    """Runs the episodes of environments that `make` returns.

    `max_turns` bounds the turns of an episode, `timeout_s` its time, and `step_timeout_s` the time of each answer of
    the environment (None: only by `timeout_s`).
    """

    def __init__(  # noqa: PLR0913 - what a run says of its episodes
        self,
        make: Callable[[], Environment],
        max_turns: int,
        timeout_s: float,
        step_timeout_s: float | None = None,
        *,
        must_score: bool = False,
        choice: Choice | None = None,
        compaction: Compaction | None = None,
    ) -> None:
        self.make, self.max_turns, self.choice = make, max_turns, choice or Choice()
        self.must_score = must_score  # nobody else does
        self.timeout_s, self.step_timeout_s = timeout_s, step_timeout_s
        self.compaction = compaction  # None: a conversation ends where its ledger is full

    def limit_turns(self, max_turns: int) -> EnvironmentAgent:
        """Return the same agent with at most so many turns in an episode."""
        result = copy(self)
        result.max_turns = max_turns
        return result

    async def run(self, task: Task, session: Session) -> Episode:
        """Run one episode. An error of the environment is its outcome; an error of the policy is raised."""
        players = Players(session, self.choice, self.compaction)
        environment: Environment | None = None
        ending, outcomes = Ending.FINISHED, dict[str, Outcome | None]()
        try:
            async with asyncio.timeout(self.timeout_s) as deadline:
                environment = await self.ask(self.make)
                if roles := roles_of(environment):
                    players = Players(session, self.choice, self.compaction, roles)
                ending = await self.play(environment, task, players)
                await self.last_words(environment, players)
            outcomes = {player.role: self.outcome(ending, player) for player in players.spoken}
        except EnvironmentFailure as error:
            failure = RewardFailure(error.reason, "timeout" if error.is_timeout else "error")
            outcomes = dict.fromkeys(players.by_role, failure)
        except TimeoutError:
            if not deadline.expired():
                raise
            reason = f"the episode was not finished after agent.timeout_s={self.timeout_s:g}"
            failure = RewardFailure(f"{reason} ({players.num_turns} turns)", "timeout")
            outcomes = dict.fromkeys(players.by_role, failure)
        finally:
            if environment is not None:
                await close_environment(environment)
        return players.episode(outcomes, ending)

    async def play(self, environment: Environment, task: Task, players: Players) -> Ending:
        """Play to the end, and return why it ended."""
        if not players.roles and (take_session := getattr(environment, "take_session", None)) is not None:
            take_session(players.by_role[ONE].session)
        player = players.begin(await self.ask(environment.reset, task))
        while True:
            turn = await player.session.reply()
            where = f"turn {players.num_turns}: "
            given = (player.role, turn) if players.roles else (turn,)
            step = check_answer(await self.ask(environment.step, *given, where=where), Step, "step", where)
            reward = player.progress.add_turn(turn, step)
            players.share(step, where)
            ending = self.ending_at(turn, step, players)
            if ending is not None:
                players.end(player, reward, player if ending is Ending.CUT else None)
                return ending
            listener = players.next_after(player, step, where)
            fits, asks_summary = listener.tell(step)
            if not fits:
                players.end(player, reward, listener)
                return Ending.FULL
            if reward:
                player.session.latest.ledger.reward_turn(reward)
            player = listener
            if asks_summary and (ending := await player.write_summary()) is not None:
                players.end(player, 0.0, player)
                return ending

    async def last_words(self, environment: Environment, players: Players) -> None:
        """Take the rewards that an environment gives at the end of its episode, however that ended, if it has a method
        `last_step`."""
        last_step = getattr(environment, "last_step", None)
        if last_step is None:
            return
        where = f"after turn {players.num_turns}: "
        step = check_answer(await self.ask(last_step, where=where), Step, "last_step", where)
        players.share(step, where)
        if not players.roles:
            only = players.by_role[ONE]
            only.last += only.progress.add_step(step)
        elif step.reward is not None:
            raise EnvironmentFailure(f"{where}last_step has a reward, and not the rewards of the roles")

    def outcome(self, ending: Ending, player: Player) -> Outcome | None:
        """Return the outcome of an episode for a player; None if the reward sources of the run score it.

        An environment that pays at its end alone has paid nothing when a limit ends the episode: that is a reward of 0.
        """
        progress = player.progress
        outcome = progress.outcome(player.last)
        if outcome is not None or not (self.must_score or player.role):
            return outcome
        if ending is not Ending.FINISHED:
            return Scored(0.0, 0.0, dict(progress.extra))
        if player.role:
            fix = f"end with Step(done=True, rewards={{{player.role!r}: ..., ...}})"
            raise EnvironmentFailure(f"no step of the environment had a reward of the role {player.role}: {fix}")
        problem = "no step of the environment had " + (f"a part {self.choice.key} in its" if progress.parts else "a")
        raise EnvironmentFailure(f"{problem} reward, and the run has no reward source")

    def ending_at(self, turn: Turn, step: Step, players: Players) -> Ending | None:
        """Return why the episode ends with this step; None if another turn may follow."""
        if turn.is_cut:
            return Ending.CUT
        if step.done or not (step.messages or step.text or step.role):
            return Ending.FINISHED
        return Ending.TURNS if players.num_turns >= self.max_turns else None

    async def ask(self, function: Callable[..., Any], *arguments: Any, where: str = "") -> Any:
        """Return what a function of the environment returns. `where` begins the reason of a failure.

        Raises:
            EnvironmentFailure: it raised an error, or took longer than `step_timeout_s`.
        """
        return await call_within_limit(function, *arguments, limit_s=self.step_timeout_s, where=where)
