"""Every metric that a run writes, declared once: what it means, and which way it is better.

Whatever chooses by a metric (the best checkpoint, early stopping, searches, the final summary, reports, the pages of
sweeps) asks here; nothing is guessed from a name. docs/metrics.md is generated from this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HIGHER, LOWER = "higher", "lower"
PASS_AT_K = re.compile(r"pass\d+")


@dataclass(frozen=True)
class Metric:
    """A metric: its meaning, in words of the glossary, and which way it is better.

    `better`: None if more of it is neither better nor worse, so that nothing can be chosen by it. `is_share`: it is
    between 0 and 1 by what it is.
    """

    meaning: str
    better: str | None = None
    is_share: bool = False


PASS = Metric("pass@k: the share of prompts of which at least one of k responses passes", HIGHER, is_share=True)

# By the last part of the name: it means the same in training (train/), in an evaluation (eval/), of each of its sets
# (eval/<set>/) and of each source of prompts (train/<source>/). Where it does not, by the whole name.
METRICS: dict[str, Metric] = {
    # losses
    "loss": Metric("The loss that is minimised; of pairs and single answers the mean over them", LOWER),
    "gpt_loss": Metric("Mean loss of a token: -log p of the data, in nats", LOWER),
    "nll_loss": Metric("-log p of a token of the chosen answers: the mean of each answer, then that over pairs", LOWER),
    "distil_loss": Metric("Divergence of the student from its teacher, mean over tokens", LOWER),
    "ptx_loss": Metric("gpt_loss of the documents that are trained on beside a rollout", LOWER),
    "aux_loss": Metric("Load-balancing loss of mixture-of-experts models", LOWER),
    "policy_loss": Metric("The policy loss; its value says nothing, since the advantages have mean 0"),
    "critic_loss": Metric("Squared error of the critic's values, mean over tokens"),
    "kl_loss": Metric("Mean estimate of the KL to the reference as a loss, without its coefficient"),
    "entropy_before": Metric("Mean entropy of the policy before the update, at each token of the rollout, in nats"),
    "entropy_coef": Metric("Coefficient of the entropy bonus in this step, where actor.entropy_target steers it"),
    "entropy": Metric("Mean entropy of the policy at each token, in nats"),
    # what a model can do
    "acc": Metric(
        "Share of pairs, steps or tokens of which the model prefers the right one; equal rewards count half",
        HIGHER,
        is_share=True,
    ),
    "auc": Metric("How often a good answer or step ranks above a bad one", HIGHER, is_share=True),
    "reward": Metric("Mean reward that is trained on, after shaping; in an evaluation the mean reward", HIGHER),
    "score": Metric("Mean of what the sources of rewards say, before shaping", HIGHER),
    "pass_rate": Metric("Share of samples whose score is above 0.5", HIGHER, is_share=True),
    "pass1": PASS,
    "pass1_stderr": Metric("Standard error of pass1 over prompts"),
    "pass1_low": Metric("Lower end of the 95 % interval of pass1 of a benchmark", is_share=True),
    "pass1_high": Metric("Upper end of the 95 % interval of pass1 of a benchmark", is_share=True),
    "timed_out": Metric("Share of answers to a benchmark whose rule took too long", LOWER, is_share=True),
    "loose": Metric("ifeval: share of prompts of which a variant of the answer follows all", HIGHER, is_share=True),
    "inst_strict": Metric("ifeval: share of instructions that are followed", HIGHER, is_share=True),
    "inst_loose": Metric("ifeval: share that a variant of the answer follows", HIGHER, is_share=True),
    "flexible": Metric("gsm8k: share of answers whose last number is right", HIGHER, is_share=True),
    "reward_margin": Metric("Reward of the chosen answer less that of the rejected one, mean over pairs", HIGHER),
    "chosen_reward": Metric("Mean reward of chosen (or desirable) answers; dpo may lower both rewards"),
    "reject_reward": Metric("Mean reward of rejected (or undesirable) answers"),
    "chosen_logps": Metric("Mean log-prob of whole chosen answers, in nats"),
    "reject_logps": Metric("Mean log-prob of whole rejected answers, in nats"),
    "reward_mean": Metric("Mean score of a reward model over all answers; its scale is the model's own"),
    "reward_std": Metric("Standard deviation of a reward model's scores"),
    "reward_p05": Metric("Score of a reward model below which 5 % of the answers are"),
    "reward_p25": Metric("The same for 25 %"),
    "reward_p50": Metric("The same for half of the answers"),
    "reward_p75": Metric("The same for 75 %"),
    "reward_p95": Metric("The same for 95 %"),
    "kl": Metric("KL to the reference: in rl the mean estimate of a token, in kto the reference point"),
    # samples
    "response_length": Metric("Mean number of tokens that the model wrote in a response or episode"),
    "response_length_mean": Metric("The same in an evaluation"),
    "total_length": Metric("Mean number of tokens of a response or episode with its prompt"),
    "truncated": Metric("Share of samples that a limit cut off", LOWER, is_share=True),
    "truncated_rate": Metric("The same in an evaluation", LOWER, is_share=True),
    "num_samples": Metric("Number of samples"),
    "rollout/reward_mean": Metric("Mean reward of a rollout"),
    "rollout/reward_std": Metric("Standard deviation of the rewards of a step"),
    "rollout/filter_rounds": Metric("Rounds of sampling that the filters made a step take"),
    "rollout/filter_pass_rate": Metric("Share of sampled groups that the filters leave in", is_share=True),
    "rollout/waiting_groups": Metric("Groups that were left in and wait for a later step"),
    "rollout/not_recorded": Metric("Samples of clients before the step that rollouts/ has no room for"),
    "rollout/prompts_not_chosen": Metric("Candidates that algo.prompt_filter left out"),
    "rollout/dropped_groups": Metric("Groups that were dropped because a sample has no reward"),
    "rollout/weight_version": Metric("Weight version that sampled the rollout"),
    "group_reward_std": Metric("Mean standard deviation of the rewards inside a group; 0: nothing to learn from"),
    # updates
    "lr": Metric("Learning rate"),
    "actor_lr": Metric("Learning rate of the policy"),
    "critic_lr": Metric("Learning rate of the critic"),
    "grad_norm": Metric("Norm of the gradient before it is clipped"),
    "actor_grad_norm": Metric("The same of the policy"),
    "critic_grad_norm": Metric("The same of the critic"),
    "skipped": Metric("Share of optimiser steps that were skipped because they were not finite", LOWER, is_share=True),
    "actor_skipped": Metric("The same of the policy", LOWER, is_share=True),
    "critic_skipped": Metric("The same of the critic", LOWER, is_share=True),
    "epoch": Metric("Epochs at the end of the step"),
    "tokens": Metric("Tokens of the step that are trained on"),
    "samples": Metric("Rows of the step"),
    "ppo_clip_ratio": Metric("Share of tokens whose ratio is clipped", is_share=True),
    "ppo_clip_ratio_low": Metric("Share of tokens whose ratio is clipped from below", is_share=True),
    "ppo_clip_ratio_high": Metric("Share of tokens whose ratio is clipped from above", is_share=True),
    "ppo_kl": Metric("Mean of log p before the update less log p now, over tokens"),
    "covariance": Metric("Covariance of log-prob and advantage over tokens; above 0 an update lowers the entropy"),
    "chosen_token_ratio": Metric("Share of tokens that clip_cov leaves out or kl_cov holds back", is_share=True),
    "return": Metric("Mean over episodes of their returns' sum"),
    "values": Metric("Mean value of the critic over tokens"),
    "kl_coef": Metric("Coefficient beta of the KL in this step"),
    "logprobs_diff": Metric("Mean of log p of the policy less that of the reference, over tokens"),
    "teacher_kl": Metric("Mean of log p of the policy less that of the teacher, over tokens", LOWER),
    "advantage_clip_ratio": Metric("Share of tokens whose advantage algo.advantage.clip_range bounds", is_share=True),
    # engine against trainer
    "vllm_kl": Metric("KL of the engine to the trainer, estimate of a token"),
    "mismatch/mean": Metric("Mean |log-prob difference| of engine and trainer with the same weights, in nats", LOWER),
    "mismatch/max": Metric("Largest |log-prob difference| of engine and trainer with the same weights", LOWER),
    "rerouted": Metric(
        "Share of the engines' routes (a token in a layer) for which the policy's router chose other experts before "
        "the update",
        is_share=True,
    ),
    "correction/masked": Metric("Share of tokens that the correction drops", is_share=True),
    "correction/ratio": Metric("Mean of p / q over tokens; 1 without a mismatch"),
    "correction/chi2": Metric("Mean of (p / q)^2 less 1"),
    "correction/ess": Metric("Effective share of the samples under the correction's weights", HIGHER, is_share=True),
    "sync/tensors": Metric("Tensors that a weight sync sent"),
    "sync/bytes": Metric("Their size in bytes; with LoRA that of the adapters, where the engines hold the base model"),
    "sync/read_back": Metric("Tensors that were read back from the engines and compared"),
    "sync/probe": Metric("Largest |log-prob difference| of engine and trainer on the probe, in nats", LOWER),
    # rollouts beside training
    "async/staleness_mean": Metric("How many weight versions old a token is, mean over the tokens of a step"),
    "async/staleness_max": Metric("The same of the oldest token"),
    "async/versions_per_ledger": Metric("Mean number of weight versions that wrote a ledger"),
    "async/overtaken": Metric("Groups that began before the newest one of this step, and are still being written"),
    "async/outstanding": Metric("Groups that are under way or wait to be trained on"),
    "async/rejected": Metric("Groups that were rejected"),
    "async/policy_gap_mean": Metric(
        "How far the policy has moved since tokens were sampled: mean |log-prob difference|"
    ),
    "async/policy_gap_max": Metric("The same, its largest value"),
    "async/policy_gap_kl": Metric("The same as an estimate of the KL of a token"),
    # rewards
    "reward/errors": Metric("Samples without a reward because of an error", LOWER),
    "reward/timeouts": Metric("Samples without a reward because it took too long", LOWER),
    "reward/retries": Metric("Requests for rewards that were made again", LOWER),
    # judges
    "judge/answers": Metric("Responses that a judge was to score"),
    "judge/cached": Metric("Questions whose answer it had given before, or that were the same as another"),
    "judge/pairs": Metric("Pairs of answers that a judge ranked in both orders (reward.judge.both_orders)"),
    "judge/pairs_reversed": Metric("Those that it ordered otherwise when it saw them the other way round", LOWER),
    "judge/no_verdict": Metric("Those without a verdict", LOWER),
    "judge/calls": Metric("Requests to judges, with those that were sent again"),
    "judge/tokens": Metric("Tokens of their questions and replies"),
    "judge/seconds": Metric("Seconds from question to reply, added up over all requests"),
    # agents
    "agent/turns": Metric("Mean number of turns of an episode"),
    "agent/calls": Metric("Mean number of calls of tools in an episode"),
    "agent/malformed_calls": Metric("Mean number of calls that could not be read", LOWER),
    "agent/tool_errors": Metric("Mean number of calls that a tool answered with an error"),
    "agent/python_calls": Metric("Mean number of blocks of code that were run"),
    "agent/python_errors": Metric("Mean number of those that raised an error"),
    "agent/python_timeouts": Metric("Mean number of those that took too long"),
    "agent/environment_truncated": Metric("Share of episodes that their environment cut off", is_share=True),
    "agent/compactions": Metric("Mean number of summaries of an episode, with which its conversation went on"),
    "agent/summary_tokens": Metric("Mean number of tokens of all summaries of an episode"),
    "agent/ledgers": Metric("Mean number of ledgers of an episode"),
    "agent/orphans": Metric("Mean number of turns that a program did not go on with, which are not trained on"),
    "agent/retries": Metric("Mean number of requests that a client sent again"),
    # time and memory
    "tokens_per_s": Metric("Tokens that are trained on per second", HIGHER),
    "perf/memory_gb": Metric("Largest memory of a device, or of a process without one, in GiB", LOWER),
    "perf/actor_memory_gb": Metric("The same of the policy", LOWER),
    "perf/critic_memory_gb": Metric("The same of the critic", LOWER),
    "perf/engine_idle": Metric("Share of a step in which the engines have nothing to do", LOWER, is_share=True),
    "perf/trainer_idle": Metric("Share of a step in which the trainer has nothing to do", LOWER, is_share=True),
    "perf/overlap": Metric(
        "Time in which engines and trainer are busy, as a share of that of the less busy one", HIGHER
    ),
    "perf/engine_restarts": Metric("Times that an engine was started again", LOWER),
    "engine/acceptance": Metric("Share of the guesses of speculative decoding that are kept", HIGHER, is_share=True),
    "perf/prefix_cache_hits": Metric("Share of the tokens of prompts that an engine had in its cache", HIGHER),
    # loops
    "loop/rows": Metric("Rows that an iteration trains on"),
    "loop/dropped": Metric("Prompts that an iteration drops"),
}

# Metrics whose names have a free part: of the user's own, of a phase of the driver, or of a source of rewards.
FAMILIES: dict[str, Metric] = {
    "eval/pass<k>": PASS,
    "train/teacher_kl/<teacher>": Metric("teacher_kl over the rows of one of several teachers", LOWER),
    "reward/<name>": Metric("Mean of a number of that name that a reward or an environment gave"),
    "reward/<source>/<number>": Metric("mean, errors, timeouts, retries, rows and seconds of a source of rewards"),
    "agent/ended/<why>": Metric("Episodes of a step that ended so: finished, cut, full, turns, timed_out or failed"),
    "agent/<name>": Metric("Mean of a number of that name that an agent of the user's own gave"),
    "rollout/left_out/<reason>": Metric("Groups that algo.group_filter left out for that reason"),
    "timing/<phase>": Metric("Seconds that the driver was in that phase; step_total is the whole step", LOWER),
}
FREE = re.compile("train/teacher_kl/.+|reward/.+|agent/.+|rollout/left_out/.+|timing/.+")


def metric_of(name: str) -> Metric | None:
    """Return the declaration of a metric such as `eval/<set>/acc`; None for one that a user named."""
    last = name.rpartition("/")[2]
    if PASS_AT_K.fullmatch(last):
        return PASS
    if name not in METRICS and FREE.fullmatch(name):
        return None
    return METRICS.get(name) or METRICS.get(last)


def is_known(name: str) -> bool:
    """Return whether a metric is declared, or of a family of which users name some."""
    return metric_of(name) is not None or FREE.fullmatch(name) is not None


def direction_of(name: str) -> str | None:
    """Return HIGHER or LOWER, whichever is better of a metric such as `eval/<set>/acc`; None if it has no direction."""
    metric = metric_of(name)
    return None if metric is None else metric.better


def is_share(name: str) -> bool:
    """Return whether a metric is between 0 and 1 by what it is."""
    metric = metric_of(name)
    return metric is not None and metric.is_share
