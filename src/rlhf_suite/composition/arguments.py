"""The words of the command line sorted: Hydra's options, overrides, help, and words that are neither."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_suite.composition.presets import group_names, preset_names
from rlhf_suite.config.formatting import did_you_mean, quoted
from rlhf_suite.config.names import flags_of
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.runs import TASKS

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
        return None if folder is None else Path(folder).expanduser()

    @property
    def for_hydra(self) -> list[str]:
        """The words for Hydra, options first: its argparse refuses overrides on both sides of an option."""
        hydras = {name: value for name, value in self.options.items() if name != "--config"}
        options = [word for name, value in hydras.items() for word in (name, value) if word]
        return [*options, *self.overrides]


def parse(argv: list[str]) -> CommandLine:
    """Sort the words. Words without `=` are kept apart: after --help they are prefixes, otherwise mistakes."""
    line = CommandLine()
    words = iter(merge_values(argv))
    for word in words:
        name, _, value = word.partition("=")
        name = ALIASES.get(name, name)
        if word in SWITCHES:
            line.options[SWITCHES[word]] = ""
        elif name in VALUED:
            line.options[name] = value
        elif word.startswith("-") and word.strip("-"):
            line.problems.append(dashed(word))
        elif "=" in word or word.startswith("~"):
            line.overrides.append(with_quoted_home(word))
        else:
            line.words.append(word)
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
        takes_next = bool(after) and not after.startswith("-")
        position += 1
        if name in VALUED:
            takes_next = takes_next and (after in VALUES[name] if name in VALUES else True)
            yield f"{name}={after if takes_next else VALUED[name]}"
            position += takes_next
        elif word.startswith("--") and word not in SWITCHES and "=" not in word and takes_next and "=" not in after:
            yield f"{word}={after}"
            position += 1
        else:
            yield word


def dashed(word: str) -> Problem:
    """Return the problem of `--actor.adam.lr=1e-6`, as OpenRLHF's commands take it, or of an unknown option."""
    name, _, value = word.lstrip("-").partition("=")
    if f"--{name}" in PLAN_OPTIONS:
        return Problem(f"--{name}", "is an option of rlhf-suite plan", f"write rlhf-suite plan --{name} ... task=...")
    if "." in name or "_" in name or value:
        return Problem(f"--{name}", "flags are written without dashes", f"write {name}={'...' if value else 'true'}")
    fix = "options are --help, --cfg job, --info, --config <file>, --config-dir <folder>, -m (sweep)"
    return Problem(word, "no such option", fix)


def with_quoted_home(word: str) -> str:
    """Quote a value that begins with `~`: Hydra's grammar has no such character outside quotes."""
    key, equals, value = word.partition("=")
    if not value.startswith("~") or set(value) & set("\"'"):
        return word
    return f"{key}{equals}{','.join(quoted(part) for part in value.split(','))}"


def key_of(word: str) -> str:
    """Return the key of an override, without the signs that add or delete one."""
    return word.lstrip("+~").partition("=")[0]


def lonely(word: str) -> Problem:
    """Return the problem of a word without `=`: a task or a preset without its group, or a flag without its value."""
    group = next((group for group in group_names() if word in preset_names(group)), None)
    if group is not None:
        return Problem(word, "expected key=value", f"write {group}={word}")
    if word in flags_of(None):
        return Problem(word, "expected key=value", f"write {word}=<value>; see --help {word}")
    tasks = did_you_mean(word, TASKS)
    return Problem(word, "expected key=value", tasks.replace("mean ", "mean task=") if tasks else "see --help")
