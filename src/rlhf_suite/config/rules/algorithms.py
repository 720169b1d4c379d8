"""Rules about algorithms: what a loss, an estimator or a correction needs of the other flags."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_suite import registry
from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RL
from rlhf_suite.config.plan.run_plan import optimizer_steps_per_rollout
from rlhf_suite.registry import correction, is_own, policy_loss

CORRECTION = "algo.advantage.is_correction"


@rule(tasks=RL)
def covariances_choose_tokens(run: Run) -> Iterator[Problem]:
    """Find a band of covariances that holds none, and a pull to the old policy where nothing has moved from it."""
    loss, band = run.actor.policy_loss_type, run.actor.clip_cov_range
    if policy_loss.needs(loss, "covariance_band") and not (len(band) == 2 and band[0] < band[1]):
        yield Problem("actor.clip_cov_range", f"{band} is not [low, high]", "write 'actor.clip_cov_range=[1,5]'")
    if policy_loss.needs(loss, "largest_covariances") and optimizer_steps_per_rollout(run) == 1:
        problem = f"{loss} penalises the distance from the old policy, which is 0 in a single optimiser step"
        samples = run.rollout.batch_size * run.rollout.n_samples_per_prompt
        fix = f"write train.batch_size={max(samples // 4, 1)}, train.max_epochs=2, or another loss"
        yield Problem("actor.policy_loss_type", problem, fix)


@rule(tasks=RL)
def entropy_bonus_has_room(run: Run) -> Iterator[Problem]:
    coef, most = run.actor.entropy_coef, run.actor.entropy_coef_max
    if coef is not None and run.actor.entropy_target is not None and coef > most:
        key = "actor.entropy_coef_max"
        yield Problem(key, f"{most:g} is less than actor.entropy_coef={coef:g}", f"write {key}={2 * coef:g}")


@rule(tasks=RL)
def correction_fits(run: Run) -> Iterator[Problem]:
    config, loss = run.algo.advantage, run.actor.policy_loss_type
    level, mode, gating = config.is_correction_level, config.is_correction_mode, config.is_correction_gating
    if level == "off":
        return
    if correction.reads(mode, "is_correction_threshold"):
        yield from band_problems(config.is_correction_threshold, gating)
    if correction.needs(mode, "ratio") and registry.gating.needs(gating, "upper_bound"):
        problem = f"mode clip cannot bound weights by a band of another quantity ({CORRECTION}_gating={gating})"
        yield Problem(f"{CORRECTION}_mode", problem, f"write {CORRECTION}_mode=mask, or {CORRECTION}_gating=ratio")
    elif correction.needs(mode, "unit_weight") and level == "seq":
        problem = "level seq keeps or drops whole sequences, so there is no single weight to bound"
        yield Problem(f"{CORRECTION}_mode", problem, f"write {CORRECTION}_mode=mask, or {CORRECTION}_level=geo")
    if policy_loss.needs(loss, "sequences") and level == "token":
        problem = f"level token would weight single tokens, but the ratio of {loss} is that of whole sequences"
        yield Problem(f"{CORRECTION}_level", problem, f"write {CORRECTION}_level=geo")


def band_problems(given: list[float], gating: str) -> Iterator[Problem]:
    key = f"{CORRECTION}_threshold"
    if registry.gating.needs(gating, "upper_bound") and len(given) != 1:
        problem = f"{given}: a divergence has no lower bound"
        yield Problem(key, problem, f"write '{key}=[0.05]', or {CORRECTION}_gating=ratio")
    elif len(given) not in (1, 2) or given[0] >= [*given, float("inf")][1]:
        problem = f"{given} is neither [low, high] with low < high nor [high]"
        yield Problem(key, problem, f"write '{key}=[0.5,5.0]'")


@rule(tasks=RL)
def advantages_keep_their_signs(run: Run) -> Iterator[Problem]:
    given, key = run.algo.advantage.clip_range, "algo.advantage.clip_range"
    if given is not None and not (len(given) == 2 and given[0] <= 0 <= given[1] and given[0] < given[1]):
        problem = f"{given} is not [low, high] with low <= 0 <= high, so signs would change"
        yield Problem(key, problem, f"write '{key}=[-5,5]', or null")


@rule(tasks=RL)
def warm_up_ends(run: Run) -> Iterator[Problem]:
    if run.train.max_steps is not None and run.algo.advantage.needs("values"):
        limit = f"train.max_steps={run.train.max_steps}"
        yield from warm_up_problems(run.critic.freezing_steps, run.train.max_steps, limit, "train.max_steps")


def warm_up_problems(frozen: int, steps: int, limit: str, more: str) -> Iterator[Problem]:
    """Yield a problem if `frozen` steps of the critic alone leave none of `steps`, which the flag `more` raises."""
    if frozen >= steps:
        problem = f"{frozen} leaves no step of {limit} for the policy"
        yield Problem("critic.freezing_steps", problem, f"write critic.freezing_steps={steps // 10}, or raise {more}")


@rule(tasks=RL)
def numbers_are_given(run: Run) -> Iterator[Problem]:
    """Find numbers that nobody can give. What own code, servers, rules and environments give is not known here, and is
    seen in the first rollout."""
    given, agents = run.reward, run.agent.has_turns
    is_known = not (run.replays or agents or given.sources or given.rule or given.remote_url or given.rubric)
    known = {
        "overlong_penalty": given.overlong_buffer_len is not None,
        "stop_properly_penalty": given.stop_properly_penalty_coef is not None,
        **dict.fromkeys(("num_steps", "step_min", "step_mean"), given.process.enable),
    }
    for name in run.algo.advantage.numbers:
        of_agents = name.startswith("agent/") and not agents and not run.replays
        if of_agents or (is_known and not known.get(name, False)):
            who = "an agent gives it, and the run has none" if of_agents else "nothing in the run gives it"
            problem = f"{run.algo.advantage.estimator} needs the number {name!r} of samples: {who}"
            fix = "take another estimator, or a reward or an agent that gives it (docs/own_code_inputs.md)"
            yield Problem("algo.advantage.estimator", problem, fix)


@rule(tasks=RL)
def reward_parts_are_named(run: Run) -> Iterator[Problem]:
    """Find an estimator of reward parts without parts, or with penalties that are none of them, and wrong weights."""
    config, key, penalised = run.algo.advantage, "algo.advantage.reward_parts", penalties(run)
    if not config.needs("parts"):
        return
    parts, weights = config.reward_parts, config.reward_part_weights
    known = ",".join(f"{name}/mean" for name in run.reward.sources) or "<name>,<name>"
    if not parts or len(set(parts)) < len(parts):
        problem = f"{config.estimator} standardises every part of the reward by itself, and " + (
            f"{','.join(parts)} names one twice" if parts else "none is named"
        )
        yield Problem(key, problem, f"write '{key}=[{known}]' (docs/rl_estimators.md)")
    elif missing := [name for name in penalised if name not in parts]:
        problem = f"{config.estimator} reads only the parts of the reward, and {missing[0]} is not one of them"
        yield Problem(key, problem, f"write '{key}=[{','.join([*parts, *missing])}]', or {penalised[missing[0]]}=null")
    if weights is not None and (len(weights) != len(parts) or not any(weights)):
        problem = f"{weights} is not one number for each of {len(parts)} parts, with at least one above 0"
        weights_key = "algo.advantage.reward_part_weights"
        yield Problem(weights_key, problem, f"write '{weights_key}=[{','.join('1' for _ in parts)}]', or null")


def penalties(run: Run) -> dict[str, str]:
    """Return the penalties that the run takes from rewards by the names of their numbers, each with its flag."""
    given = {
        "overlong_penalty": ("reward.overlong_buffer_len", run.reward.overlong_buffer_len),
        "stop_properly_penalty": ("reward.stop_properly_penalty_coef", run.reward.stop_properly_penalty_coef),
    }
    return {name: flag for name, (flag, value) in given.items() if value is not None}


@rule(tasks=RL)
def rewards_are_successes(run: Run) -> Iterator[Problem]:
    """Find penalties that make rewards negative, for an estimator that divides by how often a prompt succeeds."""
    config = run.algo.advantage
    if not config.needs("successes"):
        return
    problem = f"negative rewards do not count as successes, and {config.estimator} divides by the mean of successes"
    if run.reward.overlong_buffer_len is not None:
        key = "reward.overlong_buffer_len"
        yield Problem(key, f"its penalty makes rewards negative: {problem}", f"write {key}=null, or another estimator")
    if (coef := run.reward.stop_properly_penalty_coef) is not None and coef < 0:
        key = "reward.stop_properly_penalty_coef"
        yield Problem(key, f"{coef:g} replaces rewards: {problem}", f"write {key}=0, null, or another estimator")


@rule(tasks=RL)
def groups_hold_k_samples(run: Run) -> Iterator[Problem]:
    config, samples = run.algo.advantage, run.rollout.n_samples_per_prompt
    if (
        registry.estimator.reads(config.estimator, "pass_k")
        and not is_own(config.estimator)
        and samples < config.pass_k
    ):
        problem = f"a group of {samples} samples has fewer than {config.pass_k}"
        key = "rollout.n_samples_per_prompt"
        yield Problem("algo.advantage.pass_k", problem, f"write {key}={2 * config.pass_k}, or a smaller number")


@rule(tasks=RL)
def kl_pulls(run: Run) -> Iterator[Problem]:
    kl, samples = run.algo.kl, run.rollout.batch_size * run.rollout.n_samples_per_prompt
    pulls = kl.unbiased_gradient or not registry.kl_estimator.needs(kl.estimator, "reward")
    if kl.use_loss and kl.init_coef > 0 and not pulls:
        problem = f"{kl.estimator} has a gradient of mean zero as a loss term, so it has no effect on average"
        fix = "write algo.kl.estimator=k3, algo.kl.unbiased_gradient=true or algo.kl.use_loss=false"
        yield Problem("algo.kl.estimator", problem, fix)
    if kl.target is not None and kl.horizon <= 0.2 * samples:
        problem = f"{kl.horizon} is too short for {samples} samples per step: the coefficient could fall to 0"
        yield Problem("algo.kl.horizon", problem, f"write algo.kl.horizon={10 * samples}")


@rule(tasks=("prm",))
def reward_tokens_differ(run: Run) -> Iterator[Problem]:
    if run.algo.reward_tokens is not None:
        names = run.algo.reward_tokens
        if len(names) < 2 or len(set(names)) < len(names):
            problem = f"{', '.join(names) or 'nothing'}: a reward is a choice between two or more tokens that differ"
            yield Problem("algo.reward_tokens", problem, "write 'algo.reward_tokens=[+,-]', or null")
