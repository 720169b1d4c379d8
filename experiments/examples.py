"""The pages of the examples that are not recipes: gallery.py writes them from the first lines of each file, and from
what the benchmarks of agents measured."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
sys.path += [str(FOLDER), str(ROOT / "benchmarks")]

from measured import WRITTEN_BY, Curves, Row, gibibytes, minutes  # noqa: E402

from agents import EXAMPLES as LEARNED  # noqa: E402
from agents import LAST  # noqa: E402
from seeds import spread  # noqa: E402
from when_to_call import KINDS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(?:^(?: {4}|python |pip ).*\n?)+", re.MULTILINE)  # commands among the first lines of a file
JOINED = re.compile(r" {3,}(?=\S)")  # where a command goes on in another line of the file
END = "\n[All examples]({up}README.md)\n"


@dataclass(frozen=True)
class Example:
    """A folder of examples, what checks it, and a sentence for the list of all: without one, the first of agent.py."""

    folder: str
    checked: tuple[str, ...]
    what: str = ""

    @property
    def path(self) -> Path:
        return FOLDER / self.folder

    @property
    def name(self) -> str:
        return self.path.name

    def sentence(self) -> str:
        """Return what the example shows."""
        return self.what or " ".join(head_of(self.path / "agent.py").partition("\n\n")[0].split())


CURVES = "`benchmarks/agents.py`: every command above, on demand; its page is [agent_curves]({docs}agent_curves.md)."
AGENT = (
    "`tests/planner/test_examples.py`, in each change: the commands pass all checks of a run.",
    CURVES,
)
ALONE = "By hand, because it needs packages in a separate environment: [the page]({docs}%s.md) has the versions."
EXAMPLES = (
    *(Example(f"agents/{name}", AGENT) for name in ("second_try", "guess", "nim", "calculator")),
    Example(
        "agents/chat_client",
        (*AGENT, "`tests/e2e/test_foreign_agents.py`, on demand: it trains, and trains on each token once."),
    ),
    Example("agents/fences", AGENT),
    Example(
        "agents/harnesses",
        (
            f"{AGENT[0][:-1]}, where Codex is installed.",
            CURVES,
            "`tests/e2e/test_ledgers_of_harnesses.py`, on demand: each sampled token is trained on once.",
            "[Harnesses]({docs}agents_harnesses.md) describes how the harnesses behave.",
        ),
    ),
    Example(
        "agents/when_to_call",
        (AGENT[0], CURVES.replace("agents.py", "when_to_call.py").replace("agent_curves", "when_to_call")),
    ),
    Example(
        "agents/programs",
        (ALONE % "agents_program", "`tests/e2e/test_foreign_agents.py`, where they are installed."),
        "Unchanged programs of LangGraph, OpenAI's Agents SDK and verifiers, as agents that use a tool to add.",
    ),
    Example(
        "agents/openenv",
        (ALONE % "agents_environments",),
        "The game of the example guess, on a real OpenEnv server.",
    ),
    Example(
        "own_code",
        (
            "`tests/planner/test_examples.py`, in each change: the commands pass all checks of a run.",
            "`tests/config/test_own_code.py`, `tests/rl/test_filtering.py`: each function is found, and trains a step.",
            "`tests/algo/test_async_fork.py`: comparison with values that were computed by hand.",
            "`tests/e2e/test_own_code_run.py`, on demand: a whole run.",
        ),
        "Your own estimators, losses, filters, rule, row format and learning-rate schedule.",
    ),
    Example(
        "callbacks",
        (
            "`tests/planner/test_examples.py`, in each change: the commands pass all checks of a run.",
            "`tests/train/test_callbacks.py`: the files that they write, also in a continued run.",
        ),
        "Send metrics and samples to other programs; end a run when it has reached a goal.",
    ),
    Example(
        "notebooks",
        ("`tests/api/test_notebooks.py`, on demand: both run to their end and show a curve.",),
        "Your own agent and your own reward, in Jupyter.",
    ),
    Example(
        "grpo_client",
        ("`tests/api/test_client.py`, on demand: its weights are those of `task=ppo experiment=grpo`, bit for bit.",),
        "GRPO as your own training loop.",
    ),
)


def head_of(file: Path) -> str:
    """Return the first text of a Python file or of a notebook."""
    if file.suffix == ".ipynb":
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        return "".join(cells[0]["source"]).partition("\n\n")[2] + f"\n\n    jupyter execute {file.relative_to(ROOT)}\n"
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def commands_of(file: Path) -> list[str]:
    """Return the commands in the first text of a file that run as they are, each in one line."""
    lines = (" ".join(line.split()) for block in BLOCK.findall(head_of(file)) for line in block.splitlines())
    return [
        line
        for line in lines
        if line.startswith(("python run.py", "python experiments", "jupyter ")) and "..." not in line
    ]


def text_of(file: Path) -> str:
    """Return the first text of a file as Markdown, with its commands in blocks."""

    def block(found: re.Match[str]) -> str:
        lines = (line.strip() for line in found[0].rstrip("\n").splitlines())
        return "```text\n" + "\n".join(JOINED.sub(" \\\\\n    ", line) for line in lines) + "\n```\n"

    return BLOCK.sub(block, head_of(file).strip() + "\n")


def files_of(example: Example) -> list[Path]:
    """Return the files whose first texts make the page."""
    return sorted(path for path in example.path.iterdir() if path.suffix in (".py", ".ipynb"))


def page(example: Example) -> str:
    """Return the page of an example."""
    up = "../" * len(Path(example.folder).parts)
    files = files_of(example)
    parts = [f"# {example.name}\n"]
    parts += [f"{example.what}\n"] if example.what and len(files) > 1 else []
    for file in files:
        parts += [f"## {file.name}\n"] if len(files) > 1 else []
        parts.append(text_of(file))
    parts += [f"All of it is [{files[0].name}]({files[0].name}).\n"] if len(files) == 1 else []
    parts.append("## What to expect\n")
    parts += [*expected(example)]
    parts.append("## Checked\n")
    parts.append("\n".join(f"- {line.format(docs=f'{up}../docs/')}" for line in example.checked))
    return WRITTEN_BY + "\n" + "\n".join(parts) + "\n" + END.format(up=up)


def expected(example: Example) -> Iterator[str]:
    """Yield what is known of the cost and the result of an example."""
    rows, curves = results(example.name), learned(example.name)
    if rows:
        yield "| | at the first step | at the end |\n|---|---|---|\n" + "\n".join(table(curves)) + "\n"
        yield cost_of(rows)
        yield "![The curves of the means](curve.png)\n"
    else:
        yield "There are no separate measurements: the run that uses this code determines time and memory.\n"


def results(name: str) -> list[Row]:
    """Return the newest line of each seed of an agent."""
    file = "when_to_call" if name == "when_to_call" else "agents"
    rows = map(json.loads, (RESULTS / f"{file}.jsonl").read_text().splitlines())
    return [*{row["seed"]: row for row in rows if row.get("example", name) == name}.values()]


def learned(name: str) -> Mapping[str, list[Sequence[float]]]:
    """Return what an agent learned: the values at each step, for each seed."""
    rows = results(name)
    if name == "when_to_call":
        labels = {"calls": "calls per episode", "right": "right answers"}
        return {
            f"{label}, {told}": [row[kind][key] for row in rows]
            for kind, told in KINDS.items()
            for key, label in labels.items()
        }
    if name not in LEARNED:
        return {}
    found = LEARNED[name]
    return {
        f"share of episodes in which {found.right}": [row["right"] for row in rows],
        f"{found.used} per episode": [row["used"] for row in rows],
    }


def table(curves: Mapping[str, list[Sequence[float]]]) -> Iterator[str]:
    """Yield a line for each thing that is learned."""
    for label, seeds in curves.items():
        first = spread([values[0] for values in seeds])
        last = spread([sum(values[-LAST:]) / LAST for values in seeds])
        yield f"| {label} | {first} | {last} |"


def cost_of(rows: list[Row]) -> str:
    """Return a sentence about the figures and what all commands took."""
    count, dates = len(rows), sorted(row["date"][:10] for row in rows)
    taken = minutes(sum(row["seconds"] for row in rows) / count)
    memory = [row["peak_pss_mb"] for row in rows if "peak_pss_mb" in row]
    held = f" and {gibibytes(max(memory))} of memory for all processes" if memory else ""
    loads = [row["machine"]["load_average"] for row in rows]
    low, high = f"{min(loads):.0f}", f"{max(loads):.0f}"
    load = low if low == high else f"{low} to {high}"
    seeds = "Values of one seed"
    if count > 1:
        seeds = f"Means over {count} seeds, with the lowest and the highest in brackets"
    return (
        f"{seeds}; the end is the mean of the last {LAST} steps. All commands together took {taken} minutes"
        f"{held}, on two CPU cores with a load average of {load} (until {dates[-1]}).\n"
    )


def curve_of(name: str) -> Curves:
    """Return the means over seeds of what an agent learned, at each step."""
    return {
        label: [(step, sum(values) / len(seeds)) for step, values in enumerate(zip(*seeds, strict=True), 1)]
        for label, seeds in learned(name).items()
    }
