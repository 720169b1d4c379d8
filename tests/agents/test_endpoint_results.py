"""What a program returns: results, failures, limits, and names of metrics."""

from __future__ import annotations

import re
from concurrent.futures import Future
from threading import Event

import pytest
from endpoint_episodes import (
    Model,
    ask,
    client,
    echo,
    get,
    head,
    post,
    status_of,
    user,
)

from rlhf_suite.agents.endpoint import outcome_of
from rlhf_suite.rewards.base import Choice, RewardFailure, Scored

pytestmark = pytest.mark.stack


@pytest.mark.notices(
    "a reward that comes over HTTP is lost",
    "agents/endpoint.py",
    "outcome = chat.report if returned is None",
    "outcome = None if returned is None",
)
def test_a_result_may_come_over_http(play, tokenizer):
    found = []

    def run_agent(task, base_url, api_key):
        url = base_url.removesuffix("/v1") + "/complete"
        found.append(status_of(post(url, json={"reward": "much"}, headers=head(api_key))))
        found.append(post(url, json={"reward": 2, "metrics": {"x": 1}}, headers=head(api_key)).status_code)
        found.append(get(f"{base_url}/models", headers=head(api_key)).json()["data"][0]["id"])
        found.append(get(base_url.split("/sessions")[0] + "/health").json())
        ask(base_url, api_key, task.messages)

    episode, _ = play(run_agent, Model(tokenizer, echo), must_score=True)
    assert found == [(400, "reward='much', not a finite number"), 200, "policy", {"status": "ok"}]
    assert isinstance(episode.outcome, Scored) and episode.outcome.reward == 2 and episode.outcome.extra == {"x": 1}


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (True, Scored(1.0, 1.0)),
        (None, None),
        ({"reward": 2, "score": 0.5}, Scored(2.0, 0.5)),
        ({"error": "no container"}, RewardFailure("no container", "error")),
        ({"reward": {"right": 1, "short": 0.5}, "score": 1}, Scored(1.5, 1.0, {"right": 1.0, "short": 0.5})),
    ],
)
def test_results(result, outcome):
    assert outcome_of(result, Choice()) == outcome


def test_one_part_of_a_reward_may_be_chosen():
    assert outcome_of({"reward": {"right": 1, "short": 0.5}}, Choice("short")).reward == 0.5
    with pytest.raises(ValueError, match=r"reward.reward_key=long"):
        outcome_of({"reward": {"right": 1}}, Choice("long"))


@pytest.mark.parametrize("result", [{"rewrad": 1}, float("nan"), "1", {"score": 1}, {"reward": 1, "metrics": 3}])
def test_results_that_are_none(result):
    with pytest.raises(ValueError):
        outcome_of(result, Choice())


def test_an_error_of_the_program_is_a_failure_and_no_reward_is_one_where_nobody_else_scores(play, tokenizer):
    def broken(task, base_url, api_key):
        raise KeyError("x")

    def silent(task, base_url, api_key):
        ask(base_url, api_key, task.messages)

    episode, _ = play(broken, None)
    assert re.fullmatch(r"run_agent failed: test_endpoint_results\.py:\d+: KeyError: 'x'", episode.outcome.reason)
    assert play(silent, Model(tokenizer, echo))[0].outcome is None
    episode, _ = play(silent, Model(tokenizer, echo), must_score=True)
    assert isinstance(episode.outcome, RewardFailure) and "no reward" in episode.outcome.reason


@pytest.mark.notices(
    "a reward without a turn of the model counts",
    "agents/endpoint.py",
    "and not chat.session.num_turns and",
    "and chat.session.num_turns < 0 and",
)
def test_a_reward_without_a_turn_is_a_failure_and_not_a_silent_run_that_learns_nothing(play, tokenizer):
    def elsewhere(task, base_url, api_key):
        return 1.0

    def refused(task, base_url, api_key):
        assert ask(base_url, api_key, task.messages, temperature=0.0).status_code == 400
        return 0.0

    for program, said in (
        (elsewhere, "its requests must go to base_url"),
        (refused, "the endpoint had said: .*temperature"),
    ):
        episode, _ = play(program, None)
        assert episode.ending == "failed" and episode.outcome.kind == "error"
        assert re.fullmatch(
            f"run_agent returned a reward without a turn of the model; {said}.*", episode.outcome.reason
        )


@pytest.mark.notices(
    "a program that a limit ended ends the run",
    "agents/endpoint.py",
    "chat.limit, Scored(0.0, 0.0) if self.must_score else None",
    "chat.limit, outcome if self.must_score else None",
)
@pytest.mark.parametrize(("more", "ending"), [({"max_turns": 2}, "turns"), ({"max_len": 60}, "cut")])
def test_a_program_that_stops_at_a_limit_is_not_a_failure(play, tokenizer, more, ending):
    """Where reward sources score it. One that catches the error may go on, for example with a shorter history."""

    def run_agent(task, base_url, api_key):
        messages = list(task.messages)
        while True:
            answer = client(base_url, api_key).chat.completions.create(model="m", messages=messages)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), user("go on")]

    episode, ledgers = play(run_agent, Model(tokenizer, echo), **more)
    assert (episode.ending, episode.outcome) == (ending, None) and len(ledgers[-1].turns) >= 1
    assert ledgers[-1].truncated is (ending == "cut")
    alone = play(run_agent, Model(tokenizer, echo), must_score=True, **more)[0]
    assert (alone.ending, alone.outcome) == (ending, Scored(0.0, 0.0)), "nobody had paid until then"


@pytest.mark.parametrize("must_score", [True, False])
def test_a_program_whose_first_request_has_no_room_has_no_reward(play, tokenizer, must_score):
    def run_agent(task, base_url, api_key):
        client(base_url, api_key).chat.completions.create(model="m", messages=[user("word " * 9000)])

    failure = play(run_agent, Model(tokenizer, echo), must_score=must_score)[0].outcome
    assert isinstance(failure, RewardFailure) and "BadRequestError" in failure.reason


def test_a_program_that_goes_on_behind_a_limit_may_still_fail(play, tokenizer):
    def run_agent(task, base_url, api_key):
        assert ask(base_url, api_key, [user("word " * 9000)]).status_code == 400
        assert ask(base_url, api_key, task.messages).status_code == 200
        raise ValueError("something else")

    failure = play(run_agent, Model(tokenizer, echo))[0].outcome
    assert re.fullmatch(r"run_agent failed: test_endpoint_results\.py:\d+: ValueError: something else", failure.reason)


def test_a_program_that_takes_too_long_has_no_reward_and_is_answered_no_more(play, tokenizer, clock):
    is_over, late = Event(), Future[int]()

    def run_agent(task, base_url, api_key):
        ask(base_url, api_key, task.messages)
        clock.forward(601.0)
        is_over.wait()
        late.set_result(ask(base_url, api_key, task.messages).status_code)

    episode, _ = play(run_agent, Model(tokenizer, echo), timeout_s=600.0)
    assert isinstance(episode.outcome, RewardFailure) and episode.outcome.kind == "timeout"
    assert "agent.timeout_s=600 (1 turns)" in episode.outcome.reason
    is_over.set()
    assert late.result(300) == 404


@pytest.mark.notices(
    "a failure of the engines is one of the program",
    "agents/endpoint.py",
    "            if chat.failed.done():\n                raise\n",
    "",
)
def test_a_failure_of_the_engines_ends_the_run(play, tokenizer):
    class Broken(Exception):
        pass

    def reply(prompt):
        raise Broken("the engine is gone")

    with pytest.raises(Broken):
        play(lambda task, base_url, api_key: ask(base_url, api_key, task.messages), Model(tokenizer, reply))


@pytest.mark.notices(
    "a program names as many metrics as it likes",
    "agents/endpoint.py",
    '    check_names("the program", name, given)\n',
    "",
)
@pytest.mark.parametrize("names", [["a\x1b[2J"], ["n" * 101], [""], [f"m{n}" for n in range(257)]])
@pytest.mark.parametrize("place", ["metrics", "reward"])
def test_names_of_metrics_are_few_short_and_visible(names, place):
    given = {"reward": 1.0} | {place: dict.fromkeys(names, 1.0)}
    with pytest.raises(ValueError, match="the program returned"):
        outcome_of(given, Choice())
