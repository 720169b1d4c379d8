"""The command itself, on this machine: what it prints, its exit codes, and trials that fail."""

from __future__ import annotations

import pytest

from rlhf_suite.cli import main
from rlhf_suite.doctor import examine
from rlhf_suite.doctor.findings import FAULT, GOOD, MARK, NOTE


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


def test_findings_are_read_beside_what_libraries_print(monkeypatch, tmp_path):
    """A library may print when it is imported, and when the trial ends."""
    lines = ["import atexit, sys", "if 'rlhf_suite.doctor.trial' in ' '.join(sys.orig_argv):"]
    lines += ["    print('[', end='')", "    atexit.register(lambda: print('good bye'))"]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert [finding.state for finding in examine.run_trial("computing") if finding.subject != "CUDA"] == [GOOD]


@pytest.mark.parametrize("printed", ["", "good bye", f"{MARK}[", f"{MARK}[1]", f'{MARK}[{{"x": 1}}]'])
def test_other_output_has_no_findings(printed):
    with pytest.raises((ValueError, TypeError, StopIteration)):
        examine.read_findings(printed)


@pytest.mark.parametrize("words", [["--fast"], ["--quick", "task=sft"]])
def test_other_words_are_refused_with_the_usage(words, capsys):
    assert main(["doctor", *words]) == 2
    assert "usage: rlhf-suite doctor" in capsys.readouterr().err
