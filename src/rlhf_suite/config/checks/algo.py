"""Rules between the flags that choose an RL algorithm: estimator, policy loss, aggregation, correction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rlhf_suite.config.problems import Problem
from rlhf_suite.config.runs import PPORun
from rlhf_suite.registry import aggregation, is_own, policy_loss

CORRECTION = "algo.advantage.is_correction"


def aggregation_fits(run: PPORun) -> Iterator[Problem]:
    loss, mode = run.actor.policy_loss_type, run.actor.loss_agg_mode
    if policy_loss.needs(loss, "sequences") and not (is_own(mode) or aggregation.needs(mode, "sequences")):
        what = f"{mode} would weigh sequences by their tokens, and the ratio of {loss} is one of whole sequences"
        yield Problem("actor.loss_agg_mode", what, f"write actor.loss_agg_mode={aggregation.that_need('sequences')[0]}")


def correction_band_is_one(run: PPORun) -> Iterator[Problem]:
    config = run.algo.advantage
    if config.is_correction_level == "off":
        return
    given, key = config.is_correction_threshold, f"{CORRECTION}_threshold"
    if config.is_correction_gating != "ratio" and len(given) != 1:
        what = f"{given}: a divergence has no lower bound"
        yield Problem(key, what, f"write '{key}=[0.05]', or {CORRECTION}_gating=ratio")
    elif len(given) not in (1, 2) or given[0] >= [*given, float("inf")][1]:
        what = f"{given} is neither [low, high] with low < high nor [high]"
        yield Problem(key, what, f"write '{key}=[0.5,5.0]'")


def correction_fits(run: PPORun) -> Iterator[Problem]:
    config, loss = run.algo.advantage, run.actor.policy_loss_type
    level, mode, gating = config.is_correction_level, config.is_correction_mode, config.is_correction_gating
    if level == "off":
        return
    if mode == "clip" and gating != "ratio":
        what = f"a weight cannot be bounded by a band of another quantity ({CORRECTION}_gating={gating})"
        yield Problem(f"{CORRECTION}_mode", what, f"write {CORRECTION}_mode=mask, or {CORRECTION}_gating=ratio")
    elif mode == "clip" and level == "seq":
        what = "level seq keeps or drops whole sequences, there is no one weight to bound"
        yield Problem(f"{CORRECTION}_mode", what, f"write {CORRECTION}_mode=mask, or {CORRECTION}_level=geo")
    if policy_loss.needs(loss, "sequences") and level == "token":
        what = f"token would weigh single tokens, and the ratio of {loss} is one of whole sequences"
        yield Problem(f"{CORRECTION}_level", what, f"write {CORRECTION}_level=geo")


def filtering_can_work(run: PPORun) -> Iterator[Problem]:
    algo = run.algo
    if not algo.dynamic_filtering_enable:
        return
    if run.rollout.n_samples_per_prompt < 2:
        what = "dynamic filtering compares the samples of a prompt with each other, there is 1"
        yield Problem("rollout.n_samples_per_prompt", what, "write rollout.n_samples_per_prompt=8")
    band = algo.dynamic_filtering_range
    if len(band) != 2 or band[0] >= band[1]:
        fix = "write 'algo.dynamic_filtering_range=[0,1]'"
        yield Problem("algo.dynamic_filtering_range", f"{band} is not [low, high] with low < high", fix)


def warm_up_ends(run: PPORun) -> Iterator[Problem]:
    steps, frozen = run.train.max_steps, run.critic.freezing_steps
    if steps is not None and run.algo.advantage.needs("values") and frozen >= steps:
        what = f"{frozen} leaves none of train.max_steps={steps} to the policy"
        yield Problem("critic.freezing_steps", what, f"write critic.freezing_steps={steps // 10}")


def penalties_fit(run: PPORun) -> Iterator[Problem]:
    buffer, longest = run.reward.overlong_buffer_len, run.rollout.max_new_tokens or run.data.max_len
    if buffer is not None and buffer >= longest:
        what = f"{buffer} tokens would penalise every response: the longest has {longest}"
        yield Problem("reward.overlong_buffer_len", what, f"write reward.overlong_buffer_len={max(1, longest // 5)}")


def average_is_whole(run: PPORun) -> Iterator[Problem]:
    if run.train.enable_ema and run.ds.zpg > 1:
        what = "a second partition of the weights (ds.zpg) would be gathered in place of their average"
        yield Problem("train.enable_ema", what, "write ds.zpg=1, or leave train.enable_ema away")


RULES: tuple[Callable[[PPORun], Iterable[Problem]], ...] = (
    aggregation_fits,
    correction_band_is_one,
    correction_fits,
    filtering_can_work,
    warm_up_ends,
    penalties_fit,
    average_is_whole,
)
