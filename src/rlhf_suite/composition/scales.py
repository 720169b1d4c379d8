"""The group `scale`: presets that make a run of any size a small one, and leave its method as it is.

`scale=tiny` is made for the task of the run from the demo of the task: its model, rows, lengths, sizes and learning
rate, with which a tiny model learns in minutes on two processors. All else stays what the run says: estimator, losses,
corrections, precision of the optimiser, placement.
"""

from __future__ import annotations

from typing import Any

from rlhf_suite.composition.presets import CHOICES, SCALES, file_of, preset_names, read_preset
from rlhf_suite.config.declarations.flags import flat
from rlhf_suite.config.declarations.runs import flags_of
from rlhf_suite.config.declarations.task_groups import SUPERVISED

# What it has of the demo of the task; and what has its default again where that demo does not set it: what names models
# and sources of scores, and what tells of columns, templates and other things of the rows.
OF_DEMO: tuple[str, ...] = (
    "actor.adam.lr",
    "actor.lr_scheduler",
    "critic.",
    "data.",
    "rollout.",
    "train.",
    "eval.",
    "ds.",
)
OF_DEMO += ("reward.rule", "algo.placeholder_token", "algo.reward_tokens")
OF_ROWS: tuple[str, ...] = (
    "_dataset",
    "_key",
    "_template",
    "_kwargs",
    "_split",
    "_probs",
    "_columns",
    ".row_format",
    ".turn_markers",
)
OF_ROWS += (".multiturn",)
MODEL = ".model_name_or_path"
# Sizes for two processors, of which a task has those of its flags.
SIZES: dict[str, Any] = {
    "launch.device": "cpu",
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 1,
    "actor.aux_loss_coef": 0.0,  # no built-in model has experts
    "critic.num_nodes": 1,
    "critic.num_gpus_per_node": 1,
    "ref.num_nodes": 1,
    "ref.num_gpus_per_node": 1,
    "reward.num_nodes": 1,
    "reward.num_gpus_per_node": 1,
    "vllm.num_engines": 1,
    "vllm.tensor_parallel_size": 1,
    "vllm.enable_sleep": False,
    "ds.adam_offload": False,
    "data.max_samples": 4096,
    "loop.num_iterations": 1,
}
# What makes a run shorter than the demo.
SHORT: dict[str, dict[str, Any]] = {"ppo": {"rollout.batch_size": 32, "train.max_steps": 16, "eval.steps": 4}}
SHORT |= {task: {"train.max_steps": 120, "eval.steps": 20} for task in SUPERVISED}


def make_tiny(task: str) -> dict[str, Any]:
    """Return the values of `scale=tiny` for a task, by their flags."""
    known, file = flags_of(task), file_of("demo", task)
    demo = flat(read_preset(file)[0]) if file else {}
    scores = {f"reward.{name}" for name in CHOICES["reward"][2]}
    reset = [key for key in known if key in scores or key.endswith(MODEL) or is_of_rows(key)]
    values = {key: known[key].default for key in reset}
    values |= {key: value for key, value in demo.items() if key.startswith(OF_DEMO) or key.endswith(MODEL)}
    values |= {key: value for key, value in SIZES.items() if key in known}
    return values | SHORT.get(task, {})


def is_of_rows(key: str) -> bool:
    """Return whether a flag says what the rows are like."""
    return key.startswith("data.") and key.endswith(OF_ROWS)


def scales_of(task: str | None) -> dict[str, dict[str, Any]]:
    """Return the values of each scale for a task, by their flags: no values before a task is chosen. A task without a
    demo has no scales."""
    if task is None:
        return {name: {} for name in SCALES}
    if task not in preset_names("demo"):
        return {}
    return {SCALES[0]: make_tiny(task)}
