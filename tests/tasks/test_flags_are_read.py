"""Every flag that a task accepts is read by a run of this task: a flag connected to nothing is a lie.

A flag that other tasks read, and this one does not, is found too. tests/e2e/test_flags_of_rl_are_read.py says the same
of tasks with engines, and tests/train_server of that server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import flag_reads
from rlhf_suite.config.declarations.task_groups import SUPERVISED
from rlhf_suite.models.builtin import create_tiny

DEADLINE_S = 500
FEW = (
    "train.max_steps=2 eval.max_samples=8 data.max_samples=24 train.batch_size=8 train.micro_batch_size=4 "
    "logger.progress=false launch.device=cpu data.cache_enable=false "  # rows from the cache are not encoded
)
# What is read only where it is switched on; resumed once. The code that reads it is that of all supervised tasks.
MORE = (
    "task=sft demo=sft ckpt.save_steps=1 ckpt.load_enable=true ds.zero_stage=3 ds.lora.rank=4 "
    "train.dynamic_batch_enable=true train.max_tokens_per_gpu=600 actor.lr_scheduler=cosine_with_min_lr "
    f"actor.gradient_checkpointing_enable=true {FEW}".replace("data.cache_enable=false", "")
)
IMAGES = f"task=sft demo=sft_images actor.freeze_visual_encoder=true {FEW}".replace("data.cache_enable=false", "")
RUNS = {
    **{task: [f"task={task} demo={task} ckpt.save_steps=1 {FEW}"] for task in SUPERVISED},
    "score by a rule": ["task=score demo=score launch.device=cpu"],
    "score by a model": [
        "task=score data.dataset={rows} reward.model_name_or_path={judge} reward.normalize_enable=true "
        "launch.device=cpu"
    ],
    "score by a process model": [
        "task=score data.dataset={rows} reward.process.enable=true reward.process.model_name_or_path={steps} "
        "launch.device=cpu"
    ],
    "check_reward": ["task=check_reward demo=check_reward launch.device=cpu"],
    "merge_lora": ["task=merge_lora actor.model_name_or_path={model} lora.path={adapter} launch.device=cpu"],
    "chat": ["task=chat demo=chat chat.temperature=0.5 launch.device=cpu"],
}
RUNS["sft"] += [MORE, MORE, IMAGES]
RUNS["distill"] = [f"{line} teacher.model_name_or_path={{model}}" for line in RUNS["distill"]]
READ_ELSEWHERE = {
    "ckpt.load_enable": "the command line finds the run to go on with; here task=sft goes on",
    "ds.use_universal_ckpt": "a run with a record of its flags, tests/config/test_continued_runs.py",
    "explain": "the command line shows the plan instead of running",
    "launch.device": "in a task without models the command line hides the GPUs by it, from the user's own code too",
    "launch.timeout_s": "the command line limits all waits by it, tests/test_waits.py",
    "launch.trust_remote_code": "the command line passes it on, tests/e2e/test_code_of_models.py",
    "launch.umask": "the command line takes it over before the task begins, tests/launch/test_environment.py",
    "logger.report": "the command line writes the page of a run, tests/report",
    "plan": "as explain",
    "own_code": "the run writes it itself; tests/config/test_own_code.py",
    "run_dir": "the command line names the folder of the run",
    "task": "the command line begins the task",
}


def make_inputs(folder) -> dict[str, str]:
    """A model, an adapter of it, a reward model with the constants of its scores, and rows to score."""
    paths = {name: str(folder / name) for name in ("model", "adapter", "judge", "rows.jsonl")}
    create_tiny(folder / "model", seed=1)
    create_tiny(folder / "judge", seed=1)
    plain = AutoModelForCausalLM.from_pretrained(paths["model"])
    get_peft_model(plain, LoraConfig(target_modules=["q_proj"])).save_pretrained(paths["adapter"])
    judge = AutoModelForSequenceClassification.from_pretrained(paths["judge"], num_labels=1)
    judge.config.reward_mean, judge.config.reward_std = 0.5, 2.0
    judge.save_pretrained(paths["judge"])
    rows = [{"prompt": f"say {number}:", "response": f"{number}"} for number in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name.partition(".")[0]: path for name, path in paths.items()}


@pytest.fixture(scope="module")
def unread(tmp_path_factory):
    """The flags of each kind of run that none of its lines read."""
    folder = tmp_path_factory.mktemp("recorded")
    inputs = make_inputs(folder)
    lines = [line for of_kind in RUNS.values() for line in of_kind]
    steps = folder / str(lines.index(*RUNS["prm"])) / "model"  # what this run writes
    lines = [line.format(**inputs, steps=steps) for line in lines]
    command = [sys.executable, str(flag_reads.RECORDING / "recorded_runs.py"), str(folder), *lines]
    environment, said = os.environ | flag_reads.environment(os.devnull), "reverse 12 =\n"
    done = subprocess.run(
        command, env=environment, input=said, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = ((line.split(), folder / f"{number}.reads") for number, line in enumerate(lines))
    return {
        kind: flag_reads.unread(*map(list, zip(*islice(made, len(of_kind)), strict=True)))
        for kind, of_kind in RUNS.items()
    }


@pytest.mark.stack
@pytest.mark.parametrize("kind", RUNS)
def test_every_active_flag_of_a_task_is_read_by_its_runs(unread, kind):
    assert unread[kind] - READ_ELSEWHERE.keys() == set()


@pytest.mark.stack
def test_what_is_read_elsewhere_is_not_read_by_each_run_here(unread):
    assert READ_ELSEWHERE.keys() == set().union(*unread.values())


def test_a_flag_that_nothing_reads_is_found(tmp_path):
    line = f"task=sft demo=sft {FEW}"
    (tmp_path / "reads").write_text("AdamConfig lr\n")
    missing = flag_reads.unread([line.split()], [tmp_path / "reads"])
    assert "actor.adam.lr" not in missing and {"actor.adam.eps", "train.batch_size", "data.max_len"} <= missing
    assert "ds.lora.alpha" not in missing, "idle without ds.lora.rank"
    assert "ds.zpg" not in missing, "refused without ZeRO-3"
    assert "launch.num_cpus" not in missing, "refused in one process"
