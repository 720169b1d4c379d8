"""Engine against trainer on a rollout: how far they may disagree before the run stops, and the correction for it."""

from __future__ import annotations

from dataclasses import replace

from rlhf_suite.algo.correction import CorrectionInput, correction_metrics, correction_weights
from rlhf_suite.config.declarations.algo import AdvantageConfig
from rlhf_suite.data.batch import require_column
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.errors import RunError

# Mean |log-prob difference|, in nats. In fp32 on a GPU the kernels of attention may round their factors to TF32.
MISMATCH_MAX = {("fp32", "cpu"): 1e-4, ("fp32", "cuda"): 1e-2, ("bf16", "cpu"): 0.1, ("bf16", "cuda"): 0.1}


def mismatch_limit(mismatch_max: float | None, param_dtype: str, device: str) -> float:
    """Return the largest mean |log-prob difference|, in nats: algo.mismatch_max, or what rounding accounts for."""
    return mismatch_max or MISMATCH_MAX[param_dtype, device]


def check_mismatch(mean: float, limit: float) -> None:
    """Stop the run when the engines sample from another policy than the one that is trained."""
    if not mean <= limit:  # NaN passes it too
        raise RunError(
            f"the engines and the trainer disagree: on this rollout the mean |log-prob difference| is {mean:.2e}, and "
            f"algo.mismatch_max allows {limit:.2e}, so the engines do not sample from the policy that is trained. "
            "Raise algo.mismatch_max if only rounding differs, as with quantised engines. Otherwise look for what "
            "engines and trainer compute in different ways"
        )


def correct(batch: Experience, config: AdvantageConfig) -> tuple[Experience, dict[str, float]]:
    """Return the batch with `correction` and metrics of it, where algo.advantage.is_correction_level asks for it.

    The weights are those of the start of the update: constants of all its optimiser steps.

    Raises:
        RunError: no token is left, so that nothing would be trained.
    """
    if config.is_correction_level == "off":
        return batch, {}
    old, engine = (
        require_column(batch.old_log_probs, "old_log_probs"),
        require_column(batch.engine_log_probs, "engine_log_probs"),
    )
    given = CorrectionInput(old, engine, batch.mask, batch.lengths)
    weights = correction_weights(given, config)
    metrics = correction_metrics(given, weights)
    if metrics.get("correction/masked") == 1:
        raise RunError(
            "the correction drops every token of the rollout: algo.advantage.is_correction_mode="
            f"{config.is_correction_mode}, algo.advantage.is_correction_threshold={config.is_correction_threshold} "
            f"(gating: {config.is_correction_gating}; the mean of trainer / engine is "
            f"{metrics['correction/ratio']:.3g}). Widen it, or repair what makes them differ (mismatch/*)"
        )
    return replace(batch, correction=weights), metrics
