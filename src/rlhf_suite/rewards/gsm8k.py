"""Rule `gsm8k`: the final number of an answer to a question of GSM8K.

The data set writes a solution and then "#### 42". A strict reading takes the number behind the first such mark of the
response; a flexible one the last number of the response. Both are compared as texts, without commas, dollar signs and a
full stop at the end: 42.0 is not 42. These are the readings that lm-evaluation-harness has for its task gsm8k.
"""

from __future__ import annotations

import re

from rlhf_suite.config.reward import RuleConfig
from rlhf_suite.registry import reward_rule
from rlhf_suite.rewards.base import LabelError, Sample, Scored

MARK = "#### "
STRICT = re.compile(rf"{MARK}(-?[\d.,]+)", re.ASCII)
NUMBER = re.compile(r"-?[$\d.,]{2,}|-?\d+", re.ASCII)


@reward_rule(needs=("label",))
def gsm8k(row: Sample, config: RuleConfig) -> Scored:
    """The number behind the first "#### " of the response is that of the label; `flexible` is 1 if its last number is.

    The label is a number, or a solution that ends with "#### " and the number.
    """
    wanted = bare(row.label.rpartition(MARK)[2])
    if not NUMBER.fullmatch(wanted):
        raise LabelError(f"the label {row.label[-80:]!r} does not end with a number; give 42 or a text with #### 42")
    strict, numbers = STRICT.search(row.response), NUMBER.findall(row.response)
    is_strict = strict is not None and bare(strict[1]) == wanted
    is_flexible = bool(numbers) and bare(numbers[-1]) == wanted
    return Scored(float(is_strict), float(is_strict), {"flexible": float(is_flexible)})


def bare(number: str) -> str:
    """Return a number as it is compared: without commas, dollar signs, spaces around it, and one full stop at its
    end."""
    return number.replace(",", "").replace("$", "").strip().removesuffix(".")
