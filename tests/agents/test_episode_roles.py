"""Episodes with roles: each has a conversation and a reward of its own; what cannot be a game is a clear failure."""

from __future__ import annotations

import asyncio

import pytest
from scripted import Scripted, chat_task, open_session, run
from test_compaction import ASK, Writer, sampled, shown

from rlhf_suite.agents.base import Start, Step
from rlhf_suite.agents.compaction import Compaction
from rlhf_suite.agents.environment import EnvironmentAgent
from rlhf_suite.agents.episodes import with_outcome
from rlhf_suite.agents.players import problem_of_roles
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.trajectory import to_batch
from rlhf_suite.rewards.base import RewardFailure, Scored
from rlhf_suite.rl.scoring import place_of


class Riddles:
    """The proposer writes a sum, and the solver has two tries: who wins has 1, the proposer half of it."""

    roles = ("proposer", "solver")

    async def reset(self, task):
        self.tries = 0
        solver = {"role": "system", "content": "solve it"}
        return {"proposer": Start(), "solver": Start((solver,))}

    async def step(self, role, turn):
        if role == "proposer":
            if "+" not in turn.content:
                return Step(done=True, rewards={"proposer": -1.0, "solver": 0.0})
            self.answer = str(eval(turn.content))
            return Step.say(turn.content, role="solver", extra={"length": float(len(turn.content))})
        self.tries += 1
        if turn.content == self.answer:
            return Step(done=True, rewards={"proposer": 0.0, "solver": 1.0})
        if self.tries == 2:
            return Step(done=True, rewards={"proposer": 0.5, "solver": 0.0})
        return Step.say("no", role="solver", reward=-0.25)

    async def close(self): ...


def play(tokenizer, replies, environment=Riddles, max_turns=20, compaction=None, **limits):
    policy, task = Writer(tokenizer, replies), chat_task(tokenizer)
    session = open_session(tokenizer, policy, task, **limits)
    agent = EnvironmentAgent(environment, max_turns, 600.0, compaction=compaction)
    return policy, run(agent.run, task, session)


def by_role(episode) -> dict:
    return {each.ledgers[0].role: each for each in (episode, *episode.others)}


@pytest.mark.notices(
    "roles see what others say",
    "agents/players.py",
    "    result.branches, result.seed = [result.open], (*session.seed, number)",
    "    result.branches, result.open, result.seed = session.branches, session.open, (*session.seed, number)",
)
@pytest.mark.notices(
    "what the last step pays a role goes to the first one",
    "agents/players.py",
    "            player.last += reward",
    "            self.by_role[self.roles[0]].last += reward",
)
def test_each_role_has_a_conversation_and_a_reward_of_its_own(tokenizer):
    policy, episode = play(tokenizer, ["2 + 2", "5", "4"])
    parts = by_role(episode)
    proposer, solver = (parts[role].ledgers[0] for role in Riddles.roles)
    assert shown(tokenizer, proposer.ids) == "[user\nbegin][assistant\n2 + 2]"
    assert shown(tokenizer, solver.ids) == ("[system\nsolve it][user\n2 + 2][assistant\n5][user\nno][assistant\n4]")
    assert sorted(sampled([proposer, solver])) == sorted(policy.wrote), "every sampled token is the model's once"
    assert parts["proposer"].outcome == Scored(0.0, 0.0, {"length": 5.0})
    assert parts["solver"].outcome == Scored(1.0, 0.75, {}) and solver.turn_rewards.sum() == -0.25
    assert (parts["proposer"].extra["proposer"], parts["solver"].extra["solver"]) == (0.0, 0.75)
    assert [parts[role].extra["agent/turns"] for role in Riddles.roles] == [1.0, 2.0]
    assert {each.ending for each in parts.values()} == {Ending.FINISHED}
    assert len({request.seed for request in policy.asked}) == 3


@pytest.mark.notices(
    "the reward of a turn goes to the role that speaks next",
    "agents/environment.py",
    "                player.session.latest.ledger.reward_turn(reward)",
    "                listener.session.latest.ledger.reward_turn(reward)",
)
@pytest.mark.notices(
    "a role is trained on what its opponent said",
    "data/trajectory.py",
    "        return self.owner == MODEL",
    "        return self.owner != PROMPT",
)
def test_a_turn_is_rewarded_and_trained_on_in_the_ledger_of_the_role_that_wrote_it(tokenizer):
    paid = {"one": 0.0, "two": 2.0, "three": 4.0, "four": 8.0}

    class Talk(Riddles):
        async def step(self, role, turn):
            if turn.content == "four":
                return Step(done=True, reward=8.0, rewards={"proposer": -1.0})
            other = "solver" if role == "proposer" else "proposer"
            return Step.say(turn.content, role=other, reward=paid[turn.content])

    _, episode = play(tokenizer, [*paid], Talk)
    parts = by_role(episode)
    ledgers = [parts[role].ledgers[0] for role in Riddles.roles]
    proposer, solver = ledgers
    assert shown(tokenizer, proposer.ids) == "[user\nbegin][assistant\none][user\ntwo][assistant\nthree]"
    assert shown(tokenizer, solver.ids).endswith("[user\none][assistant\ntwo][user\nthree][assistant\nfour]")
    masks = to_batch(ledgers).mask.bool().split([len(ledger.ids) for ledger in ledgers])
    written = [shown(tokenizer, t.ids[mask.numpy()]) for t, mask in zip(ledgers, masks, strict=True)]
    assert written == ["one]three]", "two]four]"], "the loss has the turns of the role alone"
    for ledger, turns in ((proposer, {"three": 4.0}), (solver, {"two": 2.0})):
        ends = {shown(tokenizer, turn).rstrip("]"): turn for turn in ledger.turns}
        assert set(turns) < set(ends)
        places = ledger.turn_rewards.nonzero()[0]
        assert ledger.turn_rewards[places].tolist() == [*turns.values()]
        for place, said in zip(places, turns, strict=True):
            start = int(place) + 1 - len(ends[said])
            assert ledger.ids[start : place + 1].tolist() == ends[said].tolist(), "it stands at the end of that turn"
    assert [(parts[role].outcome.reward, parts[role].outcome.score) for role in Riddles.roles] == [(-1, 3), (8, 10)]


def test_the_ledgers_of_a_role_stand_together_and_the_roles_of_an_episode_are_one_game(tokenizer):
    """Of two episodes, the second of which has summaries: fork, episode, game and group of each ledger."""
    ledgers = []
    for sample, replies in enumerate((["2 + 2", "4"], ["1 + 1", "wrong " * 8, "SUMMARY", "2"])):
        compaction = Compaction(60, ASK, 40)
        _, episode = play(tokenizer, replies, compaction=compaction)
        found = with_outcome(episode)
        for ledger in found:
            ledger.sample, ledger.group = sample, 0
        ledgers += found
    ledgers.sort(key=place_of)
    assert [(t.sample, t.role, t.fork) for t in ledgers] == [
        *((0, "proposer", 0), (0, "solver", 0)),
        *((1, "proposer", 0), (1, "solver", 0), (1, "solver", 1)),
    ]
    batch = to_batch(ledgers)
    assert batch.game.tolist() == [0, 0, 1, 1, 1] and batch.num_games == 2
    assert batch.episode.tolist() == [0, 1, 2, 3, 3] and batch.num_episodes == 4
    assert batch.group.tolist() == [0, 1, 0, 1, 1] == batch.role.tolist()
    assert batch.ledgers_of([1, 0]) == [2, 3, 4, 0, 1]
    solver = sum(t.response_length for t in ledgers[3:])
    assert batch.episode_tokens.tolist()[3:] == [solver, solver], "a role weighs as an episode"


def test_who_did_not_speak_has_no_part_in_the_episode(tokenizer):
    _, episode = play(tokenizer, ["no sum"])
    assert [*by_role(episode)] == ["proposer"] and episode.outcome.reward == -1.0
    assert [t.role for t in with_outcome(episode)] == ["proposer"]


@pytest.mark.notices(
    "what one role did to a limit is held against all",
    "agents/players.py",
    "ending if self.stopped in (None, player) else Ending.FINISHED",
    "ending",
)
def test_a_limit_is_that_of_the_role_that_met_it(tokenizer):
    class Pays(Riddles):
        async def last_step(self):
            return Step(rewards={"proposer": 0.25, "solver": -1.0})

    _, episode = play(tokenizer, ["2 + 2", ("4 " * 30, "length")], Pays)
    parts = by_role(episode)
    assert (parts["proposer"].ending, parts["solver"].ending) == (Ending.FINISHED, Ending.CUT)
    assert [parts[role].outcome.reward for role in Riddles.roles] == [0.25, -1.25]
    _, episode = play(tokenizer, ["2 + 2", "5"], Pays, max_turns=2)
    assert {each.ending for each in by_role(episode).values()} == {Ending.TURNS}
    _, episode = play(tokenizer, ["2 + 2", "5"], max_turns=2)
    outcomes = {role: each.outcome for role, each in by_role(episode).items()}
    assert outcomes == {"proposer": Scored(0.0, 0.0, {"length": 5.0}), "solver": Scored(-0.25, -0.25)}, "the rest is 0"


def test_what_is_told_before_the_first_turn_stands_in_the_prompt(tokenizer):
    class Twice(Riddles):
        async def reset(self, task):
            return {"solver": Start(), "proposer": Start(({"role": "user", "content": "rules"},))}

        async def step(self, role, turn):
            done = Step(done=True, rewards={"solver": 1.0, "proposer": 2.0})
            return Step.say("go", role="proposer") if role == "solver" else done

    _, episode = play(tokenizer, ["first", "second"], Twice)
    parts = by_role(episode)
    assert shown(tokenizer, parts["solver"].ledgers[0].ids) == "[user\nbegin][assistant\nfirst]", (
        "the first of the dict"
    )
    assert shown(tokenizer, parts["proposer"].ledgers[0].ids) == "[user\nrules\n\ngo][assistant\nsecond]"


def test_roles_may_speak_in_raw_text(tokenizer):
    class Raw(Riddles):
        async def reset(self, task):
            return {"proposer": Start(text="ask: "), "solver": Start(text="answer ")}

        async def step(self, role, turn):
            if role == "proposer":
                return Step(text=turn.content + " = ", role="solver")
            return Step(done=True, rewards=dict.fromkeys(self.roles, 1.0))

    _, episode = play(tokenizer, ["2 + 2", "4"], Raw)
    parts = by_role(episode)
    assert shown(tokenizer, parts["solver"].ledgers[0].ids) == "answer 2 + 2 = 4]"


def changed(**methods):
    return type("Changed", (Riddles,), methods)


async def reset_alone(self, task):
    return {"proposer": Start()}


async def reset_other(self, task):
    return {"proposer": Start(), "judge": Start()}


async def reset_one(self, task):
    return Start()


async def reset_silent(self, task):
    return {"proposer": Start(), "solver": Start(())}


def step(value):
    async def method(self, role, turn):
        return value

    return method


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (changed(reset=reset_alone), "reset returned no Start for the role solver"),
        (changed(reset=reset_other), "reset returned a Start of 'judge', and its roles are proposer, solver"),
        (changed(reset=reset_one), "reset returned Start, not a dict with a Start for each role: proposer, solver"),
        (
            changed(reset=reset_silent, step=step(Step(role="solver"))),
            "the role solver has no prompt: give it messages in reset, or in a step",
        ),
        (
            changed(step=step(Step.say("x", role="judge"))),
            "turn 1: the step lets the role speak 'judge', and its roles are proposer, solver",
        ),
        (
            changed(step=step(Step.say("x"))),
            "turn 1: the step does not say who speaks next: write Step(..., role=<role>)",
        ),
        (
            changed(step=step(Step(role="proposer"))),
            "turn 1: the role proposer speaks again, and the step tells it nothing",
        ),
        (
            changed(step=step(Step(done=True, rewards={"judge": 1.0}))),
            "turn 1: there are rewards of the role 'judge', and its roles are proposer, solver",
        ),
        (
            changed(step=step(Step(done=True, rewards={"solver": 1.0}))),
            "no step of the environment had a reward of the role proposer: end with "
            "Step(done=True, rewards={'proposer': ..., ...})",
        ),
        (
            changed(step=step(Step(done=True, rewards={"proposer": float("nan")}))),
            "proposer=nan: it is not a finite number",
        ),
        (changed(step=step(Step(done=True, rewards={"proposer": "1"}))), "it is not a finite number"),
        (changed(step=step(Step(done=True, rewards=1.0))), "it is not a dict of a number for each role"),
        (changed(roles="solver"), 'roles is \'solver\', not a tuple of names, such as ("proposer", "solver")'),
        (changed(roles=("a", "a")), "roles has 'a' twice"),
        (
            changed(roles=(), reset=reset_one, step=lambda self, turn: Step(done=True, rewards={"a": 1.0})),
            "turn 1: there are rewards of the role 'a', and its class has no roles",
        ),
    ],
)
def test_what_cannot_be_a_game_is_a_failure_that_says_why(tokenizer, environment, reason):
    _, episode = play(tokenizer, ["2 + 2", "4"], environment)
    outcomes = [each.outcome for each in (episode, *episode.others)]
    assert all(isinstance(outcome, RewardFailure) and reason in outcome.reason for outcome in outcomes), outcomes
    assert {t.failure for t in with_outcome(episode)} == {outcomes[0].reason}


def test_names_of_roles():
    assert problem_of_roles(("a", "b")) is None and problem_of_roles(["a"]) is None and problem_of_roles(()) is None
    assert "not a tuple of names" in problem_of_roles(("a b",)) and "not a tuple" in problem_of_roles(property())


def test_games_that_are_under_way_at_the_same_time_do_not_mix(tokenizer):
    class Slow(Scripted):
        async def generate(self, request):
            await asyncio.sleep(0)
            return await super().generate(request)

    async def both():
        policies = [Slow(tokenizer, [f"{n} + 0", str(n)]) for n in range(4)]
        task = chat_task(tokenizer)
        agent = EnvironmentAgent(Riddles, 9, 600.0)
        return await asyncio.gather(*(agent.run(task, open_session(tokenizer, each, task)) for each in policies))

    for number, episode in enumerate(run(both)):
        solver = by_role(episode)["solver"]
        assert shown(tokenizer, solver.ledgers[0].ids).endswith(f"[user\n{number} + 0][assistant\n{number}]")
        assert solver.outcome.reward == 1.0
