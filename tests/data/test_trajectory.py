"""The ledger of a sample: who wrote each token, with which weights, and what counts as the model's response."""

from __future__ import annotations

import numpy as np
import pytest

from given import prompt
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.generation import INTERRUPTED, Generation, whole
from rlhf_suite.data.trajectory import ENVIRONMENT, MODEL, PROMPT, Trajectory, to_batch


def ledger(group: int = 0, sample: int = 0) -> Trajectory:
    """A prompt of two tokens; the model writes two, a tool one, the model one more with newer weights."""
    result = Trajectory.start(prompt(3), group, sample)
    result.append_model(np.array([5, 6]), np.array([-0.5, -0.25], np.float32), 7)
    result.append_environment([8])
    result.append_model(np.array([9]), np.array([-1.0], np.float32), 8)
    return result


@pytest.mark.notices(
    "what a tool wrote counts as the model's",
    "data/trajectory.py",
    "self._append(np.asarray(ids), ENVIRONMENT,",
    "self._append(np.asarray(ids), MODEL,",
)
@pytest.mark.notices(
    "what a tool wrote has the version of the weights",
    "data/trajectory.py",
    "ENVIRONMENT, zeros(ids), -1)",
    "ENVIRONMENT, zeros(ids), 0)",
)
def test_each_token_has_its_owner_its_log_prob_and_its_weights():
    one = ledger()
    assert one.ids.tolist() == [1, 2, 5, 6, 8, 9]
    assert one.owner.tolist() == [PROMPT, PROMPT, MODEL, MODEL, ENVIRONMENT, MODEL]
    assert one.engine_log_probs.tolist() == [0, 0, -0.5, -0.25, 0, -1]
    assert one.version.tolist() == [-1, -1, 7, 7, -1, 8]


@pytest.mark.notices(
    "a response is without what tools wrote in it",
    "data/trajectory.py",
    "return self.ids[int((self.owner == PROMPT).sum()) :]",
    "return self.ids[self.model_mask]",
)
def test_a_response_has_what_tools_wrote_and_its_length_has_not():
    one = ledger()
    assert one.response_ids.tolist() == [5, 6, 8, 9]
    assert one.response_length == 3


def test_a_turn_is_what_the_model_wrote_between_two_texts_of_others():
    assert [turn.tolist() for turn in ledger().turns] == [[5, 6], [9]]
    assert Trajectory.start(prompt(), 0, 0).turns == []


def test_a_reward_of_a_turn_stands_at_the_turns_last_token():
    one = Trajectory.start(prompt(), 0, 0)
    one.append_model(np.array([5, 6]), np.zeros(2, np.float32), 7)
    one.reward_turn(0.5)
    one.append_environment([8])
    one.reward_turn(0.25)
    one.append_model(np.array([9]), np.zeros(1, np.float32), np.array([8], np.int32))
    one.reward_turn(-1)
    assert one.turn_rewards.tolist() == [0, 0, 0, 0.75, 0, -1]


@pytest.mark.notices(
    "a response is cut off unless it stopped",
    "data/ending.py",
    'cls.CUT if finish_reason == "length"',
    'cls.CUT if finish_reason != "stop"',
)
@pytest.mark.parametrize(("reason", "truncated"), [("length", True), ("stop", False), ("abort", False), ("", False)])
def test_only_the_length_limit_cuts_a_response_off(reason, truncated):
    one = ledger()
    one.ending = Ending.of_response(reason)
    assert one.truncated is truncated


@pytest.mark.notices(
    "groups of one prompt from two rounds become one group",
    "data/trajectory.py",
    "[t.group * len(roles)",
    "[t.prompt.index * len(roles)",
)
def test_a_batch_has_the_models_tokens_as_its_mask_and_the_groups_of_the_step():
    """Two groups of one prompt, as when a prompt comes twice in a step, are two groups."""
    batch = to_batch([ledger(group=0), ledger(group=0, sample=1), ledger(group=1)])
    assert batch.lengths.tolist() == [6, 6, 6]
    assert batch.mask.tolist() == [0, 0, 1, 1, 0, 1] * 3
    assert batch.engine_log_probs.tolist() == [0, 0, -0.5, -0.25, 0, -1] * 3
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.index.tolist() == [0, 1, 2]


def routes(*tokens: int) -> np.ndarray:
    """Routes of one layer with two experts, which say of which token and generation they are."""
    return np.array([[[token, token + 1]] for token in tokens], np.int8)


@pytest.mark.notices(
    "a token that is read again keeps the route of older weights",
    "data/trajectory.py",
    "            self.routes = pad_routes(routes, len(self.ids))",
    "            self.routes = self.routes if self.routes is not None else pad_routes(routes, len(self.ids))",
)
def test_a_token_gets_the_route_of_each_turn_that_reads_it():
    one = Trajectory.start(prompt(3), 0, 0)
    one.append_model(np.array([5, 6]), np.zeros(2, np.float32), 7, routes(10, 11, 12))
    assert one.routes.tolist() == [*routes(10, 11, 12).tolist(), [[-1, -1]]]
    one.append_environment([8])
    assert (one.routes[3:] == -1).all() and len(one.routes) == 5
    one.append_model(np.array([9]), np.zeros(1, np.float32), 8, routes(20, 21, 22, 23, 24))
    assert one.routes[:, 0, 0].tolist() == [20, 21, 22, 23, 24, -1]
    assert one.cut(4).routes[:, 0, 0].tolist() == [20, 21, 22, 23]


@pytest.mark.notices(
    "ledgers without routes shift those after them",
    "data/trajectory.py",
    "    return np.concatenate([pad_routes(part, len(t.ids)) for part, t in zip(own, trajectories, strict=True)])",
    "    return pad_routes(np.concatenate(own), sum(len(t.ids) for t in trajectories))",
)
def test_a_batch_has_the_routes_of_each_ledger_where_there_are_any():
    with_routes = Trajectory.start(prompt(3), 0, 1)
    with_routes.append_model(np.array([5]), np.zeros(1, np.float32), 7, routes(1, 2))
    assert to_batch([ledger()]).routes is None
    batch = to_batch([ledger(), with_routes])
    assert batch.routes[:, 0, 0].tolist() == [*[-1] * 6, 1, 2, -1]


@pytest.mark.notices(
    "a response of several parts has the routes of its beginning",
    "data/generation.py",
    "next((part.routes for part in reversed(parts)",
    "next((part.routes for part in parts",
)
def test_a_response_of_several_parts_has_the_routes_of_the_last_one():
    parts = [
        Generation(1, np.array([5, 6]), np.zeros(2), INTERRUPTED, np.array([1, 1]), routes=routes(10, 11, 12)),
        Generation(1, np.array([7]), np.zeros(1), "stop", np.array([2]), routes=routes(20, 21, 22, 23)),
        Generation(1, np.array([], np.int64), np.zeros(0), INTERRUPTED, np.array([], np.int32)),
    ]
    assert whole(parts).routes[:, 0, 0].tolist() == [20, 21, 22, 23]
