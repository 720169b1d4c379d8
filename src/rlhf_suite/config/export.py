"""The reference that is generated: `python -m rlhf_suite.config.export` writes docs/flags.md,
the pages of docs/flags and docs/metrics.md."""

from __future__ import annotations

import re
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
HEADER = ("| flag | default | type | meaning, and tasks that have it |", "| --- | --- | --- | --- |")
HEADER_OF_SETTINGS = ("| flag | default | type | meaning |", "| --- | --- | --- | --- |")
NOTE = "<!-- Generated from src/rlhf_suite/config: python -m rlhf_suite.config.export -->"
GROUPS = {"supervised": SUPERVISED, "loops": LOOPS}
CODE = re.compile(r"`[^`]*`|<br>|<")
OF_RUN = "run"  # the page of flags without a section
NAMES = "; ".join(f"`{name}` are the tasks {', '.join(tasks)}" for name, tasks in GROUPS.items())
COLUMNS = f"""\
If tasks differ in a default, a type, a meaning or a condition, a line begins with the names of its tasks,
and the line above it is for all other tasks. {NAMES}."""
BACK = f"[All sections](../flags.md). {COLUMNS}"
INTRODUCTION = f"""\
Every flag, with its default, type and meaning: one page per section. In a terminal, `python run.py --help task=<task>`
prints the flags of a task. `python run.py --help task=<task> actor.adam` prints only those that begin with actor.adam.

{COLUMNS}"""


def pages() -> dict[str, str]:
    """Return the text of each page of the reference by its path below docs/: an index of the flags, a page for each
    section with what is below it, and the metrics."""
    shown = {name: section_page(name, declared) for name, declared in sections_of_pages().items()}
    texts = {f"flags/{name or OF_RUN}.md": page for name, page in sorted(shown.items())}
    texts |= {"flags/hydra_launcher.md": launchers_page(), "flags/algorithms.md": algorithms_page()}
    return {"flags.md": index(), **texts, "metrics.md": metrics()}


def index() -> str:
    """Return the page that leads to the pages of all sections."""
    lines = [NOTE, "", "# Flags", "", INTRODUCTION, "", "| section | what it is about | flags |", "| --- | --- | --- |"]
    for name, declared in sorted(sections_of_pages().items()):
        title = f"`{name}`" if name else "the run itself"
        below = ", ".join(f"`{section}`" for section in declared if section != name)
        count = sum(map(len, declared.values()))
        lines.append(
            join_cells(
                f"[{title}](flags/{name or OF_RUN}.md)",
                title_of(declared[name]),
                f"{count}, with {below}" if below else str(count),
            )
        )
    kinds = ", ".join(kind.title for kind in KINDS.values() if [*algorithms(kind)])
    count = sum(len(settings_of(name)) for name in LAUNCHERS)
    lines.append(
        join_cells(
            f"[`{PREFIX}`](flags/hydra_launcher.md)", "How jobs are started: on this machine or by Slurm", str(count)
        )
    )
    lines.append(join_cells("[algorithms](flags/algorithms.md)", f"What flags choose by name: {kinds}", ""))
    return "\n".join(lines) + "\n"


def sections_of_pages() -> dict[str, dict[str, dict[str, dict[str, FlagInfo]]]]:
    """Return `sections()` by the first word of their names."""
    groups: dict[str, dict[str, dict[str, dict[str, FlagInfo]]]] = {}
    for section, flags in sorted(sections().items()):
        groups.setdefault(section.partition(".")[0], {})[section] = flags
    return groups


def title_of(flags: Mapping[str, Mapping[str, FlagInfo]]) -> str:
    """Return what a section is about, which its class says."""
    info = next(info for infos in flags.values() for info in infos.values())
    return " ".join((info.owner.__doc__ or "").split())


def section_page(name: str, declared: Mapping[str, dict[str, dict[str, FlagInfo]]]) -> str:
    """Return the page of a section and of those below it, each flag once with the tasks that have it."""
    lines = [NOTE, "", f"# Flags of `{name}`" if name else "# Flags of the run itself", "", BACK]
    for section, flags in declared.items():
        lines += ["", f"## `{section}`", "", f"{title_of(flags)}."] if section else []
        lines += ["", *HEADER, *(row(key, infos) for key, infos in flags.items())]
    return "\n".join(lines) + "\n"


def launchers_page() -> str:
    """Return the page of the launchers of sweeps and jobs."""
    lines = [NOTE, "", f"# Settings of `{PREFIX}`", "", "[All sections](../flags.md)."]
    for name, settings in LAUNCHERS.items():
        lines += ["", f"## {settings.__doc__}", "", *HEADER_OF_SETTINGS, *map(setting, settings_of(name))]
    return "\n".join(lines) + "\n"


def algorithms_page() -> str:
    """Return the page of the suite's own algorithms, with a table for each kind."""
    lines = [NOTE, "", "# Algorithms that flags choose by name", "", "[All sections](../flags.md)."]
    for kind in KINDS.values():
        lines += algorithms(kind)
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
    own = f"`<file.py>:<function>` with `{algorithm.signature('<function>')}`"
    yield f"[Your own](../own_code.md): {own}."
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
    return join_cells(f"`{key}`", default, kind, f"{meaning}<br>**Tasks**: {name_tasks(infos)}")


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
    """Return a row of a table. Angles outside of code, as in <file.py>, are no HTML; a new line in a cell is <br>."""
    return (
        "| "
        + " | ".join(CODE.sub(escape_angles, cell).replace("|", "\\|").replace("\n", "\\n") for cell in cells)
        + " |"
    )


def escape_angles(part: re.Match[str]) -> str:
    """Return a span of code or a line break as it is, and any other angle as a character."""
    return part[0] if len(part[0]) > 1 else "&lt;"


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


def write() -> None:
    """Write all pages of the reference, and remove those of sections that are gone."""
    texts = pages()
    (DOCS / "flags").mkdir(exist_ok=True)
    for file in (DOCS / "flags").glob("*.md"):
        if f"flags/{file.name}" not in texts:
            file.unlink()
    for path, text in texts.items():
        (DOCS / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
