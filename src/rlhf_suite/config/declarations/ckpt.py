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
    """Checkpoints, resuming from them, and the final model"""

    load_enable: bool = flag(False, resume=FREE, tasks=RESUMABLE)
    """Resume an earlier run: from the checkpoints in ckpt.path, or else the run in run_dir, or else the newest run with
    the same configuration. If there is none, start a new run"""
    allow_changes: list[str] = flag([], resume=FREE, when=is_true(".load_enable"), tasks=RESUMABLE)
    """Flags that may differ from the run that is resumed, for example [train.max_steps,actor.adam.lr]. The change is
    recorded in the run folder"""
    output_dir: str | None = flag(None, tasks=(*TRAINING, "merge_lora"))
    """Folder of the final model, in Hugging Face format; null: <run folder>/model"""
    save_adapter: bool = flag(False, when=is_positive("ds.lora.rank", "<rank>"), tasks=TRAINED)
    """Also save the LoRA adapter by itself, in the format of peft, in the folder <output_dir>_adapter"""
    path: str | None = flag(None, "Folder of checkpoints; null: <run folder>/checkpoints", tasks=TRAINED)
    save_steps: int = flag(-1, ge=-1, resume=FREE, tasks=TRAINING)
    """Save a checkpoint every N steps; in a loop, N steps of each training. -1: no periodic checkpoints"""
    disable_ds: bool = flag(False, resume=FREE, tasks=TRAINED)
    """Save only the weights, without the optimiser state. Such a checkpoint takes about a third of the space, but
    resuming from it needs ckpt.reset_optimizer=true"""
    reset_optimizer: bool = flag(False, resume=FREE, when=is_true(".load_enable"), tasks=TRAINED)
    """Load only the weights when resuming. The moments of the optimiser start again at 0"""
    save_hf: bool = flag(False, "Also save each checkpoint in Hugging Face format", tasks=TRAINED)
    max_num: int = flag(3, ge=1, resume=FREE, when=PERIODIC, tasks=TRAINED)
    """Number of periodic checkpoints to keep; older ones are deleted"""
    max_mem: float | None = flag(None, gt=0, resume=FREE, when=PERIODIC, tasks=TRAINED)
    """Size limit of the checkpoint folder in GiB; the oldest checkpoints are deleted. null: no limit"""
    best_metric_key: str | None = flag(
        None,
        needs=Need(EVALUATED, "the metric comes from an evaluation", at=NAMES_A_METRIC, off=NO_METRIC),
        tasks=TRAINED,
    )
    """Evaluation metric that selects the best checkpoint. This checkpoint is kept, and its model is saved in
    <output_dir>_best in Hugging Face format. null: if there are periodic checkpoints, the best one by the task's first
    metric is kept too, but its model is not saved separately. none: off"""

    @property
    def keeps_best(self) -> bool:
        """Whether there is a checkpoint of the step with the best evaluation."""
        return self.best_metric_key != NO_METRIC and (self.save_steps > 0 or self.best_metric_key is not None)
