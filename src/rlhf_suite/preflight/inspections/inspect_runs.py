"""Every inspection of runs, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from rlhf_suite.config.check.problems import Problem, distinct
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.preflight.inspections.agents import AGENTS
from rlhf_suite.preflight.inspections.engines import engine_arguments_exist, runs_on_cpus, vllm_is_installed
from rlhf_suite.preflight.inspections.hub import hub_names_exist
from rlhf_suite.preflight.inspections.machine import (
    cluster_accepts,
    commands_of_tools_exist,
    flags_fit_the_device,
    gpus_can_be_used,
    machine,
    server_has_its_token,
)
from rlhf_suite.preflight.inspections.models import images_are_read_alike, models_fit
from rlhf_suite.preflight.inspections.outputs import OUTPUTS, resume_fits
from rlhf_suite.preflight.inspections.own_code import own_code_can_be_used
from rlhf_suite.preflight.inspections.replay import replay_fits
from rlhf_suite.preflight.inspections.rewards import REWARDS
from rlhf_suite.preflight.inspections.routing import routers_are_known
from rlhf_suite.preflight.inspections.rows import ROWS
from rlhf_suite.preflight.inspections.vocabularies import (
    others_have_embeddings,
    reward_model_reads_the_policy,
    teachers_read_the_student,
)

# An inspection takes the run and its folder. The folder is None if it is not known yet (for a whole sweep,
# `explain=true`).
Inspection = Callable[[Run, Path | None], Iterable[Problem]]

INSPECTIONS: tuple[Inspection, ...] = (
    resume_fits,
    replay_fits,
    machine,
    gpus_can_be_used,
    flags_fit_the_device,
    cluster_accepts,
    server_has_its_token,
    commands_of_tools_exist,
    vllm_is_installed,
    engine_arguments_exist,
    runs_on_cpus,
    models_fit,
    reward_model_reads_the_policy,
    others_have_embeddings,
    teachers_read_the_student,
    images_are_read_alike,
    routers_are_known,
    hub_names_exist,
    *ROWS,
    *REWARDS,
    *AGENTS,
    *OUTPUTS,
)


def inspect(runs: Iterable[Run], folder: Path | None = None) -> list[Problem]:
    """Return every problem that the inspections find in these runs, without repetitions; if there is none, those of the
    user's own code."""
    asked = [*runs]
    problems = distinct(problem for run in asked for inspection in INSPECTIONS for problem in inspection(run, folder))
    problems = problems or distinct(problem for run in asked for problem in own_code_can_be_used(run, folder))
    return [problem.of_kind("inspection") for problem in problems]
