"""Rules about where rows come from, and how they become text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlhf_suite.config.check.formatting import did_you_mean
from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.check.sources import names_in
from rlhf_suite.config.declarations.benchmarks import BENCHMARKS, named_benchmarks
from rlhf_suite.config.declarations.data import DataConfig, has_one_place, says_reward
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.runs import (
    Run,
)
from rlhf_suite.config.declarations.task_groups import PLANNED, RL, SAMPLING, SUPERVISED, TRAINED

WEIGHTS = {  # of sources that are mixed, by the flag that names these
    "data.dataset": "data.dataset_probs",
    "data.prompt_dataset": "data.prompt_probs",
    "data.pretrain_dataset": "data.pretrain_probs",
}

ROUNDED = 1e-4  # the sum of probabilities that were rounded, as 0.333333 of three, may differ so much from 1


@rule()
def data_is_named(run: Run) -> Iterator[Problem]:
    values = all_values(run)
    for key, weights in WEIGHTS.items():
        if key not in values or (key == "data.pretrain_dataset" and values[key] is None):
            continue
        if run.has("generate") and run.generate.benchmark is not None:
            continue
        names, given = names_in(values[key]), values.get(weights)
        if not names:
            yield Problem(key, "no data is named", f"add {key}=<file, folder, hub name or builtin:<task>>")
        elif given is not None:
            yield from probability_problems(weights, given, key, len(names))


def probability_problems(weights: str, given: list[float], key: str, count: int) -> Iterator[Problem]:
    """Yield what is wrong with the probabilities, in flag `weights`, of the `count` sources in flag `key`."""
    if len(given) != count:
        problem = f"{len(given)} probabilities for {count} sources in {key}"
        even = ",".join([f"{1 / count:.3g}"] * count)
        yield Problem(weights, problem, f"write one for each source, e.g. '{weights}=[{even}]'")
    elif min(given) <= 0:
        yield Problem(weights, "a source with probability 0 is never read", f"remove it from {key}")
    elif abs(sum(given) - 1) > ROUNDED:
        scaled = ",".join(f"{share / sum(given):.6g}" for share in given)
        yield Problem(weights, f"the sum is {sum(given):g}, not 1", f"write '{weights}=[{scaled}]' in proportion")


@rule(tasks=TRAINED)
def evaluation_sets_have_their_columns(run: Run) -> Iterator[Problem]:
    sources = names_in(run.eval.dataset)
    if twice := sorted({name for name in sources if sources.count(name) > 1}):
        yield Problem("eval.dataset", f"names {', '.join(twice)} twice", "name each evaluation set once")
    for name, given in run.eval.column_flags().items() if sources else ():
        if len(given) not in (1, len(sources)):
            problem = f"{len(given)} columns for {len(sources)} sources in eval.dataset"
            yield Problem(f"eval.{name}", problem, "write one for all of them, or one for each")


def benchmark_of(run: Run) -> tuple[str, str | None]:
    """Return the flag of a run that names benchmarks, and its value."""
    named = run.eval.benchmark if run.task in RL else run.generate.benchmark
    return "eval.benchmark" if run.task in RL else "generate.benchmark", named


@rule(tasks=SAMPLING)
def benchmarks_are_known(run: Run) -> Iterator[Problem]:
    key, named = benchmark_of(run)
    entries = [*named_benchmarks(named)]
    if named is not None and not entries:
        yield Problem(key, "names no benchmark", f"write {key}=<name>:<file>; the names are {', '.join(BENCHMARKS)}")
    for number, (name, place) in enumerate(entries):
        if name not in BENCHMARKS:
            fix = did_you_mean(name, BENCHMARKS) or f"write one of {', '.join(BENCHMARKS)}"
            yield Problem(key, f"there is no benchmark {name!r}", fix)
        elif not place:
            fix = f"write {key}={name}:<file or folder of {BENCHMARKS[name].source}>"
            yield Problem(key, f"{name} has no file", fix)
        if name in [other for other, _ in entries[:number]]:
            yield Problem(key, f"names {name} twice", "name each benchmark once")


@rule(tasks=RL)
def benchmarks_have_one_turn(run: Run) -> Iterator[Problem]:
    key = "eval.benchmark"
    if run.eval.benchmark is not None and run.agent.has_turns:
        problem = "a benchmark has prompts of a single turn, but this run has an agent"
        yield Problem(key, problem, f"remove {key}, and measure the model without agent.kind")


# Flags of prompts that a benchmark has instead.
OF_PROMPTS = ("prompt_dataset", "prompt_split", "skip_samples", "input_key", "input_template", "label_key", "tools_key",
              "reward_columns", "target_reward")  # fmt: skip


@rule(tasks=("generate",))
def benchmarks_have_their_prompts(run: Run) -> Iterator[Problem]:
    default = DataConfig.of("generate")
    for name in OF_PROMPTS if run.generate.benchmark is not None else ():
        if getattr(run.data, name) != getattr(default, name):
            yield Problem(f"data.{name}", "a benchmark has prompts of its own", "remove it, or generate.benchmark")


# A backslash and an n where a new line was meant; LaTeX commands such as \nabla go on in lower case.
UNTURNED_NEWLINE = re.compile(r"\\n(?![a-z])")
FLAG = "data.chat_template_kwargs"
# What apply_chat_template gives a template itself.
TAKEN = ("messages", "conversation", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template")


@rule(tasks=(*PLANNED, "chat"))
def template_has_one_place(run: Run) -> Iterator[Problem]:
    key, template = "data.input_template", run.data.input_template
    if template is None or run.data.apply_chat_template:
        return
    if not has_one_place(template):
        fix = f"write {key}=null for no template, or one {{}}; other braces are doubled"
        yield Problem(key, f"{template!r} must have one {{}}, where the prompt goes", fix)
    if UNTURNED_NEWLINE.search(template):
        fix = f"""in bash write $'{key}="..."' with the dollar sign, or put the template in a preset"""
        yield Problem(key, f"{template!r} contains a backslash and an n instead of a line break", fix)


@rule(tasks=(*PLANNED, "chat"))
def variables_are_named(run: Run) -> Iterator[Problem]:
    for setting in run.data.chat_template_kwargs:
        name, colon, _ = setting.partition(":")
        if not colon or not name.isidentifier():
            yield Problem(FLAG, f"{setting!r} is not name:value", f"write '{FLAG}=[enable_thinking:false]'")
        elif name in TAKEN:
            yield Problem(FLAG, f"{name} is a variable that the suite itself passes to the template", "remove it")


@rule(tasks=SUPERVISED)
def turns_are_marked(run: Run) -> Iterator[Problem]:
    markers = run.data.turn_markers if run.data.has("turn_markers") else None
    if markers is not None and (len(set(markers)) != 2 or len(markers) != 2 or not all(map(str.strip, markers))):
        problem = f"{markers}: the texts that begin a turn of the user and a turn of the assistant must differ"
        yield Problem("data.turn_markers", problem, """write 'data.turn_markers=["Human:","Assistant:"]', or null""")


@rule(tasks=("sft", "distill"))
def reward_has_its_place(run: Run) -> Iterator[Problem]:
    if run.data.reward_key is not None:
        yield from reward_template_problems(run.data)


@rule(tasks=("generate", "chat"))
def target_has_its_place(run: Run) -> Iterator[Problem]:
    if run.data.target_reward is not None:
        yield from reward_template_problems(run.data)


def reward_template_problems(data: DataConfig) -> Iterator[Problem]:
    if not says_reward(data.reward_template):
        problem = f"{data.reward_template!r} must have {{prompt}} once and a {{reward}}; other braces are doubled"
        fix = """write 'data.reward_template="{prompt} <rm_score>: {reward:.2f} "'"""
        yield Problem("data.reward_template", problem, fix)
