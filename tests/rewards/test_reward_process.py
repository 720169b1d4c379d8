"""Reward code may do what it likes: every row gets an outcome in time, and the next batch works."""

from __future__ import annotations

import os
import resource
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context

import pytest
from reward_rows import row

from clock import HOURS_S
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.errors import UserError
from rlhf_suite.rewards.base import RewardFailure, Scored
from rlhf_suite.rewards.child import MAX_LOG_BYTES
from rlhf_suite.rewards.reward_process import (
    IsolatedScorer,
    ParallelScorer,
)
from rlhf_suite.rewards.worker import limit_cpu, limit_memory
from rlhf_suite.sandbox import kernel

pytestmark = pytest.mark.stack


def test_a_rule_scores_in_several_processes_and_each_row_keeps_its_place(tmp_path):
    config = RewardConfig.of("generate", rule="exact_match", num_processes=3)
    with closing(ParallelScorer(config, tmp_path / "reward.log")) as scorer:
        assert scorer.score([row("a", "a")]) == [Scored(1, 1)] and len(scorer.scorers) == 1
        rows = [row("a", "a" if number % 7 else "b") for number in range(100)]
        assert [outcome.score for outcome in scorer.score(rows)] == [float(number % 7 > 0) for number in range(100)]
        assert len({one.process.popen.pid for one in scorer.scorers}) == 3


def test_a_flood_of_output_neither_blocks_nor_fills_the_log(rewarder, tmp_path, capfd):
    code = """
    def reward_func(queries, prompts, labels):
        print("spam " * 2_000_000)
        return [1.0] * len(labels)
    """
    scorer = rewarder(code)
    assert scorer.score([row("a"), row("b")]) == [Scored(1, 1)] * 2
    scorer.close()
    logged = (tmp_path / "reward.log").read_text()
    assert len(logged) < MAX_LOG_BYTES + 1000 and "spam" in logged and "dropped" in logged
    assert capfd.readouterr() == ("", "")


@pytest.mark.notices(
    "reward code that prints hangs when the disk of its log is full",
    "rewards/child.py",
    "with contextlib.suppress(OSError), log.open",
    "with log.open",
)
def test_reward_code_that_prints_goes_on_when_the_disk_of_its_log_is_full(rewarder, tmp_path):
    (tmp_path / "reward.log").symlink_to("/dev/full")
    code = """
    def reward_func(queries, prompts, labels):
        print("spam " * 200_000)
        return [1.0] * len(labels)
    """
    assert rewarder(code).score([row("a"), row("b")]) == [Scored(1, 1)] * 2


def lowered_limits() -> list[tuple[int, int]]:
    """Return the limits that a process of rewards gives itself where those of its user are lower. To be called in a
    process of its own."""
    resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
    kernel.drop_capabilities()  # that of root to raise limits
    limit_memory(False)
    limit_cpu(10_000.0)
    kernel.limit(resource.RLIMIT_NOFILE, 64, 64)
    return [*map(resource.getrlimit, (resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_NOFILE))]


@pytest.mark.notices(
    "a limit of memory or time of the user stops rewards and the jail",
    "sandbox/kernel.py",
    "min(value, most) if most != resource.RLIM_INFINITY else value",
    "value",
)
def test_limits_of_the_user_that_are_lower_hold():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        limits = process.submit(lowered_limits).result(HOURS_S)
    assert limits == [(1000, 1000), (1 << 30, 1 << 30), (64, 64)]


def test_what_reward_code_prints_does_not_act_when_the_log_is_shown(rewarder, tmp_path):
    code = """
    import sys

    def reward_func(queries, prompts, labels):
        sys.stdout.buffer.write("\\x1b[2J数\\udcff\\n".encode(errors="surrogatepass"))
        sys.stdout.flush()
        return [1.0] * len(labels)
    """
    scorer = rewarder(code)
    assert scorer.score([row("a")]) == [Scored(1, 1)]
    scorer.close()
    assert (tmp_path / "reward.log").read_text() == "\\x1b[2J数\ufffd\ufffd\ufffd\n"


@pytest.mark.notices(
    "a file is called row by row",
    "rewards/reward_process.py",
    "if self.takes_batches and len(rows) > 1:",
    "if self.takes_batches and len(rows) > 100:",
)
def test_the_process_is_started_once_and_gets_the_whole_batch(rewarder):
    code = """
    import os
    async def reward_func(queries, prompts, labels):
        return {"rewards": [os.getpid()] * len(labels), "scores": [len(labels)] * len(labels)}
    """
    scorer = rewarder(code)
    first, second = scorer.score([row("a"), row("b"), row("c")]), scorer.score([row("a"), row("b")])
    assert [outcome.score for outcome in first + second] == [3, 3, 3, 2, 2]
    assert len({outcome.reward for outcome in first + second}) == 1 and first[0].reward != os.getpid()
    assert scorer.score([]) == []


@pytest.mark.notices(
    "each call of an async reward function has a new event loop",
    "rewards/file.py",
    "result = loop.run(wait_for(result))",
    "result = asyncio.run(wait_for(result))",
)
def test_async_functions_keep_clients_and_locks_from_call_to_call(rewarder):
    """What asyncio makes belongs to the event loop of its first wait: in another loop, it raises an error."""
    code = """
    import asyncio
    lock, queue, calls = asyncio.Lock(), asyncio.Queue(), []

    async def serve():
        while True:
            number, answer = await queue.get()
            answer.set_result(number)

    async def one(number):
        async with lock:
            answer = asyncio.get_running_loop().create_future()
            await queue.put((number, answer))
            return await answer

    server = None

    async def reward_func(queries, prompts, labels):
        global server
        server = server or asyncio.create_task(serve())
        calls.append(asyncio.get_running_loop())
        found = await asyncio.gather(*(one(float(label)) for label in labels))
        return {"rewards": found, "scores": [len(labels) + len(set(calls)) / 10] * len(labels)}
    """
    scorer = rewarder(code)
    for _ in range(3):
        assert scorer.score([row("1"), row("2"), row("3")]) == [Scored(n, 3.1) for n in (1, 2, 3)]


def test_what_a_failed_batch_started_does_not_go_on_beside_its_rows(rewarder):
    code = """
    import asyncio
    open_calls = 0

    async def one(label):
        global open_calls
        open_calls += 1
        try:
            if label == "bad":
                raise ValueError("bad")
            if label == "last":
                return float(open_calls)
            await asyncio.sleep(0.01)
            return 1.0
        finally:
            open_calls -= 1

    async def reward_func(queries, prompts, labels):
        return await asyncio.gather(*map(one, labels))
    """
    outcomes = rewarder(code).score([row("a"), row("b"), row("bad"), row("last")])
    assert [getattr(outcome, "reward", None) for outcome in outcomes] == [1, 1, None, 1]


def test_queries_prompts_and_labels_arrive_as_they_are(rewarder):
    code = """
    def reward_func(queries, prompts, labels):
        return [q == "q<|x|>\\n\\u00e9\\ud800" and p == "q" and l == "5" for q, p, l in zip(queries, prompts, labels)]
    """
    assert rewarder(code).score([row("5", "<|x|>\n\u00e9\ud800"), row("5", "other")]) == [Scored(1, 1), Scored(0, 0)]


def test_a_file_may_import_its_neighbours(rewarder, tmp_path):
    (tmp_path / "reward_helpers.py").write_text("BONUS = 7\n")
    code = """
    from reward_helpers import BONUS
    def reward_func(queries, prompts, labels):
        return [BONUS for _ in labels]
    """
    assert rewarder(code).score([row("a")]) == [Scored(7, 7)]


def test_a_wrong_result_is_not_papered_over_row_by_row(rewarder):
    code = """
    def reward_func(queries, prompts, labels):
        return [1.0]
    """
    assert (
        rewarder(code).score([row("a"), row("b")])
        == [RewardFailure("reward_func returned 1 rewards for 2 responses", "error")] * 2
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("x = 1", r"defines no reward_func\(queries, prompts, labels\)"),
        ("import no_such_module_at_all", "ModuleNotFoundError"),
        ("def reward_func(:", "SyntaxError"),
        ("raise SystemExit(1)", "SystemExit"),
        ("import os; os.abort()", "SIGABRT"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_a_user_error_at_once(rewarder, code, reason):
    with pytest.raises(UserError, match=rf"reward\.remote_url=.*rewards0\.py cannot be used: .*{reason}"):
        rewarder(code)


def test_a_missing_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"reward\.remote_url=.*no such file"):
        IsolatedScorer(RewardConfig.of("generate", remote_url=str(tmp_path / "none.py")), tmp_path / "reward.log")


@pytest.mark.parametrize("rule", ["exact_match", "math"])
def test_rules_run_in_the_process_too(rewarder, rule):
    outcomes = rewarder(rule=rule).score([row("12", "12"), row("12", "21")])
    assert [(outcome.reward, outcome.score) for outcome in outcomes] == [(1, 1), (0, 0)]


# Rules of a user that declare what the suite's own do: a response may keep them busy, asleep, or end their process.
OWN_RULE = """
import os, signal, time
from rlhf_suite.registry import reward_rule

@reward_rule(needs=("time_limit",))
def rule(row, config):
    if row.label == "bad":
        exec(row.response)
    return len(row.label)
"""


@pytest.mark.notices(
    "a response that computes for too long is not counted",
    "rewards/reward_process.py",
    "{TIMED_OUT: 1.0} if isinstance(outcome, TimedOut) else",
    "{TIMED_OUT: 0.0} if isinstance(outcome, TimedOut) else",
    cases="pass",
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("misdeed", "metrics"),
    [
        ("while True: pass", {"timed_out": 1.0}),
        ("10 ** 10 ** 10", {"timed_out": 1.0}),
        ("time.sleep(1000)", {"timed_out": 1.0}),
        ("os.abort()", {"timed_out": 0.0, "unreadable": 1.0}),
        ("os._exit(0)", {"timed_out": 0.0, "unreadable": 1.0}),
        ("os._exit(3)", {"timed_out": 0.0, "unreadable": 1.0}),
    ],
)
def test_a_response_at_which_a_rule_does_not_end_is_wrong_and_counted(tmp_path, misdeed, metrics):
    (tmp_path / "own.py").write_text(OWN_RULE)
    config = RewardConfig.of("generate", rule=f"{tmp_path}/own.py:rule", timeout_s=15.0, num_processes=1)
    with closing(ParallelScorer(config, tmp_path / "reward.log")) as scorer:
        rows = [row("bad", misdeed), row("abc"), row("bad", misdeed), row("ab")]
        assert scorer.score(rows) == [
            Scored(0, 0, metrics),
            Scored(3, 3, {"timed_out": 0.0}),
            Scored(0, 0, metrics),
            Scored(2, 2, {"timed_out": 0.0}),
        ]
    assert misdeed in (tmp_path / "reward.log").read_text()


def test_a_copy_of_a_rules_process_that_is_killed_from_outside_is_no_verdict(tmp_path):
    (tmp_path / "own.py").write_text(OWN_RULE)
    config = RewardConfig.of("generate", rule=f"{tmp_path}/own.py:rule", timeout_s=60.0)
    with closing(IsolatedScorer(config, tmp_path / "reward.log")) as scorer:
        (outcome,) = scorer.score([row("bad", "os.kill(os.getpid(), signal.SIGKILL)")])
    assert isinstance(outcome, RewardFailure) and "SIGKILL" in outcome.reason


@pytest.mark.timeout(300)
def test_math_that_hangs_is_wrong_alone(rewarder):
    """The expression of huggingface/Math-Verify issue 65, which math-verify's own time limit does not interrupt."""
    hang = r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}"
    bad, good = rewarder(rule="math", timeout_s=60.0).score([row("5", hang), row("5", r"\boxed{5}")])
    assert bad.reward == 0 and good.reward == 1
