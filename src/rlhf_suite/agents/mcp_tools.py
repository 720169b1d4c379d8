"""Tools of MCP servers. Each episode has a session of its own: what a server keeps of one never reaches another.

A server that is a command is a process for each session, which starts with the first call of an episode; one at a URL
is told of a new session. Descriptions of the tools are asked for once.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO, cast

from rlhf_suite.agents.base import Schema
from rlhf_suite.agents.calls import EnvironmentFailure
from rlhf_suite.agents.tools import ToolError, Tools
from rlhf_suite.certificates import certificate_problem
from rlhf_suite.foreign_text import printable

if TYPE_CHECKING:
    from mcp import Client

START_S = 60.0  # limit for the start of a server
TAIL = 2000  # characters of what it wrote to standard error that a failure shows


class McpServer:
    """A server of tools: a command that speaks over its standard input and output, or a URL.

    `is_shared`: all episodes of a process share one session, which is for servers that keep nothing between calls.
    """

    def __init__(self, server: Any, is_shared: bool = False) -> None:
        self.server = server
        self.shared = McpSession(server, self.schemas, is_shared=True) if is_shared else None
        self.listing: asyncio.Task[list[Schema]] | None = None

    def of_episode(self) -> Tools:
        """Return the tools as one episode has them."""
        return self.shared or McpSession(self.server, self.schemas)

    async def schemas(self) -> list[Schema]:
        """Return the descriptions of the tools, which the first episode asks for. If that failed, the next one does.

        Raises:
            EnvironmentFailure: the server does not answer.
        """
        if self.listing is None or (self.listing.done() and has_failed(self.listing)):
            self.listing = asyncio.create_task(self.list_tools())
        return await asyncio.shield(self.listing)

    async def list_tools(self) -> list[Schema]:
        """Ask the server for its tools."""
        session = self.shared or McpSession(self.server, self.schemas)
        try:
            await session.begin()
            return await session.list_tools()
        finally:
            await session.close()


@dataclass
class Connection:
    """A connection to a server, and what ends it."""

    client: asyncio.Future[Client]
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether it cannot be used any more."""
        return self.task is None or self.task.done()


class McpSession:
    """One session with a server. It begins with the first call; one that broke begins again with the next. One that
    `is_shared` outlives the episodes."""

    def __init__(self, server: Any, schemas: Callable[[], Awaitable[list[Schema]]], *, is_shared: bool = False) -> None:
        self.server, self.schemas_of_server, self.is_shared = server, schemas, is_shared
        # The newer protocol has no sessions; the older one begins each with a handshake.
        self.mode = "auto" if is_shared else "legacy"
        self.connection: Connection | None = None
        self.said = ""  # the last that the server wrote to standard error

    async def schemas(self) -> list[Schema]:
        """Return the descriptions of the server's tools."""
        return await self.schemas_of_server()

    async def begin(self) -> None:
        """Begin the session if it is not under way.

        Raises:
            EnvironmentFailure: the server does not answer, or dies.
        """
        if self.connection is None or self.connection.is_over:
            self.connection = Connection(asyncio.get_running_loop().create_future())
            self.connection.task = asyncio.create_task(self.serve(self.connection))
        await asyncio.shield(self.connection.client)

    async def serve(self, connection: Connection) -> None:
        """Hold a connection: it must end in the task in which it began."""
        from mcp import Client

        connected = connection.client
        try:
            with self.transport() as transport:
                client = Client(transport, mode=self.mode)
                async with asyncio.timeout(START_S) as start, client:
                    start.reschedule(None)
                    connected.set_result(client)
                    await connection.ending.wait()
        except Exception as error:
            if not connected.done():
                connected.set_exception(EnvironmentFailure(self.silence(error)))
                connected.exception()  # an episode that has ended does not look at it

    @contextmanager
    def transport(self) -> Iterator[Any]:
        """Yield what the client connects to. What a command writes to standard error goes to ours."""
        if not isinstance(self.server, str) or self.server.startswith(("http://", "https://")):
            yield self.server
            return
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        command, *arguments = shlex.split(self.server)
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(reading, self.hear, reading)
        try:
            with os.fdopen(writing, "w") as file:
                yield stdio_client(StdioServerParameters(command=command, args=arguments), cast(TextIO, file))
        except BaseException:
            self.hear(reading)
            raise
        finally:
            loop.remove_reader(reading)
            os.close(reading)

    def hear(self, reading: int) -> None:
        """Take what the server wrote to standard error."""
        with suppress(BlockingIOError):
            while text := os.read(reading, 1 << 16).decode(errors="replace"):
                sys.stderr.write(text)
                self.said = (self.said + text)[-TAIL:]

    def silence(self, error: BaseException) -> str:
        """Return what to say of a server that does not answer."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        wrote = f"; it wrote: {printable(self.said.strip(), TAIL, keep_lines=True)}" if self.said.strip() else ""
        reason = certificate_problem(error) or f"{type(error).__name__}: {error}"
        return f"the MCP server {self.server} does not answer ({reason}){wrote}"

    async def list_tools(self) -> list[Schema]:
        """Ask for the descriptions of the tools."""
        assert self.connection is not None
        list_tools = await (await self.connection.client).list_tools()
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": dict(tool.input_schema),
                },
            }
            for tool in list_tools.tools
        ]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the texts of the server's answer. A session that no longer answers ends."""
        assert self.connection is not None
        connection = self.connection
        try:
            result = await (await connection.client).call_tool(name, arguments)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            if is_broken(error):
                await self.end_connection(connection)
                problem += "; the server of this tool has ended, and what it kept is lost"
            raise ToolError(problem) from error
        text = "\n".join(str(part.text) for part in result.content if part.type == "text")
        if result.is_error:
            raise ToolError(text)
        return text

    async def end_connection(self, connection: Connection) -> None:
        """End a connection, and the server if it is a command."""
        self.connection = None if self.connection is connection else self.connection
        connection.ending.set()
        if connection.task is not None:
            await asyncio.wait([connection.task])

    async def close(self) -> None:
        """End the session of an episode."""
        if self.connection is not None and not self.is_shared:
            await self.end_connection(self.connection)


def is_broken(error: Exception) -> bool:
    """Return whether an error of a call is one of the connection, and not one that the server answered with."""
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    return not isinstance(error, MCPError) or error.code == CONNECTION_CLOSED


def has_failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
