"""Which way a metric is better, and which metrics are shares. Whatever chooses by a metric (the best checkpoint, early
stopping, the final summary, reports, the pages of sweeps) asks here; nothing is guessed from a name.
"""

from __future__ import annotations

import re

HIGHER, LOWER = "higher", "lower"
PASS_AT_K = re.compile(r"pass\d+")

# By the last part of the name: what an evaluation measures has the same name for each of its sets. None: more of it is
# neither better nor worse, so that nothing can be chosen by it.
DIRECTIONS: dict[str, str | None] = {
    "gpt_loss": LOWER,
    "loss": LOWER,
    "aux_loss": LOWER,
    "nll_loss": LOWER,
    "distil_loss": LOWER,
    "ptx_loss": LOWER,
    "acc": HIGHER,
    "auc": HIGHER,
    "reward": HIGHER,
    "score": HIGHER,
    "pass1": HIGHER,  # and pass@k of every k
    "pass_rate": HIGHER,
    "reward_margin": HIGHER,
    "truncated_rate": LOWER,
    "truncated": LOWER,
    "chosen_reward": None,  # DPO lowers both rewards, and their difference grows
    "reject_reward": None,
    "chosen_logps": None,
    "reject_logps": None,
    "reward_mean": None,  # the scale of a reward model is its own
    "reward_std": None,
    "reward_p05": None,
    "reward_p25": None,
    "reward_p50": None,
    "reward_p75": None,
    "reward_p95": None,
    "kl": None,  # 0 where nothing was learned
    "pass1_stderr": None,
    "response_length_mean": None,
    "response_length": None,
    "num_samples": None,
    "policy_loss": None,  # its value says nothing: the advantages have mean 0
    "grad_norm": None,
    "actor_grad_norm": None,
    "tokens_per_s": None,
}

# Metrics between 0 and 1, by the last part of the name; and pass@k of every k.
SHARES = ("acc", "auc", "pass_rate", "truncated", "truncated_rate")


def direction_of(metric: str) -> str | None:
    """Return HIGHER or LOWER, whichever is better of a metric such as `eval/<set>/acc`; None if it has no direction."""
    last = metric.rpartition("/")[2]
    return HIGHER if PASS_AT_K.fullmatch(last) else DIRECTIONS.get(last)


def is_share(metric: str) -> bool:
    """Return whether a metric is between 0 and 1 by what it is."""
    last = metric.rpartition("/")[2]
    return last in SHARES or PASS_AT_K.fullmatch(last) is not None
