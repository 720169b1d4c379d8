"""Rewards over HTTP: what is asked, what is accepted, and what is done about servers that fail."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from reward_server import RewardServer
from rlhf_suite.config.declarations.reward import HttpConfig
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.polling import poll_until
from rlhf_suite.rewards import remote, retry
from rlhf_suite.rewards.base import Choice, RewardFailure, Sample, Scored
from rlhf_suite.rewards.remote import RemoteReward, Server, Servers

DEAD = "http://127.0.0.1:9/get_reward"  # nobody listens at the discard port


def row(label: str, response: str = "r") -> Sample:
    return Sample(query="q" + response, prompt="q", response=response, label=label, datasource="default")


def bomb(text: bytes) -> bytes:
    """`text` over and over, 64 MiB of it, of which compression leaves a thousandth."""
    return gzip.compress(text * ((64 << 20) // len(text)), 1)


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
    last = threading.Event()

    def answer(body):
        if body["labels"][0] == "a":  # the first request is answered last
            assert last.wait(60)
        elif body["labels"][0] == "eeeee":
            last.set()
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


def test_further_columns_go_with_each_request(serve):
    server = serve(lambda body: (200, {"rewards": body["columns"]["n"]}))
    rows = [replace(row("x"), columns={"n": n, "tests": [{"é": None}]}) for n in (1, 2, 3)]
    assert RemoteReward([server.url], HttpConfig(batch_size=2)).score(rows) == [Scored(n, n) for n in (1, 2, 3)]
    assert sorted(body["columns"]["n"] for body in server.seen) == [[1, 2], [3]]
    assert server.seen[0]["columns"]["tests"][0] == [{"é": None}]
    plain = serve(lengths)
    RemoteReward([plain.url], HttpConfig()).score([row("a")])
    assert plain.seen[0].keys() == {"query", "prompts", "labels"}


@pytest.mark.notices(
    "all requests go to the first server",
    "rewards/remote.py",
    "(self.all.index(chosen) + 1) % len(self.all)",
    "self.all.index(chosen)",
)
def test_no_more_requests_are_under_way_than_allowed_and_servers_take_turns(serve):
    def slow(body):
        time.sleep(0.05)
        return lengths(body)

    first, second = serve(slow), serve(slow)
    reward = RemoteReward([first.url, second.url], HttpConfig(batch_size=1, concurrency=2))
    assert reward.score([row("a")] * 8) == [Scored(1, 1)] * 8
    assert len(first.seen) == len(second.seen) == 4
    assert first.most_under_way + second.most_under_way <= 3  # 2 at any moment


@pytest.mark.notices("the token is sent without its scheme", "rewards/http_body.py", 'f"Bearer {token}"', "token")
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
        ((200, b'{"rewards": [1' + b"0" * 400 + b", 1]}"), "a number of 401 digits"),
        ((200, b"[" * 100_000), "nested too deeply"),
        (
            (200, b'{"rewards": [1, 2], "extra_logs": {"a\\u001b": 1}}'),
            "expected a name of 1 to 100 visible",
        ),
        ((200, {"rewards": [1, 2], "extra_logs": {str(n): 1 for n in range(257)}}), "257 names in extra_logs"),
        ((200, b" " * (2 << 20)), "more than 1.12 MiB"),
        ((200, partial(bomb, b" "), "gzip"), "more than 1.12 MiB"),
        ((200, b"not gzip", "gzip"), "cannot be decompressed"),
        ((200, b"anything", "br"), "a Content-Encoding other than"),
        ((422, partial(bomb, b"no"), "gzip"), "HTTP 422: nonono"),
        ((200, b"\xff\xfe\x00"), "not JSON"),
    ],
)
def test_an_answer_that_will_not_get_better_fails_its_rows_at_once_and_names_the_server(serve, reply, reason):
    status, content, *encoding = reply
    content = content() if callable(content) else content
    server = serve(lambda body: (status, content, *encoding))
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


def test_numbers_that_no_float_holds_and_values_of_other_kinds_fail_their_row_alone(serve):
    deep = b"[" * 500 + b"]" * 500
    values = [
        b"1" + b"0" * 315,
        b"-1e999",
        deep,
        b"{}",
        b"null",
        b'"' + b"x" * 5000 + b'"',
        b'"\\ud800\\u001b[2J"',
        b"2",
    ]
    server = serve(lambda body: (200, b'{"rewards": [' + b", ".join(values) + b"]}"))
    *bad, good = RemoteReward([server.url], HttpConfig()).score([row("a")] * len(values))
    assert good == Scored(2, 2)
    assert [outcome.reason for outcome in bad] == [
        "reward is too large for a floating-point number",
        "reward is -inf",
        "reward is of type list, not a number",
        "reward has no named part",
        "reward is null, not a number",
        f"reward is '{'x' * 200}... (5000 characters)', not a number",
        r"reward is '\ud800\x1b[2J', not a number",
    ]


def test_a_server_may_answer_with_named_parts_and_with_one_number_for_every_row(serve):
    answer = {"rewards": {"answer": [1, 0], "format": 0.25}, "extra_logs": {"mean": 0.5}}
    server = serve(lambda body: (200, answer))
    outcomes = RemoteReward([server.url], HttpConfig()).score([row("a"), row("b")])
    assert outcomes == [
        Scored(1.25, 1.25, {"mean": 0.5, "answer": 1, "format": 0.25}),
        Scored(0.25, 0.25, {"mean": 0.5, "answer": 0, "format": 0.25}),
    ]
    chosen = RemoteReward([server.url], HttpConfig(), Choice("answer")).score([row("a"), row("b")])
    assert [(each.reward, each.score) for each in chosen] == [(1, 1), (0, 0)]


def test_an_answer_that_comes_byte_by_byte_ends_at_the_deadline():
    with Trickle(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" ") as url:
        config = HttpConfig(timeout_s=0.5, num_retries=0)
        (outcome,) = RemoteReward([url], config).score([row("a")])
    assert isinstance(outcome, RewardFailure) and outcome.kind == "timeout"


def test_an_endless_line_of_headers_fails_the_row():
    with Trickle(b"HTTP/1.1 200 OK\r\nX: ", b"x" * 65536) as url:
        (outcome,) = RemoteReward([url], HttpConfig(timeout_s=20, num_retries=0)).score([row("a")])
    assert isinstance(outcome, RewardFailure) and len(outcome.reason) < 2000


class Trickle:
    """A server that answers with `begin` and then `more` for ever."""

    def __init__(self, begin, more):
        self.begin, self.more, self.is_over = begin, more, threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))

    def __enter__(self):
        threading.Thread(target=self.serve, daemon=True).start()
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}/"

    def serve(self):
        with self.listener.accept()[0] as line, contextlib.suppress(OSError):
            line.recv(1 << 16)
            line.sendall(self.begin)
            while not self.is_over.wait(0.01):
                line.sendall(self.more)

    def __exit__(self, *args):
        self.is_over.set()
        self.listener.close()


def test_what_a_server_says_reaches_the_reason_without_control_characters_and_bounded(serve):
    answers = [(500, b"\x1b[2Jowned"), (200, {"rewards": [None], "errors": ["\x1b]0;" + "x" * 3_000_000]})]
    server = serve(lambda body: answers[0])
    outcome = RemoteReward([server.url], HttpConfig(num_retries=0)).score([row("a")])[0]
    assert outcome.reason == f"{server.url}: HTTP 500: \\x1b[2Jowned"
    answers[0] = (200, {"rewards": [None], "errors": ["\x1b]0;" + "x" * 300_000]})
    outcome = RemoteReward([server.url], HttpConfig(num_retries=0)).score([row("a")])[0]
    assert outcome.reason.startswith(f"{server.url}: \\x1b]0;xxx") and outcome.reason.endswith("(300004 characters)")
    assert len(outcome.reason) < 1200


@pytest.mark.parametrize("token", ["s3cret\n", " s3cret", "s3\ncret", "s3crét"], ids=range(4))
def test_a_token_that_no_header_can_hold_is_a_mistake_that_does_not_quote_it(serve, monkeypatch, token):
    monkeypatch.setenv("RLHF_SUITE_REWARD_TOKEN", token)
    server = serve(lengths)
    with pytest.raises(UserError, match=r"^RLHF_SUITE_REWARD_TOKEN is a token with a line end") as raised:
        RemoteReward([server.url], HttpConfig(num_retries=0)).score([row("a")])
    assert "s3" not in str(raised.value) and not server.seen


@pytest.mark.notices(
    "a request is tried once less than asked for",
    "rewards/remote.py",
    "range(config.num_retries + 1)",
    "range(config.num_retries)",
)
def test_no_answer_in_time_is_a_timeout(serve):
    free = threading.Event()
    server = serve(lambda body: (free.wait(60), lengths(body))[1])
    config = HttpConfig(timeout_s=2.0, num_retries=1)
    (outcome,) = RemoteReward([server.url], config).score([row("a")])
    free.set()
    assert isinstance(outcome, RewardFailure) and (outcome.kind, outcome.retries) == ("timeout", 1)
    assert "no answer within 2 s (reward.http.timeout_s)" in outcome.reason
    assert poll_until(lambda: len(server.seen) == 2, 300)  # it may be later than the client


@pytest.mark.notices(
    "a server is left out one failure too late",
    "rewards/remote.py",
    "self.failures >= FAILURES_IN_A_ROW",
    "self.failures > FAILURES_IN_A_ROW",
)
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


@pytest.mark.notices(
    "rows wait for a server that is down, one after the other",
    "rewards/remote.py",
    "    outage.check()\n",
    "",
)
@pytest.mark.notices(
    "a reward server that is down ends a run that drops rows without a score",
    "rewards/remote.py",
    "            if not self.drops:\n",
    "            if True:\n",
)
def test_a_server_that_dies_costs_a_run_that_drops_rows_only_those_without_a_score(serve):
    """Its process ends while it answers: connections are refused from then on."""

    def answer(body):
        if len(server.seen) == 3:
            server.close()
        return lengths(body)

    server = serve(answer)
    reward = RemoteReward([server.url], HttpConfig(batch_size=1, concurrency=1, num_retries=3), drops=True)
    outcomes = reward.score([row("a" * number) for number in range(1, 11)])
    assert [outcome.reward for outcome in outcomes[:3]] == [1, 2, 3]
    for outcome in outcomes[3:]:
        assert isinstance(outcome, RewardFailure) and outcome.reason.startswith("no server of reward.remote_url")
    assert reward.servers.all[0].failures == 4  # tries of the fourth row: the others are not waited for
    with pytest.raises(RunError, match=r"no server of reward\.remote_url answers"):
        RemoteReward([server.url], HttpConfig(num_retries=2)).score([row("a")])


def test_a_server_that_is_back_is_asked_again_and_one_that_fails_again_stays_out_longer():
    servers = Servers(["a", "b"])
    first, second = servers.all
    began = time.monotonic()
    for _ in range(remote.FAILURES_IN_A_ROW):
        first.fails("gone")
    assert began + remote.FIRST_BREAK_S <= first.out_until <= time.monotonic() + remote.FIRST_BREAK_S
    assert [servers.next().url for _ in range(3)] == ["b", "b", "b"]
    first.out_until = 0.0  # the break is over
    assert {servers.next().url, servers.next().url} == {"a", "b"}
    first.fails("gone still")
    assert first.out_until > began + 1.5 * remote.FIRST_BREAK_S
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
    assert server.out_until <= time.monotonic() + remote.LONGEST_BREAK_S


@pytest.mark.notices(
    "a server that asks to be left alone for a moment is given up", "rewards/remote.py", "{408, 425, 429,", "{408, 425,"
)
@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_server_that_may_recover_is_asked_again(serve, status):
    answers = [(status, b"later"), (200, {"rewards": [7]})]
    server = serve(lambda body: answers.pop(0))
    assert RemoteReward([server.url], HttpConfig(num_retries=1)).score([row("a")]) == [Scored(7, 7, retries=1)]


@pytest.mark.notices(
    "failures of a server add up over the whole run",
    "rewards/remote.py",
    "def works(self) -> None:\n        self.failures = 0",
    "def works(self) -> None:\n        pass",
)
def test_failures_with_a_success_between_them_leave_no_server_out():
    server = Server("a")
    for _ in range(3 * remote.FAILURES_IN_A_ROW):
        for _ in range(remote.FAILURES_IN_A_ROW - 1):
            server.fails("busy")
        server.works()
    server.fails("busy")
    assert not server.is_out


@pytest.mark.notices(
    "a server is left out for ever",
    "rewards/remote.py",
    "return time.monotonic() < self.out_until",
    "return self.out_until > 0",
)
def test_a_server_is_left_out_until_its_break_is_over():
    server = Server("a")
    for _ in range(remote.FAILURES_IN_A_ROW):
        server.fails("gone")
    assert server.is_out
    server.out_until = time.monotonic() - 0.001
    assert not server.is_out
