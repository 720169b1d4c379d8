"""`loop`: how often a loop generates, selects and trains, and what it selects."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.ckpt import ResumeConfig
from rlhf_suite.config.flags import FREE, flag


@dataclass
class LoopConfig:
    """Iterations: each answers prompts of its own with the model of the one before, and trains that model on"""

    num_iterations: int = flag(2, "Number of iterations", ge=1)
    prompts_per_iteration: int | None = flag(None, ge=1)
    """Prompts per iteration, taken in order, and from the start again after the last; null: equal shares"""


@dataclass
class RejectionLoopConfig(LoopConfig):
    """Iterations: each tunes the model on its own best answers to prompts of its own"""

    min_score: float | None = flag(None, "Leave out prompts whose best answer scores less than this; null: none")


@dataclass
class PreferenceLoopConfig(LoopConfig):
    """Iterations: each lets the model prefer the best of its own answers to the worst"""

    fixed_reference_enable: bool = flag(False)
    """The first model is the reference in every iteration, not the one that the iteration starts from"""


@dataclass
class ConditionalLoopConfig(LoopConfig):
    """Iterations: each teaches the model what its own answers of every reward look like"""

    target_reward: float | None = flag(None)
    """Reward that the trained model is asked for; null: the highest of the answers it was trained on"""
    standardize_enable: bool = flag(False)
    """Write rewards as (reward - mean) / deviation over all answers of the iteration; loop.target_reward is then in
    these units too"""


@dataclass
class LoopCheckpointConfig(ResumeConfig):
    """Checkpoints within an iteration's training, and the final model"""

    output_dir: str | None = flag(None, "Folder of the final model in HF format; null: <run folder>/model")
    save_steps: int = flag(-1, "Save every so many steps of a training; -1: never", ge=-1, resume=FREE)
