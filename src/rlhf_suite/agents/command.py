"""A command that plays an episode (`agent.command`): a process with folders of its own, which finds the URL and the key
of its episode in its environment.

What it prints is kept, up to a limit and without the key. It ends with its episode, and with it all that it started.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_suite.agents.base import Task
from rlhf_suite.agents.isolation import Isolation, Launch, Place
from rlhf_suite.agents.request import MODEL
from rlhf_suite.agents.turn_records import text_of
from rlhf_suite.disk import DiskError, write_text
from rlhf_suite.foreign_text import printable
from rlhf_suite.launch.processes import OF_EPISODE_WORKER, kill_marked
from rlhf_suite.launch.watch import MARK as OF_CLUSTER
from rlhf_suite.sandbox.memory import Watched, remove_tree, watcher
from rlhf_suite.sandbox.reaper import CLEAR_S, Line, with_reaper

MARK = (
    "RLHF_SUITE_PROGRAM"  # environment variable of all that a command starts; its value is the session of the episode
)
FOUND_BY = (OF_CLUSTER, OF_EPISODE_WORKER)  # variables by which the processes of a run are found when it has ended
# Of our own environment. Other variables of the suite may be passwords.
KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ", "USER", "LOGNAME", "TMPDIR", *FOUND_BY)
HALF_BYTES = 32 << 10  # of the output that is kept, at its beginning and at its end
READ_BYTES = 1 << 16
MAX_LOGS = 500  # files of a process; older ones are removed
MAX_TEXT = 100_000  # bytes in an environment variable, of which the kernel takes 128 KiB
TAIL = 300  # characters of the errors, quoted in messages
END_S = 5.0  # for what is killed to be gone, and for its output to be read
ALL_ENDS_S = 4 * END_S + CLEAR_S  # for all that a command has started to end with its episode
KEY = "AGENT_KEY"  # environment variable of the command that asks for turns
PARTS = ("output", "errors", "output of the score", "errors of the score")  # of a log


class ProgramFailure(Exception):
    """An error of the user's program. It becomes the outcome of the episode."""


class Kept:
    """The beginning and the end of what a process prints, without the secret in it."""

    def __init__(self, secret: str) -> None:
        self.secret, self.head, self.tail, self.dropped = secret.encode(), bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        """Keep more, or drop what is in the middle."""
        room = HALF_BYTES - len(self.head)
        self.head += data[: max(room, 0)]
        self.tail += data[max(room, 0) :]
        over = len(self.tail) - HALF_BYTES
        if over > HALF_BYTES:  # not at each call
            del self.tail[:over]
            self.dropped += over

    def text(self) -> str:
        """Return what is kept. A secret that the cut divides is left out too."""
        edge = len(self.secret)
        if not self.dropped:
            return self.hide(self.head + self.tail).decode(errors="replace")
        head, tail = self.hide(self.head)[:-edge], self.hide(self.tail)[edge:]
        middle = b"\n[... %d bytes ...]\n" % (self.dropped + 2 * edge)
        return (head + middle + tail).decode(errors="replace")

    def hide(self, data: bytearray) -> bytes:
        """Return output without the secret."""
        return bytes(data).replace(self.secret, b"<key>")


@dataclass
class Command:
    """Runs a command for each episode, and another one that scores the files which it left."""

    command: str
    memory_mb: int
    score: str | None = None
    logs: Path | None = None  # folder for what the commands print
    isolation: Isolation = field(default_factory=Isolation)
    written: deque[Path] = field(default_factory=deque)

    async def run(self, task: Task, url: str, key: str, name: str) -> Any:
        """Play an episode; return its result, as a function `run_agent` would. `url`: of the session, without /v1;
        `name`: of the episode, for its log.

        Raises:
            ProgramFailure: a command ended with an error, or held too much memory.
        """
        folder = Path(tempfile.mkdtemp(prefix="rlhf_suite_program_"))
        place = Place(self.isolation, str(folder), url, name)
        played, scored = (Kept(key), Kept(key)), (Kept(key), Kept(key))
        try:
            environment = prepare_folder(folder, task) | {MARK: name}
            await self.run_one(self.command, "agent.command", place, environment | addresses(place.url, key), played)
            if self.score is None:
                return None
            environment |= in_file(folder / "label.txt", "AGENT_LABEL", task.label)
            await self.run_one(self.score, "agent.score_command", place, environment, scored)
            return result_of(scored[0].text())
        finally:
            with suppress(OSError, DiskError):
                self.write_log(name, zip(PARTS, (*played, *scored), strict=True))
            await asyncio.to_thread(remove_tree, str(folder))

    async def run_one(
        self, command: str, flag: str, place: Place, environment: Mapping[str, str], outputs: tuple[Kept, Kept]
    ) -> None:
        """Run a command to its end, in the place of the episode. `outputs` keep what it prints: to standard output,
        and to standard error."""
        why, line = list[str](), Line()
        launch = place.prepare(command, environment, KEY in environment)

        def end(reason: str) -> None:
            why.append(reason)
            line.close()

        try:
            process, reading = await start(launch, line, place.folder, outputs)
        except OSError as error:
            raise ProgramFailure(f"{flag} cannot be started: {error.strerror}") from error
        watched = Watched(process.pid, None, self.memory_mb, 0, end)
        watcher.add(watched)
        try:
            async with place.connect(launch):
                await process.wait()
        finally:
            watcher.remove(watched)
            line.close()
            await end_process(process, environment[MARK], END_S + (CLEAR_S if launch.clear else 0.0))
            await asyncio.wait(reading, timeout=END_S)  # the pipes end with those who hold them
            for task in reading:
                task.cancel()
        if why:
            raise ProgramFailure(f"{flag} was killed: {why[0]} (agent.command_memory_mb)")
        if process.returncode:
            last = next((text for kept in reversed(outputs) if (text := kept.text().strip())), "it printed nothing")
            raise ProgramFailure(f"{flag} ended with exit code {process.returncode}: {printable(last[-TAIL:], TAIL)}")

    def write_log(self, name: str, parts: Iterable[tuple[str, Kept]]) -> None:
        """Write what the commands of an episode printed to a file; the oldest ones are removed."""
        if self.logs is None:
            return
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"{name}.log"
        said = [(part, text) for part, kept in parts if (text := kept.text())]
        write_text(path, "".join(f"--- {part}\n{text}\n" for part, text in said), durable=False)
        self.written.append(path)
        while len(self.written) > MAX_LOGS:
            self.written.popleft().unlink(missing_ok=True)


async def start(
    launch: Launch, line: Line, folder: str, outputs: tuple[Kept, Kept]
) -> tuple[asyncio.subprocess.Process, list[asyncio.Future[None]]]:
    """Start a command, and begin to read what it prints. Where it cannot be started, nothing of it stays open."""
    passed = [line.theirs, *(() if launch.relay is None else (launch.relay[1].fileno(),))]
    with Path(folder, "prompt.txt").open("rb") as prompt:
        streams, writable = zip(*[await open_pipe() for _ in outputs], strict=True)
        try:
            process = await asyncio.create_subprocess_exec(
                *with_reaper(launch.words, line.theirs, launch.clear),
                stdin=prompt,
                stdout=writable[0],
                stderr=writable[1],
                cwd=Path(folder, "work"),
                env=launch.environment,
                pass_fds=passed,
                start_new_session=True,
            )
        except BaseException:
            launch.close()
            line.close()
            raise
        finally:
            for descriptor in (*writable, line.theirs):
                os.close(descriptor)
    return process, [asyncio.ensure_future(read_all(*pair)) for pair in zip(streams, outputs, strict=True)]


async def open_pipe() -> tuple[asyncio.StreamReader, int]:
    """Return a pipe: its readable end, and the descriptor of the other one. (Those that asyncio makes hold the wait for
    a process until all that it has started have closed them.)"""
    readable, writable = os.pipe()
    stream = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(readable, "rb"))
    return stream, writable


async def read_all(stream: asyncio.StreamReader, kept: Kept) -> None:
    """Read what a process prints to the end, so that it never waits for a reader."""
    while data := await stream.read(READ_BYTES):
        kept.add(data)


async def end_process(process: asyncio.subprocess.Process, mark: str, limit_s: float) -> None:
    """Wait until a reaper has ended all that came of its command. If it does not, or was killed itself, kill what is
    still found by its group and its environment."""
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), limit_s)  # no-limit: it has one
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.to_thread(kill_marked, MARK, mark)
    await asyncio.wait_for(process.wait(), END_S)  # no-limit: it has one


def prepare_folder(folder: Path, task: Task) -> dict[str, str]:
    """Write the task of an episode to its folder, and return the environment of its commands. The label is not in it:
    the model could read it."""
    for name in ("work", "home"):
        (folder / name).mkdir(exist_ok=True)
    prompt = next(
        (text_of(message["content"]) for message in reversed(task.messages) if message["role"] == "user"), task.text
    )
    given = {"messages": task.messages, "tools": task.tools, "datasource": task.datasource, "columns": task.columns}
    (folder / "task.json").write_text(json.dumps(given, default=str), encoding="utf-8")
    inherited = {name: value for name, value in os.environ.items() if name in KEPT}
    own = {
        "HOME": str(folder / "home"),
        "AGENT_TASK": str(folder / "task.json"),
        "AGENT_START": str(Path.cwd()),
    }
    return inherited | in_file(folder / "prompt.txt", "AGENT_PROMPT", prompt) | own


def in_file(file: Path, variable: str, text: str) -> dict[str, str]:
    """Write a text to a file, and return the variables of the environment that lead to it: the path, and the text
    itself if the kernel takes it."""
    file.write_text(text, encoding="utf-8")
    named = {f"{variable}_FILE": str(file)}
    return named | {variable: text} if len(text.encode()) < MAX_TEXT and "\0" not in text else named


def addresses(url: str, key: str) -> dict[str, str]:
    """Return the variables by which clients find the model of an episode."""
    return {
        "AGENT_URL": url,
        KEY: key,
        "AGENT_MODEL": MODEL,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
    }


def result_of(said: str) -> Any:
    """Return the result that a command of `agent.score_command` printed in its last line."""
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    try:
        result = json.loads(last)
    except (ValueError, RecursionError):
        result = None
    if isinstance(result, bool) or not isinstance(result, int | float | dict):
        wanted = "a number, or a JSON object with reward, score, metrics or error"
        raise ProgramFailure(f"agent.score_command printed {printable(repr(last), 60)} in its last line, not {wanted}")
    return result
