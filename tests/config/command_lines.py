"""Beginnings of command lines, one for each task, and parts of them."""

from __future__ import annotations

from pathlib import Path

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
RING, PACKED, FLASH = "ds.ring_attn_size=2 ", "ds.packing_samples=true ", "ds.attn_implementation=flash_attention_2 "
COMPILED = "ds.deepcompile=true "
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
