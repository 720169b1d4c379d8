"""Flags of OpenRLHF become words of this suite, remarks, or lost ones: none is passed over in silence."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from rlhf_suite.cli.app import main
from rlhf_suite.migrate.convert import migrate
from rlhf_suite.migrate.script import Command, commands_in

FLAGS = json.loads(Path(__file__).with_name("openrlhf_flags.json").read_text())  # of 0.11.2, and of older scripts
# Features that the suite does not have yet, or will not have.
MISSING = {
    *("ds.tensor_parallel_size", "ds_tensor_parallel_size"),
    *("actor.freeze_visual_encoder", "freeze_visual_encoder", "data.image_key", "image_key"),
    *("data.max_images_per_prompt", "max_images_per_prompt"),
    *("ckpt.disable_ds", "ds.deepcompile", "ds.experts_implementation", "ds.use_universal_ckpt"),
    *("use_ms", "data.disable_fast_tokenizer"),
}


def words_of(line: str) -> tuple[set[str], list[str], list[str]]:
    """The words of the new command, its remarks, and what is lost."""
    (command,) = commands_in(line)
    new = migrate(command)
    return set(new.words), new.remarks, new.lost


@pytest.mark.parametrize(("entry", "flag"), [(entry, flag) for entry, flags in FLAGS.items() for flag in flags])
def test_every_flag_of_openrlhf_ends_somewhere(entry, flag):
    value = "text" if flag == "post_processor" else "2"
    new = migrate(Command(entry, (f"--{flag}", value)))
    assert new.lost or new.remarks or new.flags
    assert flag in MISSING or not new.lost or flag == "post_processor"


def test_an_unknown_flag_is_lost():
    assert words_of("python -m openrlhf.cli.train_sft --no_such_flag 1")[2] == [
        "--no_such_flag 1: no counterpart is known"
    ]


def test_a_supervised_command():
    words, remarks, lost = words_of(
        "deepspeed --module openrlhf.cli.train_dpo --pretrain m --dataset d --bf16 --beta 0.2 --ipo "
        "--learning_rate 5e-7 --chosen_key good --packing_samples --flash_attn --lora_rank 8 "
        "--adam_betas 0.9 0.98 --use_wandb secret"
    )
    assert words == {
        *("task=dpo", "actor.model_name_or_path=m", "data.dataset=d", "ds.param_dtype=bf16", "algo.beta=0.2"),
        *("algo.loss=ipo", "actor.adam.lr=5e-7", "data.chosen_key=good", "ds.packing_samples=true", "ds.lora.rank=8"),
        *("actor.adam.betas=[0.9,0.98]", "logger.wandb.enable=true"),
    }
    assert lost == []
    assert not any("secret" in text for text in remarks)


def test_an_rl_command_with_its_own_defaults():
    words, _, lost = words_of(
        "python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --reward_pretrain r --prompt_max_len 1024 "
        "--generate_max_len 512 --advantage_estimator rloo --gamma 1.0 --n_samples_per_prompt 8 --critic_num_nodes 1"
    )
    assert lost == []
    assert {"data.max_len=1536", "rollout.max_new_tokens=512", "algo.advantage.estimator=rloo"} <= words
    assert {"actor.num_gpus_per_node=8", "ref.num_gpus_per_node=8", "reward.num_gpus_per_node=8"} <= words
    assert not any(word.startswith(("critic.", "algo.advantage.gamma")) for word in words)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("openrlhf.cli.train_kto --pretrain m", "algo.beta=0.01"),
        ("openrlhf.cli.train_kto --pretrain m --beta 0.2", "algo.beta=0.2"),
        ("openrlhf.cli.interactive_chat --pretrain m --greedy_sampling", "chat.temperature=0"),
        ("openrlhf.cli.interactive_chat --pretrain m", "chat.temperature=0.2"),
        ("openrlhf.cli.interactive_chat --pretrain m", "chat.repetition_penalty=1.2"),
        ("openrlhf.cli.interactive_chat --pretrain m --repetition_penalty 1.1", "chat.repetition_penalty=1.1"),
        ("openrlhf.cli.batch_inference --eval_task rm --pretrain m --dataset d", "reward.model_name_or_path=m"),
        ("openrlhf.cli.batch_inference --eval_task generate --pretrain m --dataset d", "data.prompt_dataset=d"),
        ("openrlhf.cli.lora_combiner --model_path m --lora_path a --output_path o --is_rm", "ckpt.output_dir=o"),
    ],
)
def test_defaults_that_differ_are_written(line, expected):
    assert expected in words_of(f"python -m {line}")[0]


RL = "python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --remote_rm_url r.py "


def test_clips_and_centred_rewards_of_the_fork():
    words, _, lost = words_of(f"{RL} --value_clip 0.2 --value_clip_high 0.4 --advantage_clip_low_high 4 9")
    assert {"critic.value_clip=0.2", "critic.value_clip_high=0.4"} <= words and lost == []
    assert not any("clip_range" in word for word in words), "the fork does not clip what gae says"
    words, _, lost = words_of(
        f"{RL} --advantage_estimator group_norm --advantage_clip_low_high 4 9 --value_clip_high 1"
    )
    assert "algo.advantage.clip_range=[-5,10]" in words and lost == []
    assert not any(word.startswith("critic.") for word in words)
    words, _, lost = words_of(f"{RL} --reward_pretrain r --normalize_mean")
    assert {"reward.normalize_enable=true", "reward.normalize_mean_only=true"} <= words and lost == []


FORK = """
advantage_estimator dpg_beta use_filter_sample use_adv_mask_before use_adv_mask_after use_adv_mask_skip use_loss_mask
use_cispo use_dual_policy_loss remove_advantage_whiten advantage_clip_low_high drop_samples sample_strategy
use_positive_gamma use_adv_shaping entropy_shape_alpha entropy_shape_kappa use_reward_smooth use_length_acc_balance
use_exp_norm_by_length use_exp_before_queue use_mopps use_outlier_mask reward_key ref_pretrain use_prefetch
use_critic_prefetch use_env_mask use_acc_filter use_length_filter use_eval_filter reuse_offline dump_data global_shuffle
sft_loss_coef eps_clip_high value_clip_high normalize_mean use_global_token_level_loss use_seq_balancing use_dynamic_bz
"""
NONE_HERE = ("use_filter_sample", "remove_advantage_whiten", "sft_loss_coef", "eps_clip_high")


@pytest.mark.parametrize("flag", FORK.split())
def test_every_flag_of_the_asynchronous_fork_ends_somewhere(flag):
    given = {"advantage_clip_low_high": "1 2", "reward_key": "answer", "advantage_estimator": "dpg"}.get(flag, "1")
    _, remarks, lost = words_of(f"{RL} --{flag} {given}")
    known, _, _ = words_of(RL)
    assert (not any("no counterpart is known" in text for text in lost)) and bool(lost) == (flag in NONE_HERE)
    assert lost or remarks or words_of(f"{RL} --{flag} {given}")[0] != known


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--advantage_estimator dpg", "algo.advantage.estimator=FILE:dpg"),
        ("--advantage_estimator reinforce_baseline_nomean", "algo.advantage.estimator=FILE:no_mean"),
        ("--advantage_estimator reinforce_global", "algo.advantage.estimator=flash_reinforce"),
        ("--use_positive_gamma --advantage_estimator reinforce --gamma 0.9", "algo.advantage.gamma=0.9"),
        ("--advantage_estimator reinforce --use_positive_gamma", "algo.advantage.estimator=FILE:positive_gamma"),
        ("--use_exp_norm_by_length", "algo.advantage.estimator=FILE:whitened_by_length"),
        ("--use_adv_shaping --advantage_estimator group_norm", "algo.advantage.estimator=FILE:entropy_shaped"),
        ("--use_outlier_mask", "algo.group_filter=FILE:outliers"),
        ("--use_length_filter", "algo.group_filter=FILE:too_long"),
        ("--use_mopps", "algo.prompt_filter=FILE:mopps"),
    ],
)
def test_estimators_and_filters_of_the_fork_are_functions_in_a_file(flags, expected):
    words, _, lost = words_of(f"{RL} {flags}")
    assert expected.replace("FILE", "experiments/own_code/async_fork.py") in words and lost == []


def test_there_is_one_filter_of_groups():
    _, _, lost = words_of(f"{RL} --use_outlier_mask --use_length_filter")
    assert len(lost) == 1 and "write one that calls both" in lost[0]


@pytest.mark.parametrize(
    ("flags", "target", "template"),
    [
        ("--enable_csft", "5.00", "{prompt} <rm_score>: {reward:.2f} "),
        ("--enable_csft --csft_prompt '<rm_score>: 3.5 '", "3.5", "{prompt} <rm_score>: {reward:.1f} "),
        ("--csft_prompt 'quality 7!'", "7", "{prompt} quality {reward:.0f}! "),
    ],
)
def test_the_prompt_of_conditional_sft_is_a_target_in_a_template(flags, target, template):
    words, _, lost = words_of(f"python -m openrlhf.cli.interactive_chat --pretrain m {flags}")
    assert f"data.target_reward={target}" in words and lost == []
    assert any(word.startswith("data.reward_template=") and template in word for word in words)


def test_old_rollouts_are_corrected_for_and_engines_have_their_own_devices():
    words, remarks, _ = words_of(
        "python -m openrlhf.cli.train_ppo_ray --async_train --colocate_all_models --agent_func_path a.py --pretrain m"
    )
    assert {"correction=tis", "train.async_enable=true", "train.colocate_actor_ref=true"} <= words
    assert {"agent.kind=environment", "train.agent_func_path=a.py"} <= words
    assert "train.colocate_all=true" not in words
    assert any("correction=tis" in text for text in remarks)


@pytest.mark.notices(
    "a correction loses its lower bound",
    "migrate/handlers.py",
    "f\"[{','.join(values)}]\")",
    "f\"[{','.join(values[-1:])}]\")",
)
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--enable_vllm_is_correction", {"correction=tis"}),
        ("--enable_vllm_is_correction --use_icepop", {"correction=icepop"}),
        (
            "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop "
            "--algo.advantage.is_correction_threshold 0.5 5.0",
            {"correction=icepop", "algo.advantage.is_correction_threshold=[0.5,5.0]"},
        ),
        ("--top_p 0.9", {"correction=tis", "rollout.top_p=0.9", "algo.mismatch_max=0.21"}),
        ("--freezing_actor_steps 3 --advantage_estimator gae", {"critic.freezing_steps=4"}),
        ("--use_kl_estimator_k3", {"algo.kl.estimator=k3"}),
        (
            "--colocate_all_models --vllm_num_engines 2 --vllm_tensor_parallel_size 4",
            {"vllm.num_engines=2", "vllm.tensor_parallel_size=4", "train.colocate_all=true"},
        ),
        ("--reward_pretrain a/b,c", {"reward.sources={m1:{model_name_or_path:a/b},m2:{model_name_or_path:c}}"}),
    ],
)
def test_flags_that_change(flags, expected):
    words, _, lost = words_of(f"python -m openrlhf.cli.train_ppo_ray --pretrain m {flags}")
    assert expected <= words
    assert lost == []


def test_a_script_becomes_a_script_that_passes_the_checks(tmp_path, capsys):
    data = tmp_path / "rows of mine.jsonl"
    data.write_text('{"question": "1+1", "answer": "2"}\n')
    script = tmp_path / "train.sh"
    script.write_text(
        f"DATA='{data}'\nOUT={tmp_path}/out\n"
        'deepspeed --num_gpus 2 --module openrlhf.cli.train_sft --pretrain builtin:tiny --dataset "$DATA" '
        "--input_key question --output_key answer --input_template $'Q: {}\\nA: ' --save_path $OUT\n"
    )
    assert main(["migrate", str(script)]) == 0
    printed = capsys.readouterr().out
    as_words = subprocess.run(
        ["bash", "-c", f"python() {{ printf '%s\\0' \"$@\"; }}\n{printed}"], capture_output=True, check=True
    )
    words = as_words.stdout.decode().split("\0")[1:-1]
    assert main([*words, "--cfg", "job"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["data"]["dataset"] == str(data)
    assert shown["data"]["input_template"] == "Q: {}\nA: "
    assert shown["actor"]["num_gpus_per_node"] == 2


def test_what_is_lost_is_said_first_and_in_the_exit_code(capsys):
    assert main(["migrate", "python -m openrlhf.cli.train_sft --use_ms --pretrain builtin:tiny"]) == 1
    assert capsys.readouterr().out.splitlines()[1].startswith("#   LOST: --use_ms")


def test_a_text_without_a_command_is_a_mistake(capsys):
    assert main(["migrate", "echo hello"]) == 2
    assert "No command of OpenRLHF" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "band"),
    [
        ("--algo.advantage.is_correction_level seq --algo.advantage.is_correction_threshold 0.99 1.01", "[0.99,1.01]"),
        ("--enable_vllm_is_correction --vllm_is_truncated_threshold 0.3 2", "[0.3,2]"),
        ("--enable_vllm_is_correction --vllm_is_truncated_threshold 3", "[3]"),
        ("--algo.advantage.is_correction_enable", "[0.5,5.0]"),
    ],
)
def test_a_correction_keeps_its_bounds(flags, band):
    words, _, lost = words_of(f"{RL} {flags}")
    assert f"algo.advantage.is_correction_threshold={band}" in words and lost == []


def test_a_band_without_a_correction_is_left_out_aloud():
    words, remarks, _ = words_of(f"{RL} --algo.advantage.is_correction_threshold 0.99 1.01")
    assert not any("is_correction" in word for word in words)
    assert any("[0.99,1.01] is left out: no correction is on" in text for text in remarks)


@pytest.mark.parametrize("path", ["out/model/ckpt", "./out/model/a/b", "out/models"])
def test_checkpoints_stay_inside_the_folder_of_the_model(path):
    words, remarks, _ = words_of(f"{RL} --save_path out/model --ckpt_path {path}")
    assert {"ckpt.output_dir=out/model", f"ckpt.path={path}"} <= words
    assert not any("ckpt.path" in text for text in remarks)


@pytest.mark.notices(
    "checkpoints in the folder of the model have none of their own",
    "migrate/combinations.py",
    'new.add("ckpt.path", f"{output}/checkpoints")',
    "pass",
)
@pytest.mark.parametrize("path", ["out/model", "./out/model/"])
def test_checkpoints_in_the_folder_of_the_model_itself_get_one_of_their_own(path):
    words, remarks, _ = words_of(f"{RL} --save_path out/model --ckpt_path {path}")
    assert {"ckpt.output_dir=out/model", "ckpt.path=out/model/checkpoints"} <= words
    assert any("in a folder inside that of the model" in text for text in remarks)


def test_optimiser_states_that_cannot_move_here_are_told_with_the_reason():
    _, remarks, _ = words_of(f"{RL} --colocate_all_models --zero_stage 1 --deepspeed_enable_sleep")
    assert any("moves the states of the optimiser only with ds.zero_stage=2 or 3" in text for text in remarks)
    words, _, _ = words_of(f"{RL} --colocate_all_models --zero_stage 3 --deepspeed_enable_sleep")
    assert {"ds.zero_stage=3", "ds.enable_sleep=true"} <= words


def test_variables_that_steered_openrlhf_are_flags_or_remarks():
    (command,) = commands_in(f"export OPENRLHF_ASYNC_QUEUE_SIZE=2 ENV_ITER_NUM=3 HF_TOKEN=hush X=1\n{RL} --async_train")
    new = migrate(command)
    assert "train.async_queue_size=2" in new.words
    said = "\n".join(new.remarks)
    assert "ENV_ITER_NUM=3: here it is agent.max_turns" in said and "X=1" in said
    assert "HF_TOKEN" in said and "hush" not in said


def test_several_reward_models_share_the_devices_of_one():
    words, _, lost = words_of(f"{RL} --reward_pretrain a,b --reward_num_gpus_per_node 2 --normalize_reward")
    assert {"reward.num_gpus_per_node=2", "reward.normalize_enable=true"} <= words and lost == []
