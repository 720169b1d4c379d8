"""The reference that is generated: `python -m rlhf_suite.config.export` writes docs/flags.md and docs/metrics.md."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from rlhf_suite.config.check.formatting import describe_type
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.flags import FlagInfo
from rlhf_suite.config.declarations.launchers import LAUNCHERS, PREFIX, settings_of
from rlhf_suite.config.declarations.metrics import FAMILIES, METRICS
from rlhf_suite.config.declarations.runs import TASKS, flags_of
from rlhf_suite.config.declarations.task_groups import LOOPS, SUPERVISED
from rlhf_suite.registry import KINDS, Kind

DOCS = Path(__file__).parents[3] / "docs"
HEADER = ("| flag | default | type | tasks | meaning |", "| --- | --- | --- | --- | --- |")
HEADER_OF_SETTINGS = ("| flag | default | type | meaning |", "| --- | --- | --- | --- |")
NOTE = "<!-- Generated from src/rlhf_suite/config: python -m rlhf_suite.config.export -->"
GROUPS = {"supervised": SUPERVISED, "loops": LOOPS}
INTRODUCTION = f"""\
`python run.py --help task=<task> [prefix]` prints the flags of a task. Where tasks differ in a default, a type, a
meaning or a condition, lines that begin with their names say so, and the line above is that of the others.

{chr(10).join(f"- {name}: {', '.join(tasks)}" for name, tasks in GROUPS.items())}"""


def markdown() -> str:
    """Return the tables of all flags by section, each flag once with the tasks that have it."""
    lines = [NOTE, "", "# Flags", "", INTRODUCTION]
    for section, flags in sorted(sections().items()):
        lines += ["", f"## `{section}`" if section else "## The run itself", "", *HEADER]
        lines += [row(key, infos) for key, infos in flags.items()]
    for name, settings in LAUNCHERS.items():
        lines += ["", f"## `{PREFIX}`: {settings.__doc__}", "", *HEADER_OF_SETTINGS, *map(setting, settings_of(name))]
    for algorithm in KINDS.values():
        lines += algorithms(algorithm)
    return "\n".join(lines) + "\n"


def algorithms(algorithm: Kind) -> Iterator[str]:
    """Yield the table of the suite's own algorithms of a kind, as they are declared at their functions."""
    flags = dict.fromkeys(
        info.key for task in TASKS for info in flags_of(task).values() if info.meta.algorithms is algorithm
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
        yield join_cells(*cells)


def sections() -> dict[str, dict[str, dict[str, FlagInfo]]]:
    """Return what each task declares, by section, flag and task."""
    declared: dict[str, dict[str, dict[str, FlagInfo]]] = {}
    for task in TASKS:
        for info in flags_of(task).values():
            if info.key != "task":
                declared.setdefault(info.key.rpartition(".")[0], {}).setdefault(info.key, {})[task] = info
    return declared


def row(key: str, infos: Mapping[str, FlagInfo]) -> str:
    """Return the row of a flag from what the tasks that have it declare."""
    meaning = by_task({task: info.meaning for task, info in infos.items()})
    for begin, texts in (
        ("read when ", {task: info.read_when for task, info in infos.items()}),
        ("", {task: info.needed for task, info in infos.items()}),
    ):
        is_same = len({*texts.values()}) == 1
        for text in filter(None, dict.fromkeys(texts.values())):
            said = f"{begin}{text}"
            named = name_tasks([task for task in infos if texts[task] == text])
            meaning += f". {said[0].upper()}{said[1:]}" if is_same else f"<br>*{named}*: {said}"
    default = by_task({task: f"`{spell(info.default)}`" for task, info in infos.items()})
    kind = by_task({task: describe_type(info) for task, info in infos.items()})
    return join_cells(f"`{key}`", default, kind, name_tasks(infos), meaning)


def by_task(texts: Mapping[str, str]) -> str:
    """Return the text that most tasks have, and below it the others with their tasks."""
    tasks: dict[str, list[str]] = {}
    for task, text in texts.items():
        tasks.setdefault(text, []).append(task)
    first, *others = sorted(tasks, key=lambda text: -len(tasks[text]))
    return "<br>".join([first, *(f"*{name_tasks(tasks[text])}*: {text}" for text in others)])


def name_tasks(tasks: Collection[str]) -> str:
    """Return the names of tasks, and of groups of tasks where all of a group are among them."""
    if len(tasks) == len(TASKS):
        return "all"
    whole = {task: name for name, group in GROUPS.items() for task in group if {*group} <= {*tasks}}
    return ", ".join(dict.fromkeys(whole.get(task, task) for task in tasks))


def setting(info: FlagInfo) -> str:
    """Return the row of a setting of a launcher."""
    return join_cells(f"`{info.key}`", f"`{spell(info.default)}`", describe_type(info), info.help)


def join_cells(*cells: str) -> str:
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
