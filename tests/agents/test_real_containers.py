"""Commands of episodes in a real container of podman or docker (agent.container), where this machine can run one.

The image has no files but links: the programs of this machine are shown to the container by agent.container_paths.
"""

from __future__ import annotations

import io
import shlex
import shutil
import subprocess
import tarfile

import pytest
from endpoint_episodes import Model, echo, trained
from test_commands_of_episodes import ASK
from test_isolation_of_commands import running

from rlhf_suite.agents.command import Command
from rlhf_suite.agents.isolation import TOOLS, Isolation
from rlhf_suite.rewards.base import Scored

pytestmark = pytest.mark.stack
IMAGE = "localhost/rlhf-suite-test:1"
LINKS = ("bin", "sbin", "lib", "lib64")
FOLDERS = ("usr", "etc", "tmp", "proc", "sys", "dev")


def image() -> bytes:
    """Return the files of an image: the folders of the root, and the links of a system whose programs are in /usr."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for name in FOLDERS:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        for name in LINKS:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
    return held.getvalue()


def refusal(tool: str) -> str | None:
    """Return why this program runs no container here; None if it does."""
    made = subprocess.run([tool, "import", "-", IMAGE], input=image(), capture_output=True, timeout=120, check=False)
    if made.returncode:
        return f"{tool} import: {made.stderr.decode(errors='replace').strip()[-300:]}"
    words = ["run", "--rm", "--init", "--network", "host", "--memory", "64m", "--volume", "/usr:/usr:ro", IMAGE]
    ran = subprocess.run([tool, *words, "/bin/sh", "-c", "true"], capture_output=True, timeout=120, check=False)
    return f"{tool} run: {ran.stderr.decode(errors='replace').strip()[-300:]}" if ran.returncode else None


@pytest.fixture(scope="module")
def container_program():
    """Return the first program that runs a container here."""
    found = [tool for tool in reversed(TOOLS) if shutil.which(tool)]
    why = {tool: refusal(tool) for tool in found}
    works = next((tool for tool in found if why[tool] is None), None)
    if works is None:
        pytest.skip("; ".join(map(str, why.values())) or "neither docker nor podman is installed")
    return works


@pytest.fixture
def run_in_container(play, tokenizer, tmp_path, container_program):
    """Play an episode of a command in a container; return its outcome and its log."""

    def run(command, score=None, memory_mb=512, readable=("/usr",)):
        policy = Model(tokenizer, echo)
        isolation = Isolation(IMAGE, "host", readable, memory_mb, container_program)
        program = Command(command, memory_mb, score, tmp_path / "programs", isolation)
        episode, ledgers = play(program, policy)
        (log,) = (tmp_path / "programs").iterdir()
        assert trained(ledgers) == sorted(policy.written)
        left = [container_program, "ps", "--all", "--quiet", "--filter", f"name=rlhf_suite_{log.stem}"]
        assert subprocess.run(left, capture_output=True, text=True, check=True).stdout == "", "a container is left"
        return episode.outcome, log.read_text()

    return run


OUTSIDE = """
import os
print("hidden", not os.path.exists({secret!r}))
print("without rights", "CapEff:\\t0000000000000000" in open("/proc/self/status").read())
try:
    open("/usr/new", "w")
except OSError as error:
    print("read only", type(error).__name__)
open("answer.txt", "w").write(answer)
"""


def test_a_command_in_a_real_container_asks_for_turns_and_is_scored_in_its_folder(run_in_container, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    code = shlex.quote(ASK + OUTSIDE.format(secret=str(secret)))
    outcome, log = run_in_container(
        f"/usr/bin/python3 -c {code}", 'test -z "$AGENT_KEY" && cat answer.txt && echo && echo 3'
    )
    assert outcome == Scored(3.0, 3.0), log
    assert "answer 1" in log and "hidden True" in log and "without rights True" in log and "read only OSError" in log


def test_what_a_command_leaves_in_a_real_container_ends_with_it(run_in_container):
    words = "import time; time.sleep(1000)  # left in a container"
    left = f"env -i setsid /usr/bin/python3 -c '{words}' & "
    outcome, log = run_in_container(f"{left} /usr/bin/python3 -c {shlex.quote(ASK)}")
    assert outcome is None, log
    assert running("# left in a container") == []
