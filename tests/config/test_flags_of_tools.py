"""Flags that a task would never read: it has none of them, or refuses them where nothing reads them."""

from __future__ import annotations

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.declarations.runs import flags_of
from rlhf_suite.preflight.jobs import preflight


@pytest.mark.parametrize("task", ["check_reward", "chat", "merge_lora", "serve_rm"])
def test_a_task_without_ray_has_no_flags_of_its_size(task):
    assert not {"launch.num_cpus", "launch.object_store_mb"} & flags_of(task).keys()


def test_a_task_without_a_reward_model_normalises_no_scores():
    assert "reward.normalize_enable" not in flags_of("generate").keys() | flags_of("check_reward").keys()


@pytest.mark.parametrize(
    "word", ["data.max_len=64", "data.apply_chat_template=true", "ds.param_dtype=fp32", "ds.value_head_prefix=head"]
)
def test_what_only_a_reward_model_reads_has_no_effect_with_a_rule(word):
    (problem,) = preflight(parse(["task=score", "demo=score", word])).problems
    assert problem.key == word.partition("=")[0] and "reward.model_name_or_path" in f"{problem}"
