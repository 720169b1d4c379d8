"""Where the commands of episodes run (`agent.container`): beside the run, in a container of docker or podman, or in a
jail of this machine, whose only network is the endpoint."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from rlhf_suite.config.declarations.agent import JAIL
from rlhf_suite.errors import FixableError
from rlhf_suite.foreign_text import printable
from rlhf_suite.launch.processes import SHELL
from rlhf_suite.sandbox.command_jail import CommandJail, choose_user

# What each program for containers is asked, to see whether it works. `docker version` succeeds only if its daemon
# answers; podman has no daemon, and `podman info` looks at its storage.
TOOLS = {
    "docker": ("version", "--format", "{{.Server.Version}}"),
    "podman": ("info", "--format", "{{.Version.Version}}"),
}
ANSWER_S = 10.0  # for the answer of such a program
OF_THE_MACHINE = ("PATH", "LD_LIBRARY_PATH", "USER", "LOGNAME", "TMPDIR")  # mean nothing elsewhere
MAX_TASKS = 1024  # processes and threads of a container
READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Isolation:
    """The flags that say where commands run."""

    container: str | None = None  # an image, `JAIL` or None
    network: str = "host"  # of containers
    readable: Sequence[str] = ()  # what they may read of this machine
    memory_mb: int = 4096
    tool: str | None = None  # the program that runs the containers of an image


@dataclass(frozen=True)
class Launch:
    """How a command is started: its words, its environment, the command that clears up after it, and the socket by
    which the jail says where its endpoint listens."""

    words: Sequence[str]
    environment: Mapping[str, str]
    clear: Sequence[str] = ()
    relay: tuple[socket.socket, socket.socket] | None = None  # ours, and that of the jail

    def close(self) -> None:
        """Close the sockets of a command that could not be started."""
        for end in self.relay or ():
            end.close()


@cache
def container_tool() -> str:
    """Return the first program that can run containers on this machine. A process asks once, until one has answered.

    Raises:
        FixableError: none can; the error says what each of them said.
    """
    refusals = []
    for tool, question in TOOLS.items():
        refusal = ask(tool, question)
        if refusal is None:
            return tool
        refusals.append(refusal)
    fix = f"start the daemon of docker, install podman, or write agent.container={JAIL} or null"
    raise FixableError(f"no program can run containers on this machine: {'; '.join(refusals)}", fix)


def ask(tool: str, question: Sequence[str]) -> str | None:
    """Return why a program cannot run containers; None if it answers a question that it can answer only if it can."""
    if shutil.which(tool) is None:
        return f"{tool} is not installed"
    try:
        said = subprocess.run([tool, *question], capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{tool} does not answer within {ANSWER_S:g} s"
    except OSError as error:
        return f"{tool} cannot be started: {error.strerror}"
    if said.returncode == 0:
        return None
    return f"{tool} says: {printable(said.stderr.strip(), 200) or f'nothing, and exit code {said.returncode}'}"


class Place:
    """The place of the commands of one episode: `folder` is theirs, `url` that of its session, `name` its own."""

    def __init__(self, isolation: Isolation, folder: str, url: str, name: str) -> None:
        self.isolation, self.folder, self.name = isolation, folder, f"rlhf_suite_{name}"
        self.uid = choose_user()  # of a jail that root starts
        self.address = urlsplit(url)
        self.connections: set[asyncio.Task[None]] = set()  # from the jail to the endpoint

    @property
    def is_jail(self) -> bool:
        return self.isolation.container == JAIL

    @property
    def url(self) -> str:
        """The URL of the session, as the command sees it."""
        inside = self.address._replace(netloc=f"127.0.0.1:{self.address.port}")
        return (inside if self.is_jail else self.address).geturl()

    def prepare(self, command: str, environment: Mapping[str, str], is_connected: bool) -> Launch:
        """Return how a command of the shell is started here. `is_connected`: it may reach the endpoint."""
        if self.isolation.container is None:
            return Launch((SHELL, "-c", command), environment)
        inside = {name: value for name, value in environment.items() if name not in OF_THE_MACHINE}
        if not self.is_jail:
            return self.prepare_container(command, inside)
        relay = socket.socketpair() if is_connected else None
        descriptor = -1 if relay is None else relay[1].fileno()
        jail = CommandJail(self.folder, self.isolation.readable, self.uid, self.address.port or 0, descriptor)
        inside |= {"PATH": environment.get("PATH", os.defpath), "USER": "agent", "LOGNAME": "agent"}
        return Launch(jail.command((SHELL, "-c", command)), inside, (), relay)

    def prepare_container(self, command: str, inside: Mapping[str, str]) -> Launch:
        """Return how a command is started in a container, which is removed at the end however that comes. The values of
        variables are not among the words, which everybody on the machine can read."""
        own, image, tool = self.isolation, self.isolation.container, self.isolation.tool
        assert image is not None and tool is not None
        memory, home = f"{own.memory_mb}m", inside["HOME"]
        words = [
            *(tool, "run", "--rm", "--init", "--interactive", "--name", self.name, "--network", own.network),
            *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(MAX_TASKS)),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{os.getuid()}:{os.getgid()}"),
            *(("--userns", "keep-id") if tool == "podman" and os.getuid() else ()),
            *("--volume", f"{self.folder}:{self.folder}", "--workdir", f"{self.folder}/work"),
            *(word for path in own.readable for word in ("--volume", f"{path}:{path}:ro")),
            *(word for name in sorted(inside) if name != "HOME" for word in ("--env", name)),
            *("--env", f"HOME={home}", "--entrypoint", SHELL, image, "-c", command),
        ]
        of_client = {name: value for name, value in inside.items() if name != "HOME"}
        return Launch(words, os.environ | of_client, (tool, "rm", "--force", self.name))

    @asynccontextmanager
    async def connect(self, launch: Launch) -> AsyncIterator[None]:
        """Carry what comes to the endpoint of a jail to the endpoint, within the block."""
        if launch.relay is None:
            yield
            return
        ours, theirs = launch.relay
        theirs.close()
        carrying = asyncio.ensure_future(self.carry_all(ours))
        try:
            yield
        finally:
            carrying.cancel()
            with suppress(asyncio.CancelledError):
                await carrying
            ours.close()

    async def carry_all(self, control: socket.socket) -> None:
        """Get the socket that listens in the jail, and connect all who come to it with the endpoint."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(control, arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(control)
        _, descriptors, _, _ = socket.recv_fds(control, READ_BYTES, 1)
        if not descriptors:  # the jail has failed, and says why on its standard error
            return
        server = await asyncio.start_server(self.carry, sock=socket.socket(fileno=descriptors[0]))
        try:
            await server.serve_forever()
        finally:
            server.close()
            for connection in list(self.connections):
                connection.cancel()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a connection from the jail with the endpoint, until either side closes it."""
        own = asyncio.current_task()
        assert own is not None
        self.connections.add(own)
        try:
            with suppress(OSError):
                answers, requests = await asyncio.open_connection(self.address.hostname, self.address.port)
                try:
                    await asyncio.gather(copy(reader, requests), copy(answers, writer))
                finally:
                    requests.close()
        finally:
            writer.close()
            self.connections.discard(own)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Write what is read to its end, and say that it has ended."""
    while data := await reader.read(READ_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
