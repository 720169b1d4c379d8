from collections.abc import Iterable
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.runs import Run
def check(run: Run, given: frozenset[str]) -> list[Problem]:
    return []
