"""A post-training suite for language models: `python run.py task=<task> group.flag=value ...`, or from Python:
`import rlhf_suite as rs; rs.run("sft", model=..., data=...)` (docs/python.md)."""

from __future__ import annotations

import gc

# As in `typing`, whose import would take as long as the start of Python.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rlhf_suite.api.client import Client as Client
    from rlhf_suite.api.plans import explain as explain
    from rlhf_suite.api.plans import plan as plan
    from rlhf_suite.api.runs import Run as Run
    from rlhf_suite.api.runs import load as load
    from rlhf_suite.api.runs import write_report as write_report
    from rlhf_suite.api.start import check as check
    from rlhf_suite.api.start import run as run
    from rlhf_suite.api.sweeps import Sweep as Sweep
    from rlhf_suite.api.sweeps import load_sweep as load_sweep
    from rlhf_suite.api.sweeps import sweep as sweep
    from rlhf_suite.config.check.problems import ConfigurationError as ConfigurationError
    from rlhf_suite.config.check.problems import Problem as Problem
    from rlhf_suite.errors import RunError as RunError
    from rlhf_suite.errors import UserError as UserError
    from rlhf_suite.rl.datum import Adam as Adam
    from rlhf_suite.rl.datum import Datum as Datum
    from rlhf_suite.rl.datum import LossOutput as LossOutput
    from rlhf_suite.train.callbacks import Evaluate as Evaluate
    from rlhf_suite.train.callbacks import Save as Save
    from rlhf_suite.train.callbacks import Stop as Stop

# The names of `rs`, and where each is. A module is imported when one of its names is asked for.
NAMES = {
    "Client": "rlhf_suite.api.client",
    **dict.fromkeys(("Adam", "Datum", "LossOutput"), "rlhf_suite.rl.datum"),
    **dict.fromkeys(("check", "run"), "rlhf_suite.api.start"),
    **dict.fromkeys(("explain", "plan"), "rlhf_suite.api.plans"),
    **dict.fromkeys(("Run", "load", "write_report"), "rlhf_suite.api.runs"),
    **dict.fromkeys(("Sweep", "load_sweep", "sweep"), "rlhf_suite.api.sweeps"),
    **dict.fromkeys(("ConfigurationError", "Problem"), "rlhf_suite.config.check.problems"),
    **dict.fromkeys(("RunError", "UserError"), "rlhf_suite.errors"),
    **dict.fromkeys(("Evaluate", "Save", "Stop"), "rlhf_suite.train.callbacks"),
}

# Every process imports libraries with a million objects that stay. To look through all of them again and again takes a
# sixth of the time of these imports; younger objects are collected as often as ever.
gc.set_threshold(700, 10, 100)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(NAMES)
