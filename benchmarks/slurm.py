"""Run the tests of a real Slurm, and write what they note into docs/slurm_measured.md.

python benchmarks/slurm.py [slurm | hosts] [arguments of pytest]

`hosts`: those of two hosts that are made of namespaces. Scenarios that are not chosen keep their rows.
"""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, scratch, write_section

PAGE = ROOT / "docs" / "slurm_measured.md"


@dataclass(frozen=True)
class Measurement:
    """A file of tests, the columns of what they note, and the heading and introduction of their section."""

    tests: str
    columns: tuple[str, ...]
    heading: str
    introduction: str


MEASUREMENTS = {
    "slurm": Measurement(
        "tests/e2e/test_slurm_job.py",
        ("scenario", "command", "outcome", "seconds"),
        "## Measured",
        """
`python3 noxfile.py -s slurm` starts a real Slurm of two nodes on one machine, without root, and runs its tests there;
`python benchmarks/slurm.py` does too and writes this section. The seconds are those of the whole scenario with the tiny
models of the demos, on two CPU cores that also had other work: most are the start of Python and Ray. A job that Slurm
has queued again is started at once there.
""",
    ),
    "hosts": Measurement(
        "tests/e2e/test_hosts.py",
        ("scenario", "outcome", "seconds"),
        "## Two hosts, measured",
        """
`python3 noxfile.py -s hosts` makes three hosts of Linux namespaces on one machine, each with its own network,
processes, name and /tmp, and a real Slurm over two of them; it needs root, and Debian's `iproute2` and `slurm-wlm`. It
runs the tests there and writes this section. "Equal weights" are those of a run that nothing has disturbed, by their
digest. The seconds are those of the whole scenario, on two CPU cores that also had other work.
""",
    ),
}


def read_rows(report: Path, columns: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the cells of each scenario that a test has noted, and of each test that failed before."""
    for case in xml.parse(report).iter("testcase"):
        noted = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        if noted:
            yield [noted[name] for name in columns]
        elif case.find("failure") is not None or case.find("error") is not None:
            yield [case.get("name", ""), *[""] * (len(columns) - 3), "FAILED", case.get("time", "")]


def read_table(heading: str) -> dict[str, list[str]]:
    """Return the rows of the section on the page, by scenario."""
    section = PAGE.read_text().partition(f"{heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {cells[0]: cells for cells in lines[2:]}


def main() -> None:
    name = sys.argv[1] if sys.argv[1:2] and sys.argv[1] in MEASUREMENTS else "slurm"
    chosen, words = MEASUREMENTS[name], sys.argv[1 + (sys.argv[1:2] == [name]) :]
    with scratch() as folder:
        report = folder / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            chosen.tests,
            f"--junitxml={report}",
            "-ojunit_family=xunit1",
            *words,
        ]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        rows = read_table(chosen.heading) | {cells[0]: cells for cells in read_rows(report, chosen.columns)}
    cells = [list(chosen.columns), ["---"] * len(chosen.columns), *rows.values()]
    table = "".join(f"| {' | '.join(row)} |\n" for row in cells)
    write_section(PAGE, f"{chosen.heading}\n", f"{chosen.heading}\n{chosen.introduction}\n{table}")
    sys.exit(code)


if __name__ == "__main__":
    main()
