"""`rlhf-suite why <run folder>`: what a run is doing, what it waits for, or how it ended."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_suite.errors import UserError
from rlhf_suite.foreign_text import printable

USAGE = """usage: rlhf-suite why <run folder>

Says how far a run is, what it waits for and since when, where code of yours is that it waits for, on which hosts its
processes are, and the end of the logs of those concerned; or how it ended. It reads files only, so it works for a run
on another node, and for one that was killed. The exit code is 0 if the run works or is done, 1 if it failed, was
stopped or killed, or stands still, and 2 if the folder has no run."""

OUTPUT_LIMIT = 100_000  # characters


def main(words: Sequence[str]) -> int:
    """Print what the run in a folder does; return the exit code."""
    from rlhf_suite.api.runs import find_record
    from rlhf_suite.api.why import describe_run

    if len(words) != 1:
        raise UserError(USAGE)
    code, lines = describe_run(find_record(words[0]))
    print(printable("\n".join(lines), OUTPUT_LIMIT, keep_lines=True))
    return code
