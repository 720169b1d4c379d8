"""`teacher`: the frozen model that a student learns from."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import flag


@dataclass
class TeacherConfig:
    """The teacher; it has the student's vocabulary"""

    model_name_or_path: str | None = flag(None, "HF folder or hub name, or builtin:<name>")
