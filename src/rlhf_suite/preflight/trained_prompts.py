"""The prompts that the models of a run were trained on: used where the user chose nothing, else contradicted aloud."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.check.sources import first_columns, names_in
from rlhf_suite.config.declarations.calls import is_constant
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.runs import Run, flags_of
from rlhf_suite.config.plan.run_plan import ACTOR, CRITIC, PROCESS, model_paths, model_sections
from rlhf_suite.foreign_files import DamagedFile
from rlhf_suite.models.prompt_format import FILE, PromptFormat, adopt_prompts, format_of, read
from rlhf_suite.preflight.inspections.models import folder_of

OTHERWISE = (
    "{key}={path} was trained with {trained}, but this run has {used}, so its prompts differ from those of the "
    "training. Write what the model was trained with, unless you want that"
)

Recorded = dict[str, tuple[str, PromptFormat]]  # path and format, by the section that names the model


@dataclass(frozen=True)
class Adopted:
    """A run with what it took from its model, by flag; what to tell the user; and what is wrong."""

    run: Run
    values: dict[str, object]
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def adopt_training_prompts(run: Run, given: Collection[str]) -> Adopted:
    """Return the run with the prompts that its model was trained on. `given`: the flags that the user has set; what a
    preset sets counts too."""
    known, problems = read_records(run)
    if run.task == "serve_rm":
        return Adopted(run, {}, tuple(describe_served(known)), tuple(problems))
    if is_constant(run.task, "data.input_template"):  # its clients make the prompts
        return Adopted(run, {}, (), tuple(problems))
    if run.has("score") and hold_their_texts(run, given):
        known = {}
    leading = next(iter(known), None) if run.has("score") else ACTOR
    values, notes = dict[str, Any](), list[str]()
    if leading in known:
        path, trained = known[leading]
        values = adopt_prompts(run, trained, list_chosen(run, given))
        if values:
            run = replace(run, data=replace(run.data, **values))
            notes.append(f"{trained}, as {path} was trained ({FILE} in its folder)")
    notes += otherwise(run, known)
    return Adopted(run, {f"data.{name}": value for name, value in values.items()}, tuple(notes), tuple(problems))


def read_records(run: Run) -> tuple[Recorded, list[Problem]]:
    """Return what the folders of a run's models say, each with its path, and what is wrong with such a file."""
    known, problems = Recorded(), list[Problem]()
    for name, path in models_that_read_prompts(run):
        folder = folder_of(path)
        try:
            prompts = None if folder is None else read(folder)
        except DamagedFile as damage:
            problems.append(Problem(f"{name}.model_name_or_path", str(damage), "correct the file, or delete it"))
        else:
            known |= {} if prompts is None else {name: (path, prompts)}
    return known, problems


def models_that_read_prompts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the models of a run that read the prompts of its rows, by section, with their paths. A process reward model
    has a format of its own."""
    for name, section in model_sections(run).items():
        if name not in (CRITIC, PROCESS):
            paths = model_paths(run, name, section)
            yield from ((key, path) for key, path in paths.items() if path is not None)


def list_chosen(run: Run, given: Collection[str]) -> set[str]:
    """Return the flags of `data` that the user or a preset has set."""
    defaults = {key: info.default for key, info in flags_of(run.task).items()}
    values = all_values(run)
    return {*given} | {key for key, value in values.items() if key.startswith("data.") and value != defaults.get(key)}


def otherwise(run: Run, known: Recorded) -> Iterator[str]:
    """Yield a line for each model that was trained on other prompts than those of the run."""
    used = format_of(run)
    for name, (path, trained) in known.items():
        if used is not None and used != trained:
            yield OTHERWISE.format(key=f"{name}.model_name_or_path", path=path, trained=trained, used=used)


def describe_served(known: Recorded) -> Iterator[str]:
    """Yield what the clients of a served reward model should know."""
    for path, trained in known.values():
        yield f"Texts are scored as they come, and {path} was trained with {trained}: clients send prompts like these"


def hold_their_texts(run: Run, given: Collection[str]) -> bool:
    """Return whether rows have the text that the model is asked about (data.query_key), or may have it, and nobody
    asks for another one."""
    if list_chosen(run, given) & {"data.apply_chat_template", "data.input_template"}:
        return False
    files = [Path(name) for name in names_in(run.data.dataset)]
    columns = [first_columns(file) if file.is_file() else None for file in files]
    return any(column is None or run.data.query_key in column for column in columns)
