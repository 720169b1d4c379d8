"""Where commands of episodes run (agent.container): what the jail lets them do, and how containers are asked for."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from pathlib import Path

import pytest
from endpoint_episodes import Model, echo, trained
from test_commands_of_episodes import ASK, python

from rlhf_suite.agents.command import Command
from rlhf_suite.agents.isolation import Isolation
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.preflight.inspections.agents import commands_can_run, commands_have_their_place
from rlhf_suite.rewards.base import RewardFailure, Scored

pytestmark = pytest.mark.stack
IMAGE = "agents:1"
STANDIN = Path(__file__).with_name("docker_standin.py")


def problems(**flags) -> list[tuple[str, str]]:
    """Return what is found before a run whose section `agent` has these values."""
    run = Run.of("ppo")
    for name, value in ({"command": "true"} | flags).items():
        setattr(run.agent, name, value)
    found = [*commands_can_run(run, Path()), *commands_have_their_place(run, Path())]
    return [(each.key, each.what) for each in found]


@pytest.fixture
def run_in(play, tokenizer, tmp_path):
    """Play an episode of a command in a place; return its outcome, its log, and the URL and key of its session."""

    def run(isolation, command, score=None, memory_mb=1024, **limits):
        policy = Model(tokenizer, echo)
        program = Command(command, memory_mb, score, tmp_path / "programs", isolation)
        episode, ledgers = play(program, policy, **limits)
        log = max((tmp_path / "programs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        assert trained(ledgers) == sorted(policy.written)
        return episode.outcome, log.read_text(), log.stem

    return run


# What a program in the jail tries. `jailed` is its own Python, which must lie in a folder that the jail shows.
OUTSIDE = """
import os, socket
def refused(action, what):
    try:
        action()
    except OSError as error:
        print("refused", what, type(error).__name__)
    else:
        print("ALLOWED", what)
refused(lambda: open("/usr/new", "w"), "write")
refused(lambda: open({secret!r}).read(), "read")
refused(lambda: open("/etc/shadow").read(), "passwords")
refused(lambda: os.kill({pid}, 0), "signal")
refused(lambda: socket.create_connection(("127.0.0.1", {port}), 5), "port")
refused(lambda: socket.create_connection(("10.0.0.1", 80), 5), "network")
refused(lambda: os.setuid(0) if os.getuid() else None, "root")
refused(lambda: os.unshare(0x10000000) if hasattr(os, "unshare") else (_ for _ in ()).throw(OSError()), "namespace")
open("answer.txt", "w").write(answer)
print("processes", sorted(name for name in os.listdir("/proc") if name.isdecimal()))
"""


@pytest.fixture
def needs_a_jail():
    if found := problems(container="jail"):
        pytest.skip(found[0][1])


def test_a_command_in_the_jail_reaches_its_endpoint_and_nothing_else(run_in, needs_a_jail, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as other:
        code = OUTSIDE.format(secret=str(secret), pid=os.getpid(), port=other.getsockname()[1])
        outcome, log, _ = run_in(
            Isolation("jail"),
            f"/usr/bin/python3 -c {shlex.quote(ASK + code)}",
            'test -z "$AGENT_KEY" && cat answer.txt && echo && echo 2',
        )
    assert outcome == Scored(2.0, 2.0), log
    assert "ALLOWED" not in log and log.count("refused") == 8 and "answer 1" in log
    seen = next(line for line in log.splitlines() if line.startswith("processes"))
    assert len(seen.split()) <= 4, "its own processes alone"


def test_what_leaves_a_command_in_the_jail_ends_with_it(run_in, needs_a_jail):
    left = "env -i setsid /usr/bin/python3 -c 'import time; time.sleep(1000)  # left in jail' & "
    outcome, _, _ = run_in(Isolation("jail"), f"{left} /usr/bin/python3 -c {shlex.quote(ASK)}")
    assert outcome is None and running("# left in jail") == []


def running(words: str) -> list[str]:
    """Return the processes of this machine whose command line has these words."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if words in line and process.name != str(os.getpid()):
            found.append(line)
    return found


def test_a_command_in_the_jail_that_hangs_or_holds_too_much_is_killed(run_in, needs_a_jail, end_time_when):
    end_time_when(lambda: "sleep 10001 " in running("sleep 10001"))
    outcome, _, _ = run_in(Isolation("jail"), f"/usr/bin/python3 -c {shlex.quote(ASK)}; sleep 10001")
    assert outcome.kind == "timeout"
    held = ASK + "held = bytearray(300 << 20)\nimport time; time.sleep(1000)"
    outcome, _, _ = run_in(Isolation("jail"), f"/usr/bin/python3 -c {shlex.quote(held)}", memory_mb=200)
    assert isinstance(outcome, RewardFailure) and "its limit is 200 MiB" in outcome.reason


@pytest.fixture
def docker(tmp_path, monkeypatch, forget_container_tool):
    """Put the stand-in for docker on the path; return what it was called with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    calls = tmp_path / "calls.jsonl"
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\nSTANDIN_CALLS={calls} exec {sys.executable} {STANDIN} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return lambda: [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []


def test_a_container_is_asked_for_with_these_words_and_removed(run_in, docker, tmp_path):
    isolation = Isolation(IMAGE, "agents", (str(tmp_path),), 512, "docker")
    outcome, log, name = run_in(
        isolation, python(ASK + 'open("answer.txt", "w").write(answer)'), "cat answer.txt; echo; echo 3"
    )
    assert outcome == Scored(3.0, 3.0) and "answer 1" in log
    played, cleared, scored, cleared_again = docker()
    folder = played[played.index("--workdir") + 1].removesuffix("/work")
    variables = [played[place + 1] for place, word in enumerate(played) if word == "--env"]
    given = [word for word in played if word != "--env" and word not in variables]
    assert given == [
        *("run", "--rm", "--init", "--interactive", "--name", f"rlhf_suite_{name}", "--network", "agents"),
        *("--memory", "512m", "--memory-swap", "512m", "--pids-limit", "1024"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{os.getuid()}:{os.getgid()}"),
        *("--volume", f"{folder}:{folder}", "--workdir", f"{folder}/work", "--volume", f"{tmp_path}:{tmp_path}:ro"),
        *("--entrypoint", "/bin/sh", IMAGE, "-c", python(ASK + 'open("answer.txt", "w").write(answer)')),
    ]
    assert {"AGENT_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", f"HOME={folder}/home"} <= set(variables)
    assert not {"PATH", "AGENT_LABEL"} & set(variables)
    assert "AGENT_LABEL" in scored and "AGENT_KEY" not in scored
    assert cleared == cleared_again == ["rm", "--force", f"rlhf_suite_{name}"]
    assert not Path(folder).exists()


@pytest.mark.notices(
    "a container outlives the time of its episode",
    "agents/isolation.py",
    '(tool, "rm", "--force", self.name))',
    "())",
)
def test_a_container_is_removed_when_its_episode_takes_too_long(run_in, docker, end_time_when):
    end_time_when(lambda: "sleep 10002 " in running("sleep 10002"))
    outcome, _, name = run_in(Isolation(IMAGE, tool="docker"), f"{python(ASK)}; sleep 10002")
    assert outcome.kind == "timeout" and docker()[-1] == ["rm", "--force", f"rlhf_suite_{name}"]


def test_a_missing_image_is_named_before_the_run(docker):
    assert problems(container=IMAGE, command="no-such-program") == []
    ((key, what),) = problems(container="agents:2")
    assert key == "agent.container" and "No such image: agents:2" in what


def test_folders_that_commands_may_read_must_be_there(needs_a_jail):
    assert problems(container="jail", container_paths=["/no/such/folder"]) == [
        ("agent.container_paths", "there is no /no/such/folder")
    ]
