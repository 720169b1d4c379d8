"""`rlhf-suite plan` and `plan=true`: what they print for runs and machines."""

from __future__ import annotations

import re
import shlex

import pytest
from test_planner import FEW, FLAG

from rlhf_suite.cli import main


def planned(capsys, *words):
    """The exit code of `rlhf-suite plan`, and what it printed."""
    return answered(capsys, "plan", *words)


def answered(capsys, *words):
    """The exit code of a command line, and what it printed."""
    code = main([*words])
    done = capsys.readouterr()
    return code, done.out, done.err


TRAINING = ("task=sft", "data.dataset=builtin:arithmetic", "data.max_len=2048", "train.batch_size=64")


def test_the_command_plans_a_run_for_a_gpu_that_is_not_here(capsys, folder):
    code, out, _ = planned(
        capsys, "--gpu", "h200", *TRAINING, f"{FLAG}={folder(num_hidden_layers=8)}", "train.micro_batch_size=1"
    )
    assert code == 0
    assert "It fits." in out
    assert "optimiser moments" in out
    assert "The actor's batches: packed rows, varlen attention, micro-batches of at most 1 rows." in " ".join(
        out.split()
    )


@pytest.mark.parametrize(("ranks", "code"), [(1, 0), (4096, 1)])
def test_plan_true_says_what_the_command_says_and_starts_nothing(capsys, folder, tmp_path, monkeypatch, ranks, code):
    """But for the rate of a core, which each measures. So many processes do not fit into any machine."""
    small = folder(**FEW, num_hidden_layers=2, num_key_value_heads=4)
    batch = f"train.batch_size={ranks} train.micro_batch_size=1 actor.num_gpus_per_node={ranks} ds.zero_stage=2"
    words = (*TRAINING[:2], "data.max_len=64", *batch.split(), f"{FLAG}={small}")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    command, flag = planned(capsys, *words), answered(capsys, *words, "plan=true")
    assert (command[0], flag[0]) == (code, code)
    assert without_times(flag[1]) == without_times(command[1]) != []
    assert sorted(tmp_path.rglob("*")) == before


def without_times(printed):
    frame, times = set("┌─┬┐└┴┘"), ("passes over a step", "sign of life", "ends the run")
    return [line for line in printed.splitlines() if not any(time in line for time in times) and not set(line) <= frame]


def test_the_plan_of_a_sweep_is_that_of_its_first_job(capsys, folder):
    small = folder(**FEW, num_hidden_layers=2, num_key_value_heads=4)
    code, out, _ = answered(
        capsys, "-m", *TRAINING[:2], "data.max_len=64,128", f"{FLAG}={small}", "train.micro_batch_size=2", "plan=true"
    )
    assert code == 0
    assert "Longest micro-batch of a rank: 2 x 64 tokens" in out
    assert "This is the first of 2 jobs." in out


RL = (
    "task=ppo",
    "experiment=grpo",
    "data.prompt_dataset=builtin:arithmetic",
    "reward.rule=math",
    "data.label_key=answer",
)
LENGTH = "data.max_len=2048"
KEEPS = "actor.gradient_checkpointing_enable=false"  # so that the search, not the plan, finds out that this helps
RANKS = (LENGTH, "actor.num_gpus_per_node=4", "ref.num_gpus_per_node=4", "vllm.num_engines=4")
SHARED = ("train.colocate_all=true", "ds.zero_stage=3")
TOO_LARGE = {
    "sft": ("12", *TRAINING, "train.micro_batch_size=32"),
    "dpo, ZeRO-2": ("5", "task=dpo", "data.dataset=builtin:preferences", *RANKS[:2], "ds.zero_stage=2"),
    "grpo, engines apart": ("4.8", *RL, *RANKS, "ds.zero_stage=2", "vllm.kv_cache_mb=128"),
    "grpo, shared": ("8", *RL, *RANKS, *SHARED),
    "grpo, both sleep": (
        "6",
        *RL,
        *RANKS,
        SHARED[0],
        "ds.zero_stage=2",
        "vllm.enable_sleep=true",
        "ds.enable_sleep=true",
    ),
    "grpo, adapters": ("7", *RL, *RANKS, *SHARED, "ds.lora.rank=8"),
    "ppo with a critic": (
        "11",
        RL[0],
        *RL[2:],
        *RANKS,
        "critic.num_gpus_per_node=4",
        KEEPS.replace("actor", "critic"),
        *SHARED,
    ),
}


QUICK = "grpo, shared"  # the others search for longer


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.stack if name == QUICK else pytest.mark.proof) for name in TOO_LARGE]
)
def test_every_proposal_is_a_command_that_fits_when_it_is_planned(capsys, folder, name):
    memory, *words = *TOO_LARGE[name], KEEPS
    path = folder(num_hidden_layers=8, vocab_size=32_000)
    code, out, err = planned(
        capsys, "--gpu", "rtx-4090", "--memory", memory, *words, "launch.device=cuda", f"{FLAG}={path}"
    )
    assert (code, err) == (1, "")
    assert "It does not fit: " in out
    commands = re.findall(r"^ +rlhf-suite (plan .*)$", out, re.MULTILINE)
    assert 1 <= len(commands) <= 3
    for command in commands:
        assert "kv_cache_mb=256" not in command
        code, out, err = answered(capsys, *shlex.split(command))
        assert (code, err) == (0, ""), command
        held = re.search(r"KV cache of an engine: .* tokens, ([0-9.]+) x data.max_len", out)
        assert held is None or float(held[1]) >= 8, command


def test_idle_gpus_are_said_in_a_sentence(capsys, folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    small = folder(**FEW, num_hidden_layers=2, num_key_value_heads=4)
    code, out, _ = planned(
        capsys, "--gpu", "h100-80", *TRAINING[:2], "data.max_len=64", f"{FLAG}={small}", "launch.device=cuda"
    )
    assert code == 0
    assert "The run takes 1 of the 8 GPUs of this machine: 7 of them stay idle." in out


def test_a_micro_batch_that_takes_longer_than_the_deadline_is_named(capsys, folder):
    """Of a device that computes 1e6 operations per second."""
    small = folder(**FEW, num_hidden_layers=2, num_key_value_heads=4)
    words = ("--tflops", "0.000001", *TRAINING[:2], "data.max_len=64", f"{FLAG}={small}", "train.micro_batch_size=1")
    _, out, _ = planned(capsys, *words, "launch.timeout_s=5")
    assert re.search(r"A micro-batch of the actor takes .* s, and launch.timeout_s=5 ends the run: write", out)
    _, out, _ = planned(capsys, *words, "launch.timeout_s=1e6")
    assert "Longest time without a sign of life: a micro-batch of the actor" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "h1000", *TRAINING), "--gpu h1000: this type of GPU is not known"),
        (("--memory", "-1", *TRAINING), "--memory -1.0: must be above 0"),
        (("task=chat",), "only runs that train a model can be planned"),
        ((*TRAINING, "train.batch=3"), "train.batch"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(capsys, words, message):
    code, out, err = planned(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err
