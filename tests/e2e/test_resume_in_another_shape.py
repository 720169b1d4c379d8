"""A run of reinforcement learning that goes on with other ranks, at another ZeRO stage, with tokens that ranks split,
and with other engines: the numbers are those of the run that was not stopped."""

from __future__ import annotations

import pytest
from reshaped_run import SHAPES, go_on, run
from same_numbers import check_same_numbers

from rlhf_suite.run_folders.run_folder import RunFolder

pytestmark = pytest.mark.proof


def test_two_ranks_go_on_where_one_stopped(runs, actor_critic, actor_critic_words):
    """Policy and critic with their optimisers, the average of the weights, the KL controller and waiting samples."""
    folder, words = runs / "resumed_on_two", [*actor_critic_words, *SHAPES["two ranks"]]
    check_same_numbers(folder, actor_critic, go_on(actor_critic, folder, words))
    changed = RunFolder(folder).status()["resumes"][-1]["changed"]
    assert {*changed} == {word.partition("=")[0] for word in SHAPES["two ranks"]}


@pytest.mark.parametrize(("before", "after"), [("split", "shared"), ("shared", "torch"), ("torch", "split")])
def test_a_run_goes_on_in_another_shape(runs, actor_critic_words, before, after):
    whole = runs / f"whole_{before}"
    run(whole, [*actor_critic_words, *SHAPES[before]])
    folder = runs / f"from_{before}_to_{after}"
    check_same_numbers(folder, whole, go_on(whole, folder, [*actor_critic_words, *SHAPES[after]]))
