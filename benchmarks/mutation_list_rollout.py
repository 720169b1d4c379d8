"""Mistakes in sampling, scoring, filtering and evaluating responses."""

from __future__ import annotations

from mutation import Mutation

ANSWERS = ("tests/offline/test_answers.py",)
COLLECT = ("tests/rl/test_sampling.py",)
EVALUATION = ("tests/rl/test_evaluation.py",)
GATHER = ("tests/rl/test_rollout.py",)
RECORDED = ("tests/rl/test_recorded_rollouts.py",)
REPLAYS = ("tests/config/test_replays.py",)
JUDGES = ("tests/rl/test_reward_models.py",)
SCORING = ("tests/rl/test_scoring.py",)
STAMPS = ("tests/e2e/test_stamped_versions.py",)

ROLLOUT = [
    Mutation(
        "every step draws with the same seeds",
        "rl/sampling.py",
        "[(self.seed, *stream, t.prompt, ",
        "[(self.seed, t.prompt, ",
        COLLECT,
    ),
    Mutation(
        "every sample of a group has the same seed",
        "rl/sampling.py",
        "t.prompt, t.sample)",
        "t.prompt)",
        COLLECT,
    ),
    Mutation(
        "an evaluation draws with the seeds of training",
        "rl/sampling.py",
        "TRAINING, EVALUATION = 0, 1",
        "TRAINING, EVALUATION = 0, 0",
        COLLECT,
    ),
    Mutation(
        "a response may be longer than data.max_len allows",
        "rl/sampling.py",
        "self.max_len - prompt_tokens",
        "self.max_len",
        COLLECT,
    ),
    Mutation(
        "the greedy baseline is drawn",
        "rl/sampling.py",
        "self.settings(0.0)",
        "self.settings(self.config.temperature)",
        COLLECT,
    ),
    Mutation(
        "an evaluation draws with the temperature of training",
        "rl/evaluation.py",
        "self.config.temperature",
        "self.sampler.config.temperature",
        EVALUATION,
    ),
    Mutation(
        "pass@k is that of k samples, not of n",
        "rl/evaluation.py",
        "pass_at_k(int(count), int(c), k)",
        "pass_at_k(k, min(int(c), k), k)",
        EVALUATION,
    ),
    Mutation(
        "a score of exactly one half passes",
        "rl/evaluation.py",
        "scored.scores > PASS",
        "scored.scores >= PASS",
        EVALUATION,
    ),
    Mutation(
        "rewards of an evaluation are of all sources",
        "rl/evaluation.py",
        "float(scored.rewards[chosen].mean())",
        "float(scored.rewards.mean())",
        EVALUATION,
    ),
    Mutation(
        "the standard error is the deviation",
        "algo/scores.py",
        "math.sqrt(variance / count)",
        "math.sqrt(variance)",
        ("tests/algo/test_passk.py",),
    ),
    Mutation(
        "a failed sample is dropped without its group",
        "rl/scoring.py",
        "kept = [i for i, t in enumerate(trajectories) if t.group not in failed]",
        "kept = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Scored)]",
        SCORING,
    ),
    Mutation(
        "rewards move up where a group was dropped",
        "rl/scoring.py",
        "[outcome for i in kept if isinstance(outcome := outcomes[i], Scored)]",
        "[outcome for outcome in outcomes if isinstance(outcome, Scored)][: len(kept)]",
        SCORING,
    ),
    Mutation(
        "labels are those of the prompts at the start of the data",
        "rl/scoring.py",
        "self.prompts[t.prompt] for t",
        "self.prompts[t.group] for t",
        SCORING,
    ),
    Mutation(
        "as many failures as are allowed end the run",
        "rl/scoring.py",
        "len(failures) > config.max_error_rate",
        "len(failures) >= config.max_error_rate",
        SCORING,
    ),
    Mutation(
        "evaluations are of rewards, not of scores",
        "rl/scoring.py",
        "np.array([s.score for s in chosen]",
        "np.array([s.reward for s in chosen]",
        SCORING,
    ),
    Mutation(
        "a reward model's score is standardised too",
        "rl/reward_models.py",
        "[Scored(reward, score) for",
        "[Scored(reward, reward) for",
        JUDGES,
    ),
    Mutation(
        "a solution that does not fit is scored by the steps that do",
        "rl/reward_models.py",
        "if steps.truncated:",
        "if False:",
        JUDGES,
    ),
    Mutation(
        "every round of filtering draws with the same seeds",
        "rl/rollout.py",
        "self.sample(chosen, state.rounds)",
        "self.sample(chosen, 0)",
        GATHER,
    ),
    Mutation(
        "groups are filtered by their shaped rewards",
        "rl/filtering.py",
        "for score in group.scores]",
        "for score in group.rewards]",
        GATHER,
    ),
    Mutation(
        "the pass rate of the filter is that of the last round",
        "rl/rollout.py",
        "sampled, accepted = sampled + len(fresh), accepted + len(kept)",
        "sampled, accepted = len(fresh), len(kept)",
        GATHER,
    ),
    Mutation(
        "the spread inside groups is the biased one",
        "rl/sample_metrics.py",
        "std(ddof=1)",
        "std()",
        GATHER,
    ),
    Mutation(
        "all tokens of a response have the version of its first one",
        "rl/sampling.py",
        "generation.log_probs, generation.versions)",
        "generation.log_probs, generation.versions[:1])",
        COLLECT,
    ),
    Mutation(
        "all samples of a row are drawn alike",
        "offline/answers.py",
        "self.config.rollout.seed, number, sample)",
        "self.config.rollout.seed, number)",
        ANSWERS,
    ),
    Mutation(
        "answers to the first row of a chunk go to the chunk before",
        "offline/answers.py",
        'side="right"',
        'side="left"',
        ANSWERS,
    ),
    Mutation(
        "tokens are stamped with the version before that of their weights",
        "engines/actor.py",
        "engine.set_weight_version(str(manifest.version))",
        "engine.set_weight_version(str(max(manifest.version - 1, 0)))",
        STAMPS,
    ),
    Mutation(
        "unfinished responses keep the KV cache of the old weights",
        "engines/actor.py",
        "engine.reset_prefix_cache(reset_running_requests=True)",
        "engine.reset_prefix_cache()",
        STAMPS,
    ),
    Mutation(
        "a replay trains on scores in place of shaped rewards",
        "rl/replay.py",
        'rewards=floats("reward")',
        'rewards=floats("score")',
        RECORDED,
    ),
    Mutation(
        "a replay forgets the rewards of turns",
        "rl/replay.py",
        'tokens("turn_rewards") if "turn_rewards" in names else [',
        "[",
        RECORDED,
    ),
    Mutation(
        "a replay reads log-probs at another temperature",
        "preflight/inspections/replay.py",
        '"rollout.temperature", ',
        "",
        REPLAYS,
    ),
    Mutation(
        "a group that a filter objects to is trained on",
        "rl/rollout.py",
        "        found = self.filters.objection(group)",
        "        found = None",
        ("tests/rl/test_filtering.py", "-k", "counted_by_reason"),
    ),
    Mutation(
        "the scores of earlier groups are not in checkpoints",
        "rl/rollout.py",
        "waiting, History.load(folder))",
        "waiting)",
        ("tests/rl/test_filtering.py", "-k", "record_of_scores_is_in"),
    ),
    Mutation(
        "a copied record of scores grows with the original",
        "rl/filtering.py",
        "History({prompt: [*groups] for",
        "History({prompt: groups for",
        ("tests/rl/test_filtering.py", "-k", "record_of_scores_is_in"),
    ),
    Mutation(
        "a filter of prompts draws the same numbers each round",
        "rl/filtering.py",
        "[self.seed, PROMPTS, number]",
        "[self.seed, PROMPTS, 0]",
        ("tests/rl/test_filtering.py", "-k", "random_numbers"),
    ),
    Mutation(
        "a stream forgets the scores when it continues",
        "rl/stream.py",
        "self.builder.state.history = History.load(folder)",
        "self.builder.state.history = History()",
        ("tests/rl/test_filtering.py", "-k", "goes_on_with_its_record"),
    ),
    Mutation(
        "prompts that were not chosen count as outstanding",
        "rl/stream.py",
        "return self.next - self.rejected - self.skipped",
        "return self.next - self.rejected",
        ("tests/rl/test_filtering.py", "-k", "sees_what and stream"),
    ),
]
