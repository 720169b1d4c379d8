"""The reference that is generated: `python -m rlhf_suite.config.export` writes docs/flags.md and docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf_suite.config.flags import FlagInfo, by_section, walk
from rlhf_suite.config.formatting import describe_type, spell
from rlhf_suite.config.launchers import LAUNCHERS, PREFIX, settings_of
from rlhf_suite.config.metrics import FAMILIES, METRICS
from rlhf_suite.config.runs import TASKS
from rlhf_suite.registry import KINDS, Kind

DOCS = Path(__file__).parents[3] / "docs"
HEADER = ("| flag | default | type | meaning |", "| --- | --- | --- | --- |")
NOTE = "<!-- Generated from src/rlhf_suite/config: python -m rlhf_suite.config.export -->"


def markdown() -> str:
    """Return the table of every flag of every task by section; a section that several tasks share is written once."""
    lines = [NOTE, "", "# Flags", "", "`python run.py --help task=<task> [prefix]` prints the same."]
    for (key, rows), tasks in sorted(sections().items(), key=lambda item: item[0][0]):
        names = ", ".join(f"task={task}" for task in tasks)
        lines += ["", f"## `{key}` ({names})" if key else f"## The run itself ({names})", ""]
        lines += [*HEADER, *rows]
    for name, settings in LAUNCHERS.items():
        lines += ["", f"## `{PREFIX}`: {settings.__doc__}", "", *HEADER, *map(row, settings_of(name))]
    for algorithm in KINDS.values():
        lines += algorithms(algorithm)
    return "\n".join(lines) + "\n"


def algorithms(algorithm: Kind) -> Iterator[str]:
    """Yield the table of the suite's own algorithms of a kind, as they are declared at their functions."""
    flags = dict.fromkeys(
        info.key for root in TASKS.values() for info in walk(root) if info.meta.algorithms is algorithm
    )
    if not flags:
        return
    yield from ("", f"## {algorithm.title[0].upper()}{algorithm.title[1:]}", "")
    yield f"Chosen by {', '.join(f'`{key}`' for key in flags)}."
    yield f"Your own: `<file.py>:<function>` with `{algorithm.signature('<function>')}` (docs/own_code.md)."
    if algorithm.names():
        yield from ("", "| name | meaning | needs | flags that it reads |", "| --- | --- | --- | --- |")
    for name, declaration in algorithm.builtin().items():
        cells = (
            f"`{name}`",
            declaration.help,
            ", ".join(declaration.needs),
            ", ".join(f"`{flag}`" for flag in declaration.reads or ()),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def sections() -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """Return the tasks that have a section, by the key of the section and its table."""
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for task, root in TASKS.items():
        for key, infos in by_section(info for info in walk(root) if info.key != "task").items():
            rows.setdefault((key, tuple(map(row, infos))), []).append(task)
    return rows


def row(info: FlagInfo) -> str:
    cells = (f"`{info.key}`", f"`{spell(info.default)}`", describe_type(info), info.help)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "\\n") for cell in cells) + " |"


def metrics() -> str:
    """Return the table of every metric."""
    lines = [
        *(NOTE, "", "# Metrics", ""),
        "`metrics.jsonl` has them, and TensorBoard and Weights & Biases too. A name without a slash means the same in",
        "each section: `train/acc` is measured in training, `eval/acc` in an evaluation, `eval/<set>/acc` in each",
        "of its sets, `train/<source>/reward` of each source of prompts. The last column says which way is better: the",
        "best checkpoint, early stopping and searches choose by that, and by no metric without it.",
        *("", "| metric | meaning | better |", "| --- | --- | --- |"),
    ]
    for name, metric in (METRICS | FAMILIES).items():
        lines.append(f"| `{name}` | {metric.meaning.replace('|', chr(92) + '|')} | {metric.better or ''} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (DOCS / "flags.md").write_text(markdown())
    (DOCS / "metrics.md").write_text(metrics())
