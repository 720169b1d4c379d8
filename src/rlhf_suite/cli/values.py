"""The names in `key=value` words: flags of the task, sections mistaken for flags, and unknown keys."""

from __future__ import annotations

from functools import cache

from hydra.core.override_parser.types import Override, OverrideType

from rlhf_suite.config.flags import FlagInfo, walk
from rlhf_suite.config.names import did_you_mean, unknown_flag
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.runs import TASKS
