"""`ckpt`: checkpoints, resume, the final model."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.declarations.conditions import Condition, Need, is_positive, is_true
from rlhf_suite.config.declarations.eval import EVALUATED
from rlhf_suite.config.declarations.flags import FREE, flag
from rlhf_suite.config.declarations.sections import Section
from rlhf_suite.config.declarations.task_groups import RESUMABLE, TRAINED, TRAINING

NO_METRIC = "none"  # the value of ckpt.best_metric_key that switches the best checkpoint off
NAMES_A_METRIC = Condition("", lambda name: name not in (None, NO_METRIC), " names a metric", "", "=<metric>")
PERIODIC = is_positive(".save_steps", "<steps>")


@dataclass
class CheckpointConfig(Section):
    """Checkpoints, how to go on from one, and the final model"""

    load_enable: bool = flag(False, resume=FREE, tasks=RESUMABLE)
    """Continue from ckpt.path, or the run in run_dir, or else the newest run of the same configuration; start fresh
    where there is none"""
    allow_changes: list[str] = flag([], resume=FREE, when=is_true(".load_enable"), tasks=RESUMABLE)
    """Flags that may differ from the continued run, e.g. [train.max_steps,actor.adam.lr]. The change is recorded in the
    run folder"""
    output_dir: str | None = flag(None, tasks=(*TRAINING, "merge_lora"))
    """Folder of the final model in HF format; null: <run folder>/model"""
    save_adapter: bool = flag(False, when=is_positive("ds.lora.rank", "<rank>"), tasks=TRAINED)
    """Also export the adapter alone, in peft's format: <output_dir>_adapter"""
    path: str | None = flag(None, "Folder of checkpoints; null: <run folder>/checkpoints", tasks=TRAINED)
    save_steps: int = flag(-1, ge=-1, resume=FREE, tasks=TRAINING)
    """Save every so many steps, in a loop those of each training; -1: never"""
    disable_ds: bool = flag(False, resume=FREE, tasks=TRAINED)
    """Save the weights alone, without the optimiser's state, in about a third of the space; to resume from such a
    checkpoint, ckpt.reset_optimizer=true is needed"""
    reset_optimizer: bool = flag(False, resume=FREE, when=is_true(".load_enable"), tasks=TRAINED)
    """Resume from the weights alone: the moments of the optimiser begin anew"""
    save_hf: bool = flag(False, "Also export each checkpoint in HF format", tasks=TRAINED)
    max_num: int = flag(3, "How many periodic checkpoints are kept", ge=1, resume=FREE, when=PERIODIC, tasks=TRAINED)
    max_mem: float | None = flag(None, gt=0, resume=FREE, when=PERIODIC, tasks=TRAINED)
    """Size limit of the checkpoint folder in GiB; null: no limit"""
    best_metric_key: str | None = flag(
        None,
        needs=Need(EVALUATED, "it is measured in an evaluation", at=NAMES_A_METRIC, off=NO_METRIC),
        tasks=TRAINED,
    )
    """Evaluation metric whose best checkpoint is kept, and whose best model is in <output_dir>_best in HF format; null:
    the task's first, without a model folder of its own; none: off"""

    @property
    def keeps_best(self) -> bool:
        """Whether there is a checkpoint of the step with the best evaluation."""
        return self.best_metric_key != NO_METRIC and (self.save_steps > 0 or self.best_metric_key is not None)
