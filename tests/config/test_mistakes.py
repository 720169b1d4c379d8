"""Mistakes on the command line: each is found, names its flag, and says what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from remedies import advised, applied

from rlhf_suite.composition.presets import group_names

SFT = "task=sft actor.model_name_or_path=builtin:tiny data.dataset=builtin:reverse "
PPO = (
    "task=ppo actor.model_name_or_path=builtin:tiny data.prompt_dataset=builtin:reverse data.label_key=label "
    "reward.rule=exact_match "
)
RM = "task=rm actor.model_name_or_path=builtin:tiny data.dataset=builtin:reverse_pairs "
DPO = "task=dpo actor.model_name_or_path=builtin:tiny data.dataset=builtin:reverse_pairs "
KTO = "task=kto actor.model_name_or_path=builtin:tiny data.dataset=builtin:reverse_labelled "
PRM = "task=prm actor.model_name_or_path=builtin:tiny data.dataset=builtin:reverse_steps "
DISTILL = (
    "task=distill actor.model_name_or_path=builtin:tiny data.dataset=builtin:reverse data.output_key=output "
    "teacher.model_name_or_path=builtin:tiny "
)
PROCESS = "reward=prm reward.rule=null reward.process.model_name_or_path=prm "
FILTERED = "algo.dynamic_filtering_enable=true rollout.n_samples_per_prompt=8 "
OPD = "experiment=on_policy_distill teacher.model_name_or_path=builtin:tiny "

WRITTEN = Path(__file__).parents[2] / "benchmarks" / "results" / "sft.jsonl"
GENERATE = "task=generate actor.model_name_or_path=builtin:tiny data.prompt_dataset=builtin:reverse "
REJECTION = (
    "task=rejection_sampling actor.model_name_or_path=builtin:tiny data.prompt_dataset=builtin:reverse "
    "data.label_key=label reward.rule=exact_match "
)
CONDITIONAL = REJECTION.replace("rejection_sampling", "conditional_sft")
ITERATIVE = REJECTION.replace("rejection_sampling", "iterative_dpo")
SCORE = "task=score data.dataset=builtin:reverse data.input_key=input data.output_key=output "
CHECK = "task=check_reward data.dataset=builtin:reverse data.input_key=input "
SOURCES = PPO.replace("reward.rule=exact_match", "'reward.sources={}'")


def sources(text: str) -> str:
    return SOURCES.replace("{}", text)


IS, N = "algo.advantage.is_correction_", "rollout.n_samples_per_prompt"
# A command line, the key of the problem, and words of what is said about it.
RING, PACKED, FLASH = "ds.ring_attn_size=2 ", "ds.packing_samples=true ", "ds.attn_implementation=flash_attention_2 "
COMPILED = "ds.deepcompile=true "
ALONE = "ds.zero_stage=null "
TENSOR = "ds.tensor_parallel_size=2 "
TWO_RANKS = "actor.num_gpus_per_node=2 critic.num_gpus_per_node=2"
DYNAMIC = "train.dynamic_batch_enable=true ds.packing_samples=true"

FOUR_BITS = "ds.load_in_4bit=true "
MERGE = "task=merge_lora actor.model_name_or_path=builtin:tiny "
CHAT = "task=chat actor.model_name_or_path=builtin:tiny "
SLURM = "-m hydra/launcher=slurm "
SERVE = "task=serve_rm reward.model_name_or_path=some/model "

ASYNC = PPO + "train.async_enable=true "
STREAM = ASYNC + "train.partial_rollout_enable=true correction=tis "
ROUND = "rollout.vllm_generate_batch_size"
SHARED_STREAM = PPO + "train.colocate_all=true train.partial_rollout_enable=true"

IMAGES = " data.apply_chat_template=true data.image_key=image"
SEEING_PPO = (
    PPO.replace("tiny", "vision").replace(":reverse", ":digits")
    + "rollout.n_samples_per_prompt=8 algo.advantage.estimator=rloo"
    + IMAGES
)

PARTS, GDPO_FLAGS = "algo.advantage.reward_parts", "algo.advantage.estimator=gdpo rollout.n_samples_per_prompt=8 "
GDPO = PPO + GDPO_FLAGS

MISTAKES = [
    # images
    (SFT + "data.output_key=output" + IMAGES, "actor.model_name_or_path", "builtin:tiny reads no images"),
    (SFT.replace("tiny", "vision") + "data.output_key=output data.image_key=image", "data.image_key", "chat template"),
    (DISTILL + IMAGES, "data.image_key", "task=distill reads text alone"),
    (SEEING_PPO.replace("=rloo", "=gae"), "algo.advantage.estimator", "trains a critic"),
    (SEEING_PPO + " agent.kind=environment agent.server_url=ws://x:1 agent.history=template", "agent.history", "again"),
    (SEEING_PPO + " data.max_images_per_prompt=0", "data.max_images_per_prompt", "1"),
    # asynchronous training
    (ASYNC, "train.async_enable", "add correction=tis"),
    (ASYNC + "correction=tis train.colocate_all=true", "train.colocate_all", "write train.colocate_all=false"),
    (ASYNC + "correction=tis vllm.enable_sleep=true", "vllm.enable_sleep", "write vllm.enable_sleep=false"),
    (
        ASYNC + "correction=tis train.partial_rollout_enable=true train.async_run_ahead=2",
        "train.async_run_ahead",
        "write train.async_queue_size=2 or more",
    ),
    (PPO + "train.partial_rollout_enable=true", "train.partial_rollout_enable", "add train.async_enable=true"),
    (PPO + "train.partial_rollout_enable=true", "train.partial_rollout_enable", "or train.colocate_all=true"),
    (SHARED_STREAM, "train.partial_rollout_enable", "add correction=tis"),
    (
        SHARED_STREAM + " correction=tis train.async_enable=true",
        "train.colocate_all",
        "the engines stop for each update",
    ),
    (PPO + "ds.enable_sleep=true", "ds.enable_sleep", "or train.colocate_all=true"),
    (
        SHARED_STREAM + " correction=tis ds.enable_sleep=true ds.zero_stage=3",
        "ds.enable_sleep",
        "write ds.zero_stage=2",
    ),
    (SHARED_STREAM + " correction=tis ds.enable_sleep=true ds.adam_offload=true", "ds.enable_sleep", "always in host"),
    (PPO + "train.async_queue_size=2", "train.async_queue_size", "add train.async_enable=true"),
    # tasks and presets
    ("", "task", "add task=sft or task=rm"),
    ("actor=tiny", "task", "none is chosen"),
    ("task=ppp", "task", "did you mean task=ppo?"),
    ("task=null", "task", "a preset cannot be null"),
    ("task=ppo experiment=grp", "experiment", "did you mean experiment=grpo?"),
    ("task=ppo experiment=null", "experiment", "remove experiment=null"),
    ("task=ppo demo=pppo", "demo", "did you mean demo=ppo?"),
    ("task=sft demo=ppo", "demo", "does not fit this task"),
    ("task=sft experiment=grpo", "experiment", "does not fit this task"),
    ("task=sft actor=Qwen/Qwen3-0.6B", "actor", "write actor.model_name_or_path=Qwen/Qwen3-0.6B"),
    (
        "-m demo=sft task=sft train.seed=1,2 hydra/launcher=basic",
        "hydra/launcher",
        "write hydra/launcher=local or slurm",
    ),
    ("task=sft hydra/launcher=slrm", "hydra/launcher", "did you mean hydra/launcher=slurm?"),
    ("task=sft hydra.run.folder=x", "hydra.run.folder", "Could not override"),
    ("task=sft hydra/launcher=local hydra.launcher.paralel=2", "hydra.launcher.paralel", "Could not override"),
    (
        SLURM + SFT + "hydra.launcher.tasks_per_node=8",
        "hydra.launcher.tasks_per_node",
        "write hydra.launcher.tasks_per",
    ),
    (SLURM + SFT + "hydra.launcher.slurm_array_parallelism=0", "hydra.launcher.slurm_array_parallelism", "is not >= 1"),
    (SLURM + SFT + "hydra.launcher.timeout_min=2", "hydra.launcher.slurm_signal_delay_s", "raise hydra.launcher.timeo"),
    (
        SFT + "actor.num_nodes=2 train.micro_batch_size=1 hydra/launcher=slurm",
        "actor.num_nodes",
        "write actor.num_nodes=1 actor.num_gpus_per_node=2",
    ),
    (
        PPO + "train.colocate_all=true actor.num_gpus_per_node=4 vllm.num_engines=4 ref.num_nodes=2 "
        "ref.num_gpus_per_node=2 critic.num_gpus_per_node=4",
        "train.colocate_all",
        "make num_nodes equal",
    ),
    (SFT + "hydra/launcher=slurm hydra.launcher.mem_gb=0", "hydra.launcher.mem_gb", "is not >= 1"),
    (SFT + "hydra/launcher=slurm train.seed=1,2", "train.seed", "a sweep needs -m"),
    ("-m " + SFT + "hydra.launcher.parallel=0", "hydra.launcher.parallel", "is not >= 1"),
    ("task=sft --config-dir /nowhere", "--config-dir", "is not a folder"),
    # tools
    (MERGE, "lora.path", "add lora.path=<folder of a LoRA adapter>"),
    (MERGE + "lora.path=/nowhere", "lora.path", "has no adapter_config.json"),
    (CHAT + "chat.max_len=512", "chat.max_len", "write chat.max_len=2048, or a smaller chat.max_new_tokens"),
    (CHAT + "chat.temperature=0 chat.top_p=0.9", "chat.top_p", "has no effect with chat.temperature=0"),
    (CHAT + "chat.temperature=-1", "chat.temperature", "is not >= 0"),
    (CHAT + "'data.input_template=\"Q: {}\"'", "data.input_template", "add data.apply_chat_template=false"),
    (CHAT + "data.apply_chat_template=false data.input_template=Q", "data.input_template", "must have one {}"),
    (CHAT + "rollout.temperature=0", "rollout.temperature", "it belongs to task="),
    ("task=chat actor.model_name_or_path=/nowhere", "actor.model_name_or_path", "the folder /nowhere does not exist"),
    (SFT + "ckpt.save_adapter=true", "ckpt.save_adapter", "add ds.lora.rank=<rank>"),
    # names
    (PPO + "algo.advantage.lambda=0.9", "algo.advantage.lambda", "did you mean algo.advantage.lambd?"),
    (PPO + "algo.kl.init_coeff=0", "algo.kl.init_coeff", "did you mean algo.kl.init_coef?"),
    (PPO + "+algo.bonus=1", "algo.bonus", "task=ppo has no such flag"),
    (PPO + "++algo.bonus=1", "algo.bonus", "task=ppo has no such flag"),
    (PPO + "+actor.adam.lr=1", "actor.adam.lr", "remove the +"),
    (PPO + "~actor.adam.lr", "actor.adam.lr", "cannot be deleted"),
    (SFT + "vllm.num_engines=2", "vllm.num_engines", "it belongs to task=ppo"),
    (SFT + "rollout.batch_size=2", "rollout.batch_size", "it belongs to task=ppo"),
    (PPO + "data.dataset=x", "data.dataset", "it belongs to task=sft"),
    (PPO + "algo.advantage=rloo", "algo.advantage", "did you mean algo.advantage.estimator=rloo?"),
    (PPO + "algo/kl=k3", "algo/kl", "did you mean algo.kl.estimator=k3?"),
    (PPO + "algo=grpo", "algo", "is a section, not a flag"),
    (PPO + "algo.kl={init_coef:0,foo:1}", "algo.kl.foo", "task=ppo has no such flag"),
    (PPO + "optimizer/adam=x", "optimizer/adam", "not a group of presets"),
    # shapes of data
    (PPO + "rollout.temperature=2.5", "rollout.temperature", "2.5"),
    (PPO + "rollout.temperature=0.005", "rollout.temperature", "0.005"),  # vLLM would sample at 0.01
    (PPO + "eval.temperature=2.5", "eval.temperature", "2.5"),
    (DPO + "data.turn_markers=[Human]", "data.turn_markers", "must be two different texts"),
    (DPO + "data.turn_markers=[Human,Human]", "data.turn_markers", "must be two different texts"),
    (DPO + "data.turn_markers=[Q,A] data.prompt_key=prompt", "data.turn_markers", "add data.prompt_key=null"),
    (SFT + "data.turn_markers=[Q,A] data.output_key=output", "data.turn_markers", "add data.output_key=null"),
    (SFT + "data.pack_to_max_len=true ds.packing_samples=false", "data.pack_to_max_len", "add ds.packing_samples=true"),
    (
        SFT + "data.reward_key=label data.multiturn=true data.apply_chat_template=true",
        "data.reward_key",
        "a reward belongs to one answer",
    ),
    (SFT + "data.reward_key=label data.turn_markers=[Q,A]", "data.reward_key", "add data.apply_chat_template=true"),
    (SFT + "data.reward_template=x", "data.reward_template", "add data.reward_key=<column>"),
    # names of OpenRLHF
    (SFT + "pretrain=x", "pretrain", "renamed to actor.model_name_or_path"),
    (SFT + "model.model_name_or_path=x", "model.model_name_or_path", "renamed to actor.model_name_or_path"),
    (SFT + "adam.lr=1e-5", "adam.lr", "renamed to actor.adam.lr"),
    (SFT + "lr_scheduler=cosine", "lr_scheduler", "renamed to actor.lr_scheduler"),
    (SFT + "zero_stage=3", "zero_stage", "renamed to ds.zero_stage"),
    (SFT + "train_batch_size=8", "train_batch_size", "renamed to train.batch_size"),
    (PPO + "init_kl_coef=0.1", "init_kl_coef", "renamed to algo.kl.init_coef"),
    (PPO + "vllm_num_engines=2", "vllm_num_engines", "renamed to vllm.num_engines"),
    (PPO + "n_samples_per_prompt=8", "n_samples_per_prompt", "renamed to rollout.n_samples_per_prompt"),
    (PPO + "use_kl_loss=true", "use_kl_loss", "renamed to algo.kl.use_loss"),
    (PPO + "logger.wandb.key=abc", "logger.wandb.key", "export WANDB_API_KEY"),
    (PPO + "use_wandb=abc", "use_wandb", "export WANDB_API_KEY"),
    (PPO + "--gpu h100-80", "--gpu", "rlhf-suite plan --gpu"),
    (PPO + "--verbose", "--verbose", "no such option"),
    (PPO + "explain", "explain", "expected key=value"),
    (PPO + "explain=true plan=true", "explain", "has no effect with plan=true"),
    (PPO + "plan=true --gpu h100-80", "--gpu", "write rlhf-suite plan --gpu"),
    # types and values
    (PPO + "actor.num_nodes=1e0", "actor.num_nodes", "write actor.num_nodes=1"),
    (PPO + "actor.num_nodes=two", "actor.num_nodes", "is not an int"),
    (PPO + "actor.adam.lr=fast", "actor.adam.lr", "is not a float"),
    (PPO + "actor.adam.lr=null", "actor.adam.lr", "is not a float"),
    (PPO + "'actor.adam.betas=[0.9,${nope}]'", "actor.adam.betas", "'nope' not found"),
    (PPO + "actor.adam.lr=nan", "actor.adam.lr", "is not a finite number"),
    (PPO + "algo.kl.target=None", "algo.kl.target", "write algo.kl.target=null"),
    (PPO + "algo.kl.init_coef=0 algo.kl.target=0.1", "algo.kl.target", "no KL to control"),
    (PPO + "algo.kl.init_coef=0 algo.kl.use_loss=true", "algo.kl.use_loss", "no KL to make a loss of"),
    (PPO + "actor.adam.betas=0.9", "actor.adam.betas", "write 'actor.adam.betas=[0.9,0.95]'"),
    (PPO + "actor.adam.betas=0.9,0.95", "actor.adam.betas", "'actor.adam.betas=[0.9,0.95]'"),
    (PPO + "'actor.adam.betas=[0.9,high]'", "actor.adam.betas", "list[float]"),
    (PPO + "ds.packing_samples=2", "ds.packing_samples", "=true or ds.packing_samples=false"),
    (PPO + "data.input_key=1e-6", "data.input_key", "is not a str"),
    (PPO + "algo.kl.estimator=K3", "algo.kl.estimator", "write algo.kl.estimator=k3"),
    (PPO + "ds.zero_stage=5", "ds.zero_stage", "is not one of 0, 1, 2, 3"),
    (PPO + "actor.adam.lr=-1", "actor.adam.lr", "is not >= 0"),
    (PPO + "rollout.top_p=1.5", "rollout.top_p", "> 0 and <= 1"),
    (PPO + "rollout.temperature=0", "rollout.temperature", "is not >= 0.01"),
    (PPO + "'actor.adam.betas=[0.9,1.0]'", "actor.adam.betas", "is not < 1"),
    (PPO + "'data.input_key=a{b'", "data.input_key", "quote the value twice"),
    (PPO + "data.input_key=a=b", "data.input_key", "quote the value twice"),
    # rules between flags
    (SFT + "actor.model_name_or_path=/no/model", "actor.model_name_or_path", "does not exist"),
    ("task=sft actor.model_name_or_path=x", "data.dataset", "no data is named"),
    (SFT + "data.dataset=none.jsonl", "data.dataset", "there is no file none.jsonl"),
    (SFT + "'data.dataset_probs=[0.5,0.5]'", "data.dataset_probs", "2 probabilities for 1 sources"),
    (SFT + "train.batch_size=100", "train.batch_size", "write train.batch_size=104"),
    (SFT + "train.batch_size=9 actor.num_gpus_per_node=2 " + DYNAMIC, "train.batch_size", "=10"),
    (
        SFT + "train.max_tokens_per_gpu=100 " + DYNAMIC,
        "train.max_tokens_per_gpu",
        "are too few for one sequence",
    ),
    (SFT + "ckpt.save_steps=0", "ckpt.save_steps", "0 is not an interval"),
    (SFT + "'actor.adam.betas=[0.9]'", "actor.adam.betas", "needs 2 values, not 1"),
    (SFT + "actor.optim=muon actor.max_norm=0 ds.lora.rank=8", "actor.optim", "write actor.optim=adam"),
    (SFT + "ds.zero_stage=0 ds.param_dtype=fp32 ds.adam_offload=true", "ds.adam_offload", "write ds.zero_stage=1"),
    (SFT + "ds.zpg=2", "ds.zpg", "write ds.zero_stage=3"),
    (SFT + ALONE + "ds.adam_offload=true", "ds.adam_offload", "needs ds.zero_stage=1 or more, but it is null"),
    (SFT + ALONE + "ds.overlap_comm=true", "ds.overlap_comm", "one rank has nothing to reduce"),
    (SFT + ALONE + "actor.num_gpus_per_node=2", "ds.zero_stage", "trains on one rank, but actor has 2"),
    (PPO + ALONE + "ref.num_gpus_per_node=2", "ds.zero_stage", "trains on one rank, but ref has 2"),
    (SFT + ALONE + "actor.optim=muon actor.max_norm=0", "actor.optim", "write ds.zero_stage=2, or actor.optim=adam"),
    (SFT + "ds.attn_implementation=sdpa ds.packing_samples=true", "ds.attn_implementation", "varlen"),
    (SFT + RING + "actor.num_gpus_per_node=2", "ds.packing_samples", "add ds.packing_samples=true"),
    (SFT + RING + PACKED + "actor.num_gpus_per_node=3", "actor.num_gpus_per_node", "=4"),
    (SFT + RING + PACKED + FLASH + "actor.num_gpus_per_node=2", "ds.attn_implementation", "=varlen"),
    (PPO + RING + PACKED + TWO_RANKS, "ref.num_gpus_per_node", "1 rank cannot form groups of ds.ring_attn_size=2"),
    (SFT + RING + PACKED + "actor.num_gpus_per_node=4 train.batch_size=9", "train.batch_size", "x ranks = 8 x 2"),
    (SFT + TENSOR, "actor.num_gpus_per_node", "1 rank cannot form groups of ds.tensor_parallel_size=2"),
    (SFT + TENSOR + RING + PACKED + "actor.num_gpus_per_node=6", "actor.num_gpus_per_node", "=8"),
    (SFT + TENSOR + "actor.num_gpus_per_node=4 train.batch_size=9", "train.batch_size", "ranks = 8 x 2"),
    (SFT + TENSOR + ALONE + "actor.num_gpus_per_node=2", "ds.zero_stage", "but actor has 2"),
    (SFT + TENSOR + "actor.num_gpus_per_node=2 ds.lora.rank=4", "ds.tensor_parallel_size", "or ds.lora.rank=0"),
    (
        SFT + TENSOR + RING + PACKED + "actor.num_gpus_per_node=4 ds.ring_attn_mode=ulysses",
        "ds.ring_attn_mode",
        "write ds.ring_attn_mode=gather",
    ),
    (SFT + TENSOR + "actor.num_gpus_per_node=2 ds.zero_stage=3 ds.zpg=2", "ds.zpg", "write ds.zpg=1"),
    (
        SFT + TENSOR + "actor.num_gpus_per_node=2 actor.optim=muon actor.max_norm=0",
        "actor.optim",
        "or ds.tensor_parallel_size=1",
    ),
    (DPO + TENSOR + "actor.num_gpus_per_node=2 ref.offload=true", "ref.offload", "write ref.offload=false"),
    (
        SEEING_PPO + f" {TENSOR} actor.num_gpus_per_node=2 ref.num_gpus_per_node=2",
        "ds.tensor_parallel_size",
        "write ds.tensor_parallel_size=1",
    ),
    (SFT + "train.dynamic_batch_enable=true", "train.dynamic_batch_enable", "add ds.packing_samples=true"),
    (SFT + "ds.zero_stage=0", "ds.zero_stage", "no fp32 master weights"),
    (SFT + "ds.param_dtype=fp32 ds.grad_accum_dtype=bf16", "ds.grad_accum_dtype", "write ds.grad_accum_dtype=fp32"),
    (SFT + "ds.zero_stage=1 ds.overlap_comm=true", "ds.overlap_comm", "ds.grad_accum_dtype=fp32 reduces after"),
    (
        SFT + "ds.zero_stage=0 ds.param_dtype=fp32 ds.overlap_comm=true",
        "ds.overlap_comm",
        "gradients are reduced after the backward pass",
    ),
    (
        SFT + TENSOR + "actor.num_gpus_per_node=2 ds.use_liger_kernel=true launch.device=cuda",
        "ds.use_liger_kernel",
        "split",
    ),
    (
        PPO + "rollout.batch_size=12 train.batch_size=12 train.colocate_all=true actor.num_nodes=2 "
        "actor.num_gpus_per_node=3 ref.num_nodes=2 ref.num_gpus_per_node=3 critic.num_nodes=2 "
        "critic.num_gpus_per_node=3 vllm.num_engines=3 vllm.tensor_parallel_size=2",
        "vllm.tensor_parallel_size",
        "an engine of 2 devices would be on two nodes of 3",
    ),
    (SFT + COMPILED + "launch.device=cpu", "ds.deepcompile", "DeepSpeed compiles for GPUs alone"),
    (SFT + COMPILED + "ds.zero_stage=0 ds.param_dtype=fp32", "ds.deepcompile", "ZeRO-1 to 3, but ds.zero_stage is 0"),
    (SFT + COMPILED + ALONE, "ds.deepcompile", "ZeRO-1 to 3, but ds.zero_stage is null"),
    (SFT + COMPILED + "ds.zero_stage=1", "ds.deepcompile", "does not compile ZeRO-1 with bf16"),
    (SFT + COMPILED + "ds.packing_samples=true", "ds.deepcompile", "write ds.packing_samples=false"),
    (SFT + COMPILED + "ds.overlap_comm=true", "ds.deepcompile", "write ds.overlap_comm=false"),
    (SFT + COMPILED + "ds.adam_offload=true", "ds.deepcompile", "write ds.adam_offload=false"),
    (SFT + COMPILED + "ds.lora.rank=8", "ds.deepcompile", "write ds.lora.rank=0"),
    (SFT + COMPILED + TENSOR + "actor.num_gpus_per_node=2", "ds.deepcompile", "write ds.tensor_parallel_size=1"),
    (SFT + COMPILED + "ds.zero_stage=3 ds.zpg=2", "ds.deepcompile", "write ds.zpg=1"),
    (SFT + COMPILED + "actor.optim=muon actor.max_norm=0", "ds.deepcompile", "write actor.optim=adam"),
    (
        PPO + COMPILED + "train.colocate_all=true ds.enable_sleep=true",
        "ds.deepcompile",
        "write ds.enable_sleep=false, or ds.deepcompile=false",
    ),
    (SFT + "actor.optim=muon", "actor.max_norm", "add actor.max_norm=0"),
    (SFT + FOUR_BITS + "ds.lora.rank=0", "ds.load_in_4bit", "add ds.lora.rank=<rank>"),
    (SFT + FOUR_BITS + "ds.zero_stage=3 ds.lora.rank=8", "ds.load_in_4bit", "write ds.zero_stage=2"),
    (SFT + "ds.use_liger_kernel=true launch.device=cpu", "ds.use_liger_kernel", "kernels need a GPU"),
    (DPO + "ref.offload=true launch.device=cpu", "ref.offload", "no GPU to bring the weights to"),
    (DPO + "ref.offload=true ds.lora.rank=8", "ref.offload", "the actor without its adapters"),
    (PPO + "algo.kl.init_coef=0.1 ds.lora.rank=8 ref.offload=true", "ref.offload", "the actor without its adapters"),
    (
        PPO + "algo.kl.init_coef=0.1 ds.lora.rank=8 ref.num_gpus_per_node=2",
        "ref.num_gpus_per_node",
        "on the actor's 1 rank, and asked for 2",
    ),
    (DPO + "ref.offload=true algo.loss=simpo", "ref.offload", "has no reference"),
    (DISTILL + "teacher.offload=true launch.device=cpu", "teacher.offload", "write teacher.offload=false"),
    (PPO + "reward.offload=true", "reward.offload", "add reward.model_name_or_path=<reward model>"),
    (SFT + "actor.freeze=[model.embed_tokens] ds.lora.rank=8", "actor.freeze", "choose with ds.lora.target_modules"),
    (PPO + "'critic.freeze=[\"*x\"]'", "critic.freeze", "is not a regular expression"),
    (
        SFT + "actor.aux_loss_coef=0.01 actor.gradient_checkpointing_enable=true "
        "actor.gradient_checkpointing_reentrant=true",
        "actor.gradient_checkpointing_reentrant",
        "keeps no gradient of the router",
    ),
    (SFT + "ds.attn_implementation=flash_attention_2 ds.param_dtype=fp32", "ds.attn_implementation", "fp32"),
    (SFT + "ds.attn_implementation=flash_attention_2 launch.device=cpu", "ds.attn_implementation", "GPU"),
    (
        SFT + "ds.attn_implementation=flash",
        "ds.attn_implementation",
        "there are varlen, sdpa, eager, flash_attention_2",
    ),
    (SFT + "ds.attn_implementation=sdpaa", "ds.attn_implementation", "did you mean ds.attn_implementation=sdpa"),
    (SFT + "ds.attn_implementation=flash_attention_3 launch.device=cuda", "ds.attn_implementation", "not installed"),
    (SFT + "ds.attn_implementation=kernels-community/flash-attn2", "ds.attn_implementation", "the package kernels"),
    (SFT + "ds.attn_implementation=kernels-community/x launch.device=cpu", "ds.attn_implementation", "GPU"),
    (SFT + "ds.zero3_leaf_modules=[Experts]", "ds.zero3_leaf_modules", "ds.zero_stage=3"),
    (SFT + "ds.use_universal_ckpt=true", "ds.use_universal_ckpt", "add ckpt.load_enable=true"),
    (SFT + "ckpt.reset_optimizer=true", "ckpt.reset_optimizer", "add ckpt.load_enable=true"),
    (SFT + "data.input_template=Q", "data.input_template", "must have one {}"),
    (SFT + "'data.input_template=\"{} and {}\"'", "data.input_template", "must have one {}"),
    (SFT + r"""'data.input_template="Q: {}\nA: "'""", "data.input_template", "a new line is meant"),
    (KTO + "data.prompt_key=p", "data.prompt_key", "add data.chosen_key=<column>"),
    (KTO + "data.chosen_key=chosen data.prompt_key=p", "data.rejected_key", "add data.rejected_key=rejected"),
    (KTO + "data.chosen_key=a data.rejected_key=b", "data.prompt_key", "the prompt of the pairs is not named"),
    (KTO + "data.chosen_key=a data.rejected_key=b data.prompt_key=p data.label_key=l", "data.label_key", "no effect"),
    (SFT + "data.tools_key=tools", "data.tools_key", "add data.apply_chat_template=true"),
    (
        SFT + "data.apply_chat_template=true data.chat_template_kwargs=[enable_thinking]",
        "data.chat_template_kwargs",
        "is not name:value",
    ),
    (
        SFT + "data.apply_chat_template=true data.chat_template_kwargs=[tools:true]",
        "data.chat_template_kwargs",
        "tools is given to the template by the suite",
    ),
    (SFT + "data.max_skipped_share=2", "data.max_skipped_share", "<= 1"),
    (SFT + "data.dataset=none/*.jsonl", "data.dataset", "no file matches none/*.jsonl"),
    (SFT + "data.tokenizer_chat_template=x", "data.tokenizer_chat_template", "or data.apply_chat_template=true"),
    (SFT + "eval.steps=5", "eval.dataset", "or eval.steps=-1"),
    (SFT + "train.early_stopping_patience=2", "eval.dataset", "or train.early_stopping_patience=null"),
    (
        SFT + "train.early_stopping_patience=2 ckpt.best_metric_key=none eval.dataset=builtin:reverse_eval",
        "ckpt.best_metric_key",
        "there is no metric",
    ),
    (SFT + "ckpt.best_metric_key=eval/loss", "eval.dataset", "or ckpt.best_metric_key=none"),
    (SFT + "data.multiturn=true", "data.multiturn", "add data.apply_chat_template=true"),
    (SFT + "actor.pretrain_mode_enable=true data.multiturn=true", "data.multiturn", "plain text"),
    (
        SFT + "actor.pretrain_mode_enable=true data.apply_chat_template=true",
        "data.apply_chat_template",
        "plain text",
    ),
    (PPO + "rollout.batch_size=100", "rollout.batch_size", "not a multiple of train.batch_size=128"),
    (PPO + "ref.num_gpus_per_node=3", "ref.num_gpus_per_node", "cannot be shared evenly by 3 ranks"),
    (
        PPO + "critic.num_gpus_per_node=4 train.micro_batch_size=64",
        "critic.num_gpus_per_node",
        "as many ranks as the actor",
    ),
    (PPO + "'critic.adam.betas=[0.9]'", "critic.adam.betas", "needs 2 values, not 1"),
    (PPO + "critic.optim=muon critic.max_norm=0 ds.lora.rank=8", "critic.optim", "write critic.optim=adam"),
    (PPO + "algo.advantage.estimator=rloo", "rollout.n_samples_per_prompt", "write rollout.n_samples_per_prompt=8"),
    (
        PPO + "experiment=grpo algo.advantage.gamma=0.9",
        "algo.advantage.gamma",
        "has no effect with algo.advantage.estimator=group_norm",
    ),
    (PPO + "experiment=reinforce algo.advantage.lambd=0.9", "algo.advantage.lambd", "has no effect"),
    (PPO + "experiment=rloo critic.adam.lr=1e-5", "critic.adam.lr", "has no effect with algo.advantage.estimator=rloo"),
    (
        PPO + "experiment=gspo actor.loss_agg_mode=token-mean",
        "actor.loss_agg_mode",
        "write actor.loss_agg_mode=seq-mean-token-mean",
    ),
    (PPO + "actor.policy_loss_type=gspo", "actor.loss_agg_mode", "the ratio of gspo is one of whole sequences"),
    (PPO + "actor.policy_loss_type=grpo", "actor.policy_loss_type", "write actor.policy_loss_type=ppo"),
    (PPO + "actor.policy_loss_type=sapo actor.eps_clip=0.1", "actor.eps_clip", "policy_loss_type=ppo, gspo, cispo"),
    (
        PPO + "actor.policy_loss_type=cispo actor.dual_clip=3",
        "actor.dual_clip",
        "policy_loss_type=ppo, gspo or clip_cov",
    ),
    (PPO + "actor.sapo_tau_neg=2", "actor.sapo_tau_neg", "add actor.policy_loss_type=sapo"),
    (
        PPO + "actor.loss_agg_mode=seq-mean",
        "actor.loss_agg_mode",
        "did you mean actor.loss_agg_mode=token-mean?",
    ),
    (PPO + "correction=tis algo.advantage.is_correction_level=seq", IS + "mode", "write " + IS + "mode=mask"),
    (PPO + "correction=tis " + IS + "gating=tv", IS + "mode", "write " + IS + "mode=mask"),
    (PPO + "correction=icepop " + IS + "gating=tv", IS + "threshold", "a divergence has no lower bound"),
    (PPO + "correction=icepop '" + IS + "threshold=[5,0.5]'", IS + "threshold", "low < high"),
    (PPO + "correction=icepop '" + IS + "threshold=[1,2,3]'", IS + "threshold", "low < high"),
    (PPO + "experiment=gspo correction=tis", IS + "level", "write " + IS + "level=geo"),
    (PPO + IS + "mode=clip", IS + "mode", "add " + IS + "level=token"),
    (PPO + "correction=tiss", "correction", "did you mean correction=tis?"),
    (SFT + "correction=tis", "correction", "does not fit this task"),
    (PPO + "algo.kl.unbiased_gradient=true", "algo.kl.unbiased_gradient", "add algo.kl.use_loss=true"),
    (PPO + "algo.dynamic_filtering_enable=true", "rollout.n_samples_per_prompt", "compares the samples"),
    (
        PPO + "experiment=grpo algo.dynamic_filtering_enable=true 'algo.dynamic_filtering_range=[1,0]'",
        "algo.dynamic_filtering_range",
        "low < high",
    ),
    (PPO + "algo.dynamic_filtering_min_std=0.1", "algo.dynamic_filtering_min_std", "dynamic_filtering_enable=true"),
    (PPO + ROUND + "=9", ROUND, "9 prompts is less than a step of rollout.batch_size=1024"),
    (PPO + ROUND + "=2048", ROUND, "up to 1 step old are trained on as if the policy had written them"),
    (ASYNC + ROUND + "=3072 correction=tis", ROUND, "write train.async_queue_size=2 or more"),
    (ASYNC + ROUND + "=2048 correction=tis train.async_queue_size=0", ROUND, "trained 1 step after the first ones"),
    (STREAM + ROUND + "=2048", ROUND, "write 1024 or less, or train.async_queue_size=2"),
    (PPO + "critic.freezing_steps=5 train.max_steps=5", "critic.freezing_steps", "leaves no step of train.max_steps=5"),
    (PPO + "experiment=rloo critic.freezing_steps=5", "critic.freezing_steps", "has no effect"),
    (PPO + "critic.freezing_steps=-1", "critic.freezing_steps", "is not >= 0"),
    (
        PPO + "reward.overlong_buffer_len=512 rollout.max_new_tokens=512",
        "reward.overlong_buffer_len",
        "would penalise every response",
    ),
    (PPO + "reward.overlong_penalty_factor=2", "reward.overlong_penalty_factor", "add reward.overlong_buffer_len"),
    (PPO + "reward.stop_properly_penalty_coef=1.5", "reward.stop_properly_penalty_coef", "is not <= 1"),
    (PPO + "train.ema_beta=0.9", "train.ema_beta", "add train.enable_ema=true"),
    (PPO + "train.enable_ema=true ds.zero_stage=3 ds.zpg=2", "train.enable_ema", "write ds.zpg=1"),
    (SFT + "train.enable_ema=true", "train.enable_ema", "it belongs to task=ppo"),
    (PPO + "experiment=rloo algo.advantage.estimator=opo rollout.n_samples_per_prompt=1", N, "there is only one"),
    (PPO + "experiment=rloo algo.advantage.estimator=remax algo.advantage.gamma=0.9", "algo.advantage.gamma", "has no"),
    (PPO + "reward.rule=null", "reward", "nothing scores the samples"),
    (PPO + "reward.model_name_or_path=rm", "reward", "several sources"),
    (PPO + "reward.rule=null reward.remote_url=none.py", "reward.remote_url", "is not a Python file"),
    (PPO + "reward.rule=null reward.remote_url=http:///score", "reward.remote_url", "http:///score is not a URL"),
    (PPO + "reward.rule=null 'reward.remote_url=\"http://a/s,b/s\"'", "reward.remote_url", "b/s is not a URL"),
    (PPO + "reward.rule=null reward.remote_url=http://a:abc/s", "reward.remote_url", "a number from 1 to 65535"),
    (PPO + "reward.rule=null reward.remote_url=http://a:99999/s", "reward.remote_url", "a number from 1 to 65535"),
    (PPO + "reward.rule=null reward.remote_url=http://a:0/s", "reward.remote_url", "a number from 1 to 65535"),
    (PPO + "reward.rule=null 'reward.remote_url=\"http://[::1/s\"'", "reward.remote_url", "is not a URL"),
    (PPO + "reward.rule=null 'reward.remote_url=\"http://a b/s\"'", "reward.remote_url", "is not a URL"),
    (PPO + "reward.rule=null reward.remote_url=http://me:pw@host/s", "reward.remote_url", "RLHF_SUITE_REWARD_TOKEN"),
    (PPO + "reward.http.batch_size=4", "reward.http.batch_size", "has no effect"),
    (PPO + "reward.max_error_rate=0.1", "reward.max_error_rate", "add reward.on_error=drop"),
    (PPO + "data.label_key=null", "data.label_key", "compares with a label"),
    (sources("{a: {rule: maths}}"), "reward.sources.a.rule", "did you mean rule: math?"),
    (sources("{a: {rule: math, weight: -1}}"), "reward.sources.a.weight", "is not >= 0"),
    (sources("{a: {rule: math, wait: 1}}"), "reward.sources", "Key 'wait' not in 'NamedSourceConfig'"),
    (sources("{a: {weight: 1}}"), "reward.sources.a", "nothing scores the samples"),
    (sources("{a: {rule: math, remote_url: http://b/c}}"), "reward.sources.a", "several sources"),
    (sources("{a: {remote_url: none.py}}"), "reward.sources.a.remote_url", "is not a Python file"),
    (sources("{a: {rule: math, weight: 0}}"), "reward.sources", "every weight is 0"),
    (sources("{a: {rule: math, best_of: c}, b: {rule: length}}"), "reward.sources.a.best_of", "no other source has"),
    (sources("{a: {rule: math}}") + "reward.reward_key=b/c", "reward.reward_key", "sources: a"),
    (sources("{a: {rule: math}, b: {rule: math, weight: 0}}") + "reward.reward_key=b", "reward.reward_key", "above 0"),
    (
        PPO.replace("reward.rule=exact_match", "reward.model_name_or_path=rm") + "reward.reward_key=a",
        "reward.reward_key",
        "gives one number without a name",
    ),
    (PPO + "reward.combine=mean", "reward.combine", "sum"),
    (sources("{a/b: {rule: math}}"), "reward.sources", "use only letters, digits"),
    (sources("{a: {rule: math}}") + "reward.rule=math", "reward.sources", "would be the only sources"),
    (sources("math"), "reward.sources", "is not a {name: {rule,"),
    (PPO + "reward.rules.code_timeout_s=3", "reward.rules.code_timeout_s", "has no effect"),
    (
        "task=ppo actor.model_name_or_path=builtin:tiny data.prompt_dataset=builtin:reverse reward.rule=format "
        "'reward.rules.format_pattern=\"(\"'",
        "reward.rules.format_pattern",
        "is not a regular expression",
    ),
    ("task=serve_rm", "reward.model_name_or_path", "no model is named"),
    (SERVE + "ds.attn_implementation=sdpa", "ds.attn_implementation", "write ds.attn_implementation=varlen"),
    (SERVE + "serve.port=70000", "serve.port", "<= 65535"),
    (SERVE + "train.seed=1", "train.seed", "it belongs to task="),
    (PPO + "reward.normalize_enable=true", "reward.normalize_enable", "name reward.model_name_or_path"),
    (SERVE + "reward.normalize_mean_only=true", "reward.normalize_mean_only", "add reward.normalize_enable=true"),
    (PPO + "'algo.advantage.clip_range=[1,5]'", "algo.advantage.clip_range", "signs would change"),
    (PPO + "'algo.advantage.clip_range=[0,0]'", "algo.advantage.clip_range", "not [low, high]"),
    (PPO + "'algo.advantage.clip_range=[5]'", "algo.advantage.clip_range", "not [low, high]"),
    (GDPO, "algo.advantage.reward_parts", "none is named"),
    (
        sources("{a:{rule:length},b:{rule:answer_tags}}") + GDPO_FLAGS,
        PARTS,
        "write 'algo.advantage.reward_parts=[a/mean,b/mean]'",
    ),
    (GDPO + f"'{PARTS}=[x,x]'", PARTS, "x,x names one twice"),
    (
        GDPO + f"'{PARTS}=[x]' reward.overlong_buffer_len=4",
        PARTS,
        "write 'algo.advantage.reward_parts=[x,overlong_penalty]'",
    ),
    (GDPO + f"'{PARTS}=[x,y]' 'algo.advantage.reward_part_weights=[1]'", "algo.advantage.reward_part_weights", "[1,1]"),
    (GDPO + f"'{PARTS}=[x]' 'algo.advantage.reward_part_weights=[0]'", "algo.advantage.reward_part_weights", "above 0"),
    (GDPO.replace("gdpo", "rloo") + f"'{PARTS}=[x]'", PARTS, "add algo.advantage.estimator=gdpo"),
    (PPO + "experiment=maxrl reward.overlong_buffer_len=4", "reward.overlong_buffer_len", "makes rewards negative"),
    (
        PPO + "experiment=maxrl reward.stop_properly_penalty_coef=-1",
        "reward.stop_properly_penalty_coef",
        "-1 replaces rewards",
    ),
    (PPO + "actor.dppo_tv_max=1.5", "actor.dppo_tv_max", "> 0 and <= 1"),
    (PPO + "experiment=dppo actor.dppo_kl_max=0.1", "actor.dppo_kl_max", "add actor.policy_loss_type=dppo_kl"),
    (PPO + "experiment=dppo actor.eps_clip=0.3", "actor.eps_clip", "has no effect"),
    (PPO + "experiment=clip_cov 'actor.clip_cov_range=[5,1]'", "actor.clip_cov_range", "[5.0, 1.0] is not [low, high]"),
    (PPO + "experiment=clip_cov actor.kl_cov_coef=2", "actor.kl_cov_coef", "add actor.policy_loss_type=kl_cov"),
    (
        PPO + "experiment=kl_cov rollout.batch_size=4 train.batch_size=32",
        "actor.policy_loss_type",
        "a single optimiser step has not moved",
    ),
    (PPO + "actor.entropy_target=1", "actor.entropy_target", "add actor.entropy_coef=0"),
    (PPO + "actor.entropy_coef=0 actor.entropy_coef_step=0.1", "actor.entropy_coef_step", "actor.entropy_target"),
    (PPO + "actor.entropy_coef=2 actor.entropy_target=1", "actor.entropy_coef_max", "write actor.entropy_coef_max=4"),
    (PPO + "experiment=pkpo algo.advantage.pass_k=9", "algo.advantage.pass_k", "9 of 8 samples"),
    (PPO + "algo.advantage.pass_k=2", "algo.advantage.pass_k", "add algo.advantage.estimator=pkpo"),
    (
        PPO + "algo.advantage.estimator=rloo rollout.n_samples_per_prompt=2 critic.value_clip_high=1",
        "critic.value_clip_high",
        "algo.advantage.estimator",
    ),
    (PPO + "critic.value_clip_high=0", "critic.value_clip_high", "> 0"),
    (PPO + "'reward.clip_range=[1,-1]'", "reward.clip_range", "low < high"),
    (PPO + "'reward.clip_range=[1]'", "reward.clip_range", "low < high"),
    (PPO + "'actor.eps_clip_low_high=[0.2]'", "actor.eps_clip_low_high", "not [low, high]"),
    (PPO + "data.prompt_dataset=null", "data.prompt_dataset", "no data is named"),
    (
        PPO + """'eval.dataset="builtin:reverse_eval,builtin:sort_eval"' eval.steps=1 'eval.label_key=[a,b,c]'""",
        "eval.label_key",
        "3 columns for 2 sources",
    ),
    (SFT + "'eval.input_key=[question]'", "eval.input_key", "add eval.dataset=<source>"),
    (PPO + "rollout.max_new_tokens=2048", "rollout.max_new_tokens", "leaves no room for a prompt"),
    (PPO + "actor.ptx_coef=0.1", "actor.ptx_coef", "add data.pretrain_dataset=<source>"),
    (PPO + "data.pretrain_key=body", "data.pretrain_key", "add data.pretrain_dataset=<source>"),
    (PPO + "data.pretrain_dataset=nowhere.jsonl", "data.pretrain_dataset", "nowhere.jsonl"),
    (PPO + "rollout.top_p=0.9", "rollout.top_p", "write rollout.top_p=1.0"),
    (PPO + "rollout.top_k=50", "rollout.top_k", "write rollout.top_k=-1"),
    (PPO + "rollout.min_p=0.1", "rollout.min_p", "or correct for it (correction=tis)"),
    (PPO + "rollout.repetition_penalty=1.2", "rollout.repetition_penalty", "1.2 changes what is sampled"),
    (PPO + "rollout.top_p=0.9 algo.mismatch_max=1", "rollout.top_p", "or correct for it (correction=tis)"),
    (PPO + "train.colocate_all=true vllm.num_engines=2", "train.colocate_all", "actor 1, critic 1, ref 1, vllm 2"),
    (PPO + "train.colocate_actor_ref=true ref.num_gpus_per_node=2", "train.colocate_actor_ref", "actor 1, ref 2"),
    (
        PPO + "train.colocate_critic_reward=true reward.rule=null reward.model_name_or_path=rm critic.num_nodes=2",
        "train.colocate_critic_reward",
        "critic 2, reward 1",
    ),
    (
        PPO + "train.colocate_all=true vllm.tensor_parallel_size=2 vllm.pipeline_parallel_size=2",
        "train.colocate_all",
        "actor 1, critic 1, ref 1, vllm 4",
    ),
    (PPO + "vllm.sync_backend=nccl train.colocate_all=true", "vllm.sync_backend", "on the same GPU"),
    (PPO + "vllm.enable_sleep=true", "vllm.enable_sleep", "or train.colocate_all=true"),
    (PPO + "vllm.enable_sleep=true", "vllm.enable_sleep", "an engine that shares no GPU has no reason to sleep"),
    (
        PPO + "reward.rule=null reward.remote_url=http://localhost:1 reward.rules.length_limit=5",
        "reward.rules.length_limit",
        "reward.rule=length",
    ),
    (PPO + "vllm.sync_backend=ipc", "vllm.sync_backend", "same GPU"),
    (PPO + "vllm.sync_backend=nccl launch.device=cpu", "vllm.sync_backend", "needs GPUs"),
    (PPO + "algo.kl.init_coef=0 algo.kl.target=0.1", "algo.kl.target", "write algo.kl.target=null"),
    (PPO + "algo.kl.init_coef=0 algo.kl.target=0.1", "algo.kl.target", "no KL to control"),
    (PPO + "algo.kl.init_coef=0 algo.kl.use_loss=true", "algo.kl.use_loss", "no KL to make a loss of"),
    (PPO + "algo.kl.init_coef=0 algo.kl.use_loss=true", "algo.kl.use_loss", "has no effect with algo.kl.init_coef=0"),
    (PPO + "ds.lora.rank=4 ds.lora.dropout=0.1", "ds.lora.dropout", "the one that sampled"),
    (PPO + "algo.kl.use_loss=true", "algo.kl.estimator", "write algo.kl.estimator=k3"),
    (PPO + "algo.kl.target=0.1 algo.kl.horizon=100", "algo.kl.horizon", "could fall to 0"),
    (PPO + "algo.distill.coef=1", "teacher.model_name_or_path", "add teacher.model_name_or_path=<HF folder"),
    (PPO + "algo.advantage.estimator=on_policy_distill", "algo.distill.coef", "write algo.distill.coef=1"),
    (PPO + OPD + FILTERED, "algo.dynamic_filtering_enable", "write algo.dynamic_filtering_enable=false"),
    (PPO + OPD + "teacher.num_gpus_per_node=3", "teacher.num_gpus_per_node", "cannot be shared evenly by 3 ranks"),
    (PPO + OPD + "teacher.model_name_or_path=/no/model", "teacher.model_name_or_path", "does not exist"),
    (PPO + OPD + "reward.rule=null eval.dataset=builtin:reverse_eval eval.steps=1", "reward", "or eval.dataset=null"),
    (PPO + "reward=prn", "reward", "did you mean reward=prm?"),
    (PPO + "reward=prm reward.rule=null", "reward.process.model_name_or_path", "folder that task=prm wrote"),
    (PPO + "reward.process.enable=true reward.process.model_name_or_path=prm", "reward", "several sources"),
    (
        PPO + PROCESS + "reward.process.aggregate=max",
        "reward.process.aggregate",
        "not one of min, product",
    ),
    (PPO + PROCESS + "reward.process.num_nodes=3", "reward.process.num_gpus_per_node", "evenly by 3 ranks"),
    (PPO + PROCESS.replace("path=prm", "path=/no/prm"), "reward.process.model_name_or_path", "does not exist"),
    # the supervised and preference tasks
    ("task=rm actor.model_name_or_path=builtin:tiny", "data.dataset", "no data is named"),
    (RM + "data.input_key=prompt", "data.input_key", "it belongs to"),
    (RM + "algo.beta=0.1", "algo.beta", "it belongs to task=dpo"),
    (RM + "algo.loss=sigmod", "algo.loss", "did you mean algo.loss=sigmoid?"),
    (RM + "algo.loss=logexp data.margin_key=margin", "data.margin_key", "has no effect with algo.loss=logexp"),
    (RM + "algo.loss=logexp data.margin_key=margin", "data.margin_key", "this loss takes no margins"),
    (RM + "train.max_tokens_per_gpu=1000 " + DYNAMIC, "train.max_tokens_per_gpu", "the 2 sequences of a row"),
    (RM + "actor.pretrain_mode_enable=true", "actor.pretrain_mode_enable", "it belongs to task=sft"),
    (DPO + "algo.loss=ipo algo.label_smoothing=0.1", "algo.label_smoothing", "write algo.label_smoothing=0"),
    (DPO + "algo.label_smoothing=0.5", "algo.label_smoothing", "is not < 0.5"),
    (DPO + "algo.loss=orpo", "algo.nll_loss_coef", "write algo.nll_loss_coef=1"),
    (DPO + "algo.loss=simpo ref.cache_enable=true", "ref.cache_enable", "has no reference"),
    (DPO + "algo.loss=simpo ref.model_name_or_path=x", "ref.model_name_or_path", "has no reference"),
    (DPO + "algo.simpo_gamma=1", "algo.simpo_gamma", "add algo.loss=simpo"),
    (DPO + "ref.model_name_or_path=/no/model", "ref.model_name_or_path", "does not exist"),
    (DPO + "algo.beta=0", "algo.beta", "is not > 0"),
    (DPO + "beta=0.2", "beta", "renamed to algo.beta"),
    (DPO + "data.margin_key=margin", "data.margin_key", "it belongs to task=rm"),
    (DPO + "vllm.num_engines=2", "vllm.num_engines", "it belongs to task=ppo"),
    (KTO + "algo.loss=vanila", "algo.loss", "did you mean algo.loss=vanilla?"),
    (KTO + "data.margin_key=margin", "data.margin_key", "it belongs to"),
    (KTO + "algo.label_smoothing=0.1", "algo.label_smoothing", "it belongs to task=dpo"),
    (KTO + "algo.desirable_loss_weight=-1", "algo.desirable_loss_weight", "is not >= 0"),
    (KTO + "data.label_key=null", "data.label_key", "is not a str"),
    (PRM + "'algo.reward_tokens=[good]'", "algo.reward_tokens", "two or more tokens"),
    (PRM + "'algo.reward_tokens=[good,good]'", "algo.reward_tokens", "two or more tokens"),
    (PRM + "algo.reward_tokens=good", "algo.reward_tokens", "write 'algo.reward_tokens=[good]'"),
    (PRM + "data.output_key=output", "data.output_key", "it belongs to"),
    (PRM + "ref.cache_enable=true", "ref.cache_enable", "it belongs to"),
    (DISTILL + "teacher.model_name_or_path=null", "teacher.model_name_or_path", "no teacher is named"),
    (DISTILL + "teacher.model_name_or_path=/no/model", "teacher.model_name_or_path", "does not exist"),
    (DISTILL + "algo.kd_coef=1.5", "algo.kd_coef", ">= 0 and <= 1"),
    (DISTILL + "algo.divergence=reverse", "algo.divergence", "did you mean algo.divergence=reverse_kl?"),
    (DISTILL + "algo.top_k=0", "algo.top_k", "is not >= 1"),
    (DISTILL + "data.multiturn=true", "data.multiturn", "add data.apply_chat_template=true"),
    (DISTILL + "teacher_model=x", "teacher_model", "renamed to teacher.model_name_or_path"),
    ("task=generate actor.model_name_or_path=x", "data.prompt_dataset", "no data is named"),
    (GENERATE + "actor.adam.lr=1", "actor.adam.lr", "it belongs to"),
    (GENERATE + "vllm.sync_check=off", "vllm.sync_check", "it belongs to task=ppo"),
    (GENERATE + "output_path=x.jsonl", "output_path", "renamed to generate.output_path"),
    (GENERATE + "generate.output_path=x.csv", "generate.output_path", "write generate.output_path=x.jsonl"),
    (GENERATE + f"generate.output_path={WRITTEN}", "generate.output_path", "exists already"),
    (GENERATE + "generate.shard=4/4", "generate.shard", "write generate.shard=0/4"),
    (GENERATE + "generate.shard=first", "generate.shard", "is not i/n"),
    (GENERATE + "generate.best_of_n=true rollout.n_samples_per_prompt=4", "generate.best_of_n", "nothing scores"),
    (
        GENERATE + "generate.best_of_n=true reward.rule=math data.label_key=label",
        "generate.best_of_n",
        "write rollout.n_samples_per_prompt=8",
    ),
    (GENERATE + "reward.rule=math", "data.label_key", "compares with a label"),
    (GENERATE + "reward.model_name_or_path=rm", "reward.model_name_or_path", "servers only"),
    (
        GENERATE + "rollout.temperature=0 rollout.n_samples_per_prompt=2",
        "rollout.n_samples_per_prompt",
        "would all be the same",
    ),
    (GENERATE + "rollout.max_new_tokens=2048", "rollout.max_new_tokens", "no room for a prompt"),
    # loops: every stage is checked before the first one starts, in the names of the loop's flags
    (REJECTION + "train.batch_size=100", "train.batch_size", "100 is not a multiple of train.micro_batch_size"),
    (REJECTION + "data.input_template=Q", "data.input_template", "must have one {}"),
    (REJECTION + "eval.dataset=nowhere.jsonl", "eval.dataset", "there is no file nowhere.jsonl"),
    (REJECTION + "data.prompt_dataset=nowhere.jsonl", "data.prompt_dataset", "there is no file nowhere.jsonl"),
    (REJECTION + "rollout.max_new_tokens=3000", "rollout.max_new_tokens", "leaves no room for a prompt"),
    (REJECTION + "rollout.temperature=0", "rollout.n_samples_per_prompt", "would all be the same"),
    (REJECTION + "rollout.n_samples_per_prompt=1", "rollout.n_samples_per_prompt", "none can be better"),
    (REJECTION + "reward.rule=null", "reward", "nothing scores the samples"),
    (REJECTION + "reward.model_name_or_path=org/rm", "reward", "several sources"),
    (
        REJECTION + "reward.rule=null reward.model_name_or_path=/no/model",
        "reward.model_name_or_path",
        "the folder /no/model does not exist",
    ),
    (REJECTION + "ds.zero_stage=0", "ds.zero_stage", "keeps no fp32 master weights"),
    (REJECTION + "ckpt.path=x", "ckpt.path", "it belongs to task=sft"),
    (REJECTION + "algo.beta=1", "algo.beta", "it belongs to task=dpo"),
    (REJECTION + "eval.split=test", "eval.split", "add eval.dataset=<source>"),
    (ITERATIVE + "algo.loss=ipo algo.label_smoothing=0.1", "algo.label_smoothing", "has no effect with algo.loss=ipo"),
    (ITERATIVE + "algo.loss=simpo ref.cache_enable=true", "ref.cache_enable", "has no reference"),
    (
        ITERATIVE + "algo.loss=simpo loop.fixed_reference_enable=true",
        "loop.fixed_reference_enable",
        "algo.loss=simpo: this loss has no reference",
    ),
    (
        ITERATIVE + "ref.model_name_or_path=org/x loop.fixed_reference_enable=true",
        "loop.fixed_reference_enable",
        "the reference is already named",
    ),
    ("task=score demo=score data.dataset=null", "data.dataset", "no data is named"),
    (SCORE, "reward", "nothing scores"),
    (SCORE + "reward.rule=math", "data.label_key", "compares with a label"),
    (SCORE + "reward.model_name_or_path=/no/model", "reward.model_name_or_path", "does not exist"),
    (SCORE + "reward.model_name_or_path=rm data.max_len=20000", "score.max_tokens_per_gpu", "20000 or more"),
    (SFT + "data.cache_max_gb=1 data.cache_enable=false", "data.cache_max_gb", "has no effect with"),
    (SCORE + "reward.model_name_or_path=rm reward.num_retries=2", "reward.num_retries", "add reward.rule=<name> or"),
    (SCORE + "reward.rule=format score.max_tokens_per_gpu=9000", "score.max_tokens_per_gpu", "has no effect with"),
    (
        SCORE + "reward.remote_url=http://x score.pairs=true score.best_of_n=true",
        "score.best_of_n",
        "contains the best",
    ),
    (SCORE + "reward.remote_url=http://x score.output_path=x.csv", "score.output_path", "score.output_path=x.jsonl"),
    (SCORE + "reward.remote_url=http://x score.shard=0", "score.shard", "write score.shard=0/4"),
    (CONDITIONAL + "'data.reward_template=\"{prompt}\"'", "data.reward_template", "once and a {reward}"),
    (GENERATE + "data.reward_template=x", "data.reward_template", "add data.target_reward=<number>"),
    (GENERATE + "data.reward_template=x data.target_reward=1", "data.reward_template", "once and a {reward}"),
    (SCORE + "reward=prm", "reward.process.model_name_or_path", "folder that task=prm wrote"),
    (SCORE + "reward.model_name_or_path=rm reward.offload=true", "reward.offload", "write reward.offload=false"),
    ("task=check_reward demo=check_reward data.dataset=null", "data.dataset", "no data is named"),
    (CHECK + "data.label_key=output", "reward", "nothing scores"),
    (CHECK + "reward.rule=math data.output_key=output", "data.label_key", "compares with a label"),
    (CHECK + "reward.rule=length", "data.output_key", "there is nothing to score"),
    (CHECK + "reward.rule=code data.label_key=output", "data.output_key", "contains tests, which are not an answer"),
    (CHECK + "data.output_key=output reward.model_name_or_path=rm", "reward.model_name_or_path", "use task=score"),
    (CHECK + "data.output_key=output reward.on_error=drop", "reward.on_error", "it belongs to task="),
    (
        CHECK + "data.output_key=output 'reward.sources={a: {model_name_or_path: rm}}'",
        "reward.sources.a",
        "serve it with task=serve_rm",
    ),
    # flags that would do nothing
    (PPO + "reward.process.aggregate=mean", "reward.process.aggregate", "add reward.process.enable=true"),
    (PPO + "teacher.model_name_or_path=x", "teacher.model_name_or_path", "add algo.distill.coef=<number > 0>"),
    (PPO + "algo.kl.init_coef=0 ref.num_nodes=2", "ref.num_nodes", "has no effect with algo.kl.init_coef=0"),
    (SFT + "actor.muon.lr=0.01", "actor.muon.lr", "add actor.optim=muon"),
    (SFT + "actor.lr_scheduler=linear actor.min_lr_ratio=0.2", "actor.min_lr_ratio", "has no effect"),
    (SFT + "ds.lora.alpha=32", "ds.lora.alpha", "add ds.lora.rank=<rank>"),
    (SFT + "logger.wandb.project=p", "logger.wandb.project", "add logger.wandb.enable=true"),
    # sweeps: every job is checked before the first one starts
    ("-m " + PPO + "algo.kl.estimator=k1,k2,k4", "algo.kl.estimator", "'k4' is not one of k1, k2, k3"),
    ("-m " + PPO + "actor.adam.lr=1e-6,fast", "actor.adam.lr", "'fast' is not a float"),
    (SLURM + "hydra.launcher.nodes=2 " + ITERATIVE, "hydra.launcher.nodes", "run the stages one by one"),
    (SLURM + "hydra.launcher.nodes=2 " + SFT, "hydra.launcher.nodes", "write hydra.launcher.nodes=1"),
    ("-m " + PPO + "experiment=grpo,grp", "experiment", "there is no preset experiment/grp"),
    ("-m " + SFT + "train.batch_size=128,100", "train.batch_size", "100 is not a multiple"),
]


# The flags whose remedy leads to a second mistake, which only the user can correct: two tokens are needed, or a
# correction for rollouts by older weights.
SECOND_MISTAKE = ("algo.reward_tokens", "train.async_queue_size", "train.partial_rollout_enable")


each_mistake = pytest.mark.parametrize(
    ("line", "key", "words"), MISTAKES, ids=[f"{i}-{row[1]}" for i, row in enumerate(MISTAKES)]
)


@pytest.mark.notices(
    "a bound that is excluded is allowed",
    "config/formatting.py",
    "value > bound",
    "value >= bound",
    cases="algo.beta",
)
@pytest.mark.notices(
    "the name least like a misspelt one is offered",
    "config/formatting.py",
    "key=lambda pair: -pair[0])",
    "key=lambda pair: pair[0])",
)
@pytest.mark.notices(
    "the next multiple is the one before",
    "config/formatting.py",
    "-(-number // factor) * factor",
    "number // factor * factor",
    cases="batch_size",
)
@pytest.mark.notices(
    "the CPU is taken to compile graphs",
    "config/rules/zero.py",
    'if run.launch.device == "cpu":',
    'if run.launch.device == "cuda":',
    cases="deepcompile",
)
@pytest.mark.notices(
    "problems that are told twice stay twice",
    "config/problems.py",
    "return list(dict.fromkeys(problems))",
    "return list(problems)",
)
@each_mistake
def test_a_mistake_is_one_problem(checked, line, key, words):
    (problem,) = checked(line).problems
    assert problem.key == key
    assert words in f"{problem.what} {problem.fix}"


@pytest.mark.stack
@each_mistake
def test_the_remedy_of_a_mistake_is_accepted_and_removes_it(checked, line, key, words):
    """What a concrete remedy says to write."""
    (problem,) = checked(line).problems
    word = advised(problem.fix)
    after = checked(applied(line, key, word)).problems if word else []
    assert problem not in after, word
    if word and key not in (*SECOND_MISTAKE, *group_names()):
        assert word.partition("=")[0] not in {each.key for each in after}, (word, after)


def test_a_package_that_is_not_there_is_named(checked, monkeypatch):
    monkeypatch.setattr("rlhf_suite.config.rules.models.find_spec", lambda _: None)
    for line, key, extra in (
        (SFT + FOUR_BITS + "ds.lora.rank=8", "ds.load_in_4bit", "qlora"),
        (CHAT + FOUR_BITS, "ds.load_in_4bit", "qlora"),
        (SERVE + FOUR_BITS, "ds.load_in_4bit", "qlora"),
        (SFT + "ds.use_liger_kernel=true", "ds.use_liger_kernel", "liger"),
    ):
        (problem,) = checked(line).problems
        assert problem.key == key and f"pip install 'rlhf-suite[{extra}]'" in problem.fix


def test_a_missing_package_of_a_source_and_of_its_rule_is_named_with_its_flag(checked, monkeypatch):
    monkeypatch.setattr("rlhf_suite.config.sources.find_spec", lambda _: None)
    for line, key in (
        (SFT + "data.dataset=reasoning_gym:chain_sum", "data.dataset"),
        (PPO + "data.prompt_dataset=reasoning_gym:chain_sum", "data.prompt_dataset"),
        (PPO + "reward.rule=reasoning_gym", "reward.rule"),
        (sources("{sums: {rule: reasoning_gym}}"), "reward.sources.sums.rule"),
    ):
        (problem,) = checked(line).problems
        assert problem.key == key and "pip install 'rlhf-suite[gym]'" in problem.fix


def test_all_mistakes_are_told_at_once(checked):
    line = PPO + "algo.advantage.lambda=1 actor.num_nodes=x algo.kl.estimator=k9 rollout.top_p=0.9 pretrain=y +a.b=1"
    found = {each.key for each in checked(line).problems}
    assert found == {
        "algo.advantage.lambda",
        "actor.num_nodes",
        "algo.kl.estimator",
        "rollout.top_p",
        "pretrain",
        "a.b",
    }


def test_a_misspelt_flag_is_not_told_again_as_missing(checked):
    problems = checked("task=sft actor.model_name_or_pth=builtin:tiny data.datasett=builtin:reverse").problems
    assert [each.key for each in problems] == ["actor.model_name_or_pth", "data.datasett"]


def test_a_key_is_never_shown(checked):
    for word in (
        "logger.wandb.key=s3cret",
        "use_wandb=s3cret",
        "logger.wandb.key=s3=cret",
        "--logger.wandb.key s3cret",
    ):
        assert "s3" not in "".join(map(str, checked(f"task=sft {word}").problems)), word
