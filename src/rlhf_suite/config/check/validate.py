"""One value against its flag: type, allowed values, bounds; and a composed configuration turned into a plain `Run`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_suite import registry
from rlhf_suite.config.check.formatting import BOUNDS, bounds, did_you_mean, show_value
from rlhf_suite.config.check.names import constants_of, unknown_flag
from rlhf_suite.config.check.old_names import translate_value
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.check.references import make_unresolved_problem
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.flags import FlagInfo, flat, walk
from rlhf_suite.config.declarations.launchers import PREFIX, settings_of
from rlhf_suite.config.declarations.runs import Run, flags_of
from rlhf_suite.python_source import SourceError
from rlhf_suite.registry import absolute, is_own

NULLS = ("none", "null", "nil", "")


def assign(config: DictConfig, info: FlagInfo, value: Any) -> Problem | None:
    """Put a value from the command line into the configuration, or say why it does not fit the flag's type."""
    if arrives_changed(value, info):
        return wrong_type(info, value)
    try:
        OmegaConf.update(config, info.key, value, force_add=info.type.base is dict)  # its entries are new keys
    except OmegaConfBaseException as error:
        if info.type.base is dict and isinstance(value, dict):
            return Problem(info.key, str(error).splitlines()[0], f"write '{info.key}=<{info.type.name}>'")
        return wrong_type(info, value)
    return None


def arrives_changed(value: Any, info: FlagInfo) -> bool:
    """Return whether OmegaConf would make another value of this one without an error: the text 1e-6 would become 1e-06,
    the text true True, and for a bool the number 2 would become true."""
    if info.type.base is str:
        return info.meta.choices is None and isinstance(value, bool | float)
    return info.type.base is bool and isinstance(value, int | float) and value not in (0, 1)


def wrong_type(info: FlagInfo, value: Any) -> Problem:
    article = "an" if info.type.name[0] in "aeiou" else "a"
    return Problem(info.key, f"{show_value(value)} is not {article} {info.type.name}", suggestion(info, value))


def suggestion(info: FlagInfo, value: Any) -> str:
    """Return what the user most likely meant by a value of the wrong type."""
    text, expected = str(value), info.type
    if text.lower() in NULLS and expected.base is not str:
        known = f"{info.before_value}{example(info) if info.default is not None else f'<{expected.base.__name__}>'}"
        return f"write {info.before_value}null, or {known}" if expected.optional else f"write {known}"
    if expected.base is list and not isinstance(value, list | dict):
        several = isinstance(info.default, list) and len(info.default) > 1
        return f"write '{info.before_value}{example(info) if several else f'[{text}]'}'"
    if expected.base is str and isinstance(value, bool | float | int):
        return f"""write '{info.before_value}"{text}"'"""
    if expected.base in (int, float) and (number := meant_number(text, expected.base)) is not None:
        return f"write {info.before_value}{number}"
    if expected.base is bool:
        return f"write {info.before_value}true or {info.before_value}false"
    return f"write {info.before_value}<{expected.name}>, e.g. {info.before_value}{example(info)}"


def meant_number(text: str, base: type) -> float | int | None:
    """Return the number that a text means: with a percent sign, separators or spaces in it."""
    plain = text.strip().replace(" ", "").replace("_", "").replace(",", "")
    try:
        number = float(plain.removesuffix("%")) / (100 if plain.endswith("%") else 1)
    except ValueError:
        return None
    if not math.isfinite(number) or (base is int and not number.is_integer()):
        return None
    return int(number) if base is int else number


def example(info: FlagInfo) -> str:
    """Return a value that the flag takes."""
    if info.default is not None:
        return spell(info.default)
    if info.meta.choices:
        return str(info.meta.choices[0])
    return {bool: "true", int: "1", float: "0.5", str: "text", list: "[0.5]", dict: "{}"}[info.type.base]


def value_problems(info: FlagInfo, value: Any) -> Iterator[Problem]:
    """Yield what is wrong with a value: each item of a list, and each flag in an entry of a table, is checked too."""
    if value is None:
        return
    if isinstance(value, dict):
        yield from entry_problems(info, value) if info.type.is_table else ()
        return
    if isinstance(value, list) and any(item is None or isinstance(item, list | dict) for item in value):
        yield wrong_type(info, value)
        return
    if isinstance(value, str) and means_nothing(info, value):
        yield no_name(info, value)
        return
    if value == "" and is_path(info):
        known = f"{info.before_value}<path>"
        fix = f"write {info.before_value}null, or {known}" if info.type.optional else f"write {known}"
        yield Problem(info.key, "is empty", fix)
        return
    if is_path(info) and "output" not in info.key and (long := too_long(value)):  # those are tried on the disk
        yield Problem(
            info.key, f"{long[:40]}... is too long for the name of a file", f"write {info.before_value}<path>"
        )
        return
    for item in value if isinstance(value, list) else [value]:
        yield from item_problems(info, item)


def means_nothing(info: FlagInfo, text: str) -> bool:
    """Return whether a text is one that other programs read as nothing, and no value of the flag."""
    is_value = bool(info.meta.choices) or any(need.off == text for need in info.meta.needs)
    return text != "" and text.lower() in NULLS and not is_value


def no_name(info: FlagInfo, value: str) -> Problem:
    """Return the problem of a text such as None, which other programs read as nothing."""
    fix = "null" if info.type.optional else "<text>"
    return Problem(info.key, f"{value!r} is read as text, not as an empty value", f"write {info.before_value}{fix}")


def item_problems(info: FlagInfo, item: Any) -> Iterator[Problem]:
    """Yield what is wrong with a value, or with one of a list."""
    if info.meta.algorithms is not None and (is_own(item) or not info.meta.choices):
        yield from own_problems(info, info.meta.algorithms, item)
        return
    if info.meta.choices is not None:
        if item not in info.meta.choices:
            yield not_a_choice(info, item)
        return
    if isinstance(item, float) and not math.isfinite(item):
        yield Problem(info.key, f"{item} is not a finite number", f"write a number{bounds(info.meta)}")
        return
    for name, sign, holds in BOUNDS:
        bound = getattr(info.meta, name)
        if bound is not None and not holds(item, bound):
            yield Problem(info.key, f"{item} is not {sign}{bound}", f"write a number{bounds(info.meta)}")


def own_problems(info: FlagInfo, algorithms: registry.Kind, name: str) -> Iterator[Problem]:
    """Yield what is wrong with a function of the user's own: its file is read, not run."""
    try:
        declared = algorithms.find_declaration(name)
    except SourceError as error:
        yield Problem(info.key, error.what, error.fix)
        return
    below = algorithms.below
    keys = [node.key.removeprefix(below) for node in walk(info.owner) if node.key.startswith(below)]
    known = [key for key in keys if "." not in key]
    for flag in sorted(set(declared.reads or ()) - {*known}) if known else ():
        problem = f"{declared.file}:{declared.line}: reads {flag!r}, which is not one of {', '.join(known)}"
        yield Problem(info.key, problem, did_you_mean(flag, known) or "correct the declaration")


def entry_problems(info: FlagInfo, table: dict[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with the values of a table's entries."""
    for name, entry in table.items():
        for field in walk(info.type.section, f"{info.key}.{name}."):
            yield from value_problems(replace(field, is_of_entry=True), entry[field.key.rpartition(".")[2]])


def not_a_choice(info: FlagInfo, value: Any) -> Problem:
    choices = info.meta.choices or ()
    options = ", ".join(map(str, choices))
    known = translate_value(info.key, value)
    spelt = next((allowed for allowed in choices if str(allowed).lower() == str(value).lower().replace("_", "-")), None)
    spelt = spelt or next(
        (allowed for allowed in choices if str(allowed) == str(value).lower().replace("-", "_")), None
    )
    if known is not None or spelt is not None:
        return Problem(
            info.key, f"{show_value(value)} is not one of {options}", f"write {info.before_value}{known or spelt}"
        )
    close = did_you_mean(str(value).lower(), [str(choice) for choice in choices], info.before_value)
    fix = close or f"write {info.before_value}{'null' if info.default is None else example(info)}"
    if info.meta.algorithms is not None:
        own = value if str(value).endswith(".py") else "<file.py>"
        yours = f"{info.before_value}{own}:<function>"
        fix += f" For your own write {yours}" if close else f", or {yours} for your own"
    return Problem(info.key, f"{show_value(value)} is not one of {options}", fix)


def to_run(config: DictConfig) -> tuple[Run, list[Problem]]:
    """Return a composed configuration as a plain `Run`, with `~` in its paths expanded, and the problems of its values.

    In the run, a wrong value gives way to the flag's default: rules between flags can then still be checked.
    """
    flags, constants = flags_of(config.task), constants_of(config.task)
    others = [key for key, _ in leaves(config, flags) if key not in flags]
    problems = [
        unknown_flag(key, config.task)
        for key in others
        if key not in constants or plain_value(config, key) != constants[key]
    ]
    run, values = Run.of(config.task), plain_values(config)
    for key, info in flags.items():
        try:
            value = values[key] if key in values else plain_value(config, key)
        except OmegaConfBaseException as error:
            problems.append(make_unresolved_problem(key, error, f"write {key}=<{info.type.name}>"))
            continue
        wrong = [*value_problems(info, value)]
        problems += wrong
        if not wrong:
            owner, name = owner_of(run, info)
            is_table = info.type.is_table
            setattr(
                owner,
                name,
                {key_of_entry: info.type.section(**value[key_of_entry]) for key_of_entry in value}
                if is_table
                else value,
            )
    expand_home(run, flags.values())
    return run, problems


def plain_values(config: DictConfig) -> dict[str, Any]:
    """Return the values of a configuration by dotted key, tables taken apart; none if one of them cannot be resolved:
    all at once takes a tenth of the time of one by one."""
    try:
        nested = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException:
        return {}
    assert isinstance(nested, dict)
    return flat({str(name): value for name, value in nested.items()})


def plain_value(config: DictConfig, key: str) -> Any:
    """Return one value of a configuration, a list or a table as Python's own.

    Raises:
        OmegaConfBaseException: it is missing, or refers to something that does not exist.
    """
    value = OmegaConf.select(config, key, throw_on_missing=True)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def leaves(config: DictConfig, flags: Container[str], prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Yield the dotted keys of all values of a configuration with their nodes; a list is one value, and so is a table
    of a flag."""
    for name in config:
        key, child = f"{prefix}{name!s}", config._get_node(name)
        assert isinstance(child, Node)
        if (
            key not in flags
            and isinstance(child, DictConfig)
            and not child._is_none()
            and not child._is_interpolation()
        ):
            yield from leaves(child, flags, f"{key}.")
        else:
            yield key, child


# By their names, so that a new flag needs no further mark: model_name_or_path, ckpt.output_dir, data.dataset, ...
PATH = re.compile(r"(.*[._])?(path|dir|dataset|url|tokenizer_chat_template|replay)")
HOME = re.compile(r"(^|,)(\s*)(~[^/,]*)(?=/|,|$)")


def is_path(info: FlagInfo) -> bool:
    """Return whether a flag holds a path, or a comma list of paths."""
    return info.type.base is str and PATH.fullmatch(info.key) is not None


MAX_NAME = 255  # bytes of a name in the file systems of Linux


def too_long(text: str) -> str | None:
    """Return the first part of a path, or of a comma list of paths, that no file can be called; templates are texts."""
    parts = re.split("[/,]", text) if "{" not in text else []
    return next((part for part in parts if len(part.encode(errors="replace")) > MAX_NAME), None)


def with_home(text: str) -> str:
    """Return a path or a comma list of paths, with `~` or `~user` at a beginning replaced by the home folder."""
    return HOME.sub(lambda match: match[1] + match[2] + os.path.expanduser(match[3]), text)  # noqa: PTH111


def owner_of(section: Any, info: FlagInfo) -> tuple[Any, str]:
    """Return the section below `section` that holds a flag, and the flag's name in it."""
    *parents, name = info.key.split(".")
    return reduce(getattr, parents, section), name


def expand_home(section: Any, flags: Iterable[FlagInfo]) -> None:
    """Replace `~` in every path among the `flags` of a section, and in the entries of its tables.

    The file of a user's own function becomes an absolute path: processes in other folders import it.
    """
    for info in flags:
        owner, name = owner_of(section, info)
        value = getattr(owner, name)
        if info.type.is_table:
            for entry in value.values():
                expand_home(entry, walk(entry))
        elif value is not None and is_path(info):
            setattr(owner, name, with_home(value))
        elif value is not None and info.meta.algorithms is not None:
            setattr(owner, name, [*map(absolute, value)] if isinstance(value, list) else absolute(value))


def launcher_problems(launcher: str, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with the values of a launcher's settings, whose types Hydra has checked."""
    infos = {info.key.removeprefix(f"{PREFIX}."): info for info in settings_of(launcher)}
    for name, info in infos.items():
        if not isinstance(values[name], dict):  # of free names and values, which Slurm checks
            yield from value_problems(info, values[name])
    if launcher == "slurm" and values["slurm_signal_delay_s"] >= 60 * values["timeout_min"]:
        limit = 60 * values["timeout_min"]
        problem = (
            f"{values['slurm_signal_delay_s']} s before a limit of {limit} s, so each run would be stopped at once"
        )
        key = f"{PREFIX}.slurm_signal_delay_s"
        yield Problem(key, problem, f"lower it, or raise {PREFIX}.timeout_min")
