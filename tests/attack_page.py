"""docs/reward_attacks.md: what attacks came to, a table for each file of tests that makes them.

    python3 noxfile.py -s proofs -- attacks

A file of such tests has a `SECTION`, its tests take the fixture `section` and add a row for each attack, and with the
option `--pages` the section is written when the last of them has ended.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reward_attacks.md"
WIDTH = 120


@dataclass
class Section:
    """A part of the page: its heading, what stands below it, the table, and what stands after it."""

    heading: str
    text: str
    columns: tuple[str, ...]
    behind: str = ""
    rows: list[tuple[object, ...]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Add the row of an attack."""
        assert len(cells) == len(self.columns)
        self.rows.append(cells)

    def markdown(self) -> str:
        """Return the section as it stands on the page."""
        table = [self.columns, ("---",) * len(self.columns), *self.rows]
        lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in table]
        lines[1] = lines[1].replace(" ", "")
        behind = ["", self.behind] if self.behind else []
        return "\n".join([self.heading, "", *textwrap.wrap(self.text, WIDTH), "", *lines, *behind, ""])

    def write(self, page: Path = PAGE) -> None:
        """Put the section in the place of the one with its heading."""
        before, found, others = page.read_text().partition(f"{self.heading}\n")
        assert found, f"{page.name} has no heading {self.heading!r}"
        following = others.find("\n## ")
        page.write_text(before + self.markdown() + ("" if following < 0 else others[following:]))
