"""A validated configuration on disk: `config.yaml` of a run folder, read by workers and by a resumed run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlhf_suite.config.check.references import guard_environment
from rlhf_suite.config.declarations.flags import FREE, flat, with_values
from rlhf_suite.config.declarations.reward import is_http
from rlhf_suite.config.declarations.runs import TASKS, Run, resume_of
from rlhf_suite.config.declarations.sections import class_of
from rlhf_suite.config.plan.run_plan import WorkerPlan
from rlhf_suite.disk import resolve_home, write_text
from rlhf_suite.foreign_files import DamagedFile, read_yaml
from rlhf_suite.python_source import digest, digests
from rlhf_suite.registry import absolute, own_names

PLAN = "plan"  # the key in config.yaml for what was decided; the flag of this name is false in every run that runs


def save(run: Run, path: Path, plan: WorkerPlan | None = None) -> None:
    """Write all values of a run as YAML, and under `plan` what was decided from them."""
    values = list_recorded_values(run) if plan is None else {**list_recorded_values(run), PLAN: asdict(plan)}
    write_text(path, OmegaConf.to_yaml(OmegaConf.create(values)))


def load(path: Path) -> Run:
    """Read a run back into the dataclasses of its task; types are checked, unknown keys are errors."""
    saved = read_saved(path)
    if saved.get("task") not in TASKS:
        raise LookupError(f"there is no task {saved.get('task')}")
    saved.pop(PLAN, None)  # a continued run decides again, from its own flags and machine
    with guard_environment():
        run = OmegaConf.to_object(OmegaConf.merge(schema(saved.task), saved))
    assert isinstance(run, Run)
    return run


def read_saved_values(path: Path) -> dict[str, Any]:
    """Return the values of a run by their dotted names as they were saved, also those of flags that are gone."""
    saved = OmegaConf.to_container(read_saved(path))
    assert isinstance(saved, dict), "a table of flags"
    return flat({str(key): value for key, value in saved.items() if key != PLAN})


def read_saved(path: Path) -> DictConfig:
    """Return what `save` wrote, unchecked. Raises DamagedFile."""
    saved = read_yaml(path)
    if not isinstance(saved, DictConfig):
        raise DamagedFile(f"{path} is damaged: it does not hold a table of flags")
    return saved


@cache
def schema(task: str) -> DictConfig:
    """Return the typed configuration of a task with its defaults; to be copied, not changed."""
    typed: DictConfig = OmegaConf.structured(class_of(Run, task))
    return typed


def list_recorded_values(run: Run) -> dict[str, Any]:
    """Return all values of a run, with the files of the user's own functions as they are now."""
    return asdict(run) | {"own_code": own_code(run)}


def own_code(section: Any) -> list[str]:
    """Return the files and digests of the user's own functions that a section names, tables included, and of what these
    files import of the user's own."""
    entries = list[str]()
    for key, name, meta in with_values(section):
        if key.endswith(("remote_url", "agent_func_path")) and name is not None and not is_http(name):
            entries += digests(absolute(f"{name}:reward_func"))
        elif key.endswith("rubric") and name is not None:
            entries.append(digest(resolve_home(name).resolve()))
        elif meta.algorithms is not None:
            entries += [entry for own in own_names(name) for entry in digests(own)]
    return list(dict.fromkeys(entries))


def fingerprint(run: Run) -> str:
    """Return a digest of every flag that a continued run may not change: equal for two runs that train the same."""
    values = {key: value for key, value in flat(list_recorded_values(run)).items() if resume_of(key, run.task) != FREE}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
