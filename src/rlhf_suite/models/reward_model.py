"""What the folder of a reward model says: whether its head is trained, and the constants of its scores."""

from __future__ import annotations

from transformers import PretrainedConfig

from rlhf_suite.config.declarations.reward import NormalizationConfig
from rlhf_suite.errors import UserError
from rlhf_suite.models.forward import ScalarModel
from rlhf_suite.models.load import read_config

FLAG = "reward.model_name_or_path"


def check_head_is_trained(model: ScalarModel, path: str, flag: str) -> None:
    """Raise UserError if the head was drawn at random."""
    if model.head_is_new:
        raise UserError(
            f"{flag}={path}: the checkpoint has no head named {model.head_name!r} (ds.value_head_prefix), so it cannot "
            "score. Give a reward model, or the name of its head"
        )


def score_constants(path: str | None, config: NormalizationConfig) -> tuple[float, float] | None:
    """Return the mean and standard deviation for reward.normalize_enable from config.json; None if the flag is off.

    Where scores are only centred (reward.normalize_mean_only) the deviation is 1, whatever config.json says.

    Raises:
        UserError: config.json has none, so the scores would silently stay as they are.
    """
    if not config.normalize_enable:
        return None
    assert path is not None, "checked with the flags"
    stats = reward_stats(read_config(path, FLAG))
    if stats is None or (stats[1] <= 0 and not config.normalize_mean_only):
        problem = "has no reward_mean and reward_std" if stats is None else f"has reward_std={stats[1]:g}"
        raise UserError(
            f"reward.normalize_enable=true, but config.json of {FLAG}={path} {problem}: write the mean and the "
            "standard deviation of its scores there, or remove the flag"
        )
    return (stats[0], 1.0) if config.normalize_mean_only else stats


def reward_stats(config: PretrainedConfig) -> tuple[float, float] | None:
    """Return the mean and standard deviation of a reward model's scores, if its config.json has them."""
    for mean, std in (("reward_mean", "reward_std"), ("mean", "std")):  # the second pair is OpenRLHF's
        if hasattr(config, mean) and hasattr(config, std):
            return float(getattr(config, mean)), float(getattr(config, std))
    return None
