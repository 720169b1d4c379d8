"""The three ways in which OpenRLHF's README starts PPO pass the checks here, and share devices as they do there."""

from __future__ import annotations

import json
import shlex

import pytest

from rlhf_suite.cli.app import main

COMMON = """
    --actor.num_nodes 1 --actor.num_gpus_per_node 8 --ref.num_nodes 1 --ref.num_gpus_per_node 8 --vllm.num_engines 4
    --vllm.tensor_parallel_size 2 --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture
    --data.prompt_dataset OpenRLHF/prompt-collection-v0.1 --data.input_key context_messages --data.apply_chat_template
    --data.max_len 2048 --data.max_samples 100000 --train.batch_size 128 --rollout.batch_size 1024 --ds.zero_stage 3
    --ds.param_dtype bf16 --ds.packing_samples --actor.adam.lr 5e-7 --actor.gradient_checkpointing_enable
    --algo.kl.init_coef 0.01 --vllm.sync_backend nccl --vllm.enforce_eager
"""
JUDGED = (
    "--reward.model_name_or_path OpenRLHF/Llama-3-8b-rm-700k --reward.num_gpus_per_node 8 --reward.normalize_enable"
)
TRAINED_VALUES = "--critic.num_nodes 1 --critic.num_gpus_per_node 8 --critic.adam.lr 9e-6"
WAYS = {
    "hybrid": (
        f"{JUDGED} {TRAINED_VALUES} --train.colocate_all --vllm.gpu_memory_utilization 0.5 --vllm.enable_sleep "
        "--ds.enable_sleep --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 "
        "--algo.advantage.is_correction_enable",
        ["8 actor, 4 engine x 2 devices, 8 critic, 8 ref, 8 reward (sharing)"],
        "ipc",
    ),
    "separate": (
        f"{JUDGED} {TRAINED_VALUES} --train.colocate_critic_reward --train.colocate_actor_ref --ds.adam_offload",
        ["8 actor, 8 ref (sharing)", "8 critic, 8 reward (sharing)", "4 engine x 2 devices"],
        "nccl",
    ),
    "async": (
        f"{JUDGED} --algo.advantage.estimator reinforce_baseline --rollout.n_samples_per_prompt 8 "
        "--algo.kl.use_loss --algo.kl.estimator k2 --train.async_enable --train.colocate_all",
        ["8 actor, 8 ref (sharing)", "4 engine x 2 devices", "8 reward"],
        "nccl",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_command_of_the_readme_passes_the_checks(way, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    more, placed, sync = WAYS[way]
    assert main(["migrate", f"python3 -m openrlhf.cli.train_ppo_ray {COMMON} {more}".replace("\n", " ")]) == 0
    printed = capsys.readouterr().out
    assert "TO DO" not in printed and "LOST" not in printed
    (command,) = [line for line in printed.replace("\\\n", "").splitlines() if line and not line.startswith("#")]
    cluster = ["launch.device=cuda", "launch.ray_address=auto", "explain=true"]
    assert main([*shlex.split(command)[2:], *cluster]) == 0
    shown = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    assert [row[1] for row in cells if row[0] == "GPU"] == placed
    assert ["weight sync", "vllm.sync_backend=auto", sync] in cells


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "tie_word_embeddings": False,
}


@pytest.mark.proof
def test_the_hybrid_command_of_the_readme_fits_by_the_plan(capsys, tmp_path):
    """Of the folder that stands for the models only config.json is read."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    command = f"python3 -m openrlhf.cli.train_ppo_ray {COMMON} {WAYS['hybrid'][0]}".replace("\n", " ")
    for name in ("sft-mixture", "rm-700k"):
        command = command.replace(f"OpenRLHF/Llama-3-8b-{name}", str(tmp_path))
    assert main(["migrate", command]) == 0
    (words,) = [line for line in capsys.readouterr().out.replace("\\\n", "").splitlines() if line.startswith("python")]
    words = words.replace("OpenRLHF/prompt-collection-v0.1", "builtin:arithmetic").replace(
        "data.input_key=context_messages", ""
    )
    assert {"ds.zero_stage=3", "ds.enable_sleep=true", "vllm.enable_sleep=true"} <= {*words.split()}
    assert main(["plan", "--gpu", "h100-80", *shlex.split(words)[2:]]) == 0
    shown = capsys.readouterr().out
    assert "8 x GPU: actor, engine, critic, ref, reward (sharing)" in shown and "It fits." in shown
