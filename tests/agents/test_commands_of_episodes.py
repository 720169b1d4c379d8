"""Commands that play episodes (agent.command): each way in which one can end, and what is left of it."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from endpoint_episodes import Model, echo, trained

import rlhf_suite
from clock import HOURS_S
from rlhf_suite.agents.base import Task
from rlhf_suite.agents.command import HALF_BYTES, MARK, Command, Kept, ProgramFailure
from rlhf_suite.polling import poll_until
from rlhf_suite.rewards.base import RewardFailure, Scored

pytestmark = pytest.mark.stack
ASK = """
import json, os, sys, urllib.request
def ask(url, body, head):
    head = {"content-type": "application/json", **head}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)))
said = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": sys.stdin.read()}]}
key = {"x-api-key": os.environ["ANTHROPIC_API_KEY"]}
answer = ask(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", said, key)["content"][0]["text"]
"""


def python(code: str) -> str:
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"


def alive(mark: str) -> list[str]:
    """Return the processes that a command has started and that still run."""
    entry, found = f"{MARK}={mark}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
        except OSError:
            continue
    return found


@pytest.fixture
def run_command(play, tokenizer, tmp_path):
    """Play an episode of a command; return its outcome, why it ended, its log, and what it used of the model."""

    def run(command, score=None, memory_mb=1024, **limits):
        policy = Model(tokenizer, echo)
        episode, ledgers = play(Command(command, memory_mb, score, tmp_path / "programs"), policy, **limits)
        log = max((tmp_path / "programs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        assert alive(log.stem) == [], "nothing that a command has started lives on"
        assert trained(ledgers) == sorted(policy.written)
        return episode.outcome, episode.ending, log.read_text(), policy

    return run


def test_a_command_finds_its_task_and_its_episode_and_leaves_files_that_another_scores(run_command, tokenizer):
    """The clients' own variables and ours name the same session, and the label is only in the environment of the one
    that scores."""
    code = ASK + (
        'assert os.environ["OPENAI_BASE_URL"] == os.environ["AGENT_URL"] + "/v1"\n'
        'assert os.environ["AGENT_PROMPT"] == open(os.environ["AGENT_PROMPT_FILE"]).read() == "begin"\n'
        'task = json.load(open(os.environ["AGENT_TASK"])); assert task["messages"][0]["content"] == "begin"\n'
        'assert "label" not in task and "AGENT_LABEL" not in os.environ and os.listdir() == []\n'
        'assert os.path.expanduser("~") != os.getcwd()\n'
        'open("answer.txt", "w").write(answer); print("written", os.environ["AGENT_KEY"])\n'
    )
    score = (
        'test "$(cat answer.txt)" = "answer 1" && test -z "$AGENT_KEY" && echo \'{"reward": 2, "metrics": {"a": 3}}\''
    )
    outcome, ending, log, policy = run_command(python(code), score)
    assert (outcome, ending) == (Scored(2.0, 2.0, {"a": 3.0}), "finished")
    assert "written <key>" in log and "begin" in tokenizer.decode(policy.asked[0])


def play_alone(command: Command, label: str = "", name: str = "one") -> object:
    """Play an episode of a command that asks for no turn, and return its result."""
    task = Task([1], "hi", ({"role": "user", "content": [{"type": "text", "text": "hi"}]},), label=label)
    return asyncio.run(command.run(task, "http://127.0.0.1:9/sessions/a", "key" * 9, name))


@pytest.mark.notices(
    "a long label cannot be scored",
    "agents/command.py",
    'len(text.encode()) < MAX_TEXT and "\\0" not in text',
    "True",
)
@pytest.mark.parametrize(
    ("label", "is_variable"), [("x" * 200_000, False), ("a\0b", False), ("é", True)], ids=["long", "null", "short"]
)
def test_a_label_of_any_length_is_in_a_file(tmp_path, label, is_variable):
    file = tmp_path / "expected"
    file.write_text(label, encoding="utf-8")
    code = (
        "import os\n"
        f"assert open({str(file)!r}, 'rb').read() == open(os.environ['AGENT_LABEL_FILE'], 'rb').read()\n"
        f"assert ('AGENT_LABEL' in os.environ) == {is_variable}\n"
        "assert open(os.environ['AGENT_PROMPT_FILE']).read() == 'hi'\n"
        "print(1)\n"
    )
    assert play_alone(Command('test -z "$AGENT_LABEL_FILE"', 1024, python(code)), label) == 1


def test_a_command_that_cannot_be_started_says_why_and_leaves_nothing_open(monkeypatch):
    monkeypatch.setenv("TZ", "x" * 200_000)
    for _ in range(3):
        before = {*map(str, Path("/proc/self/fd").iterdir())}
        with pytest.raises(ProgramFailure, match=r"^agent\.command cannot be started: Argument list too long$"):
            play_alone(Command("true", 1024))
        assert {*map(str, Path("/proc/self/fd").iterdir())} == before


@pytest.mark.notices(
    "a log that cannot be written costs an episode its reward",
    "agents/command.py",
    "with suppress(OSError, DiskError):",
    "with suppress(OSError):",
)
def test_a_log_that_cannot_be_written_costs_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = Command("echo said", 1024, "echo 1", tmp_path / "programs")
    assert play_alone(command, name="n" * 300) == 1  # no file can have such a long name
    assert not list(tmp_path.glob("rlhf_suite_program_*"))


def test_a_command_may_post_its_reward(run_command):
    code = ASK + 'ask(os.environ["AGENT_URL"] + "/complete", {"reward": 0.5}, key)\n'
    outcome, ending, _, _ = run_command(python(code))
    assert (outcome, ending) == (Scored(0.5, 0.5), "finished")


@pytest.mark.notices(
    "a program that crashed is one that has finished",
    "agents/command.py",
    "if process.returncode:",
    "if False:",
)
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (python(ASK + "sys.exit('the tests broke')"), "agent.command ended with exit code 1: the tests broke$"),
        (python(ASK + "os.kill(os.getpid(), 11)"), "exit code 139|exit code -11"),
        ("no-such-program", r"exit code 127: .*no-such-program.* \(before any turn of the model\)$"),
        ("true", "agent.command ended without a turn of the model"),
    ],
    ids=["crash", "signal", "missing", "silent"],
)
def test_a_command_that_crashes_or_never_asks_has_failed(run_command, command, reason):
    outcome, ending, _, _ = run_command(command)
    assert isinstance(outcome, RewardFailure) and ending == "failed"
    import re

    assert re.search(reason, outcome.reason)


@pytest.mark.parametrize("rest", ["sleep 1000", "while :; do echo x; done"], ids=["hangs", "prints"])
def test_a_command_that_hangs_or_prints_for_ever_is_killed_in_time(run_command, end_time_when, tmp_path, rest):
    asked = tmp_path / "asked"
    end_time_when(asked.exists)
    outcome, ending, log, _ = run_command(f"{python(ASK)}; echo asked; touch {asked}; {rest}")
    assert (outcome.kind, ending) == ("timeout", "timed_out") and "--- output\nasked\n" in log
    assert len(log) < 3 * HALF_BYTES


@pytest.mark.notices(
    "what a command has left running lives on",
    "sandbox/reaper.py",
    'kernel.check(kernel.prctl(kernel.SUBREAPER, 1), "prctl(PR_SET_CHILD_SUBREAPER)")',
    "pass",
    limit_s=60,
)
@pytest.mark.parametrize("how", ["setsid", "env -i setsid", "env -i setsid setsid -f"])
@pytest.mark.parametrize("hangs", [False, True], ids=["ends", "hangs"])
def test_children_of_a_command_end_with_it(run_command, end_time_when, tmp_path, how, hangs):
    """They have process groups of their own, hold its output open, have cleared their environment and lost their
    parents."""
    child = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); import time; "
    started = f"{how} {python(child + 'time.sleep(1000)')} & while ! test -s {tmp_path}/pid; do :; done; "
    command = f"{started}{python(ASK)}" + (f"; touch {tmp_path}/hangs; sleep 1000" if hangs else "")
    if hangs:
        end_time_when((tmp_path / "hangs").exists)
    outcome, ending, _, _ = run_command(command)
    assert ending == ("timed_out" if hangs else "finished") and (outcome is None) is not hangs
    pid = int((tmp_path / "pid").read_text())
    assert poll_until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or is_zombie(pid), HOURS_S, 0.01)


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("how", ["", "env -i setsid -f"], ids=["itself", "a child without a parent"])
def test_a_command_that_holds_too_much_memory_is_killed(run_command, how):
    held = "held = bytearray(300 << 20)\nimport time; time.sleep(1000)"
    outcome, ending, _, _ = run_command(f"{python(ASK)}; {how} {python(held)}; sleep 1000", memory_mb=200)
    assert ending == "failed" and "its limit is 200 MiB (agent.command_memory_mb)" in outcome.reason


def test_a_scorer_that_says_nothing_or_breaks_is_a_failure(run_command):
    for score, reason in (("true", "in its last line, not a number"), ("exit 3", "agent.score_command ended with")):
        outcome, ending, _, _ = run_command(python(ASK), score)
        assert ending == "failed" and reason in outcome.reason


def test_of_endless_output_both_ends_are_kept_without_the_key():
    key = "k" * 7 + "-secret-" + "z" * 7
    for place in range(0, 60, 7):  # the key lies across the cut of the head
        kept = Kept(key)
        for part in (b"a" * (HALF_BYTES - place), key.encode(), b"b" * (1 << 20), key.encode(), b"end"):
            kept.add(part)
        text = kept.text()
        assert "secret" not in text and not any(piece in text for piece in ("kk", "zz"))
        assert text.endswith("<key>end") and text.startswith("aaa") and len(text) < 3 * HALF_BYTES
    kept = Kept(key)
    kept.add(json.dumps({"key": key}).encode())
    assert kept.text() == '{"key": "<key>"}'


def test_passwords_of_the_run_are_not_for_its_commands(run_command, monkeypatch):
    for name in ("RLHF_SUITE_REWARD_TOKEN", "RLHF_SUITE_JUDGE_KEY", "OPENAI_ORGANIZATION"):
        monkeypatch.setenv(name, "secret-of-the-run")
    _, _, log, _ = run_command(f"env; {python(ASK)}")
    assert "AGENT_KEY=<key>" in log and "secret-of-the-run" not in log


@pytest.mark.notices(
    "a command outlives the run that started it",
    "sandbox/reaper.py",
    "            return KILLED\n",
    "            poller.unregister(line)\n",
    limit_s=60,
)
def test_a_command_ends_with_the_process_that_started_it(tmp_path):
    """As it does when a run is killed: nobody is left to say so."""
    here = Path(rlhf_suite.__file__).parents[1]
    child = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(1000)"
    starter = (
        f"import sys, os, subprocess; sys.path.insert(0, {str(here)!r})\n"
        "from rlhf_suite.sandbox.reaper import Line, with_reaper\n"
        "line = Line()\n"
        f"words = ['/bin/sh', '-c', {'env -i setsid -f ' + python(child) + '; sleep 1000'!r}]\n"
        "subprocess.Popen(with_reaper(words, line.theirs, ['touch', 'cleared']), pass_fds=[line.theirs])\n"
        "while not os.path.exists('pid') or not open('pid').read(): pass\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", starter], cwd=tmp_path, check=False)
    pid = int((tmp_path / "pid").read_text())
    assert poll_until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or is_zombie(pid), HOURS_S, 0.01)
    assert poll_until((tmp_path / "cleared").exists, HOURS_S, 0.01), "what clears up runs too"
