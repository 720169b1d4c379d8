"""Notes which flags a run reads. Python imports this by itself in every process whose PYTHONPATH has this folder, so in
the workers of a run too; it does something only where RLHF_SUITE_FLAG_READS names a file.

A line `<section class> <field>` is added to the file when code below the command line reads a field of a section for
the first time in a process. Copying, comparing, printing and checking a configuration are no reads: what counts is the
module of the caller. Methods of the section itself, and what decides the size of micro-batches and the ZeRO stage,
stand for those who call them. What a plan is resolved from is read, since the task gets the plan.
"""

import dataclasses
import os
import sys

FILE = "RLHF_SUITE_FLAG_READS"
OURS = "rlhf_suite."
LOOKED_THROUGH = tuple(f"{OURS}config.plan.{name}" for name in ("run_plan", "micro_batches", "zero"))
NOT_COUNTED = tuple(f"{OURS}{name}" for name in ("config.", "run_folders", "composition", "preflight", "sweeps", "cli"))
seen = set()


def watched(cls):
    """The section class with reads that are noted."""
    if not cls.__module__.startswith("rlhf_suite.config."):
        return cls
    fields = {field.name for field in dataclasses.fields(cls)}

    def read(self, name):
        if name in fields:
            note(self, type(self).__name__, name)
        return object.__getattribute__(self, name)

    cls.__getattribute__ = read
    return cls


def note(section, owner, name):
    if (owner, name) in seen:
        return
    frame = sys._getframe(2)
    is_planned = False
    while frame is not None and (
        frame.f_locals.get("self") is section or frame.f_globals.get("__name__") in LOOKED_THROUGH
    ):
        is_planned = is_planned or frame.f_code.co_name == "resolve"
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "") if frame else ""
    if is_planned or (module.startswith(OURS) and not module.startswith(NOT_COUNTED)):
        seen.add((owner, name))
        with open(os.environ[FILE], "a") as file:  # noqa: PTH123 - no imports for it
            file.write(f"{owner} {name}\n")


def dataclass(cls=None, /, **settings):
    decorate = declared(**settings)
    return watched(decorate(cls)) if cls is not None else lambda later: watched(decorate(later))


if "RLHF_SUITE_SAMPLED" in os.environ:
    import sampled_tokens  # noqa: F401 - it patches what is imported later
if FILE in os.environ:
    declared, dataclasses.dataclass = dataclasses.dataclass, dataclass
