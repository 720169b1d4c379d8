"""`run.log`: what a run says on the console, line by line with the time, also where the console is gone later.

It holds what Python writes to stdout and stderr, warnings of libraries among it. A progress bar is redrawn in place
all the time: the log gets a line of it only when the console keeps that line.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

ERASE = re.compile(r"\r|\x1b\[2K")  # what follows takes the place of the line so far
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours and movements
LINE_LIMIT = 20_000  # characters; a line that never ends is not kept whole


class Recorded:
    """A console stream whose lines also go to a log. Everything but writing is the stream's own."""

    def __init__(self, stream: TextIO, log: FileIO) -> None:
        self._stream, self._log = stream, log
        self._line = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write to the console first: the log must never be a reason for silence there."""
        written = self._stream.write(text)
        *whole, self._line = (self._line + text).split("\n")
        self._line = self._line[-LINE_LIMIT:]
        for line in whole:
            self._keep(line)
        return written

    def writelines(self, lines: list[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Keep the last line, which has no end."""
        self._keep(self._line)
        self._line = ""

    def _keep(self, line: str) -> None:
        shown = ESCAPES.sub("", ERASE.split(line.rstrip("\r"))[-1]).rstrip()
        if shown:
            with suppress(OSError, ValueError):  # a full disk; a library that writes after the end
                line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {shown}\n"
                self._log.write(line.encode(errors="backslashreplace"))


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Within it what is said on the console also goes to the file `path`, behind what is there."""
    with path.open("ab", buffering=0) as log:
        streams = sys.stdout, sys.stderr
        out, err = (Recorded(stream, log) for stream in streams)
        sys.stdout, sys.stderr = out, err
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
            out.finish()
            err.finish()
