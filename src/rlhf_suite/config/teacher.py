"""`teacher`: the frozen model that a student learns from."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import flag


@dataclass
class TeacherConfig:
    """The teacher; it has the student's vocabulary"""

    model_name_or_path: str | None = flag(None, "HF folder or hub name, or builtin:<name>")
    offload: bool = flag(False, "Hold its weights in host memory, and bring them to the GPU for each forward pass")


@dataclass
class RLTeacherConfig(TeacherConfig):
    """The teacher of on-policy distillation; exists when algo.distill.coef > 0"""

    num_nodes: int = flag(1, "Nodes of the teacher's worker group", ge=1)
    num_gpus_per_node: int = flag(1, "Ranks per node", ge=1)
