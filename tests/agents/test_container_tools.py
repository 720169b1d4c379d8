"""Which program runs the containers of agent.container: the first one that answers, as small programs here do."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_suite.agents import isolation
from rlhf_suite.agents.isolation import container_tool
from rlhf_suite.agents.kinds import command_of
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.errors import FixableError
from rlhf_suite.preflight.inspections.agents import commands_have_their_place

ANSWERS = "exit 0"
NO_DAEMON = "echo Cannot connect to the Docker daemon >&2; exit 1"


@pytest.fixture
def install(tmp_path, monkeypatch, forget_container_tool):
    """Make the path have programs with these names and no others; return what each of them has been asked."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def made(**programs):
        for name, body in programs.items():
            program = tmp_path / name
            program.write_text(f'#!/bin/sh\necho "{name} $1" >> {tmp_path}/asked\n{body}\n')
            program.chmod(0o755)
        return lambda: (tmp_path / "asked").read_text().splitlines()

    return made


def run_with_image() -> Run:
    """Return a run whose commands are in containers."""
    run = Run.of("ppo")
    run.agent.command, run.agent.container = "true", "agents:1"
    return run


@pytest.mark.notices(
    "docker is taken where its daemon does not answer",
    "agents/isolation.py",
    "if said.returncode == 0:",
    "if True:",
)
def test_podman_is_taken_where_no_daemon_of_docker_answers(install):
    asked = install(docker=NO_DAEMON, podman=ANSWERS)
    run = run_with_image()
    assert list(commands_have_their_place(run, Path())) == []
    assert command_of(run.agent, None).isolation.tool == "podman"
    assert asked() == ["docker version", "podman info", "podman image"]


def test_docker_is_taken_where_both_answer(install):
    asked = install(docker=ANSWERS, podman=ANSWERS)
    assert [container_tool(), container_tool()] == ["docker", "docker"] and asked() == ["docker version"]


def test_a_command_in_no_container_asks_for_no_program(install):
    install()
    run = run_with_image()
    for place in (None, "jail"):
        run.agent.container = place
        assert command_of(run.agent, None).isolation.tool is None


def test_a_machine_where_none_works_says_what_each_said_before_the_run_and_in_it(install):
    install(docker=NO_DAEMON, podman="exit 125")
    (problem,) = commands_have_their_place(run_with_image(), Path())
    assert problem.key == "agent.container"
    assert problem.what == (
        "no program can run containers on this machine: docker says: Cannot connect to the Docker daemon; "
        "podman says: nothing, and exit code 125"
    )
    with pytest.raises(FixableError) as error:
        command_of(run_with_image().agent, None)
    assert (error.value.what, error.value.fix) == (problem.what, problem.fix)
    assert "install podman" in problem.fix and "agent.container=jail" in problem.fix


def test_a_program_that_is_missing_or_cannot_be_started_is_named(install):
    install(podman="")
    Path(isolation.shutil.which("podman")).write_text("#!/no/such/interpreter\n")
    with pytest.raises(FixableError, match="docker is not installed; podman cannot be started: No such file"):
        container_tool()
    install(podman=ANSWERS)
    assert container_tool() == "podman"


def test_a_program_that_hangs_is_not_waited_for(install, monkeypatch):
    monkeypatch.setattr(isolation, "ANSWER_S", 0.5)
    install(podman="exec /bin/sleep 1000")
    with pytest.raises(FixableError, match=r"podman does not answer within 0\.5 s"):
        container_tool()
