"""`--help [task=<task>] [prefix]`: the tasks, or a task's flags with type, default, bounds and meaning."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_suite.cli.commands import COMMANDS
from rlhf_suite.composition.arguments import CommandLine
from rlhf_suite.composition.presets import group_names, preset_names
from rlhf_suite.config import name_program
from rlhf_suite.config.check.formatting import describe_type, did_you_mean
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.flags import FlagInfo, by_section
from rlhf_suite.config.declarations.launchers import LAUNCHERS, settings_of
from rlhf_suite.config.declarations.runs import TASKS, flags_of

INTRODUCTION = """\
{program} task=<task> [experiment=<preset>] [group.flag=value ...]

Tasks (without a model each runs a small built-in example):
{tasks}

Presets:
{presets}

Commands (rlhf-suite <command> --help says more):
{commands}

Options:
  --help task=<task> [prefix]   the flags of a task, or those below a prefix: --help task=ppo algo.kl
  --cfg job                     print the configuration instead of running
  --info defaults               print which presets make it up
  --config <file>               start from a YAML file of flags, such as a run's config.yaml; flags win over it
  --config-dir <folder>         presets of your own, in the same folders as those above
  -m                            sweep: a flag may have several values, a=1,2; each job is a process
                                hydra/launcher=local hydra.launcher.parallel=2, or hydra/launcher=slurm
  hydra/launcher=slurm          a job of Slurm; --help hydra.launcher lists its settings (docs/slurm.md)
  explain=true                  print batch arithmetic, placement and the origin of each value; run nothing
  plan=true                     print what memory, disk and time it would take; run nothing (rlhf-suite plan --help)
  -sc install=bash              completion: eval "$(rlhf-suite -sc install=bash)"

Lists are written '[a,b]', nothing is null, a text with = or , or {{ is quoted twice: 'flag="a=b"'."""


# The flags that most runs set, which the help of a task begins with.
CORE = (
    "actor.model_name_or_path",
    "reward.model_name_or_path",
    "lora.path",
    "teacher.model_name_or_path",
    "data.dataset",
    "data.prompt_dataset",
    "data.input_key",
    "data.output_key",
    "data.chosen_key",
    "data.rejected_key",
    "data.steps_key",
    "data.label_key",
    "data.apply_chat_template",
    "data.max_len",
    "reward.rule",
    "algo.loss",
    "algo.beta",
    "algo.kd_coef",
    "algo.advantage.estimator",
    "algo.kl.init_coef",
    "rollout.n_samples_per_prompt",
    "loop.num_iterations",
    "train.batch_size",
    "train.max_epochs",
    "train.num_episodes",
    "actor.adam.lr",
    "eval.dataset",
    "generate.output_path",
    "score.output_path",
    "chat.system",
    "chat.temperature",
    "serve.host",
    "serve.port",
    "ckpt.output_dir",
)


def print_help(line: CommandLine) -> int:
    """Print what was asked for; exit code 2 if there is no such task or prefix."""
    task = next((word.partition("=")[2] for word in line.overrides if word.startswith("task=")), None)
    if task is not None and task not in TASKS:
        return unknown("task", task, list(TASKS))
    if task is None and not line.words:
        print(introduction(line.own_presets))
        return 0
    settings = [info for name in LAUNCHERS for info in settings_of(name)] if line.words else []
    infos = flags_of(task) | {info.key: info for info in settings}
    for prefix in line.words or [""]:
        below = [info for key, info in infos.items() if key.startswith(prefix)]
        if not below:
            return unknown("prefix", prefix, [*infos, *by_section(infos.values())])
        if not prefix:
            print_core(infos)
        print_flags(below)
    return 0


def introduction(own: Path | None) -> str:
    """Return the overview of tasks, presets (with those of the user's folder `own`) and options."""
    tasks = "\n".join(f"  task={name:<8} {task.help}" for name, task in TASKS.items())
    named = [(group, preset_names(group, own)) for group in group_names() if group != "task"]
    presets = "\n".join(f"  {group}=<{' | '.join(names)}>" for group, names in named)
    commands = "\n".join(f"  rlhf-suite {f'{name} {one.words}':<31} {one.help}" for name, one in COMMANDS.items())
    return INTRODUCTION.format(program=name_program(), tasks=tasks, presets=presets, commands=commands)


def print_core(infos: Mapping[str, FlagInfo]) -> None:
    """Print the flags that most runs set, if a run reads them with the defaults of all others; they stand in their
    sections too."""
    print("The flags that most runs set. Below them are all flags by section")
    values = {key: info.default for key, info in infos.items()}
    for key in CORE:
        if key in infos and all(condition.may_hold(values) for condition in infos[key].meta.when):
            print_flag(infos[key])


def print_flags(infos: list[FlagInfo]) -> None:
    """Print flags by section: `key = default`, then the meaning, type and bounds below it.

    What each choice of an algorithm means, and why a flag needs others, is printed where one flag alone is asked for.
    """
    is_alone = len(infos) == 1
    for flags in by_section(infos).values():
        print(f"\n{flags[0].owner.__doc__}")
        for info in flags:
            print_flag(info)
            for line in details(info) if is_alone else ():
                print_wrapped(line, " " * 8, " " * 12)


def details(info: FlagInfo) -> Iterator[str]:
    """Yield what each choice of an algorithm means, and the reason of each need of a flag."""
    for name, declaration in info.meta.algorithms.builtin().items() if info.meta.algorithms is not None else ():
        yield f"{name}: {declaration.help}"
    for need in info.meta.needs:
        yield f"{info.key}{need.at.demand if need.at is not None else ''} needs {need.condition.demand}: {need.why}"


def print_flag(info: FlagInfo) -> None:
    """Print a flag with its default, and below it what it means, its type and its bounds."""
    print(f"  {info.key} = {spell(info.default)}")
    print_wrapped(f"{info.help} ({describe_type(info)})", " " * 6, " " * 6)


def print_wrapped(text: str, first: str, later: str) -> None:
    """Print a text in lines as wide as the terminal, after these indents."""
    width = max(shutil.get_terminal_size().columns, 60)
    print(textwrap.fill(text, width, initial_indent=first, subsequent_indent=later))


def unknown(kind: str, name: str, names: list[str]) -> int:
    print(f"no {kind} {name}: {did_you_mean(name, names) or 'see --help'}", file=sys.stderr)
    return 2
