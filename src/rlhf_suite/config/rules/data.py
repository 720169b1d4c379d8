"""Rules about where rows come from, and how they become text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

from rlhf_suite.config.check.formatting import did_you_mean
from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.check.sources import names_in, source_problems
from rlhf_suite.config.declarations.benchmarks import BENCHMARKS, named_benchmarks
from rlhf_suite.config.declarations.data import DataConfig, says_reward
from rlhf_suite.config.declarations.ds import wanted_packing
from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.config.declarations.runs import (
    Run,
)
from rlhf_suite.config.declarations.task_groups import LOOPS, PLANNED, RL, SCORED, SUPERVISED


def evaluation_problems(config: EvalConfig, columns: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what is wrong with the sources of eval.dataset. `columns`: flags that name columns of the training data,
    and those names."""
    if config.dataset is None:
        return
    sources = names_in(config.dataset)
    if twice := sorted({name for name in sources if sources.count(name) > 1}):
        yield Problem("eval.dataset", f"names {', '.join(twice)} twice", "name each evaluation set once")
    uneven = {name: given for name, given in config.column_flags().items() if len(given) not in (1, len(sources))}
    for name, given in uneven.items():
        problem = f"{len(given)} columns for {len(sources)} sources in eval.dataset"
        yield Problem(f"eval.{name}", problem, "write one for all of them, or one for each")
    if uneven or not sources:
        yield from source_problems("eval.dataset", config.dataset, {})
        return
    for source, own in zip(sources, config.columns_of_sets(len(sources)), strict=True):
        others = {flag: column for flag, column in columns.items() if flag.removeprefix("data.") not in own}
        named = {f"eval.{name}": column for name, column in own.items()}
        yield from source_problems("eval.dataset", source, others | named)


def columns(data: Any, unread: Collection[str] = ()) -> dict[str, str]:
    """Return the flags of the section `data` that name columns of its rows, and those names. Rows may be without those
    of `unread`."""
    if getattr(data, "row_format", None) is not None:
        return {}  # the flags name columns of rows as the function returns them
    names = [field.name for field in fields(data) if field.name.endswith("_key") and field.name not in unread]
    keys = {f"data.{name}": getattr(data, name) for name in names}
    keys["data.reward_columns"] = ",".join(getattr(data, "reward_columns", ())) or None
    return {flag: column for flag, column in keys.items() if column is not None}


@rule(tasks=SUPERVISED)
def has_training_data(run: Run) -> Iterator[Problem]:
    data, is_paired = run.data, run.data.is_paired
    names = columns(data, unread=("input_key", "output_key", "label_key") if is_paired else ())
    if run.actor.pretrains:
        names = {flag: column for flag, column in names.items() if flag == "data.input_key"}
    yield from source_problems("data.dataset", data.dataset, names, "data.dataset_probs", data.dataset_probs)
    yield from evaluation_problems(run.eval, names)


@rule(tasks=("kto",))
def pairs_are_whole(run: Run) -> Iterator[Problem]:
    if run.data.chosen_key is None:
        return
    data = run.data
    if data.rejected_key is None:
        problem = "only the better answer of each pair is named"
        yield Problem("data.rejected_key", problem, "add data.rejected_key=rejected")
    if data.prompt_key is None and data.turn_markers is None and not data.apply_chat_template:
        problem = "the prompt of the pairs is not named, so it cannot be separated from the answers"
        fix = "add data.prompt_key=<column>, data.turn_markers or data.apply_chat_template=true"
        yield Problem("data.prompt_key", problem, fix)


@rule(tasks=RL)
def has_prompts(run: Run) -> Iterator[Problem]:
    data, names = run.data, columns(run.data, unread=("pretrain_key",))
    if data.pretrain_dataset is not None:
        key, column = "data.pretrain_dataset", {"data.pretrain_key": data.pretrain_key}
        yield from source_problems(key, data.pretrain_dataset, column, "data.pretrain_probs", data.pretrain_probs)
    key = "data.prompt_dataset"
    yield from source_problems(key, data.prompt_dataset, names, "data.prompt_probs", data.prompt_probs)
    names.pop("data.teacher_prompt_key", None)  # nobody teaches in an evaluation
    yield from evaluation_problems(run.eval, names)


@rule(tasks=RL)
def benchmarks_are_known(run: Run) -> Iterator[Problem]:
    key, entries = "eval.benchmark", [*named_benchmarks(run.eval.benchmark)]
    if run.eval.benchmark is not None and not entries:
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
        problem = "a benchmark has prompts of one turn, and this run has an agent"
        yield Problem(key, problem, f"remove {key}, and measure the model without agent.kind")


@rule(tasks=("generate",))
def has_prompts_to_answer(run: Run) -> Iterator[Problem]:
    yield from source_problems("data.prompt_dataset", run.data.prompt_dataset, columns(run.data))


@rule(tasks=LOOPS)
def has_held_out_prompts(run: Run) -> Iterator[Problem]:
    """Check the sources that the stage of an evaluation answers, by the names that their flags have in the loop."""
    if run.eval.dataset is not None:
        shared = columns(run.data.as_of("generate"))
        own = {f"eval.{name}": getattr(run.eval, name) for name in ("input_key", "label_key")}
        own = {flag: column for flag, column in own.items() if column is not None}
        others = {flag: column for flag, column in shared.items() if f"eval.{flag.removeprefix('data.')}" not in own}
        yield from source_problems("eval.dataset", run.eval.dataset, others | own)


@rule(tasks=SCORED)
def has_rows(run: Run) -> Iterator[Problem]:
    names = columns(run.data, unread=("query_key", "finish_key", "tools_key"))
    yield from source_problems("data.dataset", run.data.dataset, names)


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
    try:
        places = template.format("\0").count("\0")
    except (IndexError, KeyError, ValueError):
        places = 0
    if places != 1:
        fix = f"write {key}=null for no template, or one {{}}; other braces are doubled"
        yield Problem(key, f"{template!r} must have one {{}}, where the prompt goes", fix)
    if UNTURNED_NEWLINE.search(template):
        fix = f"""in bash write $'{key}="..."' with the dollar sign, or put the template in a preset"""
        yield Problem(key, f"{template!r} has a backslash and an n where a new line is meant", fix)


@rule(tasks=(*PLANNED, "chat"))
def variables_are_named(run: Run) -> Iterator[Problem]:
    for setting in run.data.chat_template_kwargs:
        name, colon, _ = setting.partition(":")
        if not colon or not name.isidentifier():
            yield Problem(FLAG, f"{setting!r} is not name:value", f"write '{FLAG}=[enable_thinking:false]'")
        elif name in TAKEN:
            yield Problem(FLAG, f"{name} is given to the template by the suite", "remove it")


@rule(tasks=("sft", "distill"))
def examples_fit_together(run: Run) -> Iterator[Problem]:
    data, is_plain = run.data, run.actor.pretrain_mode_enable
    compiled = run.ds.packing_samples is None and run.ds.deepcompile
    if data.pack_to_max_len and wanted_packing(run.ds) is False:
        problem = "the examples of a row would be padded to one another, each to the longest"
        yield Problem(
            "data.pack_to_max_len",
            problem,
            f"write {'ds.deepcompile=false' if compiled else 'ds.packing_samples=null'}",
        )
    if data.multiturn and not (data.apply_chat_template or is_plain):
        problem = "needs the chat template, which marks the turns"
        yield Problem("data.multiturn", problem, "add data.apply_chat_template=true")
    for name in ("multiturn", "apply_chat_template"):
        if is_plain and getattr(data, name):
            problem = "actor.pretrain_mode_enable trains on every token of plain text"
            yield Problem(f"data.{name}", problem, f"write data.{name}=false, or actor.pretrain_mode_enable=false")


@rule(tasks=SUPERVISED)
def turns_are_marked(run: Run) -> Iterator[Problem]:
    markers = run.data.turn_markers if run.data.has("turn_markers") else None
    if markers is not None and (len(set(markers)) != 2 or len(markers) != 2 or not all(map(str.strip, markers))):
        problem = f"{markers}: the texts that begin a user's turn and an assistant's turn must be two different texts"
        yield Problem("data.turn_markers", problem, """write 'data.turn_markers=["Human:","Assistant:"]', or null""")


@rule(tasks=("sft", "distill"))
def reward_has_its_place(run: Run) -> Iterator[Problem]:
    if run.data.reward_key is None:
        return
    if run.data.multiturn:
        problem = "a reward belongs to one answer, and data.multiturn=true trains on several"
        yield Problem("data.reward_key", problem, "write data.multiturn=false")
    elif run.data.turn_markers is not None and not run.data.apply_chat_template:
        problem = "a dialogue that is used as it is written has no place for the reward"
        yield Problem(
            "data.reward_key", problem, "add data.apply_chat_template=true, or give prompt and answer columns"
        )
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
