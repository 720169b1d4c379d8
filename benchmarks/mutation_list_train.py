"""Mistakes in schedules, epochs, evaluation, checkpoints, resume and the record of a run."""

from __future__ import annotations

from mutation import Mutation

BATCH_JOB = ("tests/offline/test_batch_job.py",)
CHECKPOINT = ("tests/train/test_checkpoint.py", "-k", "not kill")
EVALUATE = ("tests/train/test_evaluate.py",)
JOURNAL = ("tests/tracking/test_journal.py",)
LOADER = ("tests/train/test_loader.py",)
METRICS = ("tests/tracking/test_metrics.py",)
OPTIM = ("tests/train/test_optim.py", "-k", "hand or rounding or decay or flags")
RATES = ("tests/train/test_optim.py", "-k", "rate_of_its_own")
SAVING = ("tests/train/test_saving.py",)
SETS = ("tests/train/test_sets.py",)
TRAINER = ("tests/train/test_trainer.py",)
WORLD = ("tests/train/test_world.py",)

TRAIN = [
    Mutation(
        "the learning rate of the first parameter group is that of all",
        "train/strategy.py",
        'group["lr"] = peak * factor',
        'group["lr"] = self._peaks[0] * factor',
        RATES,
    ),
    Mutation(
        "every rank draws the same dropout",
        "distributed/world.py",
        "config.seed + world.mesh.replica_index(world.rank)",
        "config.seed",
        WORLD,
    ),
    Mutation(
        "every rank continues with the random numbers of the first",
        "train/strategy.py",
        'own := folder / f"rng_{self.world.rank}.pt"',
        'own := folder / "rng_0.pt"',
        WORLD,
    ),
    Mutation(
        "random numbers begin anew after a resume",
        "train/strategy.py",
        "set_rng_state(load_tensors(own))",
        "load_tensors(own)",
        WORLD,
    ),
    Mutation(
        "the first optimiser step trains nothing",
        "train/schedules.py",
        "return (step + 1) / warmup",
        "return step / warmup",
        OPTIM,
    ),
    Mutation(
        "the schedule ends before 0",
        "train/schedules.py",
        "max(1, self.total_steps - self.warmup_steps)",
        "max(1, self.total_steps)",
        OPTIM,
    ),
    Mutation(
        "Adam's betas change places",
        "train/optim.py",
        "(adam.betas[0], adam.betas[1])",
        "(adam.betas[1], adam.betas[0])",
        OPTIM,
    ),
    Mutation(
        "Adam's epsilon is torch's own",
        "train/optim.py",
        "eps=adam.eps, ",
        "",
        OPTIM,
    ),
    Mutation(
        "norms and biases decay",
        "train/optim.py",
        '"weight_decay": 0.0}',
        '"weight_decay": config.adam.weight_decay}',
        OPTIM,
    ),
    Mutation(
        "one epoch is trained whatever the flag says",
        "train/loader.py",
        "self.order.steps_per_epoch * self.config.max_epochs",
        "self.order.steps_per_epoch",
        LOADER,
    ),
    Mutation(
        "every rank has the rows of the first",
        "train/loader.py",
        "parts[world.data_index]",
        "parts[0]",
        LOADER,
    ),
    Mutation(
        "the average of the weights starts at 0",
        "train/ema.py",
        "part.float().cpu().clone()",
        "part.float().cpu() * 0",
        ("tests/train/test_ema.py", "-k", "1-ZeRO-0"),
    ),
    Mutation(
        "an evaluation leaves its last short batch out",
        "train/evaluate.py",
        "for start in range(0, len(items), size)",
        "for start in range(0, len(items) - size + 1, size)",
        EVALUATE,
    ),
    Mutation(
        "an evaluation draws dropout",
        "train/evaluate.py",
        "model.module.eval()",
        "pass",
        EVALUATE,
    ),
    Mutation(
        "after an evaluation there is no dropout any more",
        "train/evaluate.py",
        "model.module.train()",
        "pass",
        EVALUATE,
    ),
    Mutation(
        "held-out rows are of the training split",
        "train/supervised.py",
        "Sources(source, config.eval.split,",
        "Sources(source, config.data.dataset_split,",
        SETS,
    ),
    Mutation(
        "as many held-out rows as training rows are taken",
        "train/supervised.py",
        "config.eval.max_samples, flags=EVAL)",
        "config.data.max_samples, flags=EVAL)",
        SETS,
    ),
    Mutation(
        "a resume leaves a step out",
        "train/loop.py",
        "for step in range(start, self.total_steps):",
        "for step in range(start + 1, self.total_steps):",
        TRAINER,
    ),
    Mutation(
        "a checkpoint has the number of the step before",
        "train/loop.py",
        "self.saver.save_if_due(step + 1, evaluation, self.settled)",
        "self.saver.save_if_due(step, evaluation, self.settled)",
        TRAINER,
    ),
    Mutation(
        "the last step is not evaluated",
        "train/loop.py",
        "(step % every == 0 or step == self.total_steps)",
        "step % every == 0",
        TRAINER,
    ),
    Mutation(
        "without eval.steps only the end is evaluated",
        "train/loop.py",
        "else self.steps_per_epoch",
        "else self.total_steps",
        TRAINER,
    ),
    Mutation(
        "the epoch is that before the step",
        "train/loop.py",
        "(step + 1) / self.steps_per_epoch",
        "step / self.steps_per_epoch",
        TRAINER,
    ),
    Mutation(
        "checkpoints are made one step early",
        "train/saving.py",
        "step % self.config.save_steps == 0",
        "(step + 1) % self.config.save_steps == 0",
        SAVING,
    ),
    Mutation(
        "the highest loss is the best",
        "train/saving.py",
        "value >= self.best if direction == LOWER else",
        "value >= self.best if direction != LOWER else",
        SAVING,
    ),
    Mutation(
        "a resumed run forgets its best evaluation",
        "train/saving.py",
        'self.best, self.evaluations_since_best = state["best"],',
        "self.best, self.evaluations_since_best = None,",
        SAVING,
    ),
    Mutation(
        "the KL coefficient begins anew after a resume",
        "train/saving.py",
        "part.load_state_dict(state[name])",
        "pass",
        SAVING,
    ),
    Mutation(
        "the rotation deletes the newest checkpoint",
        "train/checkpoint.py",
        "regular.pop(0)",
        "regular.pop(-2)",
        CHECKPOINT,
    ),
    Mutation(
        "a resume begins at the oldest checkpoint",
        "train/checkpoint.py",
        "(ckpt.step, ckpt.kind), reverse=True)",
        "(ckpt.step, ckpt.kind))",
        CHECKPOINT,
    ),
    Mutation(
        "a checkpoint whose contents have changed is loaded",
        "train/checkpoint.py",
        "if digest != entries[name].sha256:",
        "if False:",
        CHECKPOINT,
    ),
    Mutation(
        "a resume makes the last step's metrics disappear",
        "tracking/metrics.py",
        'row["step"] <= start',
        'row["step"] < start',
        METRICS,
    ),
    Mutation(
        "TensorBoard hides the step that a resume begins after",
        "tracking/metrics.py",
        "purge_step=start + 1",
        "purge_step=start",
        METRICS,
    ),
    Mutation(
        "the seconds of a step are added to those of the next",
        "tracking/journal.py",
        "self.seconds.clear()",
        "pass",
        JOURNAL,
    ),
    Mutation(
        "an evaluation between two logged steps is lost",
        "tracking/journal.py",
        "if always or step",
        "if step",
        JOURNAL,
    ),
    Mutation(
        "a run that goes on is still called failed",
        "tracking/run_folder.py",
        "error=None, run=run, **process",
        "run=run, **process",
        ("tests/tracking/test_run_folder.py",),
    ),
    Mutation(
        "the share of responses cut off is per prompt",
        "offline/batch_job.py",
        'totals["truncated"] / totals["samples"]',
        'totals["truncated"] / totals["prompts"]',
        BATCH_JOB,
    ),
    Mutation(
        "a continued job begins with its first row again",
        "offline/batch_job.py",
        "range(self.part.progress.next_row, self.rows.stop)",
        "range(self.rows.start, self.rows.stop)",
        BATCH_JOB,
    ),
]
