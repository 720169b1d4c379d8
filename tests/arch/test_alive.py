"""Every flag is read by the plan of a run, or by code below the command line: a flag connected to nothing is a lie."""

import ast
from pathlib import Path

import rlhf_suite
from rlhf_suite.config.declarations.flags import walk
from rlhf_suite.config.declarations.runs import TASKS, Run

# Read by the command line itself.
READ_BY_CLI = {
    "ds.use_universal_ckpt": "run_folders/resume.py lets the shape differ from that of the checkpoint",
    "explain": "cli/app.py shows the plan instead of running",
    "own_code": "run_folders/resume.py compares it with the files of a continued run",
    "plan": "cli/app.py prints what the run would need instead of running",
    "run_dir": "preflight/jobs.py makes it the folder of the run or of the sweep",
}
# What only checks and starts runs does not count.
ABOVE = ("config", "run_folders", "composition", "preflight", "sweeps", "cli")
SOURCE = Path(rlhf_suite.__file__).parent


def attributes_read() -> set[str]:
    below = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in ABOVE]
    files = [*below, *(SOURCE / "config" / "plan" / f"{name}.py" for name in ("run_plan", "micro_batches"))]
    trees = [ast.parse(path.read_text()) for path in files]
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def test_every_flag_is_read_below_the_command_line():
    read = attributes_read()
    flags = {flag.key for task in TASKS for flag in walk(Run.of(task))} - READ_BY_CLI.keys()
    assert {key for key in flags if key.split(".")[-1] not in read} == set()
