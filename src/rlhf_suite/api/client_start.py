"""The start of a client: its configuration is composed and checked as that of task=ppo, and the same actors come up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_suite.api.settings import ask, find_place, refuse
from rlhf_suite.config.check.problems import ConfigurationError, Problem
from rlhf_suite.config.declarations.calls import is_read_by_clients
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import CRITIC, Plan
from rlhf_suite.config.rules.clients import list_unserved
from rlhf_suite.launch.environment import limit_rights, pass_on_trust
from rlhf_suite.launch.slurm import allocation
from rlhf_suite.preflight.devices import launch_of, plan_workers
from rlhf_suite.preflight.folders import for_run, lock_folders
from rlhf_suite.preflight.memory import fit_to_memory
from rlhf_suite.rl.client import Started
from rlhf_suite.rl.client_start import start_client
from rlhf_suite.run_folders.record import fingerprint, save
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tasks.warm_start import with_warm_starts
from rlhf_suite.tracking.console import show_line
from rlhf_suite.waits import allow_silence

if TYPE_CHECKING:
    pass

# What task=ppo cannot do without, and a client does not need. Each stands in unless the call names the flag, something
# that begins with one of the words, or a preset that may set it.
FILES = ("demo", "config", "config_dir")
STAND_INS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("data.prompt_dataset", "builtin:reverse", FILES),
    ("reward.rule", "length", ("reward", *FILES)),
    ("algo.advantage.estimator", "reinforce", ("algo/advantage", "estimator", "experiment", *FILES)),
    ("algo.kl.init_coef", 0, ("algo.kl", "experiment", *FILES)),
)
UNREAD = ("callbacks", "estimator", "on_step")  # short names of flags that a client does not read
MODEL = ("model", "actor.model_name_or_path")  # without it the command line takes the demo, which has a critic
OF_THE_DEMO = ("algo.advantage.estimator",)  # stands in without a model too


def compose(settings: Mapping[str, Any]) -> tuple[Run, RunFolder, bool]:
    """Return the configuration of a client, its folder, and whether it has prompts of its own.

    Raises:
        ConfigurationError: there are mistakes in it; all of them are in its `problems`.
        UserError: a value has no form that a flag can take.
    """
    stand_ins = choose_stand_ins({name for name, _ in flatten(settings)})
    _, checked = ask("ppo", {**stand_ins, **settings})
    if checked.is_sweep or checked.is_submitted:
        raise ConfigurationError([Problem("hydra", "a client is one process of this machine", "remove it")])
    if allocation() is not None:
        raise ConfigurationError([Problem("hydra", "a client is on one node of a Slurm job", "start it on one node")])
    (run,) = checked.runs
    refuse([*list_unserved(run)])
    for remark in remark_on_unread(settings):
        show_line(remark, to_stderr=True)
    place = find_place(checked, for_run)
    return run, RunFolder(place.folder.resolve()), "data.prompt_dataset" not in stand_ins


def flatten(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings with their names with dots, those within tables too."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def remark_on_unread(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence about settings that a client accepts, so that those of task=ppo can be given as they are, but
    does not read. A setting that is None asks for nothing."""
    values = {name: value for name, value in flatten(settings) if value is not None}
    if unread := sorted(name for name in values if name in UNREAD or not is_read_by_clients(name)):
        yield f"Warning: a client does not read {', '.join(unread)}: your loop scores, evaluates and logs by itself"


def choose_stand_ins(names: set[str]) -> dict[str, Any]:
    """Return the flags that stand in for what a call, with settings of these `names`, says nothing about."""
    needed = [stand_in for stand_in in STAND_INS if names & {*MODEL} or stand_in[0] in OF_THE_DEMO]
    given = names | ({"data.prompt_dataset"} if "data" in names else set())
    return {
        key: value for key, value, others in needed if not any(name == key or name.startswith(others) for name in given)
    }


def start(run: Run, record: RunFolder, has_prompts: bool, stack: ExitStack) -> Started:
    """Bring up the actors of a client, with the first weights in the engines; `stack` ends them.

    Raises:
        RunError: a process did not come up.
    """
    stack.enter_context(limit_rights(run.launch))
    stack.enter_context(lock_folders(record.path, run))
    plan = plan_workers(run)
    assert isinstance(plan, Plan) and CRITIC not in plan.models
    record.start(fingerprint(run))
    stack.push(lambda kind, error, trace: mark_end(record, error))
    save(run, record.config, plan)
    allow_silence(run.launch.timeout_s)
    pass_on_trust(run.launch)
    run, remarks = fit_to_memory(replace(run, launch=launch_of(run, plan)))
    for remark in remarks:
        show_line(remark, to_stderr=True)
    plan = with_warm_starts(plan, run.data.prompt_dataset)
    return start_client(run, plan, record, stack, has_prompts=has_prompts)


def mark_end(record: RunFolder, error: BaseException | None) -> None:
    """Write into the folder of a client how it ended."""
    if error is None:
        record.mark_done({})
    elif isinstance(error, KeyboardInterrupt | SystemExit):
        record.mark_stopped("interrupted")
    else:
        record.mark_failed(error)
