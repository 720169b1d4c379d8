"""Rewards over HTTP: what is asked, what is accepted, and what is done about servers that fail."""

from __future__ import annotations

import threading
import time

import pytest

from reward_server import RewardServer
from rlhf_suite.config.reward import HttpConfig
from rlhf_suite.errors import RunError
from rlhf_suite.rewards import remote, retry
from rlhf_suite.rewards.base import RewardFailure, RewardRow, Scored
from rlhf_suite.rewards.remote import RemoteReward, Server, Servers

DEAD = "http://127.0.0.1:9/get_reward"  # nobody listens at the discard port


def row(label: str, response: str = "r") -> RewardRow:
    return RewardRow(query="q" + response, prompt="q", response=response, label=label, datasource="default")


def lengths(body):
    return 200, {"rewards": [len(label) for label in body["labels"]]}


@pytest.fixture
def serve(monkeypatch):
    """A maker of servers; waits between tries are short."""
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.01)
    made = []

    def start(answer) -> RewardServer:
        made.append(RewardServer(answer))
        return made[-1]

    yield start
    for server in made:
        server.close()


def test_a_request_has_queries_prompts_and_labels_and_the_answers_come_back_in_order(serve):
    def answer(body):
        time.sleep(0.2 if body["labels"][0] == "a" else 0)  # the first request is answered last
        rewards = [float(len(label)) for label in body["labels"]]
        return 200, {"rewards": rewards, "scores": [1] * len(rewards), "extra_logs": {"n": rewards}}

    server = serve(answer)
    labels = ["a", "bb", "ccc", "dddd", "eeeee"]
    rows = [row(label, "\u00e9\ud800") for label in labels]
    outcomes = RemoteReward([server.url], HttpConfig(batch_size=2)).score(rows)
    assert outcomes == [Scored(n, 1, {"n": n}) for n in (1, 2, 3, 4, 5)]
    assert sorted(body["labels"] for body in server.seen) == [["a", "bb"], ["ccc", "dddd"], ["eeeee"]]
    assert server.seen[0]["prompts"] == ["q"] * len(server.seen[0]["labels"])
    assert server.seen[0]["query"][0] == "q\u00e9\ud800"
    assert server.tokens == [None] * 3


def test_no_more_requests_are_under_way_than_allowed_and_servers_take_turns(serve):
    def slow(body):
        time.sleep(0.05)
        return lengths(body)

    first, second = serve(slow), serve(slow)
    reward = RemoteReward([first.url, second.url], HttpConfig(batch_size=1, concurrency=2))
    assert reward.score([row("a")] * 8) == [Scored(1, 1)] * 8
    assert len(first.seen) == len(second.seen) == 4
    assert first.most_under_way + second.most_under_way <= 3  # 2 at any moment


def test_the_token_of_the_environment_is_sent_and_a_refused_one_ends_the_run(serve, monkeypatch):
    monkeypatch.setenv("RLHF_SUITE_REWARD_TOKEN", "s3cret")
    server = serve(lambda body: lengths(body) if server.tokens[-1] == "Bearer s3cret" else (401, {}))
    reward = RemoteReward([server.url], HttpConfig())
    assert reward.score([row("a")]) == [Scored(1, 1)]
    monkeypatch.setenv("RLHF_SUITE_REWARD_TOKEN", "other")
    with pytest.raises(RunError, match=r"HTTP 401.*RLHF_SUITE_REWARD_TOKEN") as raised:
        reward.score([row("a")])
    assert "other" not in str(raised.value)


def test_a_failure_that_passes_is_tried_again(serve):
    answers = [(503, b"busy"), (200, {"rewards": [7]})]
    server = serve(lambda body: answers.pop(0))
    assert RemoteReward([server.url], HttpConfig()).score([row("a")]) == [Scored(7, 7, retries=1)]
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((422, b"no such field"), "HTTP 422: no such field"),
        ((200, b"<html>"), "not JSON: '<html>'"),
        ((200, {"score": [1, 2]}), "without 'rewards'"),
        ((200, {"rewards": [1]}), "1 rewards for 2 responses"),
        ((200, {"rewards": [1, 2], "extra_logs": [3]}), "extra_logs as list"),
        ((200, 5), "rewards as int"),
    ],
)
def test_an_answer_that_will_not_get_better_fails_its_rows_at_once_and_names_the_server(serve, reply, reason):
    server = serve(lambda body: reply)
    outcomes = RemoteReward([server.url], HttpConfig()).score([row("a"), row("b")])
    assert len(outcomes) == 2 and len(server.seen) == 1
    for outcome in outcomes:
        assert isinstance(outcome, RewardFailure) and outcome.kind == "error"
        assert reason in outcome.reason and server.url in outcome.reason


def test_a_number_that_is_none_fails_its_row_alone(serve):
    server = serve(lambda body: (200, b'{"rewards": [NaN, 1.5, "x"]}'))
    bad, good, text = RemoteReward([server.url], HttpConfig()).score([row("a")] * 3)
    assert bad == RewardFailure("reward is nan", "error")
    assert good == Scored(1.5, 1.5)
    assert text == RewardFailure("reward is 'x', not a number", "error")


def test_no_answer_in_time_is_a_timeout(serve):
    free = threading.Event()
    server = serve(lambda body: (free.wait(10), lengths(body))[1])
    config = HttpConfig(timeout_s=0.2, num_retries=1)
    (outcome,) = RemoteReward([server.url], config).score([row("a")])
    free.set()
    assert isinstance(outcome, RewardFailure) and (outcome.kind, outcome.retries) == ("timeout", 1)
    assert "no answer within 0.2 s (reward.http.timeout_s)" in outcome.reason
    assert len(server.seen) == 2


def test_another_server_takes_over_from_a_dead_one_which_is_then_left_out(serve):
    server = serve(lengths)
    reward = RemoteReward([DEAD, server.url], HttpConfig(batch_size=1, concurrency=1))
    outcomes = reward.score([row("a")] * 8)
    assert [outcome.reward for outcome in outcomes] == [1] * 8
    assert sum(outcome.retries for outcome in outcomes) == remote.FAILURES_IN_A_ROW
    dead = reward.servers.all[0]
    assert dead.failures == remote.FAILURES_IN_A_ROW and dead.is_out


def test_when_no_server_is_left_the_run_ends_with_their_names_and_last_errors(serve):
    broken = serve(lambda body: (500, b"out of memory"))
    reward = RemoteReward([DEAD, broken.url], HttpConfig(num_retries=6))
    with pytest.raises(RunError) as raised:
        reward.score([row("a"), row("b")])
    for part in (DEAD, broken.url, "HTTP 500: out of memory", "reward.remote_url"):
        assert part in str(raised.value)


def test_a_server_that_is_back_is_asked_again_and_one_that_fails_again_stays_out_longer():
    servers = Servers(["a", "b"])
    first, second = servers.all
    for _ in range(remote.FAILURES_IN_A_ROW):
        first.fails("gone")
    assert [servers.next().url for _ in range(3)] == ["b", "b", "b"]
    assert remote.FIRST_BREAK_S - 1 < first.out_until - time.monotonic() <= remote.FIRST_BREAK_S
    first.out_until = 0.0  # the break is over
    assert {servers.next().url, servers.next().url} == {"a", "b"}
    first.fails("gone still")
    assert first.out_until - time.monotonic() > remote.FIRST_BREAK_S
    for _ in range(remote.FAILURES_IN_A_ROW + 5):
        second.fails("gone too")
    assert servers.next() is first  # due back first
    first.works()
    assert not first.is_out
    servers.check()


def test_breaks_do_not_grow_without_end():
    server = Server("a")
    for _ in range(2000):
        server.fails("gone")
    assert server.out_until - time.monotonic() <= remote.LONGEST_BREAK_S
