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


PASS = Metric("pass@k: the share of prompts with at least one correct response among k", HIGHER, is_share=True)

# By the last part of the name: it means the same in training (train/), in an evaluation (eval/), of each of its sets
# (eval/<set>/) and of each source of prompts (train/<source>/). Where it does not, by the whole name.
METRICS: dict[str, Metric] = {
    # losses
    "loss": Metric("The loss that is minimised: the mean over tokens, pairs or single answers", LOWER),
    "gpt_loss": Metric("Mean loss per token: -log p of the data, in nats", LOWER),
    "nll_loss": Metric("-log p per token of the chosen answers: averaged in each answer, then over pairs", LOWER),
    "distil_loss": Metric("Divergence between student and teacher, mean over tokens", LOWER),
    "ptx_loss": Metric("gpt_loss of the documents of data.pretrain_dataset", LOWER),
    "aux_loss": Metric("Load-balancing loss of mixture-of-experts models", LOWER),
    "policy_loss": Metric("The policy loss. Its value has no meaning, because the advantages have mean 0"),
    "critic_loss": Metric("Squared error of the critic's values, mean over tokens"),
    "kl_loss": Metric("Mean estimate of the KL to the reference as a loss term, without its coefficient"),
    "entropy_before": Metric("Mean entropy of the policy before the update, over the tokens of the rollout, in nats"),
    "entropy_coef": Metric("Coefficient of the entropy bonus in this step, if actor.entropy_target is set"),
    "entropy": Metric("Mean entropy of the policy over tokens, in nats"),
    # what a model can do
    "acc": Metric(
        "Share of pairs, steps or tokens that the model gets right; a pair with equal rewards counts half",
        HIGHER,
        is_share=True,
    ),
    "auc": Metric(
        "Area under the ROC curve: how often a good answer or step ranks above a bad one", HIGHER, is_share=True
    ),
    "reward": Metric(
        "Mean reward that the policy is trained on, after shaping; in an evaluation the mean reward", HIGHER
    ),
    "score": Metric("Mean score from the sources of rewards, before shaping", HIGHER),
    "pass_rate": Metric("Share of samples whose score is above 0.5", HIGHER, is_share=True),
    "pass1": PASS,
    "pass1_stderr": Metric("Standard error of pass1 over prompts"),
    "pass1_low": Metric("Lower end of the 95 % confidence interval of a benchmark's pass1", is_share=True),
    "pass1_high": Metric("Upper end of the 95 % confidence interval of a benchmark's pass1", is_share=True),
    "timed_out": Metric("Share of a benchmark's answers for which the rule took too long", LOWER, is_share=True),
    "loose": Metric(
        "ifeval: share of prompts for which a variant of the answer follows all instructions", HIGHER, is_share=True
    ),
    "inst_strict": Metric("ifeval: share of instructions that the answers follow", HIGHER, is_share=True),
    "inst_loose": Metric("ifeval: share of instructions that a variant of the answer follows", HIGHER, is_share=True),
    "flexible": Metric("gsm8k: share of answers whose last number is right", HIGHER, is_share=True),
    "reward_margin": Metric("Reward of the chosen answer minus reward of the rejected one, mean over pairs", HIGHER),
    "chosen_reward": Metric(
        "Mean reward of chosen (or desirable) answers. dpo may lower the rewards of chosen and rejected answers"
    ),
    "reject_reward": Metric("Mean reward of rejected (or undesirable) answers"),
    "chosen_logps": Metric("Mean log-prob of whole chosen answers, in nats"),
    "reject_logps": Metric("Mean log-prob of whole rejected answers, in nats"),
    "reward_mean": Metric("Mean score of a reward model over all answers. Each model has its own scale"),
    "reward_std": Metric("Standard deviation of a reward model's scores"),
    "reward_p05": Metric("5 % quantile of a reward model's scores over all answers"),
    "reward_p25": Metric("25 % quantile of these scores"),
    "reward_p50": Metric("Median of these scores"),
    "reward_p75": Metric("75 % quantile of these scores"),
    "reward_p95": Metric("95 % quantile of these scores"),
    "kl": Metric("KL to the reference: in RL the mean estimate per token, in kto the reference point"),
    # samples
    "response_length": Metric("Mean number of tokens that the model wrote in a response or episode"),
    "response_length_mean": Metric("Mean number of tokens of a response in an evaluation"),
    "total_length": Metric("Mean number of tokens of a response or episode, including its prompt"),
    "truncated": Metric("Share of samples that were cut off at a length limit", LOWER, is_share=True),
    "truncated_rate": Metric("Share of samples that were cut off in an evaluation", LOWER, is_share=True),
    "num_samples": Metric("Number of samples"),
    "rollout/reward_mean": Metric("Mean reward of a rollout"),
    "rollout/reward_std": Metric("Standard deviation of the rewards of a step"),
    "rollout/filter_rounds": Metric("Number of sampling rounds that a step needed because of filters"),
    "rollout/filter_pass_rate": Metric("Share of sampled groups that the filters keep", is_share=True),
    "rollout/waiting_groups": Metric("Number of kept groups that wait for a later step"),
    "rollout/not_recorded": Metric(
        "Number of client samples before the step that were not stored in rollouts/ for lack of space"
    ),
    "rollout/prompts_not_chosen": Metric("Number of candidate prompts that algo.prompt_filter left out"),
    "rollout/dropped_groups": Metric("Number of groups that were dropped because a sample has no reward"),
    "rollout/weight_version": Metric("Version of the weights that sampled the rollout"),
    "group_reward_std": Metric("Mean standard deviation of the rewards within a group; 0: there is nothing to learn"),
    # updates
    "lr": Metric("Learning rate"),
    "actor_lr": Metric("Learning rate of the policy"),
    "critic_lr": Metric("Learning rate of the critic"),
    "grad_norm": Metric("Norm of the gradient before clipping"),
    "actor_grad_norm": Metric("Gradient norm of the policy before clipping"),
    "critic_grad_norm": Metric("Gradient norm of the critic before clipping"),
    "skipped": Metric(
        "Share of optimiser steps skipped because the loss or the gradient was not finite", LOWER, is_share=True
    ),
    "actor_skipped": Metric("Share of skipped optimiser steps of the policy", LOWER, is_share=True),
    "critic_skipped": Metric("Share of skipped optimiser steps of the critic", LOWER, is_share=True),
    "epoch": Metric("Number of epochs at the end of the step"),
    "tokens": Metric("Number of tokens that the step trains on"),
    "samples": Metric("Number of rows in the step"),
    "ppo_clip_ratio": Metric("Share of tokens whose ratio is clipped", is_share=True),
    "ppo_clip_ratio_low": Metric("Share of tokens whose ratio is clipped from below", is_share=True),
    "ppo_clip_ratio_high": Metric("Share of tokens whose ratio is clipped from above", is_share=True),
    "ppo_kl": Metric("Mean of log p(before the update) - log p(now), over tokens"),
    "covariance": Metric(
        "Covariance of log-prob and advantage over tokens. If it is above 0, an update lowers the entropy"
    ),
    "chosen_token_ratio": Metric("Share of tokens that clip_cov leaves out or kl_cov penalises", is_share=True),
    "return": Metric("Mean over episodes of the sum of an episode's returns"),
    "values": Metric("Mean value of the critic over tokens"),
    "kl_coef": Metric("Coefficient beta of the KL in this step"),
    "logprobs_diff": Metric("Mean of log p(policy) - log p(reference), over tokens"),
    "teacher_kl": Metric("Mean of log p(policy) - log p(teacher), over tokens", LOWER),
    "advantage_clip_ratio": Metric("Share of tokens whose advantage algo.advantage.clip_range changed", is_share=True),
    # engine against trainer
    "vllm_kl": Metric("Estimate of the KL between engine and trainer, per token"),
    "mismatch/mean": Metric(
        "Mean |log-prob difference| between engine and trainer with the same weights, in nats", LOWER
    ),
    "mismatch/max": Metric("Largest |log-prob difference| between engine and trainer with the same weights", LOWER),
    "rerouted": Metric(
        "Share of the engines' routes (one per token and layer) for which the router of the policy chose other experts "
        "before the update",
        is_share=True,
    ),
    "correction/masked": Metric("Share of tokens that the correction drops", is_share=True),
    "correction/ratio": Metric("Mean of p(trainer) / q(engine) over tokens; 1 without a mismatch"),
    "correction/chi2": Metric("Mean of (p / q)^2 - 1 over tokens"),
    "correction/ess": Metric(
        "Effective sample size under the weights of the correction, as a share of the samples", HIGHER, is_share=True
    ),
    "sync/tensors": Metric("Number of tensors that a weight sync sent"),
    "sync/bytes": Metric(
        "Size of these tensors in bytes. With LoRA only the adapters are sent if the engines hold the base model"
    ),
    "sync/read_back": Metric("Number of tensors that were read back from the engines and compared"),
    "sync/probe": Metric("Largest |log-prob difference| between engine and trainer on the probe, in nats", LOWER),
    # rollouts beside training
    "async/staleness_mean": Metric("Age of a token in weight versions, mean over the tokens of a step"),
    "async/staleness_max": Metric("Age of the oldest token of a step in weight versions"),
    "async/versions_per_ledger": Metric("Mean number of weight versions that generated the tokens of a ledger"),
    "async/overtaken": Metric("Number of unfinished groups that were started before the newest group of this step"),
    "async/outstanding": Metric("Number of groups that are in progress or wait to be trained on"),
    "async/rejected": Metric("Number of groups that were rejected"),
    "async/policy_gap_mean": Metric(
        "How far the policy has moved since the tokens were sampled: mean |log-prob difference|"
    ),
    "async/policy_gap_max": Metric("Largest |log-prob difference| since the tokens were sampled"),
    "async/policy_gap_kl": Metric("Estimate of the KL per token since the tokens were sampled"),
    # rewards
    "reward/errors": Metric("Number of samples without a reward because of an error", LOWER),
    "reward/timeouts": Metric("Number of samples without a reward because scoring took too long", LOWER),
    "reward/retries": Metric("Number of repeated requests for rewards", LOWER),
    # judges
    "judge/answers": Metric("Number of responses that the judge had to score"),
    "judge/cached": Metric(
        "Number of questions that needed no request, because the same question was asked before or in the same batch"
    ),
    "judge/pairs": Metric("Number of pairs of answers that the judge ranked in both orders (reward.judge.both_orders)"),
    "judge/pairs_reversed": Metric(
        "Number of these pairs that the judge ranked differently in the reversed order", LOWER
    ),
    "judge/no_verdict": Metric("Number of responses without a verdict", LOWER),
    "judge/calls": Metric("Number of requests to judges, including repeated ones"),
    "judge/tokens": Metric("Number of tokens in the questions and replies of judges"),
    "judge/seconds": Metric("Seconds from question to reply, summed over all requests"),
    # agents
    "agent/turns": Metric("Mean number of turns of an episode"),
    "agent/calls": Metric("Mean number of tool calls in an episode"),
    "agent/malformed_calls": Metric("Mean number of tool calls in an episode that could not be parsed", LOWER),
    "agent/tool_errors": Metric("Mean number of tool calls in an episode that returned an error"),
    "agent/python_calls": Metric("Mean number of code blocks that were run in an episode"),
    "agent/python_errors": Metric("Mean number of these code blocks that raised an error"),
    "agent/python_timeouts": Metric("Mean number of these code blocks that took too long"),
    "agent/environment_truncated": Metric("Share of episodes that the environment cut off", is_share=True),
    "agent/compactions": Metric("Mean number of summaries in an episode (agent.compact_at_tokens)"),
    "agent/summary_tokens": Metric("Mean number of tokens in all summaries of an episode"),
    "agent/ledgers": Metric("Mean number of ledgers of an episode"),
    "agent/orphans": Metric(
        "Mean number of turns in an episode that the program did not continue. They are not trained on"
    ),
    "agent/retries": Metric("Mean number of requests in an episode that the client repeated"),
    # time and memory
    "tokens_per_s": Metric("Number of tokens trained on per second", HIGHER),
    "perf/memory_gb": Metric("Peak memory of a device in GiB; without devices, that of a process", LOWER),
    "perf/actor_memory_gb": Metric("Peak memory of the policy in GiB", LOWER),
    "perf/critic_memory_gb": Metric("Peak memory of the critic in GiB", LOWER),
    "perf/engine_idle": Metric("Share of a step in which the engines are idle", LOWER, is_share=True),
    "perf/trainer_idle": Metric("Share of a step in which the trainer is idle", LOWER, is_share=True),
    "perf/overlap": Metric(
        "Time in which engines and trainer are both busy, as a share of the busy time of the less busy one", HIGHER
    ),
    "perf/engine_restarts": Metric("Number of times that an engine was restarted", LOWER),
    "engine/acceptance": Metric(
        "Share of the draft tokens of speculative decoding that are accepted", HIGHER, is_share=True
    ),
    "perf/prefix_cache_hits": Metric(
        "Share of all prompt tokens that were found in the prefix cache of an engine", HIGHER
    ),
    # loops
    "loop/rows": Metric("Number of rows that an iteration trains on"),
    "loop/dropped": Metric("Number of prompts that an iteration drops"),
}

# Metrics whose names have a free part, for example a name that the user chose or a phase of the driver.
FAMILIES: dict[str, Metric] = {
    "eval/pass<k>": PASS,
    "train/teacher_kl/<teacher>": Metric("teacher_kl over the rows of this teacher", LOWER),
    "reward/<name>": Metric("Mean of the number with this name from a reward or an environment"),
    "reward/<source>/<number>": Metric("mean, errors, timeouts, retries, rows and seconds of this source of rewards"),
    "agent/ended/<why>": Metric(
        "Number of episodes of a step with this ending: finished, cut, full, turns, timed_out or failed"
    ),
    "agent/<name>": Metric("Mean of the number with this name from your own agent"),
    "rollout/left_out/<reason>": Metric("Number of groups that algo.group_filter left out for this reason"),
    "timing/<phase>": Metric("Seconds that the driver spent in this phase; step_total is the whole step", LOWER),
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
