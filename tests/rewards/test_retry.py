"""reward.num_retries, with real workers: what fails is tried again, whatever scores it, and no more often than that."""

from __future__ import annotations

import textwrap

import pytest

from reward_server import RewardServer
from rlhf_suite.config.declarations.reward import HttpConfig, NamedSourceConfig, RewardConfig
from rlhf_suite.rewards import retry
from rlhf_suite.rewards.base import RewardFailure, Sample, Scored
from rlhf_suite.rewards.sources import Rewards

pytestmark = pytest.mark.stack

# A row with the label "flaky" misbehaves in its first three tries, each time in another way: the process that tries is
# gone each time, so the number of tries is in a file. The rows' batch and the row alone are tries of their own.
FLAKY = """
import os, pathlib, time
def reward_func(queries, prompts, labels):
    if "flaky" in labels:
        with open({count!r}, "a") as file:
            file.write(".")
        tries = os.path.getsize({count!r})
        if tries == 1:
            raise ConnectionError("the judge is busy")
        if tries == 2:
            os._exit(1)
        if tries == 3:
            time.sleep(1000)
    if "bad" in labels:
        raise ValueError("never")
    return [float(len(label)) for label in labels]
"""


def row(label: str, response: str = "r", datasource: str = "default") -> Sample:
    return Sample(query="q" + response, prompt="q", response=response, label=label, datasource=datasource)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def flaky_file(tmp_path):
    path = tmp_path / "flaky.py"
    path.write_text(textwrap.dedent(FLAKY.format(count=str(tmp_path / "tries"))))
    return str(path)


@pytest.fixture
def rewards(tmp_path):
    """A maker of open sources; they are closed in the end."""
    made = []

    def make(**config) -> Rewards:
        made.append(Rewards(RewardConfig.of("generate", timeout_s=6.0, **config), tmp_path / "reward.log"))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.notices(
    "rows that failed get the new outcomes of the first rows",
    "rewards/retry.py",
    "score([rows[i] for i in failed]), strict=True)",
    "score(rows), strict=False)",
)
def test_an_error_a_crash_and_a_hang_are_tried_again_until_there_is_a_score(rewards, flaky_file):
    flaky, other = rewards(remote_url=flaky_file, num_retries=4).score([row("flaky"), row("ab")])[0]
    assert (flaky, other) == (Scored(5, 5, retries=2), Scored(2, 2))  # the batch and the row alone were the first try


@pytest.mark.notices(
    "one retry less than asked for", "rewards/retry.py", "range(1, num_retries + 1)", "range(1, num_retries)"
)
def test_the_last_try_decides_and_no_row_is_tried_more_often_than_allowed(rewards, flaky_file):
    one = rewards(remote_url=flaky_file, num_retries=1)
    flaky, other = one.score([row("flaky"), row("ab")])[0]
    assert other == Scored(2, 2)
    assert isinstance(flaky, RewardFailure) and (flaky.kind, flaky.retries) == ("timeout", 1)
    assert "reward.timeout_s=6" in flaky.reason
    good, bad = one.score([row("ab"), row("bad")])[0]
    assert (good, bad) == (Scored(2, 2), RewardFailure("flaky.py:15: ValueError: never", "error", 1))


def test_without_retries_nothing_is_tried_again(rewards, flaky_file):
    (outcome,), _ = rewards(remote_url=flaky_file).score([row("flaky")])
    assert (outcome.kind, outcome.retries) == ("error", 0)


def test_waits_double_up_to_a_bound_and_differ():
    waits = [retry.wait_s(attempt) / 0.01 for attempt in (1, 2, 3, 4)]
    assert all(0.5 <= wait / 2**i <= 1 for i, wait in enumerate(waits))
    assert retry.wait_s(5000) <= retry.LONGEST_WAIT_S
    assert len({retry.wait_s(3) for _ in range(9)}) > 1


@pytest.mark.notices("a wait is not limited", "rewards/retry.py", "LONGEST_WAIT_S) * random", "10**9) * random")
def test_no_wait_is_longer_than_half_a_minute(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 1.0)
    waits = [retry.wait_s(attempt) for attempt in (5, 6, 7, 12, 500)]
    assert all(8 <= wait <= 16 for wait in waits[:1]) and all(15 <= wait <= 30 for wait in waits[1:])


@pytest.mark.notices(
    "a row's retries are those of its last source",
    "rewards/sources.py",
    "retries = sum(outcome.retries for _, outcome in parts)",
    "retries = parts[-1][1].retries if parts else 0",
)
def test_a_rule_and_servers_count_their_tries_too_and_a_row_those_of_all_its_sources(rewards):
    """The server says of its first two answers that it could not score; requests that fail are tried again anyway."""
    replies = [(200, {"rewards": [0], "errors": ["busy"]}), (503, b""), (200, {"rewards": [7]})]
    server = RewardServer(lambda body: replies.pop(0))
    sources = {
        "code": NamedSourceConfig(rule="code", datasets=["programs"]),
        "judge": NamedSourceConfig(remote_url=server.url, datasets=["chat"]),
        "length": NamedSourceConfig(rule="length", datasets=["chat"]),
    }
    both = rewards(sources=sources, num_retries=1, http=HttpConfig(num_retries=1))
    outcomes, metrics = both.score([row("no tests", datasource="programs"), row("x", datasource="chat")])
    server.close()
    assert len(server.seen) == 3
    assert isinstance(outcomes[0], RewardFailure) and outcomes[0].retries == 1
    assert isinstance(outcomes[1], Scored) and (outcomes[1].reward, outcomes[1].retries) == (8, 2)
    assert [metrics[f"reward/{name}/retries"] for name in sources] == [1, 2, 0]
    assert [metrics[f"reward/{name}/errors"] for name in sources] == [1, 0, 0]


@pytest.mark.parametrize(("asked", "wait"), [("0", 0), ("7", 7), ("86400", retry.LONGEST_WAIT_S)])
def test_a_server_may_say_how_long_to_wait(asked, wait):
    assert retry.wait_s(1, asked) == wait


@pytest.mark.parametrize("asked", ["Wed, 21 Oct 2026 07:28:00 GMT", "-1", "1e9", "", "\u0663"])
def test_a_header_without_a_number_of_seconds_changes_no_wait(asked, monkeypatch):
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 1.0)
    assert 0.5 <= retry.wait_s(1, asked) <= 1
