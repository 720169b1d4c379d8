"""One run: its configuration written down, its task run, its end recorded and reported.

`python -m rlhf_suite.cli.execute <folder> <pid of the loop>` runs a stage of a loop: the run whose configuration the
loop has written, as a process that ends with the loop. How it ended is in the folder's status.json and error.log.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from hydra.core.utils import configure_log
from omegaconf import DictConfig, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from rlhf_suite.config.check.problems import report
from rlhf_suite.config.check.references import guard_environment, make_unresolved_problem
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import TRAINING
from rlhf_suite.config.plan.run_plan import WorkerPlan, is_on_ray
from rlhf_suite.disk import full_reason, write_json
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.foreign_text import printable
from rlhf_suite.launch.lost_nodes import NodeLost
from rlhf_suite.launch.nodes import join_node, lead_nodes
from rlhf_suite.launch.out_of_memory import advise
from rlhf_suite.launch.slurm import is_first_node
from rlhf_suite.preflight.devices import launch_of, plan_workers
from rlhf_suite.preflight.folders import how_to_continue
from rlhf_suite.preflight.memory import fit_to_memory
from rlhf_suite.run_folders.earlier_runs import describe_finished, keep_other_config
from rlhf_suite.run_folders.record import fingerprint, load, save
from rlhf_suite.run_folders.run_folder import RunFolder

INTERRUPTED = 130
MESSAGE_LIMIT, TRACEBACK_LIMIT = 20_000, 1_000_000  # characters of the last message, and of error.log


def run_with(run: Run, folder: Path, hydra: DictConfig, origins: Mapping[str, str]) -> int:
    """Execute a run in its folder, as Hydra's settings say; return the exit code. `origins` says who set which flag."""
    with read_write(hydra), open_dict(hydra):
        hydra.runtime.output_dir = str(folder.absolute())
    try:
        with guard_environment():
            configure_log(hydra.job_logging, hydra.verbose)
    except OmegaConfBaseException as error:
        problem = make_unresolved_problem("hydra.job_logging", error, "correct the reference")
        raise UserError(report([problem])) from error
    except (ValueError, TypeError, AttributeError, ImportError) as error:  # those of logging.config
        reason = error.__cause__ or error
        raise UserError(f"hydra.job_logging: {error} ({reason}). Remove what you set there") from error
    run = replace(run, run_dir=None)
    if (end := describe_finished(run, folder)) is not None:
        return tell(end, 0)
    if is_first_node():
        write_json(RunFolder(folder).origins, origins, durable=False)
    return execute(run, folder)


def tell(message: str, code: int) -> int:
    """Print why a run ended and return the exit code. What others wrote in it (models, servers) acts on no terminal."""
    print(printable(message, MESSAGE_LIMIT, keep_lines=True), file=sys.stderr, flush=True)
    return code


def execute(run: Run, folder: Path, say: Callable[[str, int], int] = tell) -> int:
    """Run a task in its folder; return the exit code. Errors that users can mend or understand have no traceback."""
    from rlhf_suite.launch.stop import Stopped, stoppable

    try:
        with stoppable():
            plan = plan_workers(run)
            if not join_node(folder, launch_of(run, plan)):
                train(run, folder, plan)
    except Stopped as stop:
        return say(f"{stop}{how_to_continue(run, folder)}", 128 + stop.number)
    except NodeLost as lost:
        return say(f"stopped: {lost}{how_to_continue(run, folder)}", os.EX_TEMPFAIL)
    except (UserError, RunError) as error:
        return say(str(error), 2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        return say(f"interrupted{how_to_continue(run, folder)}", INTERRUPTED)
    except Exception as error:
        return say(describe_unexpected(error, folder), 1)
    return 0


def describe_unexpected(error: Exception, folder: Path) -> str:
    """Describe an error that nobody expected; its traceback goes to error.log, unless the disk is the error."""
    if (reason := full_reason(error, folder)) is not None:
        return f"{folder} cannot be written: {reason}"
    said, log = f"{type(error).__name__}: {error}{advise(error)}", folder / "error.log"
    try:
        log.write_text(printable(traceback.format_exc(), TRACEBACK_LIMIT, keep_lines=True), encoding="utf-8")
    except OSError as refused:
        return f"{said}\n{traceback.format_exc()}({log.name} cannot be written: {refused.strerror})"
    return f"{said}\nthe traceback is in {log}"


def train(run: Run, folder: Path, plan: WorkerPlan | None) -> None:
    """Run the task between a status that says running and one that says how it ended; then print what to look at."""
    from rlhf_suite.launch.environment import device_kind, pass_on_trust, runtime_env
    from rlhf_suite.launch.stop import Stopped, record_end, stoppable
    from rlhf_suite.waits import allow_silence, record_waits

    record = RunFolder(folder)
    record.start(fingerprint(run))
    allow_silence(run.launch.timeout_s)
    try:
        keep_other_config(run, record)
        save(run, record.config, plan)
        pass_on_trust(run.launch)
        os.environ.update(runtime_env(device_kind(run.launch)))  # before torch, Ray and vLLM read it
        # Stoppable here too: what Ray makes of `Stopped` in one of its calls becomes `Stopped` again.
        with record_end(record.mark_ended), record_waits(record.waits), stoppable():
            metrics = run_task(run, folder, plan)
        record.mark_done(metrics)
    except Stopped as stop:
        record.mark_stopped(str(stop))
        raise
    except KeyboardInterrupt:
        record.mark_stopped("interrupted")
        raise
    except NodeLost as lost:
        record.mark_stopped(f"{lost}{how_to_continue(run, folder)}")
        raise
    except BaseException as error:
        record.mark_failed(error)
        raise
    finally:
        report = page(run, record)
    if run.task in TRAINING:
        from rlhf_suite.report.summary import summarise

        lines = summarise(record, run)
        if run.logger.progress:
            print(printable("\n".join([*lines, *report]), MESSAGE_LIMIT, keep_lines=True), flush=True)


def run_task(run: Run, folder: Path, plan: WorkerPlan | None) -> Mapping[str, float]:
    """Run the task, after what the plan says about its memory; return its last metrics."""
    task = importlib.import_module(f"rlhf_suite.tasks.{run.task}")
    run, remarks = fit_to_memory(run)
    for remark in remarks:
        tell(remark, 0)
    launch = launch_of(run, plan)
    # The other nodes of a Slurm job wait for the first one, which may load data and train a demo's models for minutes.
    with lead_nodes(folder, launch) if is_on_ray(run) else nullcontext():
        metrics: Mapping[str, float] = (
            task.run(run, folder) if plan is None else task.run(replace(run, launch=launch), folder, plan)
        )
    return metrics


def page(run: Run, folder: RunFolder) -> list[str]:
    """Write the page of a run that trains, however it ended; return the line that says where it is, or why not."""
    if run.task not in TRAINING or not run.logger.report:
        return []
    from rlhf_suite.report.html import try_writing, write_report

    return [try_writing(lambda: write_report([folder.path]))]


def stage(folder: Path, parent: int) -> int:
    """Run a stage of the loop that is process `parent`; return the exit code."""
    from rlhf_suite.cli.run_log import outlast_console
    from rlhf_suite.launch.processes import kill_with_parent

    kill_with_parent(parent)
    try:
        run = load(RunFolder(folder).config)
    except UserError as error:
        return tell(str(error), 2)
    with outlast_console():
        return execute(run, folder, lambda message, code: code)


if __name__ == "__main__":
    from rlhf_suite.launch.stop import leave

    leave(stage(Path(sys.argv[1]), int(sys.argv[2])))
