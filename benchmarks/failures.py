"""Makes one phase of a run fail, for every schedule, phase and number of times: `python benchmarks/failures.py [words]`
prints how each run ends; with --write the table of docs/faults_measured.md is written.

The runs are those of tests/rl/test_failure_matrix.py: one process, no Ray, an engine of the tests.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from common import ROOT, scratch, write_section
from mutations import Here

PAGE, HEADING = ROOT / "docs" / "faults_measured.md", "## Failures in every phase"
HEAD = """\
`python benchmarks/failures.py --write` makes each phase of a run of four steps fail when it happens for the first, the
second and the third time, in each schedule, and writes this table; `tests/rl/test_failure_matrix.py` does the same.
Each run ended with the error that was raised there, and left no thread, no process and no unfinished request. A cell
has the seconds of the longest of the three runs, from its start to its end.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only these schedules and phases")
    parser.add_argument("--write", action="store_true", help="write the section of docs/faults_measured.md")
    given = parser.parse_args()
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "rl")]
    world = Here().world
    import failing_runs
    from plain_run import run, small

    longest: dict[tuple[str, str], float] = {}
    with scratch() as top:
        recorded = Path(top).absolute() / "recorded"
        run(world, recorded, small(train__num_episodes=2))
        for schedule, phase in failing_runs.cases():
            if given.words and not {schedule, phase} & {*given.words}:
                continue
            for number in failing_runs.TIMES:
                folder = recorded.parent / f"{len(longest)}_{number}"
                folder.mkdir()
                (folder / "recorded").symlink_to(recorded)
                outcome = failing_runs.failing_run(world, folder, schedule, phase, number)
                print(f"{schedule} | {phase} | {number} | {outcome.seconds:.1f} s | {outcome.said} | {outcome.left}")
                if failing_runs.expected(phase, number) not in outcome.said or outcome.left:
                    sys.exit(f"{schedule}, {phase} {number}: it did not end as it should")
                longest[schedule, phase] = max(longest.get((schedule, phase), 0.0), outcome.seconds)
    if given.write:
        write_section(PAGE, HEADING, f"{HEADING}\n\n{HEAD}{table(longest, failing_runs)}")


def table(longest: dict[tuple[str, str], float], failing_runs: Any) -> str:
    """Return a row for each phase and a column for each schedule."""
    lines = ["| phase | " + " | ".join(failing_runs.SCHEDULES) + " |", "|---" * (1 + len(failing_runs.SCHEDULES)) + "|"]
    for phase in failing_runs.PHASES:
        cells = [f"{longest[s, phase]:.1f}" if (s, phase) in longest else "" for s in failing_runs.SCHEDULES]
        lines.append(f"| {phase} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
