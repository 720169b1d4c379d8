"""What flags and values are called elsewhere: in OpenRLHF, its older versions and its fork, and in other libraries.

This is the only table of such names: the checks of a command line tell the name here, and `rlhf-suite migrate` writes
it. What a name becomes by a rule that needs other flags is a function in `migrate/handlers.py`, and a hint here.
"""

from __future__ import annotations

from collections.abc import Mapping

# OpenRLHF's flat names of before its nested command line, where the words do not give the present name away, and names
# of other libraries. Several names: the first one that the task has.
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
    # of other libraries
    "model": "actor.model_name_or_path",
    "model_name": "actor.model_name_or_path",
    "base_model": "actor.model_name_or_path",
    "dataset_name": ("data.dataset", "data.prompt_dataset"),
    "dataset": ("data.dataset", "data.prompt_dataset"),
    "epochs": "train.max_epochs",
    "num_epochs": "train.max_epochs",
    "num_train_epochs": "train.max_epochs",
    "per_device_train_batch_size": "train.micro_batch_size",
    "train_batch_size": "train.batch_size",
    "num_generations": "rollout.n_samples_per_prompt",
    "max_completion_length": "rollout.max_new_tokens",
    "max_seq_length": "data.max_len",
    "max_length": "data.max_len",
    "kl_coef": "algo.kl.init_coef",
    "warmup_ratio": "actor.lr_warmup_ratio",
    "max_grad_norm": "actor.max_norm",
    "entropy_coeff": "actor.entropy_coef",
    "clip_range": "actor.eps_clip",
    "cliprange": "actor.eps_clip",
    "algorithm": ("algo.advantage.estimator", "algo.loss"),
    "estimator": "algo.advantage.estimator",
    "adv_estimator": "algo.advantage.estimator",
    "loss_type": ("algo.loss", "actor.policy_loss_type"),
    "reward_model": "reward.model_name_or_path",
    "ref_model": "ref.model_name_or_path",
}
# Sections of OpenRLHF's supervised commands that live under `actor` here, as in its RL command.
MOVED = ("model.", "adam.", "muon.", "optim", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm")
# Old flags that become others: each with a value, or (None) with that of the old flag.
BECOMES: dict[str, tuple[tuple[str, str | None], ...]] = {
    "wandb_project": (("logger.wandb.project", None),),
    "wandb_group": (("logger.wandb.group", None),),
    "wandb_org": (("logger.wandb.org", None),),
    "wandb_run_name": (("logger.wandb.run_name", None),),
    "use_kl_estimator_k3": (("algo.kl.estimator", "k3"),),
    "use_cispo": (("actor.policy_loss_type", "cispo"),),
    "use_dual_policy_loss": (("actor.dual_clip", "3.0"),),
    "env_func": (("train.agent_func_path", None),),
    "ipo": (("algo.loss", "ipo"),),
    "model.ipo_enable": (("algo.loss", "ipo"),),
    "vanilla_loss": (("algo.loss", "vanilla"),),
    "ptx_coef": (("actor.ptx_coef", None),),
    "pretrain_data_probs": (("data.pretrain_probs", None),),
    "pretrain_split": (("data.pretrain_split", None),),
    "repetition_penalty": (("rollout.repetition_penalty", None), ("chat.repetition_penalty", None)),
    "greedy_sampling": (("rollout.temperature", "0"), ("chat.temperature", "0")),
    "tp_size": (("vllm.tensor_parallel_size", None),),
    "best_of_n": (("rollout.n_samples_per_prompt", None),),
    "normalize_mean": (("reward.normalize_enable", "true"), ("reward.normalize_mean_only", "true")),
    "use_acc_filter": (("algo.dynamic_filtering_enable", "true"),),
    "use_eval_filter": (("reward.on_error", "drop"),),
}
# Old flags that need nothing here, and why.
NOTHING: dict[str, str] = {
    **{name: "weights go through groups of the suite's own" for name in ("vllm_sync_with_ray", "vllm.sync_with_ray")},
    "actor_init_on_gpu": "models are always loaded where they are trained",
    "unpaired_preference": "task=kto always takes single answers with a label",
    "compute_fp32_loss": "losses are always computed in fp32",
    "model.compute_fp32_loss_enable": "losses are always computed in fp32",
    "is_rm": "task=merge_lora sees by the adapter whether it is of a reward model",
    "local_rank": "ranks are started by the suite itself",
    **{
        f"{section}muon.{name}": "DeepSpeed's Muon has this fixed, there and here"
        for section in ("", "actor.", "critic.")
        for name in ("nesterov", "no_nesterov", "ns_steps")
    },
    "disable_trace_cache": "it is not needed with this DeepSpeed",
    "ds.ring_attn_head_stride": "the suite's sequence parallelism has no strides",
    "ring_head_stride": "the suite's sequence parallelism has no strides",
    # of the fork
    "dpg_beta": "it is algo.kl.init_coef, the beta of the KL penalty",
    "entropy_shape_alpha": "it is ALPHA at the top of experiments/own_code/async_fork.py",
    "entropy_shape_kappa": "it is KAPPA at the top of experiments/own_code/async_fork.py",
    **dict.fromkeys(
        ("use_adv_mask_before", "use_adv_mask_after", "use_adv_mask_skip", "use_loss_mask"),
        "filtered samples leave the batch, and whitening uses only the samples that are trained on",
    ),
    "use_env_mask": "tokens of an environment are never trained on",
    "use_length_acc_balance": "batches are always balanced by length",
    "use_seq_balancing": "batches are always balanced by length",
    "use_global_token_level_loss": "actor.loss_agg_mode=token-mean, the default, counts all ranks",
    "use_prefetch": "token means are always over all micro-batches of a step",
    "use_critic_prefetch": "token means are always over all micro-batches of a step",
    "use_exp_before_queue": "train.async_enable keeps train.async_queue_size rollouts",
    "reuse_offline": "accepted groups that a step does not need are always kept for the next one",
    "dump_data": "rollouts are always in the run folder",
    "global_shuffle": "the samples of a rollout are always shuffled over all ranks",
    "drop_samples": "it has no effect in the fork",
    "use_reward_smooth": "it has no effect in the fork",
    "use_dynamic_bz": "it has no effect in the fork; train.dynamic_batch_enable has one",
    "sample_strategy": "it has no effect in the fork",
}
# Old flags without a counterpart, and what to do in their place.
GONE: dict[str, str] = {
    "use_ms": "models and data of ModelScope are not loaded; name a local folder",
    "ds.use_ms": "models and data of ModelScope are not loaded; name a local folder",
    "disable_fast_tokenizer": "tokenizers are always fast",
    "data.disable_fast_tokenizer": "tokenizers are always fast",
    "iter": "write the part of the rows as generate.shard=<part>/<parts> (score.shard)",
    "ta_prompt": "write the text as chat.system",
    "perf": "timings are always in the metrics",
    "use_filter_sample": "write a filter of groups, algo.group_filter (docs/own_code.md)",
    "remove_advantage_whiten": "take an estimator that is not whitened, such as dr_grpo or rloo",
    "eps_clip_high": "write actor.eps_clip_low_high=[low,high]",
    "sft_loss_coef": "train on documents beside samples with data.pretrain_dataset and actor.ptx_coef",
}
CORRECTIONS = "write correction=tis, correction=icepop or correction=seq-mask-tis"
# Old flags that become something by a rule, and what to write.
HINTS: dict[str, str] = {
    **dict.fromkeys(
        (
            "enable_vllm_is_correction",
            "vllm_enable_is_correction",
            "vllm_is_correction_type",
            "use_icepop",
            "algo.advantage.is_correction_enable",
            "algo.advantage.is_correction_type",
        ),
        CORRECTIONS,
    ),
    "vllm_is_truncated_threshold": "write 'algo.advantage.is_correction_threshold=[low,high]'",
    "fp16": "write ds.param_dtype=bf16 or ds.param_dtype=fp32: fp16 is not trained",
    "freezing_actor_steps": "write critic.freezing_steps=<steps>, which freezes one step less",
    "ref_reward_offload": "write ref.offload=true reward.offload=true",
    "margin_loss": "write data.margin_key=margin",
    "model.margin_loss_enable": "write data.margin_key=margin",
    "loss": "write algo.loss=<name>",
    "model.loss_type": "write algo.loss=<name>",
    "post_processor": "write score.best_of_n=true, score.pairs=true or task=conditional_sft",
    "enable_csft": "write data.target_reward=<reward>, and data.reward_template=<text>",
    "pretrain_data": "write data.pretrain_dataset=<source> data.pretrain_key=<column>",
    "eval_task": "write task=generate or task=score",
    "advantage_clip_low_high": "write algo.advantage.clip_range=[-1-low,1+high]",
    "use_outlier_mask": "write algo.group_filter=<file.py>:<function> (docs/own_code.md)",
    "use_length_filter": "write algo.group_filter=<file.py>:<function> (docs/own_code.md)",
    "use_mopps": "write algo.prompt_filter=<file.py>:<function> (docs/own_code.md)",
    **dict.fromkeys(
        ("use_positive_gamma", "use_exp_norm_by_length", "use_adv_shaping"),
        "write algo.advantage.estimator=<file.py>:<function> (docs/own_code.md)",
    ),
    "gradient_accumulation_steps": "write train.batch_size=<sequences of an optimiser step>, which they follow from",
    "max_prompt_length": "write data.max_len=<tokens of prompt and response together>",
}
# Values of flags by what they are called elsewhere.
PRECISIONS = {"bfloat16": "bf16", "torch.bfloat16": "bf16", "float32": "fp32", "torch.float32": "fp32", "float": "fp32"}
VALUES: Mapping[str, Mapping[str, str]] = {
    "algo.advantage.estimator": {
        "grpo": "group_norm",
        "dapo": "group_norm",
        "gspo": "group_norm",
        "drgrpo": "dr_grpo",
        "grpo_done_right": "dr_grpo",
        "ppo": "gae",
        "reinforce++": "reinforce",
        "reinforce_plus_plus": "reinforce",
        "reinforce++_baseline": "reinforce_baseline",
        "reinforce_plus_plus_baseline": "reinforce_baseline",
        "opd": "on_policy_distill",
        "reinforce_global": "flash_reinforce",
    },
    "actor.policy_loss_type": {"grpo": "ppo", "dapo": "ppo", "vanilla": "ppo", "clip": "ppo", "pg": "reinforce"},
    "actor.loss_agg_mode": {"token_mean": "token-mean", "seq_mean_token_mean": "seq-mean-token-mean"},
    "algo.kl.estimator": {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "abs": "k2"},
    "algo.loss": {"dpo": "sigmoid", "cpo": "simpo"},
    "ds.param_dtype": PRECISIONS,
    "ds.grad_accum_dtype": PRECISIONS,
    "launch.device": {"gpu": "cuda"},
    "agent.kind": {"env": "environment", "tool": "tools", "openai": "endpoint", "none": "single_turn"},
    "reward.rule": {"math_verify": "math", "accuracy": "exact_match"},
    "actor.optim": {"adamw": "adam"},
    "critic.optim": {"adamw": "adam"},
}


def translate_value(flag: str, value: object) -> str | None:
    """Return what a value that is called so elsewhere is called here; None if it is not known."""
    text = str(value).lower().replace("-", "_")
    return VALUES.get(flag, {}).get(text)
