"""Who may import what: layers point downwards, heavy libraries stay in their rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import rlhf_suite

SOURCE = Path(rlhf_suite.__file__).parent
LOOKS = {"exists", "is_file", "is_dir", "stat", "glob", "rglob", "read_text", "read_bytes", "open", "find_spec"}
ROOMS = {
    "ray": ("rl/", "engines/", "launch/", "distributed/workers.py"),
    "vllm": (
        "agents/vllm_parsers.py",
        "engines/actor.py",
        "engines/build.py",
        "engines/nodes.py",
        "engines/cpu_kernels.py",
        "engines/whole_images.py",
        "engines/routes.py",
        "weight_sync/adapter.py",
        "weight_sync/receiver.py",
        "weight_sync/read_back.py",
    ),
    "deepspeed": ("train/strategy.py", "train/state_moves.py", "train/optim.py"),
    "hydra": ("cli/", "sweeps/sweepers.py", "preflight/", "composition/"),
    "omegaconf": ("foreign_files.py", "run_folders/", "cli/", "sweeps/", "preflight/", "composition/", "config/check/"),
    "submitit": ("sweeps/slurm_jobs.py",),
    "wandb": ("tracking/metrics.py",),
}


def imports(path: Path) -> Iterator[str]:
    """The top-level packages that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """What each file imports."""
    return {str(path.relative_to(SOURCE)): {*imports(path)} for path in SOURCE.rglob("*.py")}


@pytest.mark.parametrize("library", ROOMS)
def test_a_heavy_library_stays_in_its_room(imported, library):
    users = {file for file, packages in imported.items() if library in packages}
    assert users, f"nobody imports {library}: take it out of ROOMS"
    assert {user for user in users if not user.startswith(ROOMS[library])} == set()


def test_layers_import_only_what_is_below_them():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=SOURCE.parents[1], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "cli",
        "cli.execute",
        "sweeps.launchers",
        "preflight.folders",
        "preflight.inspections.inspect_runs",
        "config.export",
    ],
)
def test_the_command_line_imports_nothing_heavy(module):
    heavy = {"torch", "ray", "vllm", "deepspeed", "transformers", "datasets"}
    code = f"import sys, rlhf_suite.{module}; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["planner.checkpointing", "planner.remedies", "tasks.sft", "distributed.ranks"])
def test_a_run_on_one_process_imports_neither_ray_nor_engines(module):
    """On a GPU it plans its memory first. A machine may have neither package, and their imports take a second each."""
    code = f"import sys, rlhf_suite.{module}; print(sorted({{'ray', 'vllm'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_protocol_is_asked_for_at_run_time():
    """Since Python 3.12 isinstance finds the flags of other tasks, which raise where they are read."""
    assert [file.name for file in SOURCE.rglob("*.py") if "runtime_checkable" in file.read_text()] == []


def test_no_module_imports_itself_through_others():
    graph = grimp.build_graph("rlhf_suite", cache_dir=None)
    assert len(graph.modules) > 300
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()


def test_rules_compare_flags_with_flags_alone():
    """Files, packages and servers are looked at by inspections."""
    found = [
        f"{file.name}:{node.lineno}"
        for file in (SOURCE / "config" / "rules").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and (getattr(node.func, "attr", None) in LOOKS or getattr(node.func, "id", None) in LOOKS)
    ]
    assert found == []
