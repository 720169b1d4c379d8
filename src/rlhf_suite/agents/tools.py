"""Tools: functions of the user's and of MCP servers, which the model calls by name.

A function is described to the model by its type hints and its docstring. What it returns, or the error that it raises,
is the answer to the call; nothing that a model writes into a call ends an episode.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_suite.agents.base import Schema, Start, Step, Task, ToolCall, Turn
from rlhf_suite.agents.environment import called
from rlhf_suite.data.messages import Message
from rlhf_suite.errors import UserError
from rlhf_suite.waits import waiting

if TYPE_CHECKING:
    from mcp import Client

MCP = "mcp:"  # before the command or the URL of a server in agent.tools
START_S = 60.0  # limit for the start of an MCP server


class ToolError(Exception):
    """A call that failed; its text is the answer."""


class Tools(Protocol):
    """Tools that all episodes share."""

    async def schemas(self) -> list[Schema]:
        """Return their descriptions."""
        ...

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the answer to a call.

        Raises:
            ToolError: it failed, with what the model is told.
        """
        ...


class FunctionTools:
    """Functions as tools, by their names."""

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        chosen = list(functions)
        self.functions = {function.__name__: function for function in chosen}
        self.known = [schema_of(function) for function in chosen]

    async def schemas(self) -> list[Schema]:
        """Return their descriptions."""
        return self.known

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return what the function returns, as text."""
        try:
            return text_of(await called(self.functions[name], **arguments))
        except Exception as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error


class McpTools:
    """The tools of an MCP server: a command that speaks over its standard input and output, or a URL.

    The server starts with the first use in an event loop, and all episodes of the loop share one connection.
    """

    def __init__(self, server: Any) -> None:
        self.server = server
        self.client: asyncio.Future[Client] | None = None
        self.ending: asyncio.Event | None = None
        self.task: asyncio.Task[None] | None = None

    async def connected(self) -> Client:
        """Return the client; connect it first if nobody has. A failed connection is tried again."""
        if self.client is None or (self.client.done() and self.client.exception() is not None):
            self.client, self.ending = asyncio.get_running_loop().create_future(), asyncio.Event()
            self.task = asyncio.create_task(self.serve(self.client, self.ending))
        return await asyncio.shield(self.client)

    async def serve(self, connected: asyncio.Future[Client], ending: asyncio.Event) -> None:
        """Hold the connection: it must end in the task in which it began."""
        from mcp import Client, StdioServerParameters

        server = self.server
        if isinstance(server, str) and not server.startswith(("http://", "https://")):
            command, *arguments = shlex.split(server)
            server = StdioServerParameters(command=command, args=arguments)
        try:
            async with asyncio.timeout(START_S) as start, Client(server) as client:
                start.reschedule(None)
                connected.set_result(client)
                await ending.wait()
        except Exception as error:
            if not connected.done():
                what = f"the server {self.server} does not answer"
                connected.set_exception(ToolError(f"{what} ({type(error).__name__}: {error})"))

    async def schemas(self) -> list[Schema]:
        """Return the descriptions of the server's tools."""
        listed = await (await self.connected()).list_tools()
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": dict(tool.input_schema),
                },
            }
            for tool in listed.tools
        ]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the texts of the server's answer."""
        try:
            result = await (await self.connected()).call_tool(name, arguments)
        except ToolError:
            raise
        except Exception as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error
        text = "\n".join(str(part.text) for part in result.content if part.type == "text")
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """End the connection, and the server if it is a command."""
        if self.ending is not None and self.task is not None:
            self.ending.set()
            await self.task


class ToolEnvironment:
    """Answers the calls of each turn. A turn without calls ends the episode; the run's reward sources score it."""

    def __init__(self, tools: Sequence[Tools], timeout_s: float) -> None:
        self.tools, self.timeout_s = tools, timeout_s  # agent.tool_timeout_s: of one call
        self.owners: dict[str, Tools] = {}
        self.errors = 0

    async def reset(self, task: Task) -> Start:
        """Tell the model which tools there are.

        Raises:
            ToolError: two of them have the same name.
        """
        schemas: list[Schema] = []
        for each in self.tools:
            for schema in await each.schemas():
                name = schema["function"]["name"]
                if name in self.owners:
                    raise ToolError(f"two tools are called {name}, so a call does not say which: rename one of them")
                self.owners[name] = each
                schemas.append(schema)
        return Start(tools=tuple(schemas))

    async def step(self, turn: Turn) -> Step:
        """Answer the calls of a turn, in their order."""
        if turn.is_cut or not turn.calls:
            return Step(done=True, extra=self.metrics())
        answers = [answer_to(call, await self.answer(call)) for call in turn.calls]
        return Step(tuple(answers), extra=self.metrics())

    async def answer(self, call: ToolCall) -> str:
        """Return the answer to a call: what the tool says, or what is wrong."""
        try:
            if call.problem is not None:
                raise ToolError(call.problem)
            if call.name not in self.owners:
                raise ToolError(f"there is no tool {call.name!r}; tools: {', '.join(self.owners)}")
            with waiting(f"the tool {call.name}", limit_s=self.timeout_s, flag="agent.tool_timeout_s"):
                async with asyncio.timeout(self.timeout_s):
                    return await self.owners[call.name].call(call.name, call.arguments)
        except ToolError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"{call.name} took longer than {self.timeout_s:g} s"
        self.errors += 1
        return f"Error: {problem}"

    def metrics(self) -> dict[str, float]:
        return {"agent/tool_errors": float(self.errors)}

    async def close(self) -> None:
        """Nothing belongs to the episode alone."""


def answer_to(call: ToolCall, text: str) -> Message:
    """Return the message of a tool that answers a call."""
    return {"role": "tool", "name": call.name or "unknown", "tool_call_id": call.id, "content": text}


def schema_of(function: Callable[..., Any]) -> Schema:
    """Return the description of a function, from its type hints and its docstring (Google style, with Args).

    Raises:
        UserError: they do not describe all of its arguments.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema: Schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        code = getattr(function, "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)
        raise UserError(
            f"{where}: the tool {function.__name__} cannot be described to the model: {error} Give each argument a "
            "type hint, and a line in the docstring below Args:"
        ) from error
    schema["function"].pop("return", None)  # templates show all of a schema, and some models know no such key
    return schema


def text_of(value: object) -> str:
    """Return what a tool returned as text: a text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
