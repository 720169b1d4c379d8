"""`--config <file>`: a run's configuration, or a user's own YAML, as the beginning of a command line."""

from __future__ import annotations

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.composition.config_file import with_config_file
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.plan.run_plan import Machine, resolve
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.run_folders.record import save

SFT = ["task=sft", "actor.model_name_or_path=builtin:tiny", "data.dataset=builtin:reverse"]
PPO = [
    *("task=ppo", "experiment=grpo", "actor.model_name_or_path=builtin:tiny", "data.prompt_dataset=builtin:reverse"),
    *("data.label_key=label", 'data.input_template="say \\"{}\\", a=b"', "reward.rule=exact_match"),
]
SOURCES = "reward.sources={a: {rule: exact_match, weight: 0.5}, b: {rule: length}}"


def checked(*words: str):
    """Return the run and the problems of a command line."""
    found = preflight(with_config_file(parse(list(words))))
    return (found.runs[0] if found.runs else None), found.problems


@pytest.mark.parametrize("words", [SFT, PPO, [*PPO[:-1], SOURCES]], ids=["sft", "ppo", "table of rewards"])
def test_the_configuration_of_a_run_gives_the_same_run(tmp_path, words):
    run, problems = checked(*words)
    assert problems == []
    plan = resolve(run, Machine("cpu", 0)) if run.task == "ppo" else None
    save(run, tmp_path / "config.yaml", plan)
    again, problems = checked("--config", str(tmp_path / "config.yaml"))
    assert problems == []
    assert all_values(again) == all_values(run)


def test_the_command_line_wins_over_the_file_and_the_file_over_presets(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("task: ppo\nexperiment: grpo\nrollout:\n  n_samples_per_prompt: 4\nactor.adam.lr: 1e-3\n")
    run, problems = checked(f"--config={file}", *PPO[2:], "actor.adam.lr=2e-3")
    assert problems == []
    assert run.algo.advantage.estimator == "group_norm"
    assert run.rollout.n_samples_per_prompt == 4
    assert run.actor.adam.lr == 2e-3


def test_a_flag_of_the_file_may_be_swept(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("task: sft\nactor:\n  model_name_or_path: builtin:tiny\ndata:\n  dataset: builtin:reverse\n")
    found = preflight(with_config_file(parse(["-m", "--config", str(file), "train.seed=1,2"])))
    assert found.problems == []
    assert [run.train.seed for run in found.runs] == [1, 2]


@pytest.mark.parametrize(
    ("content", "key", "said"),
    [
        (None, "--config", "cannot be read: No such file"),
        ("task: [", "--config", "is not valid YAML"),
        ("- a\n- b\n", "--config", "does not hold a table of flags"),
        ("task: sft\nactor:\n  adam:\n    rl: 1\n", "actor.adam.rl", "has no such flag"),
        ("task: sft\nactor:\n  adam:\n    lr: fast\n", "actor.adam.lr", "'fast' is not a float"),
        ("task: ppp\n", "task", "there is no task ppp"),
    ],
)
def test_a_mistake_in_the_file_is_one_problem(tmp_path, content, key, said):
    file = tmp_path / "mine.yaml"
    if content is not None:
        file.write_text(content)
    _, problems = checked(f"--config={file}")
    assert any(problem.key == key and said in problem.what for problem in problems), problems
