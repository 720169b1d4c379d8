"""`teacher`: the models whose token probabilities a student learns."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite import registry
from rlhf_suite.config.declarations.conditions import algorithm_needs
from rlhf_suite.config.declarations.flags import SHAPE, flag, group
from rlhf_suite.config.declarations.models import OFFLOADED
from rlhf_suite.config.declarations.reward import HttpConfig
from rlhf_suite.config.declarations.sections import Section
from rlhf_suite.config.declarations.task_groups import RL

TOKEN = "RLHF_SUITE_TEACHER_TOKEN"  # the environment variable with the token of teachers behind an endpoint
HAS_MODEL, HAS_SERVER = (algorithm_needs(".kind", registry.teacher, need) for need in ("model", "server"))
NAMED = "teacher.sources."
OFFLOAD_ALL = "Keep the weights in host memory. In each step they are copied to the GPU once, for all computations"


@dataclass
class TeacherSourceConfig:
    """A teacher, whose token probabilities the student learns"""

    kind: str = flag("model", algorithms=registry.teacher)
    """Which weights the teacher has"""
    model_name_or_path: str | None = flag(None)
    """Model to load: a folder in Hugging Face format, a name on the Hugging Face hub, or builtin:<name>"""
    remote_url: str | None = flag(None)
    """Address of a server with vLLM's protocol, such as http://<host>:8000/v1, or several addresses separated by
    commas. Several servers share the load"""


@dataclass
class NamedTeacherConfig(TeacherSourceConfig):
    """One of several teachers"""

    datasets: list[str] | None = flag(None)
    """Values of the column datasource. This teacher is used for rows with these values; null: for all rows without
    another teacher"""


@dataclass
class TeacherConfig(TeacherSourceConfig, Section):
    """The teacher, which must have the vocabulary of the student. In task=ppo there may be several teachers, if
    algo.distill.coef > 0"""

    kind: str = flag("model", algorithms=registry.teacher, tasks=RL)
    """Which weights the teacher has"""
    model_name_or_path: str | None = flag(None, when=HAS_MODEL)
    """Model to load: a folder in Hugging Face format, a name on the Hugging Face hub, or builtin:<name>"""
    remote_url: str | None = flag(None, when=HAS_SERVER, tasks=RL)
    """Address of a server with vLLM's protocol, such as http://<host>:8000/v1, or several addresses separated by
    commas. Several servers share the load"""
    sources: dict[str, NamedTeacherConfig] = flag({}, tasks=RL)
    """Several teachers by name, each for some of the rows, instead of kind, model_name_or_path and remote_url
    (docs/rl_distillation.md)"""
    http: HttpConfig = group(HttpConfig, when=HAS_SERVER, tasks=RL)
    offload: bool = flag(
        False,
        resume=SHAPE,
        when=HAS_MODEL,
        needs=OFFLOADED,
        of_tasks={task: {"help": OFFLOAD_ALL} for task in RL},
    )
    """Keep the weights in host memory. In each step they are copied to the GPU once, for all computations of the
    teacher"""
    num_nodes: int = flag(1, "Number of nodes on which a teacher runs", ge=1, resume=SHAPE, when=HAS_MODEL, tasks=RL)
    num_gpus_per_node: int = flag(1, ge=1, resume=SHAPE, when=HAS_MODEL, tasks=RL)
    """Number of ranks (processes) of a teacher on each node"""


def list_teachers(config: TeacherConfig) -> dict[str, TeacherSourceConfig]:
    """Return every teacher by the key of its section: `teacher` itself, or the entries of teacher.sources."""
    if config.sources:
        return {f"{NAMED}{name}": source for name, source in config.sources.items()}
    return {"teacher": config}


def teacher_models(config: TeacherConfig) -> dict[str, str]:
    """Return the paths of the models that a run loads as teachers, by the keys of the sections that name them."""
    return {
        key: source.model_name_or_path
        for key, source in list_teachers(config).items()
        if source.model_name_or_path is not None and registry.teacher.needs(source.kind, "model")
    }
