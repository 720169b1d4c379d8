"""The commands and options of `python run.py` and `rlhf-suite`: what they check, start and print."""

from rlhf_suite.cli.app import main

__all__ = ["main"]
