"""The command line: from `python run.py task=...` to a task module with a checked configuration."""

from rlhf_suite.cli.app import main

__all__ = ["main"]
