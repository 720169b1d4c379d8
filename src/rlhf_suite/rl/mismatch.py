"""How far engine and trainer may disagree about the same tokens under the same weights before the run stops."""

from __future__ import annotations

from rlhf_suite.config.runs import PPORun
from rlhf_suite.errors import RunError

MISMATCH_MAX = {"fp32": 1e-4, "bf16": 0.1}


def mismatch_limit(config: PPORun) -> float:
    """The largest mean |log-prob difference|, in nats: algo.mismatch_max, or what the precision accounts for."""
    return config.algo.mismatch_max or MISMATCH_MAX[config.ds.param_dtype]


def check_mismatch(mean: float, config: PPORun) -> None:
    """Stop the run when the engines sample from another policy than the one that is trained."""
    limit = mismatch_limit(config)
    if mean > limit:
        raise RunError(
            f"engine and trainer disagree: mean |log-prob difference| {mean:.2e} on the rollout passes {limit:.2e} "
            "(algo.mismatch_max); the engine does not sample from the policy that is trained"
        )
