"""Go on without a console that is gone, and keep the output of a run in `run.log`, each line with its time.

The log holds what Python writes to stdout and stderr, so also the warnings of libraries. A progress bar is redrawn many
times in the same line; the log gets only the last version of a line, as the console does.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

ERASE = re.compile(r"\r|\x1b\[2K")  # the text after it replaces the line so far
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours and movements
# The reader of a pipe has ended; a terminal was closed, as at the end of an ssh session.
GONE = (errno.EPIPE, errno.EIO)
LINE_LIMIT = 20_000  # characters; of a longer line only the end is kept


class Lasting:
    """A console stream whose other end may be gone before the process ends. All methods except those for writing are
    the stream's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write to the console, if it is still there."""
        with self._silent_when_gone():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Pass on to the console what was written."""
        with self._silent_when_gone():
            self._stream.flush()

    def writelines(self, lines: list[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    @contextmanager
    def _silent_when_gone(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in GONE:
                raise
            silence(self._stream)


class Recorded(Lasting):
    """A console stream whose lines are also written to a log."""

    def __init__(self, stream: TextIO, log: FileIO) -> None:
        super().__init__(stream)
        self._log, self._line = log, ""

    def write(self, text: str) -> int:
        """Write to the console, then to the log, so that an error of the log cannot suppress the console output."""
        written = super().write(text)
        *whole, self._line = (self._line + text).split("\n")
        self._line = self._line[-LINE_LIMIT:]
        for line in whole:
            self._keep(line)
        return written

    def finish(self) -> None:
        """Log the last line, which has no line end."""
        self._keep(self._line)
        self._line = ""

    def _keep(self, line: str) -> None:
        shown = ESCAPES.sub("", ERASE.split(line.rstrip("\r"))[-1]).rstrip()
        if shown:
            with suppress(OSError, ValueError):  # the disk is full, or a library writes after the log was closed
                line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {shown}\n"
                self._log.write(line.encode(errors="backslashreplace"))


def silence(stream: TextIO) -> None:
    """Let nothing come any more of what is written to a stream whose reader is gone."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def outlast_console() -> Iterator[None]:
    """Go on during the block when the console is gone: what is written to it then comes nowhere."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (Lasting(stream) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


@contextmanager
def record_output(path: Path) -> Iterator[None]:
    """Append the console output during the block to the file `path` too."""
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
