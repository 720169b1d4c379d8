"""`ckpt`: checkpoints, resume, the final model."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import FREE, flag, is_positive, is_true

NO_METRIC = "none"  # the value of ckpt.best_metric_key that switches the best checkpoint off
PERIODIC = is_positive(".save_steps", "<steps>")


@dataclass
class ResumeConfig:
    """Continuing an earlier run"""

    load_enable: bool = flag(False, resume=FREE)
    """Continue the newest run of the same configuration, or the one in run_dir; start fresh where there is none"""
    allow_changes: list[str] = flag([], resume=FREE, when=is_true(".load_enable"))
    """Flags that may differ from the continued run, e.g. [train.max_steps,actor.adam.lr]. The change is recorded in the
    run folder"""


@dataclass
class CheckpointConfig(ResumeConfig):
    """Checkpoints and the final model"""

    output_dir: str | None = flag(None, "Folder of the final model in HF format; null: <run folder>/model")
    save_adapter: bool = flag(False, when=is_positive("ds.lora.rank", "<rank>"))
    """Also export the adapter alone, in peft's format: <output_dir>_adapter"""
    path: str | None = flag(None, "Folder of checkpoints; null: <run folder>/checkpoints")
    load_enable: bool = flag(False, resume=FREE)
    """Resume from ckpt.path (null: the newest run of the same configuration); start fresh where there is nothing"""
    save_steps: int = flag(-1, "Save every so many steps; -1: never", ge=-1, resume=FREE)
    disable_ds: bool = flag(False, resume=FREE)
    """Save the weights alone, without the optimiser's state, in about a third of the space; to resume from such a
    checkpoint, ckpt.reset_optimizer=true is needed"""
    reset_optimizer: bool = flag(False, resume=FREE, when=is_true(".load_enable"))
    """Resume from the weights alone: the moments of the optimiser begin anew"""
    save_hf: bool = flag(False, "Also export each checkpoint in HF format")
    max_num: int = flag(3, "How many periodic checkpoints are kept", ge=1, resume=FREE, when=PERIODIC)
    max_mem: float | None = flag(None, gt=0, resume=FREE, when=PERIODIC)
    """Size limit of the checkpoint folder in GiB; null: no limit"""
    best_metric_key: str | None = flag(None)
    """Evaluation metric whose best checkpoint is kept, and whose best model is in <output_dir>_best in HF format; null:
    the task's first, without a model folder of its own; none: off"""

    @property
    def keeps_best(self) -> bool:
        """Whether there is a checkpoint of the step with the best evaluation."""
        return self.best_metric_key != NO_METRIC and (self.save_steps > 0 or self.best_metric_key is not None)
