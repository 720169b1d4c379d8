"""Stand-ins for the modules of OpenRLHF that files of its users import, where OpenRLHF is not installed.

Agents derive from its base classes, and reward files grade answers with its functions. Any other name of OpenRLHF is a
module or a name that is not there, as the error of the import says.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Base:
    """In place of a base class of agents."""

    def __init__(self, *arguments: object, **named: object) -> None:
        """Take what the file passes."""


class MultiTurnAgentExecutor(Base):
    """Keeps the class of the environments that a file passes."""

    def __init__(self, agent_instance_cls: type, *arguments: object, **named: object) -> None:
        self.agent_instance_cls = agent_instance_cls


def extract_boxed_answer(text: str) -> str | None:
    """Return what the last complete \\boxed{} of a text holds; None without one."""
    from rlhf_suite.rewards.answers import find_last_box

    return find_last_box(text)


def grade_answer(given: str | None, truth: str) -> bool:
    """Return whether an answer is right, by the rule `math` of this suite."""
    from rlhf_suite.config.declarations.reward import RuleConfig
    from rlhf_suite.rewards.base import LabelError, Sample
    from rlhf_suite.rewards.mathematics import box_text, mathematics

    if given is None:
        return False
    row = Sample("", "", box_text(given), str(truth), "default")
    try:
        return mathematics(row, RuleConfig()).reward > 0
    except LabelError:  # a word: compared as it is
        return given.strip() == str(truth).strip()


MATH: dict[str, Any] = {"extract_boxed_answer": extract_boxed_answer, "grade_answer": grade_answer}
LOGGING: dict[str, Any] = {"init_logger": logging.getLogger}


def agents() -> dict[str, Any]:
    """Return the names of openrlhf.utils.agent."""
    plain = ("AgentInstanceBase", "AgentExecutorBase", "SingleTurnAgentExecutor")
    return {name: type(name, (Base,), {}) for name in plain} | {"MultiTurnAgentExecutor": MultiTurnAgentExecutor}


MODULES: dict[str, Callable[[], dict[str, Any]]] = {
    "openrlhf": lambda: {"__path__": []},
    "openrlhf.utils": lambda: {"__path__": [], **MATH, **LOGGING},
    "openrlhf.utils.agent": agents,
    "openrlhf.utils.logging_utils": lambda: LOGGING,
    "openrlhf.utils.math_utils": lambda: MATH,
}


class StandIns(MetaPathFinder, Loader):
    """Finds the stand-ins, after all that is installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return where a module comes from, if it is one of these."""
        return ModuleSpec(name, self, is_package="__path__" in MODULES[name]()) if name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill in the names of a module."""
        vars(module).update(MODULES[module.__name__]())


def offer_openrlhf() -> None:
    """Let files of users import names of OpenRLHF from now on, also while their functions run."""
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.append(StandIns())
