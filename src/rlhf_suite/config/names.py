"""Names of flags: those that do not exist, those that are called otherwise here, and the nearest ones."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

from rlhf_suite.config.flags import FlagInfo, walk
from rlhf_suite.config.formatting import did_you_mean
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.runs import TASKS

# OpenRLHF's flat names of before its nested command line, where the words do not give the present name away.
RENAMED: dict[str, str | tuple[str, ...]] = {
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "ref_pretrain": "ref.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "normalize_reward": "reward.normalize_enable",
    "colocate_all_models": "train.colocate_all",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "prompt_max_len": "data.max_len",
    "generate_max_len": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "learning_rate": "actor.adam.lr",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "entropy_loss_coef": "actor.entropy_coef",
    "pretrain_mode": "actor.pretrain_mode_enable",
    "save_path": "ckpt.output_dir",
    "load_checkpoint": "ckpt.load_enable",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "use_ds_universal_ckpt": "ds.use_universal_ckpt",
    "micro_train_batch_size": "train.micro_batch_size",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "full_determinism": "train.full_determinism_enable",
    "bf16": "ds.param_dtype",
    "flash_attn": "ds.attn_implementation",
    "use_wandb": "logger.wandb.enable",
    "teacher_model": "teacher.model_name_or_path",
    "ipo": "algo.loss",
    "use_tensorboard": "logger.tensorboard_dir",
    "output_path": ("generate.output_path", "score.output_path", "ckpt.output_dir"),
    "batch_size": "serve.batch_size",
    "model_path": "actor.model_name_or_path",
    "max_len": ("serve.max_len", "chat.max_len", "data.max_len"),
    "max_new_tokens": ("rollout.max_new_tokens", "chat.max_new_tokens"),
    "top_p": ("rollout.top_p", "chat.top_p"),
    "async_train": "train.async_enable",
    "partial_rollout": "train.partial_rollout_enable",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout",
    "save_hf_model": "ckpt.save_hf",
    "csft_prompt": "data.reward_template",
}
# Sections of OpenRLHF's supervised commands that live under `actor` here, as in its RL command.
MOVED = ("model.", "adam.", "muon.", "optim", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm")
SECRETS = ("logger.wandb.key", "use_wandb", "wandb_key")


@cache
def flags_of(task: str | None) -> dict[str, FlagInfo]:
    """Return the flags of a task by key, in the order of their declaration; None: those of all tasks together."""
    tasks = [task] if task else list(TASKS)
    return {info.key: info for name in tasks for info in walk(TASKS[name])}


def renamed(key: str, known: Collection[str]) -> str | None:
    """Return the present name of the flag that OpenRLHF calls `key`, if `known` has it."""
    key = key.replace("-", "_")
    given = RENAMED.get(key, ())
    candidates = [given] if isinstance(given, str) else [*given]
    if key.startswith(MOVED):
        candidates += [f"actor.{key.removeprefix('model.')}", f"algo.{key.removeprefix('model.')}"]
    if "." not in key:
        candidates.append(f"data.{key}")
        candidates += [name for name in known if name.replace(".", "_") == key]
        same_word = [name for name in known if name.rpartition(".")[2] == key]
        candidates += [name for name in same_word if len(same_word) == 1 or name == f"actor.{key}"]
    return next((name for name in candidates if name in known), None)


@cache
def unknown_flag(key: str, task: str | None) -> Problem:
    """Return the problem of a key that is not a flag of `task`, or not one of any task while none is chosen."""
    if key in SECRETS:
        fix = "export WANDB_API_KEY, and set logger.wandb.enable=true"
        return Problem(key, "keys are not taken from the command line", fix)
    known = flags_of(task)
    owners = [name for name in TASKS if task and key in flags_of(name)]
    guess = did_you_mean(key, known)
    if owners:
        what = f"task={task} has no such flag; it belongs to {' or '.join(f'task={name}' for name in owners)}"
        return Problem(key, what, f"drop it, or {guess}" if guess else "drop it")
    if new := renamed(key, known):
        return Problem(key, f"renamed to {new}", f"write {new}=...")
    what = f"task={task} has no such flag" if task else "no task has such a flag"
    return Problem(key, what, guess or f"see --help{f' task={task}' if task else ''}")
