"""The flags that what trains call by call has: the server of task=serve_train, and a client in a program (`rs.Client`).

Both run the code of task=ppo, which reads the configuration of task=ppo. But their callers say with each call, or do by
themselves, what many of its flags say. In task=serve_train such a flag is a constant: the shared code finds its
default, and nobody can set it. A client accepts it, so that the settings of task=ppo can be given as they are, and says
that it does not read it.
"""

from __future__ import annotations

from collections.abc import Mapping

# The flags that task=serve_train has of these sections of task=ppo; those of others it has all, but for WITHOUT.
SERVED: Mapping[str, tuple[str, ...]] = {
    "actor": (
        *("model_name_or_path", "num_nodes", "num_gpus_per_node", "freeze", "freeze_router", "aux_loss_coef"),
        *("gradient_checkpointing_enable", "gradient_checkpointing_reentrant"),
    ),
    "agent": (),
    "algo": ("mismatch_max",),
    "ckpt": ("load_enable", "allow_changes", "path", "save_steps", "save_hf", "max_num", "max_mem"),
    "critic": (),
    "data": ("max_len",),
    "eval": (),
    "ref": (),
    "reward": (),
    "rollout": (),
    "teacher": (),
    "train": (
        *("micro_batch_size", "dynamic_batch_enable", "max_tokens_per_gpu", "seed", "full_determinism_enable"),
        *("on_nonfinite", "colocate_all"),
    ),
}
WITHOUT = ("ds.enable_sleep", "vllm.enable_sleep")

# The flags of task=ppo that a client does not read, or sections of them.
UNREAD_BY_CLIENTS = (
    *("agent", "critic", "eval", "logger", "reward", "teacher"),
    *("algo.advantage", "algo.distill", "algo.dynamic_filtering_enable", "algo.dynamic_filtering_max_rounds"),
    *("algo.dynamic_filtering_min_std", "algo.dynamic_filtering_range", "algo.group_filter", "algo.prompt_filter"),
    *("ckpt.best_metric_key", "ckpt.output_dir", "ckpt.path", "ckpt.save_adapter", "ckpt.save_steps"),
    *("rollout.token_entropy", "rollout.vllm_generate_batch_size"),
    *("train.agent_func_path", "train.async_queue_size", "train.async_run_ahead", "train.callbacks"),
    *("train.early_stopping_patience", "train.num_episodes", "train.colocate_critic_reward"),
)


def is_constant(task: str, key: str) -> bool:
    """Return whether a flag of task=ppo is a constant in a task, which nobody can set."""
    section, _, name = key.partition(".")
    if task != "serve_train" or not name:
        return False
    return key in WITHOUT or (section in SERVED and name not in SERVED[section])


def is_read_by_clients(key: str) -> bool:
    """Return whether a client reads a flag of task=ppo."""
    return not any(key == name or key.startswith(f"{name}.") for name in UNREAD_BY_CLIENTS)
