"""Algorithms of a user's own: named by file and function, read without being run, and refused with one message each."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_suite.config.declarations.flags import walk
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.python_source import SOURCE, functions
from rlhf_suite.registry import (
    KINDS,
    _aliases,
    _declarations,
    _read_declarations,
    correction,
    estimator,
    gating,
    policy_loss,
    preference_loss,
    reward_rule,
)
from rlhf_suite.run_folders.record import fingerprint, list_recorded_values, load, save
from rlhf_suite.run_folders.resume import changes

pytestmark = pytest.mark.stack

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "own_code"
EXAMPLE = FOLDER / "own.py"
PPO, DPO = "task=ppo demo=ppo", "task=dpo demo=dpo"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The example of the page, in a folder outside of the checkout from which the command line is typed."""
    shutil.copy(EXAMPLE, tmp_path / "own.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "own.py"


def written(folder: Path, text: str) -> Path:
    """A file with an estimator of the user's own, which ends this process if it is run."""
    file = folder / "mine.py"
    file.write_text(f"raise SystemExit('this file was run')\nfrom rlhf_suite.registry import estimator\n{text}\n")
    return file


@pytest.mark.parametrize(("file", "functions"), [("own.py", 7), ("async_fork.py", 8)])
def test_every_function_of_the_examples_is_accepted_as_its_page_says(checked, monkeypatch, file, functions):
    monkeypatch.chdir(ROOT)
    page = (FOLDER / file).read_text().split('"""')[1].replace("\\\n", "")
    lines = [line.strip().removeprefix("python run.py ") for line in page.splitlines() if "python run.py" in line]
    assert len(lines) == functions
    for line in lines:
        task = line.split()[0].removeprefix("task=")
        assert checked(f"{line} demo={task}").problems == []


def test_a_path_is_absolute_in_the_run_and_its_digest_is_in_the_run_folder(checked, own, tmp_path):
    run = checked(f"{PPO} algo.advantage.estimator=own.py:median_baseline").runs[0]
    assert run.algo.advantage.estimator == f"{own}:median_baseline"
    save(run, tmp_path / "config.yaml")
    (recorded,) = load(tmp_path / "config.yaml").own_code
    digest = subprocess.run(["sha256sum", str(own)], capture_output=True, text=True, check=True).stdout.split()[0]
    assert recorded == f"{own} sha256:{digest}"


def test_a_changed_file_is_a_change_of_the_run(checked, own, tmp_path):
    run = checked(f"{PPO} algo.advantage.estimator=own.py:median_baseline").runs[0]
    save(run, tmp_path / "config.yaml")
    before, was = load(tmp_path / "config.yaml"), fingerprint(run)
    assert changes(before, run) == []
    own.write_text(own.read_text() + "# another file\n")
    assert [change.key for change in changes(before, run)] == ["own_code"]
    assert fingerprint(run) != was


@pytest.mark.parametrize("flag", ["algo.group_filter", "algo.prompt_filter"])
def test_a_changed_filter_is_a_change_of_the_run(checked, tmp_path, flag):
    file = tmp_path / "mine.py"
    file.write_text("def of_group(group): ...\ndef of_prompt(candidates, generator): ...\n")
    function = {"algo.group_filter": "of_group", "algo.prompt_filter": "of_prompt"}[flag]
    run = checked(f"{PPO} {flag}={file}:{function}").runs[0]
    save(run, tmp_path / "config.yaml")
    before, was = load(tmp_path / "config.yaml"), fingerprint(run)
    assert before.own_code[0].startswith(f"{file} sha256:")
    file.write_text(file.read_text() + "# another file\n")
    assert [change.key for change in changes(before, run)] == ["own_code"] and fingerprint(run) != was
    (problem,) = checked(f"{PPO} {flag}={file}:gone").problems
    assert problem.key == flag and "defines no gone" in problem.what
    (problem,) = checked(f"{PPO} {flag}={file}:{({'of_group', 'of_prompt'} - {function}).pop()}").problems
    assert problem.key == flag and "arguments, not" in problem.what


def test_a_changed_reward_file_is_a_change_of_the_run(checked, own):
    for source in (f"reward.remote_url={own}", f"'reward.sources={{mine: {{remote_url: {own}}}}}' reward.rule=null"):
        run = checked(f"task=score demo=score reward.rule=null {source}").runs[0]
        before, was = list_recorded_values(run)["own_code"], fingerprint(run)
        assert before[0].startswith(f"{own} sha256:")
        own.write_text(own.read_text() + "# another file\n")
        assert list_recorded_values(run)["own_code"] != before and fingerprint(run) != was


def test_needs_of_an_own_function_decide_as_those_of_the_suite_do(checked, own):
    alone = f"{PPO} algo.advantage.estimator=own.py:median_baseline rollout.n_samples_per_prompt=1"
    assert any(
        "median_baseline needs rollout.n_samples_per_prompt > 1" in problem.what for problem in checked(alone).problems
    )
    (problem,) = checked(f"{PPO} actor.policy_loss_type=own.py:squared_ratio actor.dual_clip=3").problems
    assert problem.key == "actor.dual_clip" and "ppo, gspo or clip_cov" in problem.fix
    assert checked(f"{PPO} actor.policy_loss_type=own.py:squared_ratio actor.eps_clip=0.1").problems == []


def test_a_function_without_a_declaration_may_read_any_flag(checked, tmp_path):
    file = written(tmp_path, "def mine(inputs, config): ...")
    assert checked(f"{PPO} algo.advantage.estimator={file}:mine algo.advantage.gamma=0.9").problems == []
    assert estimator.needs(f"{file}:mine", "rewards") and not estimator.needs(f"{file}:mine", "values")


MISTAKES = {
    "no file": ("gone.py:mine", "", "the file gone.py does not exist"),
    "no function": (
        "mine.py:other",
        "def mine(inputs, config): ...",
        "mine.py defines no other; its functions are mine",
    ),
    "a syntax error": ("mine.py:mine", "def mine(inputs, config) ...", "mine.py:3: expected ':'"),
    "too few arguments": ("mine.py:mine", "def mine(inputs): ...", "mine takes 1 arguments, not 2"),
    "too many arguments": ("mine.py:mine", "def mine(a, b, c): ...", "mine takes 3 arguments, not 2"),
    "an argument by name only": ("mine.py:mine", "def mine(a, b, *, c): ...", "mine takes 3 arguments, not 2"),
    "an unknown need": (
        "mine.py:mine",
        "@estimator(needs=('valeus',))\ndef mine(inputs, config): ...",
        "mine.py:3: needs 'valeus', not one of rewards, values, greedy, groups, teacher",
    ),
    "an unknown flag": (
        "mine.py:mine",
        "@estimator(reads=('gama',))\ndef mine(inputs, config): ...",
        "reads 'gama', which is not one of estimator, gamma",
    ),
    "a need that is computed": (
        "mine.py:mine",
        "NEEDS = ()\n@estimator(needs=NEEDS)\ndef mine(inputs, config): ...",
        "needs= is not written as a literal",
    ),
    "a decorator that is not called": ("mine.py:mine", "@estimator\ndef mine(a, b): ...", "@estimator is not called"),
    "another kind": (
        "mine.py:mine",
        "from rlhf_suite.registry import policy_loss\n@policy_loss()\ndef mine(a, b): ...",
        "mine is declared as @policy_loss, and here @estimator is meant",
    ),
    "async": ("mine.py:mine", "async def mine(inputs, config): ...", "mine is async"),
    "no module": ("no_such_package.credit:mine", "", "there is no module no_such_package"),
    "neither file nor module": ("mine/credit:mine", "", "mine/credit is neither a .py file nor the name of a module"),
    "no function named": ("mine.py:", "", "names no function"),
    "no colon": ("mine.py", "", "'mine.py' is not one of gae"),
}


@pytest.mark.parametrize(("name", "text", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_message_and_the_file_is_not_run(checked, tmp_path, monkeypatch, name, text, said):
    written(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    (problem,) = checked(f"{PPO} algo.advantage.estimator={name}").problems
    assert problem.key == "algo.advantage.estimator" and said in problem.what and problem.fix
    if name == "mine.py":
        assert "algo.advantage.estimator=mine.py:<function>" in problem.fix


def test_the_digest_cannot_be_given(checked):
    (problem,) = checked(f"{PPO} own_code=[x]").problems
    assert problem.key == "own_code" and "the run itself" in problem.what


def test_a_module_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "own_package_of_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "credit.py").write_text("def mine(inputs, config): ...")
    monkeypatch.syspath_prepend(tmp_path)
    assert estimator.find_declaration("own_package_of_test.credit:mine").line == 1


def test_every_declaration_of_the_suite_leads_to_its_function():
    for kind in (correction, estimator, gating, policy_loss, preference_loss, reward_rule):
        for name in kind.names():
            if name != "reasoning_gym":  # its package is not installed everywhere
                assert kind.load(name).__name__ == kind.find_declaration(name).function
                assert kind.find_declaration(name).help


ADDED = {  # to which file, what, a flag that it reads, and one that it does not
    "algo.advantage.estimator": (
        "algo/advantage.py",
        '@estimator(needs=("rewards", "groups"), reads=("gamma",))',
        "algo.advantage.gamma=0.9",
        "algo.advantage.lambd=0.9",
    ),
    "algo.advantage.is_correction_mode": (
        "algo/correction.py",
        '@correction(reads=("is_correction_threshold",))',
        "'algo.advantage.is_correction_threshold=[0.2,3]'",
        "algo.advantage.is_correction_gating=tv",
    ),
    "agent.kind": (
        "agents/kinds.py",
        '@agent(needs=("turns",), reads=("mcp_sessions",))',
        "agent.mcp_sessions=process agent.max_turns=3",
        "agent.python_memory_mb=64",
    ),
}


@pytest.mark.parametrize("flag", ADDED)
def test_one_function_in_one_file_adds_an_algorithm(tmp_path, flag):
    """Choices, help, the unused-flag rule and the reference follow from its declaration."""
    module, declaration, read, unread = ADDED[flag]
    package = tmp_path / "src" / "rlhf_suite"
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    shutil.copytree(ROOT / "src" / "rlhf_suite", package, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / module).open("a") as file:
        arguments = ", ".join(next(info.meta.algorithms.parameters for info in walk(Run.of("ppo")) if info.key == flag))
        file.write(f'\n\n{declaration}\ndef fresh({arguments}):\n    """A fresh idea."""\n')
    code = f"""
import shlex
from rlhf_suite.composition.arguments import parse
from rlhf_suite.cli.complete import candidates
from rlhf_suite.cli.help import print_help
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.config.export import pages
line = "task=ppo demo=ppo correction=tis {flag}="
print(preflight(parse(shlex.split(line + "fresh " + {read!r}))).problems)
print(preflight(parse(shlex.split(line + "fresh {unread}"))).problems)
print(preflight(parse(shlex.split(line + "frech"))).problems)
print(candidates("run.py task=ppo {flag}=fr"))
print_help(parse("--help task=ppo {flag}".split()))
print([line for text in pages().values() for line in text.splitlines() if "`fresh`" in line])
"""
    environment = {"PYTHONPATH": str(tmp_path / "src"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    accepted, ignored, misspelled, completed, *help_lines, documented = done.stdout.splitlines()
    assert accepted == "[]"
    assert unread.partition("=")[0] in ignored and flag in ignored and "fresh" in ignored
    assert f"did you mean {flag}=fresh?" in misspelled
    assert f"{flag.rpartition('.')[2]}=fresh" in completed
    assert any("fresh: A fresh idea" in line for line in help_lines)
    assert "A fresh idea" in documented


def test_declarations_are_those_of_the_whole_source():
    """Only the heads of decorated functions are parsed."""
    for path in {
        SOURCE.joinpath(*module.split(".")).with_suffix(".py") for kind in KINDS.values() for module in kind.modules
    }:
        tree = ast.parse(path.read_text())
        whole = [one for node in functions(tree) for one in _read_declarations(node, path, _aliases(tree))]
        assert [*_declarations(path)] == whole != [], path
