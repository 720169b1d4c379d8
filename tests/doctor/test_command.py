"""The command itself, on this machine: what it prints, its exit codes, and trials that fail."""

from __future__ import annotations

import pytest

from rlhf_suite.cli import main
from rlhf_suite.doctor import examine
from rlhf_suite.doctor.findings import FAULT, GOOD, NOTE


@pytest.mark.vllm
def test_the_quick_form_says_what_this_machine_has(capsys):
    assert main(["doctor", "--quick"]) == 0
    said = capsys.readouterr().out
    assert "   ok  Python: " in said and "   ok  vLLM: vllm" in said
    assert "faults: 0" in said.splitlines()[-1]


def test_the_devices_are_used_for_a_moment():
    computing, meeting = examine.run_trial("computing"), examine.run_trial("processes that meet")
    found = [(finding.subject, finding.state) for finding in (*computing, *meeting)]
    states = [state for subject, state in found if (subject, state) != ("CUDA", NOTE)]  # of a build for GPUs, on a CPU
    assert states == [GOOD, GOOD]


def test_a_trial_that_fails_or_hangs_is_a_fault(monkeypatch):
    (failed,) = examine.run_trial("no such trial")
    assert (failed.state, failed.text) == (FAULT, "KeyError: 'no such trial'")
    monkeypatch.setattr(examine, "TRIAL_S", 0.01)
    (hung,) = examine.run_trial("computing")
    assert hung.state == FAULT and "did not end" in hung.text


@pytest.mark.parametrize("words", [["--fast"], ["--quick", "task=sft"]])
def test_other_words_are_refused_with_the_usage(words, capsys):
    assert main(["doctor", *words]) == 2
    assert "usage: rlhf-suite doctor" in capsys.readouterr().err
