"""Rules between the flags that choose an RL algorithm: estimator, policy loss, aggregation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rlhf_suite.config.problems import Problem
from rlhf_suite.config.runs import PPORun


def aggregation_fits(run: PPORun) -> Iterator[Problem]:
    loss, mode = run.actor.policy_loss_type, run.actor.loss_agg_mode
    if loss == "gspo" and mode != "seq-mean-token-mean":
        what = f"{mode} would weigh sequences by their tokens, and gspo's ratio is one of whole sequences"
        yield Problem("actor.loss_agg_mode", what, "write actor.loss_agg_mode=seq-mean-token-mean")


RULES: tuple[Callable[[PPORun], Iterable[Problem]], ...] = (aggregation_fits,)
