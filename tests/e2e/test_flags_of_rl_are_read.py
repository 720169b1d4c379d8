"""Every flag of `task=ppo` that is not idle is read by a run, in its driver or in one of its actors."""

from __future__ import annotations

import jobs
import pytest

import flag_reads
from reward_server import RewardServer

# What the run that other tests make leaves idle.
REST = [
    *(word for word in jobs.SMALL if not word.startswith("reward.")),
    "algo.advantage.estimator=gae",
    "algo.distill.coef=0.1",
    "algo.kl.use_loss=true",
    "algo.kl.estimator=k2",
    "actor.policy_loss_type=sapo",
    *(
        f"{model}.{flag}"
        for model in ("actor", "critic")
        for flag in (
            "optim=muon",
            "max_norm=0",
            "lr_scheduler=cosine_with_min_lr",
            "gradient_checkpointing_enable=true",
        )
    ),
    "data.pretrain_dataset=builtin:reverse",
    "data.pretrain_key=input",
    "train.dynamic_batch_enable=true",
    "train.max_tokens_per_gpu=256",
    "reward.rule=null",
    "reward.process.enable=true",
    "reward.on_error=drop",
    "reward.overlong_buffer_len=8",
    "reward.stop_properly_penalty_coef=0.5",
    "logger.wandb.enable=true",
    "train.max_steps=1",
    "eval.steps=1",
]
SOURCES = (
    'reward.sources={{steps:{{process:true}},judge:{{model_name_or_path:{judge}}},served:{{remote_url:"{url}"}},'
    "shape:{{rule:format}},short:{{rule:length}},programs:{{rule:code,datasets:[none]}}}}"
)
READ_ELSEWHERE = {
    "explain": "the command line shows the plan instead of running",
    "ckpt.load_enable": "with checkpoints: tests/e2e/test_kill_and_resume.py, and tests/tasks/test_flags_are_read.py",
    "ckpt.save_hf": "as ckpt.load_enable",
    "ckpt.disable_ds": "as ckpt.load_enable",
    "critic.min_lr_ratio": "after the warm-up, where a run is longer; the actor's is read here",
    "data.dataloader_num_workers": "where the cache lacks the encoded rows: tests/tasks/test_flags_are_read.py",
    "ds.zpg": "under ZeRO-3: tests/tasks/test_flags_are_read.py",
    "plan": "as explain",
    "own_code": "the run writes it itself; tests/config/test_own_code.py",
    "logger.report": "the command line writes the page of a run",
    "rollout.replay": "tests/e2e/test_replay_run.py",
    "run_dir": "the command line names the folder of the run",
    "reward.rules.code_allow_weaker": "where code runs: tests/sandbox",
    "reward.rules.code_memory_mb": "where code runs: tests/rewards",
    "reward.rules.code_timeout_s": "as reward.rules.code_memory_mb",
    "reward.process.enable": "declarations/reward.py says whether steps are scored: tests/rl/test_reward_models.py",
    "reward.on_error": "where a sample has no reward: tests/e2e/test_reward_sources.py",
    "reward.max_error_rate": "as reward.on_error",
    "teacher.sources": "declarations/teacher.py lists the teachers for plan and driver: tests/rl/test_teachers.py",
    "vllm.gpu_memory_utilization": "on GPUs",
}


@pytest.fixture(scope="module")
def rest(runs, warm, reward_model, judge):
    """A run of the rest, its folder and its words."""
    server = RewardServer(lambda body: (200, {"rewards": [0.5] * len(body["labels"])}))
    models = [f"actor.model_name_or_path={warm}", f"teacher.model_name_or_path={warm}"]
    models.append(f"reward.process.model_name_or_path={judge}")
    words = [*REST, *models, SOURCES.format(judge=reward_model, url=server.url)]
    jobs.run(runs / "rest", words, recorded=True)
    server.close()
    return runs / "rest", words


@pytest.mark.proof  # tests/arch/test_alive.py finds what reads each flag in the sources on every commit
def test_every_active_flag_is_read_by_a_run(baseline, baseline_words, rest):
    made = {baseline: baseline_words, rest[0]: rest[1]}
    unread = flag_reads.unread(list(made.values()), [jobs.reads(folder) for folder in made])
    assert unread <= READ_ELSEWHERE.keys()
