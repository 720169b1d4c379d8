"""The words of the command line sorted: Hydra's options, overrides, help, and words that are neither."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rlhf_suite.composition.presets import group_names, preset_names
from rlhf_suite.composition.split_words import NUMBER, join_words
from rlhf_suite.config.check.formatting import did_you_mean, quote
from rlhf_suite.config.check.old_names import BECOMES, GONE, HINTS, NOTHING, RENAMED
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.launchers import LAUNCHERS, PREFIX, settings_of
from rlhf_suite.config.declarations.runs import TASKS, flags_of
from rlhf_suite.disk import resolve_home

DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d"), "-") | {0x2014: "--"}
# Hydra's launchers of submitit, which are followed by those here, and their settings of other names.
SUBMITIT = {
    "hydra/launcher=submitit_slurm": "hydra/launcher=slurm",
    "hydra/launcher=submitit_local": "hydra/launcher=local",
}
LOCAL_NAMES = {"gpus_per_node": "gpus_per_job", "array_parallelism": "parallel"}
SWITCHES = {"-m": "--multirun", "-r": "--run", "-h": "--help"}
SWITCHES |= {name: name for name in (*SWITCHES.values(), "--resolve", "--hydra-help", "--version")}
# Options with a value, and the value of an option that came without one.
VALUED = dict.fromkeys(("--package", "--config-dir", "--config", "--shell-completion"), "")
VALUED |= {"--cfg": "job", "--info": "all"}
ALIASES = {"-c": "--cfg", "-i": "--info", "-p": "--package", "-cd": "--config-dir", "-sc": "--shell-completion"}
VALUES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
# Options of `rlhf-suite plan`: type and meaning.
PLAN_OPTIONS = {
    "--gpu": (str, "type of GPU, such as h100-80; without it: processes on the CPUs of this machine"),
    "--memory": (float, "GiB of a GPU or machine, instead of what is known of it"),
    "--mfu": (float, "share of a GPU's peak that training reaches (default 0.4)"),
    "--tflops": (float, "10^12 operations per second of a device (GPU or core), as measured"),
}


@dataclass
class CommandLine:
    """A command line sorted. `options` maps Hydra's long option names to their values (switches to "")."""

    overrides: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    from_file: dict[str, str] = field(default_factory=dict)  # keys that a --config file sets, with its path

    @property
    def own_presets(self) -> Path | None:
        """The user's folder of presets."""
        folder = self.options.get("--config-dir")
        return None if folder is None else resolve_home(folder)

    @property
    def for_hydra(self) -> list[str]:
        """The words for Hydra, options first: its argparse refuses overrides on both sides of an option."""
        hydras = {name: value for name, value in self.options.items() if name != "--config"}
        return [*words_of_options(hydras), *self.overrides]


def words_of_options(options: Mapping[str, str]) -> list[str]:
    """Return options with their values as words."""
    return [word for name, value in options.items() for word in (name, value) if word]


def parse(argv: list[str]) -> CommandLine:
    """Sort the words. Words without `=` are kept apart: after --help they are prefixes, otherwise mistakes."""
    line = CommandLine()
    words = [with_plain_dashes(word) for word in argv]
    if not {"--help", "-h"} & {*words}:
        words, line.problems = join_words(words)
    for word in merge_values(words):
        name, _, value = word.partition("=")
        name = ALIASES.get(name, name)
        if word in SWITCHES:
            line.options[SWITCHES[word]] = ""
        elif name in VALUED:
            line.options[name] = value
        elif word.startswith("-") and word.strip("-"):
            override = without_dashes(word)
            line.overrides += [with_quoted_home(override)] if override is not None else []
            line.problems += [no_option(word)] if override is None else []
        elif "=" in word or word.startswith("~"):
            line.overrides.append(with_quoted_home(with_underscores(word)))
        else:
            line.words.append(word)
    line.overrides = with_own_launcher(line.overrides)
    if "--help" not in line.options:
        line.problems += [lonely(word) for word in line.words]
    return line


def merge_values(argv: list[str]) -> Iterator[str]:
    """Join `--cfg job`, `--config-dir x` and OpenRLHF's `--flag value` into one word each."""
    position = 0
    while position < len(argv):
        word = argv[position]
        after = argv[position + 1] if position + 1 < len(argv) else ""
        name = ALIASES.get(word, word)
        takes_next = bool(after) and (not after.startswith("-") or NUMBER.fullmatch(after) is not None)
        position += 1
        if name in VALUED:
            takes_next = takes_next and (after in VALUES[name] if name in VALUES else True)
            yield f"{name}={after if takes_next else VALUED[name]}"
            position += takes_next
        elif (
            word.startswith("--") and word not in SWITCHES and "=" not in word and takes_next and is_value(word, after)
        ):
            yield f"{word}={after}"
            position += 1
        else:
            yield word


def is_value(word: str, after: str) -> bool:
    """Return whether the word after `--flag` is its value, and not the next override."""
    info = flags_of(None).get(find_key(word.lstrip("-")) or "")
    if info is not None and info.type.base is bool:
        return after.lower() in ("true", "false", "0", "1", "null")
    return "=" not in after or (info is not None and find_key(key_of(after)) is None)


def without_dashes(word: str) -> str | None:
    """Return `--actor.adam.lr=1e-6`, as other programs take it, as an override; None for an unknown option."""
    name, equals, value = word.lstrip("-").partition("=")
    if f"--{name}" in PLAN_OPTIONS:
        return None
    key = find_key(name) or old_names().get(in_dashes(name))
    if key is None and ("." in name or "_" in name or equals):
        key = name.replace("-", "_")
    return None if key is None else f"{key}={value if equals else 'true'}"


@cache
def old_names() -> dict[str, str]:
    """Return what flags are called elsewhere, by these names with dashes alone."""
    return {in_dashes(name): name for name in (*RENAMED, *BECOMES, *NOTHING, *GONE, *HINTS)}


def in_dashes(name: str) -> str:
    return name.replace(".", "-").replace("_", "-")


def find_key(name: str) -> str | None:
    """Return the flag, the group of presets or the setting of Hydra that a name with dashes in it means."""
    for spelling in (name, name.replace("-", "_")):
        if spelling in flags_of(None) or spelling in group_names() or spelling.startswith(("hydra.", "hydra/")):
            return spelling
    return by_words().get(name) if "-" in name else None


@cache
def by_words() -> dict[str, str]:
    """Return the flags by their names with dashes alone, such as actor-adam-lr."""
    return {in_dashes(key): key for key in flags_of(None)}


def with_underscores(word: str) -> str:
    """Return an override whose flag is written with dashes, such as algo.kl.init-coef=0, with the flag's name."""
    name, equals, value = word.partition("=")
    key = find_key(name) if "-" in name and not name.startswith(("+", "~")) else None
    return word if key is None else f"{key}{equals}{value}"


def with_plain_dashes(word: str) -> str:
    """Return a word in whose name the dashes of printed text are those of a keyboard."""
    name, equals, value = word.partition("=")
    return f"{name.translate(DASHES)}{equals}{value}"


def with_own_launcher(words: list[str]) -> list[str]:
    """Return overrides in which submitit's launchers of Hydra, and the names of their settings, are those here."""
    words = [SUBMITIT.get(word, word) for word in words]
    choice = next((word.partition("=")[2] for word in words if word.startswith("hydra/launcher=")), "local")
    if choice not in LAUNCHERS:
        return words
    names = {info.key.removeprefix(f"{PREFIX}.") for info in settings_of(choice)}
    return [with_own_setting(word, choice, names) for word in words]


def with_own_setting(word: str, launcher: str, names: set[str]) -> str:
    """Return the setting of a launcher by its name here, where submitit calls it otherwise."""
    name = key_of(word).removeprefix(f"{PREFIX}.")
    if not word.startswith(f"{PREFIX}.") or name in names:
        return word
    own = f"slurm_{name}" if launcher == "slurm" else LOCAL_NAMES.get(name, name)
    return f"{PREFIX}.{own}={word.partition('=')[2]}" if own in names else word


def no_option(word: str) -> Problem:
    """Return the problem of an unknown option."""
    name = word.lstrip("-").partition("=")[0]
    if f"--{name}" in PLAN_OPTIONS:
        return Problem(f"--{name}", "is an option of rlhf-suite plan", f"write rlhf-suite plan --{name} ... task=...")
    fix = "options are --help, --cfg job, --info, --config <file>, --config-dir <folder>, -m (sweep)"
    return Problem(word, "no such option", fix)


def with_quoted_home(word: str) -> str:
    """Quote a value that begins with `~`: Hydra's grammar has no such character outside quotes."""
    key, equals, value = word.partition("=")
    if not value.startswith("~") or set(value) & set("\"'"):
        return word
    return f"{key}{equals}{','.join(quote(part) for part in value.split(','))}"


def key_of(word: str) -> str:
    """Return the key of an override, without the signs that add or delete one."""
    return word.lstrip("+~").partition("=")[0]


def lonely(word: str) -> Problem:
    """Return the problem of a word without `=`: a task or a preset without its group, or a flag without its value."""
    group = next((group for group in group_names() if word in preset_names(group)), None)
    if group is not None:
        return Problem(word, "expected key=value", f"write {group}={word}", (group,), "name")
    if word in flags_of(None):
        return Problem(word, "expected key=value", f"write {word}=<value>; see --help {word}", kind="name")
    task = did_you_mean(word, TASKS, "task=")
    return Problem(word, "expected key=value", task or "see --help", kind="name")
