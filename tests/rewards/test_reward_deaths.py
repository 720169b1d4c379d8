"""Reward code that crashes, hangs or is killed costs the rows that it breaks, and outlives nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from reward_rows import row

from rlhf_suite.background import in_background
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.errors import RunError
from rlhf_suite.polling import poll_until
from rlhf_suite.rewards.base import RewardFailure, Scored
from rlhf_suite.rewards.reward_process import (
    NotStarted,
    RowLimit,
    TimedOut,
    Work,
    row_limit,
)

pytestmark = pytest.mark.stack


# A file whose rows with the label "bad" misbehave in the way of `{misdeed}`; the others get the length of their label.
TEMPLATE = """
import os, sys, time, signal
def reward_func(queries, prompts, labels):
    for label in labels:
        if label == "bad":
            {misdeed}
    return [float(len(label)) for label in labels]
"""
MISDEEDS = {
    "raise KeyError('x')": ("error", r"rewards0.py:6: KeyError: 'x'"),
    "sys.exit(3)": ("error", "SystemExit: 3"),
    "os._exit(3)": ("error", r"died \(exit code 3\)"),
    "os.kill(os.getpid(), signal.SIGSEGV)": ("error", r"died \(SIGSEGV\)"),
    "print('last words', flush=True); os.abort()": ("error", r"died \(SIGABRT\); it last said: last words"),
    "bytearray(os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') * 3 // 4)": ("error", "MemoryError"),
    "os.closerange(3, 4096)": ("error", "died|closed its connection"),
    "[os.write(fd, b'junk') for fd in range(3, 1000) if os.path.exists(f'/proc/self/fd/{fd}')]": (
        "error",
        "or wrote into it",
    ),
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_row_that_breaks_the_code_fails_alone_and_the_next_batch_works(rewarder, misdeed):
    kind, reason = MISDEEDS[misdeed]
    scorer = rewarder(TEMPLATE.replace("{misdeed}", misdeed))
    good, bad, other = scorer.score([row("a"), row("bad"), row("abcd")])
    assert good == Scored(1, 1) and other == Scored(4, 4)
    assert isinstance(bad, RewardFailure) and bad.kind == kind
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(bad.reason)
    assert scorer.score([row("ab"), row("abc")]) == [Scored(2, 2), Scored(3, 3)]


def test_a_process_that_is_killed_from_outside_is_started_again_for_the_same_rows(rewarder):
    """As the kernel does for want of memory: between two requests, then in the middle of one."""
    scorer = rewarder(rule="exact_match")
    scorer.process.popen.kill()
    scored = scorer.score([row("r"), row("other")])
    assert scored == [Scored(1, 1, retries=1), Scored(0, 0)]


def test_a_killed_batch_is_scored_as_a_whole_again(rewarder, tmp_path):
    mark = tmp_path / "killed"
    scorer = rewarder(f"""
        import os, signal
        def reward_func(queries, prompts, labels):
            if not os.path.exists({str(mark)!r}):
                open({str(mark)!r}, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return [float(len(labels)) for _ in labels]
    """)
    assert scorer.score([row("a"), row("b")]) == [Scored(2, 2, retries=1)] * 2


def test_rows_whose_process_is_killed_again_and_again_fail(rewarder):
    scorer = rewarder(TEMPLATE.replace("{misdeed}", "os.kill(os.getpid(), signal.SIGKILL)"))
    good, bad = scorer.score([row("a"), row("bad")])
    assert good == Scored(1, 1)
    assert isinstance(bad, RewardFailure)
    assert bad.reason == "the reward process died (SIGKILL), 4 times in a row"


@pytest.mark.notices(
    "the answer to a request that timed out is taken for that of the next",
    "rewards/reward_process.py",
    "except TimeoutError:\n            self._kill()",
    "except TimeoutError:\n            pass",
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("misdeed", ["while True: pass", "time.sleep(1000)", "9**9**9"])
def test_a_row_that_hangs_is_killed_in_time_and_fails_alone(rewarder, misdeed):
    scorer = rewarder(TEMPLATE.replace("{misdeed}", misdeed), timeout_s=6.0)
    good, bad, other = scorer.score([row("a"), row("bad"), row("abcd")])
    assert good == Scored(1, 1) and other == Scored(4, 4)
    assert isinstance(bad, RewardFailure) and bad.kind == "timeout" and "reward.timeout_s=6" in bad.reason
    assert scorer.score([row("ab")]) == [Scored(2, 2)]


@pytest.mark.timeout(300)
def test_when_every_row_hangs_the_batch_is_given_up(rewarder):
    scorer = rewarder(TEMPLATE.replace("{misdeed}", "time.sleep(1000)"), timeout_s=1.0)
    outcomes = scorer.score([row("bad")] * 60)
    assert [outcome.kind for outcome in outcomes] == ["timeout"] * 60
    reasons = [outcome.reason for outcome in outcomes]
    assert sum(reason.startswith("not scored: no row got a score within 2 seconds") for reason in reasons) > 30
    assert sum("this row alone had 0.033 of them" in reason for reason in reasons) >= 1


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_rows_that_hang_do_not_use_up_the_time_of_others(rewarder):
    """Nine rows of a twelfth of the time each and as many restarts, after a batch that took all of it."""
    scorer = rewarder(TEMPLATE.replace("{misdeed}", "time.sleep(1000)"), timeout_s=12.0)
    outcomes = scorer.score([row("bad")] * 9 + [row("ab")] * 3)
    assert [outcome.kind for outcome in outcomes[:9]] == ["timeout"] * 9
    assert outcomes[9:] == [Scored(2, 2)] * 3


@pytest.mark.notices(
    "a row that hangs is a failure again",
    "rewards/reward_process.py",
    "return RowLimit(CLOCK * cpu_s, cpu_s, is_wrong=True)",
    "return RowLimit(CLOCK * cpu_s, cpu_s)",
)
@pytest.mark.notices(
    "a row's limit shrinks with the number of rows without end",
    "rewards/reward_process.py",
    "min(max(count, 1), SHARE)",
    "max(count, 1)",
)
def test_the_limit_of_a_row_is_its_own_whatever_the_number_of_rows():
    own = RewardConfig.of("generate", remote_url="own.py", timeout_s=60.0)
    assert [row_limit(own, count).clock_s for count in (1, 2, 30, 1000)] == [60, 30, 2, 2]
    assert not row_limit(own, 1).is_wrong
    for rule in ("math", "reasoning_gym", "format"):
        limits = {row_limit(RewardConfig.of("generate", rule=rule, timeout_s=60.0), count) for count in (1, 30, 1000)}
        assert limits == {RowLimit(clock_s=10, cpu_s=2, is_wrong=True)}


@pytest.mark.notices(
    "a batch is given up although rows have scores",
    "rewards/reward_process.py",
    "self.problem is not None or self.works or self.lost_s",
    "self.problem is not None or self.lost_s",
)
def test_a_batch_is_given_up_only_while_no_row_has_a_score():
    """Rows that are slow but score take what they need; nothing is measured here, the seconds are said."""
    slow, dead = Work(90, 3.0), Work(90, 3.0)
    for _ in range(90):
        slow.count(Scored(1, 1), 1.0)
    assert slow.find_stop_reason() is None
    dead.count(TimedOut("", "timeout"), 3.0)
    assert dead.find_stop_reason() is None
    dead.count(TimedOut("", "timeout"), 0.1)
    assert dead.find_stop_reason().kind == "timeout"
    dead.count(Scored(1, 1), 0.1)
    assert dead.find_stop_reason() is None


@pytest.mark.notices(
    "rows beside each other are tried one after the other",
    "rewards/reward_process.py",
    "random.Random(count).shuffle(order)",
    "random.Random(count)",
)
def test_rows_beside_each_other_are_not_tried_one_after_the_other():
    order = [*Work(128, 60.0).order]
    assert sorted(order) == [*range(128)]
    assert any(index >= 48 for index in order[:8])


def test_a_process_that_does_not_start_again_is_not_tried_for_every_row():
    work = Work(3, 60.0)
    work.count(NotStarted("no module", "error"), 0.1)
    assert work.find_stop_reason().reason == "no module"


def test_close_kills_the_process_and_its_children(rewarder, tmp_path):
    code = """
    import subprocess
    child = subprocess.Popen(["sleep", "1000"])
    def reward_func(queries, prompts, labels):
        return [child.pid]
    """
    scorer = rewarder(code)
    (outcome,) = scorer.score([row("a")])
    scorer.close()
    assert ends(int(outcome.reward))


def test_reward_code_that_loops_does_not_outlive_a_killed_run(tmp_path):
    path, pid_file = tmp_path / "loop.py", tmp_path / "pid"
    path.write_text(
        "import os, pathlib\n"
        "def reward_func(queries, prompts, labels):\n"
        f"    pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()) + ' ')\n"
        "    while True: pass\n"
    )
    script = (
        "from pathlib import Path\n"
        "from rlhf_suite.config.declarations.reward import RewardConfig\n"
        "from rlhf_suite.rewards.base import Sample\n"
        "from rlhf_suite.rewards.reward_process import IsolatedScorer\n"
        f"config = RewardConfig.of('generate', remote_url={str(path)!r})\n"
        f"rewarder = IsolatedScorer(config, Path({str(tmp_path / 'log')!r}))\n"
        "rewarder.score([Sample('', '', '', '', '')])"
    )
    run = subprocess.Popen([sys.executable, "-c", script])
    try:
        assert poll_until(lambda: pid_file.exists() and pid_file.read_text().endswith(" "), 60)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert ends(int(pid_file.read_text()))


def test_cpu_time_is_limited_anew_for_each_request(rewarder):
    code = """
    import resource, time
    def reward_func(queries, prompts, labels):
        start = time.process_time()
        while time.process_time() < start + 0.6: pass
        return [resource.getrlimit(resource.RLIMIT_CPU)[0] for _ in labels]
    """
    scorer = rewarder(code, timeout_s=10.0)
    limits = [scorer.score([row("a")])[0].reward for _ in range(3)]
    assert 10 <= limits[0] <= 11 * (os.cpu_count() or 1) + 10
    assert limits[-1] > limits[0]


def ends(pid: int) -> bool:
    """Return whether the process ends within a few minutes."""
    return poll_until(lambda: not is_alive(pid), 300)


def is_alive(pid: int) -> bool:
    """Running, not a zombie that waits for an init process to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# It tells its process, and never returns.
HANGS = """
import os, time
from pathlib import Path
def reward_func(queries, prompts, labels):
    with Path(labels[0]).open("a") as told:
        told.write(f"{os.getpid()}\\n")
    time.sleep(1000)
"""


@pytest.mark.notices(
    "a reward is started again after the end",
    "rewards/reward_process.py",
    "        self.is_closed = True\n        self._kill()\n",
    "        self._kill()\n",
)
def test_a_call_that_hangs_ends_when_the_rewards_are_closed_and_nothing_is_started_again(rewarder, tmp_path):
    one, told = rewarder(HANGS, timeout_s=600.0), tmp_path / "told"
    call = in_background("a call", lambda: one.score([row(str(told)), row(str(told))]))
    assert poll_until(lambda: told.exists() and told.read_text().endswith("\n"), 60)
    one.close()
    with pytest.raises(RunError, match="the run has ended"):
        call.result(60)
    with pytest.raises(RunError, match="the run has ended"):
        one.score([row("again")])
    (pid,) = told.read_text().split()
    assert not Path(f"/proc/{pid}").exists()
