"""Weights that stay as they are while the rest of a model trains."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from rlhf_suite.errors import UserError


def freeze(model: nn.Module, patterns: Sequence[str], flag: str) -> None:
    """Take no gradient for the parameters that a pattern matches: a regular expression of a parameter's whole name, or
    of the name of a module around it. A tied matrix is frozen under either of its names.

    Raises:
        UserError: a pattern matches nothing, or all of them everything.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matches = re.compile(rf"(?:{pattern})(?:\..*)?").fullmatch
        found = [parameter for name, parameter in named if matches(name)]
        if not found:
            names = ", ".join(sorted({re.sub(r"\.\d+\..*", ".<number>", name) for name, _ in named}))
            raise UserError(f"{flag}: nothing in the model is called {pattern!r}. It has {names}")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in named):
        raise UserError(f"{flag}={list(patterns)}: freezes the whole model. Leave something to train")
