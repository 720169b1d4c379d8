"""Tool-integrated reasoning: the model writes Python, which runs in a jailed session that lasts for the episode.

Two styles. With `fence` the model writes a block that begins with ```python in its text, and the output follows as a
block that begins with ```output; this needs no chat template, so base models learn it too. With `tool` the model calls
the tool `python` in the form of its chat template.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rlhf_suite.agents.base import Environment, Schema, Start, Step, Task, ToolCall, Turn
from rlhf_suite.agents.environment import EnvironmentAgent
from rlhf_suite.agents.players import ONE, Players
from rlhf_suite.agents.tools import answer_to
from rlhf_suite.data.ending import Ending
from rlhf_suite.sandbox.jail import choose_jail, templates
from rlhf_suite.sandbox.process import Resources
from rlhf_suite.sandbox.session import CallResult
from rlhf_suite.sandbox.session import Session as JailSession
from rlhf_suite.waits import waiting

OPEN, CLOSE = "```python", "```"
BEFORE, AFTER = "\n```output\n", "\n```\n"
NO_OUTPUT = "(no output)"
REMEDY = "set agent.python_allow_weaker=true to use it, or run where namespaces are allowed (docs/agents_tools.md)"
LASTING = (
    "Run Python code. Names persist between calls. The printed output and the value of the last expression are "
    "returned."
)
PROGRAMS = "Run a Python program. The printed output is returned. Names do not persist between calls."


def schema(description: str) -> Schema:
    """Return the tool `python` as chat templates describe it."""
    code = {"type": "string", "description": "the code"}
    parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    return {"type": "function", "function": {"name": "python", "description": description, "parameters": parameters}}


class CodeSession(Protocol):
    """An interpreter whose names last from call to call. It starts with the first call."""

    async def run_async(self, code: str, timeout_s: float) -> CallResult:
        """Run code within so many seconds."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class PythonSession:
    """The interpreter of one episode: runs code and counts what came of it."""

    def __init__(self, make: Callable[[], CodeSession], timeout_s: float) -> None:
        self.session, self.timeout_s = make(), timeout_s
        self.calls = self.errors = self.timeouts = 0

    async def output(self, code: str) -> str:
        """Return what the model is told about its code: output, value of the last expression, problem."""
        with waiting("the Python of a turn", limit_s=self.timeout_s, flag="agent.tool_timeout_s"):
            result = await self.session.run_async(code, self.timeout_s)
        self.calls += 1
        self.errors += result.problem is not None
        self.timeouts += result.timed_out
        parts = (result.output, result.value, result.problem)
        return "\n".join(part.rstrip("\n") for part in parts if part) or NO_OUTPUT

    def metrics(self) -> dict[str, float]:
        """Return counts of the episode."""
        counts = {"calls": self.calls, "errors": self.errors, "timeouts": self.timeouts}
        return {f"agent/python_{name}": float(value) for name, value in counts.items()}


def make_jailed(memory_mb: int, allow_weaker: bool) -> Callable[[], CodeSession]:
    """Return what makes a jailed session. Raise SandboxError if this machine offers no jail that is allowed."""
    options = choose_jail(allow_weaker, REMEDY)
    return lambda: JailSession(templates.get(options), Resources(memory_mb=memory_mb))


class PythonEnvironment:
    """Answers calls of the tool `python`. A turn without calls ends the episode."""

    def __init__(self, make: Callable[[], CodeSession], timeout_s: float, description: str = LASTING) -> None:
        self.python, self.tool = PythonSession(make, timeout_s), schema(description)

    async def reset(self, task: Task) -> Start:
        """Tell the model about the tool."""
        return Start(tools=(self.tool,))

    async def step(self, turn: Turn) -> Step:
        """Run the code of each call, in their order."""
        if turn.is_cut or not turn.calls:
            return Step(done=True, extra=self.python.metrics())
        answers = [answer_to(call, await self.answer(call)) for call in turn.calls]
        return Step(tuple(answers), extra=self.python.metrics())

    async def answer(self, call: ToolCall) -> str:
        """Return the answer to a call: the output, or what is wrong with the call."""
        code = call.arguments.get("code")
        if call.problem is not None:
            return f"Error: {call.problem}"
        if call.name != "python" or not isinstance(code, str):
            return "Error: there is one tool, python, whose argument is code, a text"
        return await self.python.output(code)

    async def close(self) -> None:
        """End the interpreter."""
        self.python.session.close()


class FenceAgent(EnvironmentAgent):
    """Runs episodes in which code stands in fences. After the last allowed call, fences do not end a turn any more."""

    async def play(self, environment: Environment, task: Task, players: Players) -> Ending:
        """Let the model write, run each block of code, and insert its output, until the model ends its response."""
        session, progress = players.by_role[ONE].session, players.by_role[ONE].progress
        if not session.set_prompt(None, None):
            return Ending.FULL
        assert isinstance(environment, PythonEnvironment)
        python = environment.python
        progress.extra |= python.metrics()  # also of an episode without code
        others = session.sampling.stop
        while True:
            may_call = python.calls < self.max_turns - 1
            turn = await session.reply((OPEN, *others) if may_call else others)
            block = turn.text.partition(OPEN)[2] if may_call and OPEN in turn.text else None
            if turn.is_cut or (block is not None and session.is_full):
                return Ending.CUT if turn.is_cut else Ending.FULL
            if block is None:
                return Ending.FINISHED
            rest = await session.reply((CLOSE,), counts=False)
            code, closed, _ = (block + rest.text).partition(CLOSE)
            if rest.is_cut or not closed:
                return Ending.CUT if rest.is_cut else Ending.FINISHED
            output = await self.ask(python.output, code)
            progress.extra |= python.metrics()
            if not session.observe_text(output, BEFORE, AFTER):
                return Ending.FULL
