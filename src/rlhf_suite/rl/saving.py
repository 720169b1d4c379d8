"""Checkpoints of the whole RL state, resume, and the final models."""

from __future__ import annotations

from pathlib import Path

from rlhf_suite.config.runs import PPORun
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.train.checkpoint import CheckpointStore
from rlhf_suite.train.run_folder import RunFolder
from rlhf_suite.train.workers import WorkerGroup


class Saver:
    """Saves policy, critic, their optimisers and random states, and the KL controller. The data cursor, the shuffles
    and the sampling seeds are functions of the step, so the step number stands for them."""

    def __init__(
        self, config: PPORun, folder: RunFolder, policy: WorkerGroup, critic: WorkerGroup | None, credit: CreditAssigner
    ) -> None:
        self.config, self.folder, self.credit = config, folder, credit
        self.groups = {"actor": policy} | ({"critic": critic} if critic is not None else {})
        path = Path(config.ckpt.path) if config.ckpt.path else folder.checkpoints
        self.store = CheckpointStore(config.ckpt, path.absolute())
        self.best: float | None = None

    def resume(self) -> int:
        """Load the newest checkpoint when asked; the step to go on with."""
        checkpoint = self.store.latest() if self.config.ckpt.load_enable else None
        if checkpoint is None:
            return 0
        for name, group in self.groups.items():
            group.call("load_state", checkpoint.path / name, what=f"{name}: loading {checkpoint.path}")
        state = checkpoint.state()
        self.best = state["best"]
        self.credit.controller.load_state_dict(state["kl_controller"])
        return checkpoint.step

    def save_if_due(self, step: int, metrics: dict[str, float]) -> None:
        """The periodic checkpoint, and the best one when the evaluation of this step beats all before."""
        if self.is_best(metrics):
            self.save(step, "best")
        if self.config.ckpt.save_steps > 0 and step % self.config.ckpt.save_steps == 0:
            self.save(step, "step")

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Whether the metric of ckpt.best_metric_key was measured now and is the highest so far."""
        key = self.config.ckpt.best_metric_key or "eval/pass1"
        if key not in metrics or (self.best is not None and metrics[key] <= self.best):
            return False
        self.best = metrics[key]
        return self.config.ckpt.save_steps > 0 or self.config.ckpt.best_metric_key is not None

    def save(self, step: int, kind: str) -> None:
        """Write aside, then commit."""
        folder = self.store.begin(step, kind)
        for name, group in self.groups.items():
            (folder / name).mkdir()
            group.call("save_state", folder / name, what=f"{name}: saving step {step}")
        if self.config.ckpt.save_hf:
            self.groups["actor"].call("export", folder / "hf", what=f"exporting step {step}")
        state = {"step": step, "best": self.best, "kl_controller": self.credit.controller.state_dict()}
        self.store.commit(step, state, kind)

    def export(self) -> Path:
        """The final policy, and with critic.save_value_network the critic, in HF format."""
        output = Path(self.config.ckpt.output_dir) if self.config.ckpt.output_dir else self.folder.model
        self.groups["actor"].call("export", output.absolute(), what="exporting the policy")
        if "critic" in self.groups and self.config.critic.save_value_network:
            critic = output.with_name(output.name + "_critic").absolute()
            self.groups["critic"].call("export", critic, what="exporting the critic")
        return output
