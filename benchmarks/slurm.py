"""Run the tests of a real Slurm, and write what they note into docs/slurm.md.

python benchmarks/slurm.py [arguments of pytest]
"""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from pathlib import Path

from common import ROOT, scratch, write_section

TESTS = ROOT / "tests" / "e2e" / "test_slurm_job.py"
PAGE, HEADING = ROOT / "docs" / "slurm.md", "## Measured"
COLUMNS = ("scenario", "command", "outcome", "seconds")
SECTION = f"""{HEADING}

`python3 noxfile.py -s slurm` starts a real Slurm of two nodes on one machine, without root, and runs its tests there;
`python benchmarks/slurm.py` does too and writes this section. The seconds are those of the whole scenario with the tiny
models of the demos, on two CPU cores that also had other work: most are the start of Python and Ray. A job that Slurm
has queued again is started at once there.

"""


def rows(report: Path) -> Iterator[list[str]]:
    """Yield the cells of each scenario that a test has noted, and of each test that failed before."""
    for case in xml.parse(report).iter("testcase"):
        noted = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        if noted:
            yield [noted[name] for name in COLUMNS]
        elif case.find("failure") is not None or case.find("error") is not None:
            yield [case.get("name", ""), "", "FAILED", case.get("time", "")]


def main() -> None:
    with scratch() as folder:
        report = folder / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            str(TESTS),
            f"--junitxml={report}",
            "-ojunit_family=xunit1",
            *sys.argv[1:],
        ]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        cells = [list(COLUMNS), ["---"] * len(COLUMNS), *rows(report)]
    write_section(PAGE, HEADING, SECTION + "".join(f"| {' | '.join(row)} |\n" for row in cells))
    sys.exit(code)


if __name__ == "__main__":
    main()
