"""Responses to the same prompts before and after training: a short table on the console, whole texts
in `samples.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_suite.disk import write_text
from rlhf_suite.foreign_text import printable
from rlhf_suite.run_folders.run_folder import RunFolder

CELL_LIMIT = 10_000  # characters of a text in samples.md
HEADING = "| prompt | before | reward | after | reward | label |\n|---|---|---|---|---|---|\n"
TABLE_ROWS = 8
CELL_LINES = 3  # lines of text in a cell of the console's table; longer texts are cut


@dataclass(frozen=True)
class Sample:
    """One held-out prompt with its responses before and after training. `rewards` are those of the two responses."""

    prompt: str
    before: str
    after: str
    label: str
    rewards: tuple[float, float]


def samples_table(samples: Sequence[Sample], width: int) -> Table:
    """Return a table of the first samples for a console of `width` characters. Long texts keep both ends."""
    table = Table(title="Before and after training", show_lines=True)
    for column in ("prompt", "before", "after", "label", "reward"):
        table.add_column(column, overflow="fold")
    limit = CELL_LINES * max(8, (width - 28) // 4)  # four columns of text share the width beside rewards and borders
    for sample in samples[:TABLE_ROWS]:
        before, after = sample.rewards
        # Text objects: what a model writes must not act as markup of the console.
        texts = [Text(shorten(text, limit)) for text in (sample.prompt, sample.before, sample.after, sample.label)]
        table.add_row(*texts, f"{before:.3g} → {after:.3g}")
    return table


def shorten(text: str, length: int) -> str:
    """Return the text on one line of at most `length` characters, with ` … ` in place of what was cut
    from its middle."""
    line = printable(text.strip(), len(text), keep_lines=True).replace("\n", "⏎")
    if len(line) <= length:
        return line
    kept = length - 3
    return f"{line[: kept - kept // 2]} … {line[-(kept // 2) :]}"


def show_samples(samples: Sequence[Sample]) -> None:
    """Print the table."""
    console = Console()
    console.print(samples_table(samples, console.width))


def write_samples(folder: RunFolder, samples: Sequence[Sample]) -> str:
    """Write `samples.md` into the run folder and return its text."""
    text = "# Before and after training\n\n" + HEADING + "".join(_row(sample) for sample in samples)
    write_text(folder.path / "samples.md", text)
    return text


def _row(sample: Sample) -> str:
    """Return a row of the table in samples.md."""
    before, after = sample.rewards
    cells = (_cell(sample.prompt), _cell(sample.before), f"{before:.3g}", _cell(sample.after), f"{after:.3g}")
    return f"| {' | '.join(cells)} | {_cell(sample.label)} |\n"


def _cell(text: str) -> str:
    """Return a model's text as code on one line that cannot break out of its table cell."""
    line = printable(text.strip(), CELL_LIMIT, keep_lines=True).replace("\n", "⏎")
    shown = line.replace("|", "\\|").replace("`", "'")
    return f"`{shown}`" if shown else ""
