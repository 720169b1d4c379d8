"""What Hydra's documentation says of defaults lists, packages and the search path holds for a user's own presets."""

from __future__ import annotations

import pytest

import rlhf_suite as rs
from rlhf_suite.composition.compose import hydra_ready, list_sources

pytestmark = pytest.mark.stack


@pytest.fixture
def own(tmp_path):
    """A folder of presets with a group of its own, a package in a header, and a preset that chooses others."""
    files = {
        "mine/kl": "estimator: k3\nuse_loss: true\n",
        "mine/rate": "# @package actor.adam\nlr: 3e-6\n",
        "experiment/deep": "# @package _global_\ndefaults:\n  - /mine@algo.kl: kl\n  - override /task: ppo\n"
        "  - override /ds: zero3\n  - _self_\ntrain:\n  seed: 7\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def only_run(found):
    assert not found.problems, found.problems
    (run,) = found.runs
    return run


def origins(found):
    """Return the preset that sets each key, as the explanation shows it."""
    with hydra_ready():
        sources = list_sources(found.composed_of, found.hydra.searchpath)
    return {key: source.name for source in reversed(sources) for key in source.keys}


def test_a_preset_places_another_in_a_section_and_overrides_a_group(checked, own):
    found = checked(f"experiment=deep --config-dir {own}")
    run = only_run(found)
    assert (run.algo.kl.estimator, run.algo.kl.use_loss, run.ds.zero_stage, run.train.seed) == ("k3", True, 3, 7)
    of = origins(found)
    assert of["algo.kl.estimator"] == "mine/kl.yaml"
    assert of["ds.zero_stage"] == "ds/zero3.yaml"
    assert of["train.seed"] == "experiment/deep.yaml"


def test_the_package_in_a_header_says_where_a_preset_goes(checked, own):
    found = checked(f"task=sft +mine=rate --config-dir {own}")
    assert only_run(found).actor.adam.lr == 3e-6
    assert origins(found)["actor.adam.lr"] == "mine/rate.yaml"


def test_a_group_of_ones_own_is_added_at_a_place_and_swept(checked, own):
    run = only_run(checked(f"task=ppo +mine@algo.kl=kl --config-dir {own}"))
    assert (run.algo.kl.estimator, run.algo.kl.use_loss) == ("k3", True)
    swept = checked(f"-m task=ppo +mine@algo.kl=kl train.seed=1,2 --config-dir {own}")
    assert [(run.algo.kl.estimator, run.train.seed) for run in swept.runs] == [("k3", 1), ("k3", 2)]


def test_the_search_path_of_hydra_is_another_way_to_ones_presets(checked, own):
    found = checked(f"experiment=deep hydra.searchpath=[file://{own}]")
    assert only_run(found).train.seed == 7
    assert origins(found)["train.seed"] == "experiment/deep.yaml"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("+mine@algo.kl=kll", "Could not find 'mine/kll'"),
        ("+mine=kl", "Key 'mine' not in 'Run'"),
        ("+yours=kl", "task=ppo has no such flag"),
        ("+ds=zero2 ds=zero3", "Multiple values for ds"),
    ],
)
def test_a_preset_that_cannot_be_added_is_one_problem(checked, own, word, said):
    (problem,) = checked(f"task=ppo {word} --config-dir {own}").problems
    assert said in problem.what


def test_a_problem_says_what_it_is_about(checked, own):
    kinds = {
        "task=ppo use_cispo=true": "name",
        "task=ppo actor.adam.lrr=1": "name",
        "task=ppo actor.adam.lr=-1": "value",
        "task=ppo micro_rollout_batch_size=1": "renamed",
        "task=ppo rollout.batch_size=4 rollout.n_samples_per_prompt=1 algo/advantage=rloo": "rule",
    }
    found = {line: checked(line).problems for line in kinds}
    assert {line: problem.kind for line, (problem, *_) in found.items()} == kinds
    (own / "config.json").write_text('{"model_type": "unheard_of"}')
    inspected = rs.check("sft", actor={"model_name_or_path": str(own)}, data={"dataset": "builtin:reverse"})
    assert {problem.kind for problem in inspected} == {"inspection"}
