"""Tools: functions of the user's, and of MCP servers (`mcp_tools`), which the model calls by name.

A function is described to the model by its type hints and its docstring. What it returns, or the error that it raises,
is the answer to the call; nothing that a model writes into a call ends an episode.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlhf_suite.agents.base import Environment, Schema, Start, Step, Task, ToolCall, Turn
from rlhf_suite.agents.calls import EnvironmentFailure, call, call_within_limit, check_answer
from rlhf_suite.data.messages import Message
from rlhf_suite.python_source import SourceError
from rlhf_suite.waits import waiting

MCP = "mcp:"  # before the command or the URL of a server in agent.tools


class ToolError(Exception):
    """A call that failed; its text is the answer."""


class Tools(Protocol):
    """Tools as one episode has them."""

    async def schemas(self) -> list[Schema]:
        """Return their descriptions."""
        ...

    async def begin(self) -> None:
        """Begin what calls need. Called before each of them, outside of its time limit."""
        ...

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the answer to a call.

        Raises:
            ToolError: it failed, with what the model is told.
        """
        ...

    async def close(self) -> None:
        """End what belongs to the episode alone."""
        ...


class ToolSource(Protocol):
    """Where the tools of a run come from."""

    def of_episode(self) -> Tools:
        """Return the tools for one episode."""
        ...


class FunctionTools:
    """Functions as tools, by their names."""

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        chosen = list(functions)
        self.functions = {function.__name__: function for function in chosen}
        self.known = [schema_of(function) for function in chosen]

    def of_episode(self) -> Tools:
        """Return these tools: all episodes share them."""
        return self

    async def begin(self) -> None:
        """Nothing has to begin."""

    async def close(self) -> None:
        """Nothing belongs to one episode alone."""

    async def schemas(self) -> list[Schema]:
        """Return their descriptions."""
        return self.known

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return what the function returns, as text."""
        try:
            return text_of(await call(self.functions[name], **arguments))
        except Exception as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error


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
        for tool in self.tools:
            for schema in await tool.schemas():
                name = schema["function"]["name"]
                if name in self.owners:
                    raise ToolError(two_tools(name))
                self.owners[name] = tool
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
            owner = self.owners[call.name]
            await owner.begin()
            with waiting(f"the tool {call.name}", limit_s=self.timeout_s, flag="agent.tool_timeout_s"):
                async with asyncio.timeout(self.timeout_s):
                    return await owner.call(call.name, call.arguments)
        except ToolError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"{call.name} took longer than {self.timeout_s:g} s"
        self.errors += 1
        return f"Error: {problem}"

    def metrics(self) -> dict[str, float]:
        return {"agent/tool_errors": float(self.errors)}

    async def close(self) -> None:
        """End what belongs to the episode alone."""
        await asyncio.gather(*(tool.close() for tool in self.tools))


class EnvironmentWithTools:
    """An environment beside tools of its file or of agent.tools, which answer the calls of a turn.

    A turn without calls goes to the environment, and so do the calls of tools that it offers itself or that come with
    the row: it gets a turn with these calls alone. `limit_s` bounds each of its answers.
    """

    def __init__(self, environment: Environment, tools: ToolEnvironment, limit_s: float | None) -> None:
        self.environment, self.tools, self.limit_s = environment, tools, limit_s
        self.own: set[str] = set()  # tools of the environment

    async def reset(self, task: Task) -> Start:
        """Begin, and add the tools to those of the environment.

        Raises:
            ToolError: two of them have the same name.
        """
        given = await call_within_limit(self.environment.reset, task, limit_s=self.limit_s)
        start = check_answer(given, Start, "reset", "")
        self.own = {schema["function"]["name"] for schema in (*start.tools, *task.tools)}
        tools = (await self.tools.reset(task)).tools
        if twice := sorted(self.own & self.tools.owners.keys()):
            raise ToolError(two_tools(twice[0]))
        return replace(start, tools=(*start.tools, *tools))

    async def step(self, turn: Turn) -> Step:
        """Answer the calls of tools, and let the environment answer the rest of the turn."""
        calls = () if turn.is_cut else tuple(call for call in turn.calls if call.name not in self.own)
        if not calls:
            return await self.of_environment(turn)
        answered = await self.tools.step(replace(turn, calls=calls))
        rest = tuple(call for call in turn.calls if call.name in self.own)
        if not rest:
            return answered
        step = await self.of_environment(replace(turn, calls=rest))
        if step.text:
            raise EnvironmentFailure("step of the environment answered calls with a text, not with messages")
        is_over = step.done or not step.messages
        messages, extra = (*answered.messages, *step.messages), answered.extra | step.extra
        return replace(step, messages=messages, extra=extra, done=is_over)

    async def of_environment(self, turn: Turn) -> Step:
        """Return what the environment answers."""
        return check_answer(
            await call_within_limit(self.environment.step, turn, limit_s=self.limit_s), Step, "step", ""
        )

    async def last_step(self) -> Step:
        """Return the last numbers of the environment, which may have none."""
        last_step = getattr(self.environment, "last_step", None)
        return Step() if last_step is None else await call_within_limit(last_step, limit_s=self.limit_s)

    async def close(self) -> None:
        """Close both."""
        await asyncio.gather(self.tools.close(), call(self.environment.close), return_exceptions=True)


def two_tools(name: str) -> str:
    return f"two tools are called {name}, so a call does not say which: rename one of them"


def answer_to(call: ToolCall, text: str) -> Message:
    """Return the message of a tool that answers a call. Half of a surrogate pair, as in the name of a file that is not
    UTF-8, is a question mark: it is not a character, so the model cannot read it."""
    content = text.encode(errors="replace").decode()
    return {"role": "tool", "name": call.name or "unknown", "tool_call_id": call.id, "content": content}


def schema_of(function: Callable[..., Any]) -> Schema:
    """Return the description of a function, from its type hints and its docstring (Google style, with Args).

    Raises:
        SourceError: they do not describe all of its arguments.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema: Schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        code = getattr(function, "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)
        problem = f"{where}: the tool {function.__name__} cannot be described to the model: {error}"
        fix = "give it a docstring, and each argument a type hint and a line in the docstring below Args:"
        raise SourceError(problem, fix) from error
    schema["function"].pop("return", None)  # templates show all of a schema, and some models know no such key
    return schema


def text_of(value: object) -> str:
    """Return what a tool returned as text: a text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
