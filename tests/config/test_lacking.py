"""What a machine lacks is said in the same words before a run and by a process that finds it missing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rlhf_suite
from rlhf_suite.config.check.lacking import (
    LIGER_KERNEL,
    Package,
    find_missing,
    make_no_gpu_problem,
    read_token,
    refuse_missing,
    refuse_without_gpu,
)
from rlhf_suite.config.check.problems import ConfigurationError
from rlhf_suite.config.declarations.ds import FUSED_ON_GPUS, HALF_PRECISION
from rlhf_suite.config.declarations.models import TO_A_GPU
from rlhf_suite.config.declarations.runs import Run, flags_of
from rlhf_suite.config.declarations.task_groups import TRAINED
from rlhf_suite.errors import FixableError
from rlhf_suite.preflight.inspections.machine import server_has_its_token

SOURCES = Path(rlhf_suite.__file__).parent
LEAST_WORDS = 5  # of a reason that is looked for in other files
SAID_TWICE = {
    ("there is nothing to evaluate on", "loop.py"): "a callback asks at run time, whatever the flags are",
}


@pytest.mark.parametrize(("key", "need"), [("ref.offload", TO_A_GPU), ("ds.use_liger_kernel", FUSED_ON_GPUS)])
def test_a_process_without_a_gpu_refuses_what_needs_one_as_the_preflight_does(key, need):
    with pytest.raises(FixableError) as refused:
        refuse_without_gpu(key, True, need, "cpu")
    problem = make_no_gpu_problem(key, True, need, "false")
    assert str(refused.value) == f"{key}={problem.what}; {problem.fix}"
    assert need.why in problem.what
    assert problem.fix == f"write {key}=false"
    refuse_without_gpu(key, True, need, "cuda")


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it():
    absent = Package("no-such-package", "no_such_package", "gpu")
    with pytest.raises(
        FixableError, match=r"ds\.x=true: the package no-such-package is not installed; run pip install"
    ):
        refuse_missing("ds.x=true", absent)
    refuse_missing("ds.x=true", Package("pytest", "pytest", "dev"))
    assert find_missing("ds.x", Package("pytest", "pytest", "dev")) is None
    assert LIGER_KERNEL.extra == "gpu"


def test_flash_attention_needs_half_precision_by_one_declaration():
    assert HALF_PRECISION.concerns("flash_attention_2", None)
    assert not HALF_PRECISION.concerns("varlen", None)
    assert HALF_PRECISION.condition.is_met("bf16")
    assert not HALF_PRECISION.condition.is_met("fp32")


def test_the_reason_of_a_need_stands_in_no_other_file():
    """A run-time check that has the same reason takes it from the need."""
    reasons = {need.why for task in TRAINED for info in flags_of(task).values() for need in info.meta.needs}
    texts = {
        path: " ".join(node.value for node in ast.walk(ast.parse(path.read_text())) if is_text(node))
        for path in SOURCES.rglob("*.py")
        if "declarations" not in path.parts
    }
    assert len(reasons) > 40
    long = [why for why in reasons if len(why.split()) >= LEAST_WORDS]
    assert {(why, path.name) for why in long for path, text in texts.items() if why in text} == set(SAID_TWICE)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


SERVERS = {"serve_rm": "RLHF_SUITE_REWARD_TOKEN", "serve_train": "RLHF_SUITE_TRAIN_TOKEN"}


@pytest.mark.parametrize("task", SERVERS)
@pytest.mark.notices(
    "a server for other machines is not asked for its token before the run",
    "preflight/inspections/machine.py",
    "if folder is not None and run.task in TOKENS and",
    "if False and",
)
def test_a_server_for_other_machines_needs_a_token_before_and_in_the_run(task, tmp_path, monkeypatch):
    run = Run.of(task)
    run.serve.host = "0.0.0.0"
    monkeypatch.delenv(SERVERS[task], raising=False)
    (problem,) = server_has_its_token(run, tmp_path)
    assert problem.key == "serve.host" and f"export {SERVERS[task]}=" in problem.fix
    with pytest.raises(ConfigurationError) as refused:
        read_token(run)
    assert refused.value.problems == [problem]
    monkeypatch.setenv(SERVERS[task], "tml-secret")
    assert [*server_has_its_token(run, tmp_path)] == [] and read_token(run) == "tml-secret"
    monkeypatch.delenv(SERVERS[task])
    for host in ("127.0.0.1", "localhost", "::1"):
        run.serve.host = host
        assert read_token(run) is None


def test_a_key_that_clients_refuse_is_refused_without_its_value(monkeypatch):
    monkeypatch.setenv("RLHF_SUITE_TRAIN_TOKEN", "s3cret")
    with pytest.raises(ConfigurationError, match="does not begin with tml-") as refused:
        read_token(Run.of("serve_train"))
    assert "s3cret" not in str(refused.value)
