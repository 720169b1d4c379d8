"""The reference of preference tasks: frozen, the actor without its adapters, or a file; the numbers are the same."""

from __future__ import annotations

import pytest

from rlhf_suite.models.load import model_digest
from rlhf_suite.train import annotations
from small_runs import column, small_run

pytestmark = pytest.mark.stack

TRAINING = "task=dpo train.max_steps=3 data.max_samples=200 algo.beta=1 "
LINE = TRAINING + "eval.max_samples=20 "


def run_with_cache(world, folder, cache, line, models_loaded):
    """The run's metrics; it loads `models_loaded` frozen models."""
    import os

    loaded = []
    before, os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME"), str(cache)
    right = annotations.load_frozen_roles
    annotations.load_frozen_roles = lambda *args: loaded.append(1) or right(*args)
    try:
        metrics = small_run(world, folder, line)
    finally:
        annotations.load_frozen_roles = right
        del os.environ["XDG_CACHE_HOME"]
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before
    assert len(loaded) == models_loaded
    return metrics


def numbers(metrics):
    return [column(metrics, name) for name in ("train/loss", "train/acc", "train/chosen_reward", "eval/loss")]


def test_the_cache_changes_no_number_and_is_used_again(ranks, tmp_path):
    cache = tmp_path / "cache"
    plain = ranks(1).call(small_run, tmp_path / "plain", LINE)[0]
    line = LINE + "ref.cache_enable=true"
    made = ranks(1).call(run_with_cache, tmp_path / "made", cache, line, 1)[0]
    used = ranks(1).call(run_with_cache, tmp_path / "used", cache, line + " train.micro_batch_size=4", 0)[0]
    assert numbers(made) == [pytest.approx(values, abs=1e-5) for values in numbers(plain)]
    assert numbers(used) == [pytest.approx(values, abs=1e-5) for values in numbers(plain)]
    assert len([*(cache / "rlhf_suite" / "annotations").iterdir()]) == 2  # training, evaluation


def test_other_data_and_other_weights_are_other_files(ranks, tmp_path):
    cache = tmp_path / "cache"
    line = TRAINING + "ref.cache_enable=true eval.dataset=null eval.steps=-1 "
    ranks(1).call(run_with_cache, tmp_path / "one", cache, line, 1)
    ranks(1).call(run_with_cache, tmp_path / "data", cache, line + "data.max_samples=199", 1)
    model = f"ref.model_name_or_path={tmp_path / 'one' / 'model'}"
    ranks(1).call(run_with_cache, tmp_path / "model", cache, line + model, 1)
    assert len([*(cache / "rlhf_suite" / "annotations").iterdir()]) == 3
    assert model_digest(str(tmp_path / "one" / "model"), "") != model_digest(str(tmp_path / "model" / "model"), "")


def test_with_adapters_the_reference_is_the_actor_without_them(ranks, tmp_path):
    """The same numbers as with the starting weights loaded once more, though the adapters have moved."""
    line = LINE + "ds.lora.rank=4 actor.adam.lr=0.02 "
    own = ranks(1).call(small_run, tmp_path / "own", line)[0]
    copied = ranks(1).call(small_run, tmp_path / "copied", line + copy_of_tiny(tmp_path))[0]
    assert numbers(own) == [pytest.approx(values, abs=1e-5) for values in numbers(copied)]
    assert abs(column(own, "train/chosen_reward")[-1]) > 1e-3
    assert column(own, "train/loss")[0] == pytest.approx(0.6931, abs=1e-3)


def copy_of_tiny(folder):
    """The same weights under another path, so that they are loaded."""
    from rlhf_suite.models.builtin import create_tiny

    create_tiny(folder / "tiny")
    return f"ref.model_name_or_path={folder / 'tiny'}"
