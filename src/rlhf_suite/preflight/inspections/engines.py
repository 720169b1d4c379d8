"""Arguments for vLLM that the installed version does not have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from rlhf_suite.config.engine_arguments import KEY
from rlhf_suite.config.formatting import did_you_mean
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.runs import Run, SamplingRun
from rlhf_suite.python_source import module_file, parse_file

MODULE, CLASS = "vllm.engine.arg_utils", "EngineArgs"


def engine_arguments_exist(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for each name in vllm.engine_args that vLLM's EngineArgs does not have. vLLM is read, not
    imported; where it is not installed nothing is known."""
    if not isinstance(run, SamplingRun) or not run.vllm.engine_args:
        return
    known = names_of_arguments()
    for name in run.vllm.engine_args if known else ():
        if name not in known:
            close = did_you_mean(name, known) or f"remove {name}"
            yield Problem(f"{KEY}.{name}", "the installed vLLM has no such argument", close)


def names_of_arguments() -> list[str]:
    """Return the fields of EngineArgs; none without vLLM."""
    file = module_file(MODULE)
    classes = [node for node in parse_file(file).body if isinstance(node, ast.ClassDef)] if file is not None else []
    return [
        field.target.id
        for node in classes
        if node.name == CLASS
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
