"""The commands and options of `python run.py` and `rlhf-suite`: what they check, start and print."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Do what the words of a command line say, or those of this process, and return the exit code."""
    try:
        from rlhf_suite.cli.app import main as do
    except KeyboardInterrupt:  # in the first second, while there is nothing yet that would answer it
        return 130
    return do(argv)
