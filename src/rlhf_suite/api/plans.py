"""`explain` and `plan`: what a call of `run` would do and need, without running it."""

from __future__ import annotations

import argparse
from html import escape
from typing import TYPE_CHECKING, Any

from rlhf_suite.api.settings import ask, refuse
from rlhf_suite.config.problems import report
from rlhf_suite.preflight.inspections import inspect
from rlhf_suite.tracking.tables import as_text

if TYPE_CHECKING:
    from rlhf_suite.cli.plan import Planned


class Text(str):
    """A text that a notebook shows in lines of its own."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"


def explain(task: str, **settings: Any) -> Text:
    """Return the tables of `explain=true`: batch sizes, placement, decisions, and where each value comes from. The
    settings are those of `run`.

    Raises:
        ConfigurationError: there are mistakes in them; all of them are in its `problems`.
        UserError: a value has no form that a run can take.
    """
    from rlhf_suite.cli.explain import show_explanation

    line, checked = ask(task, settings)
    refuse(inspect(checked.runs))
    problems = list[Any]()
    text = as_text(lambda console: problems.extend(show_explanation(console, line, checked)))
    return Text(text + (f"{report(problems)}\n" if problems else ""))


def plan(
    task: str,
    gpu: str | None = None,
    memory: float | None = None,
    mfu: float | None = None,
    tflops: float | None = None,
    **settings: Any,
) -> Planned:
    """Return what `rlhf-suite plan` prints, as an object: `fits`, `estimate` (bytes and seconds), `proposals`, and
    `str()`. The settings are those of `run`; neither the data nor the devices need to be here.

    `gpu` is a type of GPU, such as "h100-80" (None: the CPUs of this machine), `memory` GiB, `mfu` a share of the
    GPU's speed, and `tflops` a speed in 10^12 operations per second.

    Raises:
        ConfigurationError: there are mistakes in the settings; all of them are in its `problems`.
        UserError: the task does not train, or the type of GPU is not known.
    """
    from rlhf_suite.cli.plan import plan_run

    line, checked = ask(task, settings)
    return plan_run(line, checked, argparse.Namespace(gpu=gpu, memory=memory, mfu=mfu, tflops=tflops))
