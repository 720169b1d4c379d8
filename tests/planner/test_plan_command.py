"""`rlhf-suite plan` and `plan=true`: what they print for runs and machines."""

from __future__ import annotations

import re

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
    frame = set("┌─┬┐└┴┘")
    return [line for line in printed.splitlines() if "passes over a step" not in line and not set(line) <= frame]


def test_the_plan_of_a_sweep_is_that_of_its_first_job(capsys, folder):
    small = folder(**FEW, num_hidden_layers=2, num_key_value_heads=4)
    code, out, _ = answered(
        capsys, "-m", *TRAINING[:2], "data.max_len=64,128", f"{FLAG}={small}", "train.micro_batch_size=2", "plan=true"
    )
    assert code == 0
    assert "Longest micro-batch of a rank: 2 x 64 tokens" in out
    assert "This is the first of 2 jobs." in out


@pytest.mark.stack  # each proposal is a whole plan
def test_every_proposal_fits_when_it_is_planned_again(capsys, folder):
    words = ("--gpu", "rtx-4090", *TRAINING, f"{FLAG}={folder(num_hidden_layers=8)}", "train.micro_batch_size=32")
    code, out, _ = planned(capsys, *words)
    assert code == 1
    assert "It does not fit: " in out
    proposals = re.findall(r"^  (\S+=.*?)    \(", out, re.MULTILINE)
    assert proposals
    for each in proposals:
        assert planned(capsys, *words, *each.split())[0] == 0, each


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
