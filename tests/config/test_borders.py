"""Rules between flags, exactly at their borders: the last value that is allowed, and the first that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlhf_suite.config.declarations.generate import shard_of
from rlhf_suite.config.declarations.reward import NamedSourceConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.rules.check_run import check


def sets(**flags: Any) -> Callable[[Run], None]:
    """Flags of a run, `__` for each dot."""

    def put(run: Run) -> None:
        for key, value in flags.items():
            section: Any = run
            *path, name = key.split("__")
            for part in path:
                section = getattr(section, part)
            assert hasattr(section, name), key
            setattr(section, name, value)

    return put


def told(run: Run, given: tuple[str, ...] = ()) -> set[str]:
    """The keys of a run's problems."""
    return {problem.key for problem in check(run, given)}


RANKS = {"actor__num_gpus_per_node": 4, "train__micro_batch_size": 2}
RLOO = {"algo__advantage__estimator": "rloo"}
GAE = {"algo__advantage__estimator": "gae"}
KL = {"rollout__batch_size": 50, "rollout__n_samples_per_prompt": 2, "algo__kl__target": 0.1}
SHARED = {
    "train__colocate_all": True,
    "actor__num_gpus_per_node": 2,
    "algo__kl__init_coef": 0.0,
    **RLOO,
}
BORDERS = [
    ("sft", "train.batch_size", RANKS, "train__batch_size", 16, 12),
    ("ppo", "rollout.max_new_tokens", {"data__max_len": 100}, "rollout__max_new_tokens", 99, 100),
    ("ppo", "reward.clip_range", {}, "reward__clip_range", [0.0, 0.1], [0.0, 0.0]),
    ("ppo", "algo.kl.horizon", KL, "algo__kl__horizon", 21, 20),
    ("ppo", "critic.freezing_steps", {"train__max_steps": 10, **GAE}, "critic__freezing_steps", 9, 10),
    ("ppo", "reward.overlong_buffer_len", {"rollout__max_new_tokens": 10}, "reward__overlong_buffer_len", 9, 10),
    ("ppo", "train.colocate_all", {**SHARED, "vllm__tensor_parallel_size": 2}, "vllm__num_engines", 1, 2),
    ("ppo", "algo.advantage.estimator", RLOO, "rollout__n_samples_per_prompt", 2, 1),
]  # fmt: skip


@pytest.mark.notices(
    "a batch need not be a multiple of the ranks", "config/rules/training.py", "size % (ranks * micro)", "size % micro"
)
@pytest.mark.notices(
    "responses may fill data.max_len", "config/rules/sampling.py", "new >= run.data.max_len", "new > run.data.max_len"
)
@pytest.mark.notices(
    "an empty range is a range", "config/rules/rewards.py", "given[0] >= given[1]", "given[0] > given[1]"
)
@pytest.mark.notices(
    "the horizon of the KL controller may be as short as makes the coefficient 0",
    "config/rules/algorithms.py",
    "kl.horizon <= 0.2 * samples",
    "kl.horizon < 0.2 * samples",
)
@pytest.mark.notices(
    "an engine on several devices shares as if it had one",
    "config/rules/training.py",
    "engines = run.vllm.num_engines * run.vllm.devices",
    "engines = run.vllm.num_engines",
)
@pytest.mark.notices(
    "the whole run may be the critic's warm-up", "config/rules/algorithms.py", "frozen >= steps", "frozen > steps"
)
@pytest.mark.notices(
    "the penalty may be of every response", "config/rules/rewards.py", "buffer >= longest", "buffer > longest"
)
@pytest.mark.parametrize(("task", "key", "flags", "name", "good", "bad"), BORDERS, ids=[each[1] for each in BORDERS])
def test_the_border_of_a_rule_is_where_it_says(task, key, flags, name, good, bad):
    for value, is_wrong in ((good, False), (bad, True)):
        run = Run.of(task)
        sets(**flags, **{name: value})(run)
        assert (key in told(run)) is is_wrong, value


@pytest.mark.notices(
    "a part of n may have the number n",
    "config/declarations/generate.py",
    "if part < parts else None",
    "if part <= parts else None",
)
def test_parts_of_n_are_numbered_from_0_to_n_less_1():
    assert [shard_of(text) for text in (None, "0/4", "3/4")] == [(0, 1), (0, 4), (3, 4)]
    assert [shard_of(text) for text in ("4/4", "0/0", "1", "-1/4", "1/4/2")] == [None] * 5


@pytest.mark.notices(
    "a flag that is switched off is reported as without effect",
    "config/rules/check_run.py",
    " and values.get(key) not in OFF",
    "",
)
def test_a_flag_that_nothing_reads_is_told_unless_it_was_switched_off():
    run = Run.of("ppo")
    sets(algo__kl__init_coef=0.0, ref__offload=True, train__ema_beta=0.5)(run)
    assert {"ref.offload", "train.ema_beta"} <= told(run, ("ref.offload", "train.ema_beta"))
    run.ref.offload = False
    assert "ref.offload" not in told(run, ("ref.offload",)), "false says that it is off"
    run.train.enable_ema = True
    assert "train.ema_beta" not in told(run, ("train.ema_beta",))


@pytest.mark.notices(
    "a flag that one of two others needs is reported as without effect",
    "config/declarations/conditions.py",
    " or any(alternative.holds(values) for alternative in self.alternatives)",
    "",
)
def test_a_flag_that_one_of_two_others_needs_is_read_with_either():
    key = "score.max_tokens_per_gpu"
    run = Run.of("score")
    run.reward.rule = "exact_match"
    assert key in told(run, (key,))
    run.reward.process.enable = True
    assert key not in told(run, (key,))
    other = Run.of("score")
    other.reward.model_name_or_path = "judge"
    assert key not in told(other, (key,))


@pytest.mark.notices(
    "a flag of one of several sources is reported as without effect",
    "config/declarations/conditions.py",
    "for key in (flag, *named)]",
    "for key in (flag,)]",
)
def test_a_flag_of_a_rule_is_read_where_one_of_several_sources_has_that_rule():
    key = "reward.rules.length_limit"
    run = Run.of("ppo")
    run.reward.sources = {"short": NamedSourceConfig(rule="length"), "right": NamedSourceConfig(rule="math")}
    assert key not in told(run, (key,))
    run.reward.sources = {"right": NamedSourceConfig(rule="math")}
    assert key in told(run, (key,))
