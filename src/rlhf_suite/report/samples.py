"""The before/after table of a run, as markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_suite.train.console import Sample
from rlhf_suite.train.run_folder import RunFolder

HEADING = "| prompt | before | reward | after | reward | label |\n|---|---|---|---|---|---|\n"


def write_samples(folder: RunFolder, samples: Sequence[Sample]) -> str:
    """Write `samples.md` into the run folder and return its text."""
    text = "# Before and after training\n\n" + HEADING + "".join(_row(sample) for sample in samples)
    (folder.path / "samples.md").write_text(text)
    return text


def _row(sample: Sample) -> str:
    before, after = sample.rewards
    cells = (_cell(sample.prompt), _cell(sample.before), f"{before:.3g}", _cell(sample.after), f"{after:.3g}")
    return f"| {' | '.join(cells)} | {_cell(sample.label)} |\n"


def _cell(text: str) -> str:
    """Text of a model, shown as it is: as code, on one line, with no way out of its cell."""
    shown = text.replace("\n", "⏎").replace("|", "\\|").replace("`", "'").strip()
    return f"`{shown}`" if shown else ""
