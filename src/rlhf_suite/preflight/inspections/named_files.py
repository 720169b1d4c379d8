"""Inspect the files, folders and packages that flags name, without running anything.

These inspections are as fast as the rules between flags, and their problems are reported together with those of the
rules (`preflight.jobs`); all others follow where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from rlhf_suite import registry
from rlhf_suite.config.check.agent_file import (
    ENVIRONMENTS,
    OURS,
    PROGRAM,
    RAW,
    TOOLS,
    always_scores,
    export_of,
    has_roles,
    has_tools,
    has_tools_beside,
)
from rlhf_suite.config.check.lacking import BITSANDBYTES, LIGER_KERNEL, REASONING_GYM, find_missing
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.agent import ChosenAgent, agents_of
from rlhf_suite.config.declarations.ds import is_flash
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.generate import OUTPUT_SUFFIXES, output_file
from rlhf_suite.config.declarations.reward import has_source, is_http
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import LOOPS, RL, SCORED_TEXTS
from rlhf_suite.config.plan.loop_stages import stage_problems
from rlhf_suite.config.rules.agents import TEMPLATE, agents_in
from rlhf_suite.config.rules.rewards import list_named
from rlhf_suite.disk import resolve_home
from rlhf_suite.preflight.inspections.sources import gym_problems, sources_exist
from rlhf_suite.python_source import SourceError

FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def model_folders_exist(run: Run) -> Iterator[Problem]:
    for key, path in all_values(run).items():
        if not key.endswith("model_name_or_path") or path is None or not path.startswith(("/", "./", "../", "~")):
            continue
        if not Path(path).is_dir():
            fix = "give a Hugging Face folder, a hub name or builtin:tiny"
            yield Problem(key, f"the folder {path} does not exist", fix)


def packages_are_installed(run: Run) -> Iterator[Problem]:
    values = all_values(run)
    for key, package in (("ds.load_in_4bit", BITSANDBYTES), ("ds.use_liger_kernel", LIGER_KERNEL)):
        if values.get(key) and (missing := find_missing(key, package)) is not None:
            yield missing
    attention: str | None = values.get("ds.attn_implementation")
    kernels = FLASH_PACKAGES.get(attention or "", "kernels")
    if is_flash(attention) and find_spec(kernels) is None:
        # transformers would fetch another kernel from the hub in its place, unasked
        problem = f"{attention} needs the package {kernels}, which is not installed"
        fix = "install it, or write ds.attn_implementation=varlen, which uses the kernels of torch"
        yield Problem("ds.attn_implementation", problem, fix)


def reward_files_exist(run: Run) -> Iterator[Problem]:
    for key, source in list_named(run).items() if run.task in SCORED_TEXTS else ():
        name = source.remote_url
        if name is not None and not is_http(name) and not (name.endswith(".py") and Path(name).is_file()):
            problem = f"{name} is not a Python file (seen from {Path.cwd()})"
            fix = "give a .py file with reward_func(queries, prompts, labels), or http://<host>:<port>/<path>"
            yield Problem(f"{key}.remote_url", problem, fix)
        if source.rule == REASONING_GYM.module:
            yield from gym_problems(f"{key}.rule")


def agent_files_have_their_parts(run: Run) -> Iterator[Problem]:
    for agent in agents_in(run) if run.task in RL else ():
        if agent.config.file_part is not None and agent.file is not None:
            yield from agent_file_problems(run, agent, agent.config.file_part, agent.file)


def agent_file_problems(run: Run, chosen: ChosenAgent, part: str, file: str) -> Iterator[Problem]:
    """Yield a problem if the file of an agent lacks the part that it needs, or its form needs a chat template."""
    key, kind = chosen.file_flag, f"{chosen.key}.kind"
    try:
        export = export_of(file)
    except SourceError as error:
        yield Problem(key, error.what, error.fix)
        return
    problem = f"{file} has {export.name} ({export.form}), which is not for {kind}={chosen.config.kind}"
    if part == TOOLS and not has_tools(file):
        yield Problem(key, problem, f"write {kind}={taker(OURS)}, or define tools = [functions]")
    if part == OURS and export.form not in ENVIRONMENTS:
        yield Problem(key, problem, f"write {kind}={taker(export.form)}")
    if part == PROGRAM and export.form != PROGRAM:
        yield Problem(key, problem, f"define run_agent(task, base_url, api_key), or write another {kind}")
    if part == OURS and (chosen.config.tools or has_tools(file)):
        yield from tools_beside_problems(key, file)
    if run.data.apply_chat_template:
        return
    if export.form in ("trl", "skyrl", "gymnasium"):
        problem = f"{export.name} ({export.form}) answers with messages, which need a chat template"
        yield Problem(TEMPLATE, problem, f"add {TEMPLATE}=true")


def tools_beside_problems(key: str, file: str) -> Iterator[Problem]:
    """Yield a problem if the environment of a file cannot have tools beside it. `key`: the flag of the file."""
    export, fix = export_of(file), "rename its list tools, and remove agent.tools; or"
    if has_roles(file):
        problem = f"{file} has an environment with roles, and no role can call the tools beside it"
        yield Problem(key, problem, f"{fix} offer tools in a Start")
    if export.form in RAW:
        problem = f"{file} has {export.name} ({export.form}), which answers with raw text, and tools beside it"
        yield Problem(key, problem, f"{fix} define a class Environment")


def taker(part: str) -> str:
    """Return the kind of agent that a file with this part is for."""
    return registry.agent.that_need(part)[0]


def tools_of_environments_have_a_template(run: Run) -> Iterator[Problem]:
    """Yield a problem if an environment has tools beside it, which are called in the form of a chat template."""
    if run.task in RL and not run.data.apply_chat_template and any(map(has_tools_beside, agents_in(run))):
        yield Problem(TEMPLATE, "the chat template defines the form of tool calls", f"add {TEMPLATE}=true")


def rewards_of_files_are_used(run: Run) -> Iterator[Problem]:
    if run.task not in RL or run.agent.add_reward or not has_source(run.reward):
        return
    for agent in agents_of(run.agent, run.train.agent_func_path):
        if agent.config.needs("environment") and agent.file is not None and always_scores(agent.file):
            problem = f"every reward comes from {agent.file}, so the reward sources of the run would score nothing"
            fix = "add agent.add_reward=true, or write reward.rule=null or the like"
            yield Problem("agent.add_reward", problem, fix)


def output_files_are_new(run: Run) -> Iterator[Problem]:
    if run.task not in ("generate", "score"):
        return
    key, output = f"{run.task}.output_path", run.generate if run.has("generate") else run.score
    if output.output_path is None:
        return
    path = output_file(output.output_path, output.shard, Path())
    if path.is_dir():
        yield Problem(key, f"{output.output_path} is a folder", f"write {key}={path / 'rows.jsonl'}")
    elif path.suffix not in OUTPUT_SUFFIXES:
        fix = f"write {key}={path.with_suffix('.jsonl')} (or .parquet)"
        yield Problem(key, f"{output.output_path} is neither a .jsonl nor a .parquet file", fix)
    elif path.exists() and not run.ckpt.load_enable:
        yield Problem(key, f"{path} exists already", "choose another file, or remove that one")


def adapters_exist(run: Run) -> Iterator[Problem]:
    path = run.lora.path if run.has("lora") else None
    if path is not None and not (resolve_home(path) / "adapter_config.json").is_file():
        yield Problem("lora.path", f"{path} has no adapter_config.json", "write lora.path=<folder of a LoRA adapter>")


NAMED: tuple[Callable[[Run], Iterator[Problem]], ...] = (
    model_folders_exist,
    packages_are_installed,
    sources_exist,
    reward_files_exist,
    agent_files_have_their_parts,
    tools_of_environments_have_a_template,
    rewards_of_files_are_used,
    output_files_are_new,
    adapters_exist,
)


def inspect_named(run: Run) -> list[Problem]:
    """Return every problem of the files, folders and packages that the flags of a run name, and of those of the stages
    of a loop."""
    problems = [problem.of_kind("inspection") for inspection in NAMED for problem in inspection(run)]
    if run.task in LOOPS:
        reported = {problem.key for problem in problems}
        of_stages = stage_problems(run, inspect_named, {*all_values(run)})
        problems += [problem for problem in of_stages if problem.key not in reported]
    return problems
