"""Mistakes in a step of reinforcement learning around its losses: log-probs, schedules, counts, versions, resume."""

from __future__ import annotations

from mutation import Mutation

EXPERIENCE = ("tests/rl/test_experience.py",)
PIPELINE = ("tests/rl/test_pipeline.py",)
ROLES = ("tests/rl/test_roles.py",)
UPDATE = ("tests/rl/test_update.py",)
SYNC = ("tests/weight_sync/test_weight_sync.py",)

RL_STEP = [
    Mutation(
        "log-probs of the rollout are those of temperature 1",
        "rl/experience.py",
        "algo, temperature, mismatch_limit\n",
        "algo, 1.0, mismatch_limit\n",
        EXPERIENCE,
    ),
    Mutation(
        "the score is trained on, without penalties",
        "rl/experience.py",
        "torch.from_numpy(scored.rewards)",
        "torch.from_numpy(scored.scores)",
        EXPERIENCE,
    ),
    Mutation(
        "tokens of older weights are compared with the weights of now",
        "rl/experience.py",
        '"weight_version") == version',
        '"weight_version") >= 0',
        EXPERIENCE,
    ),
    Mutation(
        "old log-probs are not measured though several steps follow",
        "rl/experience.py",
        "or steps_per_rollout > 1",
        "",
        EXPERIENCE,
    ),
    Mutation(
        "old log-probs are not measured while the critic warms up",
        "rl/experience.py",
        "or critic_warm_up > 0",
        "",
        EXPERIENCE,
    ),
    Mutation(
        "entropies of tokens are taken for their log-probs",
        "rl/experience.py",
        'columns["old_log_probs"], columns["entropies"] =',
        'columns["entropies"], columns["old_log_probs"] =',
        EXPERIENCE,
    ),
    Mutation(
        "an estimator that needs entropies gets none",
        "rl/experience.py",
        'token_entropy or algo.advantage.needs("entropies")',
        "token_entropy",
        EXPERIENCE,
    ),
    Mutation(
        "the policy's schedule does not wait for the critic's warm-up",
        "rl/update.py",
        "first = (step - self.critic_warm_up) * self.steps_per_rollout",
        "first = step * self.steps_per_rollout",
        UPDATE,
    ),
    Mutation(
        "the policy waits one step too long",
        "rl/update.py",
        "if step >= self.critic_warm_up:",
        "if step > self.critic_warm_up:",
        UPDATE,
    ),
    Mutation(
        "the critic's schedule counts RL steps",
        "rl/update.py",
        "steps, step * self.steps_per_rollout, what)",
        "steps, step, what)",
        UPDATE,
    ),
    Mutation(
        "every rollout is shuffled alike",
        "rl/update.py",
        "(config.seed, step))",
        "(config.seed, 0))",
        UPDATE,
    ),
    Mutation(
        "metrics are those of the last optimiser step, not their mean",
        "rl/roles.py",
        "sum(values) / len(values)",
        "values[-1]",
        ROLES,
    ),
    Mutation(
        "a skipped step moves the average of the weights",
        "rl/roles.py",
        'if not row["skipped"]:',
        "if True:",
        ROLES,
    ),
    Mutation(
        "the policy trains with the first KL coefficient",
        "rl/roles.py",
        "self.policy_objective.kl_coef = kl_coef",
        "self.policy_objective.kl_coef = self.policy_objective.kl.init_coef",
        ROLES,
    ),
    Mutation(
        "the policy trains at temperature 1",
        "rl/roles.py",
        "kl, rollout.temperature, horizon)",
        "kl, 1.0, horizon)",
        ROLES,
    ),
    Mutation(
        "the longest response has data.max_len tokens",
        "rl/roles.py",
        "horizon = rollout.max_new_tokens or settings.data.max_len",
        "horizon = settings.data.max_len",
        ROLES,
    ),
    Mutation(
        "the KL controller sees one sample per step",
        "rl/pipeline.py",
        "self.credit.adapt(credit_metrics, experience.num_episodes)",
        "self.credit.adapt(credit_metrics, 1)",
        PIPELINE,
    ),
    Mutation(
        "weights are published with the version of the step before",
        "rl/pipeline.py",
        "self.engines.start(step + 1, experience)",
        "self.engines.start(step, experience)",
        PIPELINE,
    ),
    Mutation(
        "after a resume the versions of weights begin anew",
        "rl/pipeline.py",
        "first(version=start)",
        "first(version=0)",
        PIPELINE,
    ),
    Mutation(
        "a resumed RL run leaves a step out",
        "train/loop.py",
        "in range(start, self.total_steps)",
        "in range(start + 1, self.total_steps)",
        PIPELINE,
    ),
    Mutation(
        "an RL checkpoint has the number of the step before",
        "train/loop.py",
        "self.saver.save_if_due(step + 1, evaluation, self.settled)",
        "self.saver.save_if_due(step, evaluation, self.settled)",
        PIPELINE,
    ),
    Mutation(
        "the last RL step is not evaluated",
        "train/loop.py",
        "(step % every == 0 or step == self.total_steps)",
        "step % every == 0",
        PIPELINE,
    ),
    Mutation(
        "one pass over the prompts whatever the flag says",
        "rl/pipeline.py",
        "order.steps_per_epoch * train.num_episodes",
        "order.steps_per_epoch",
        PIPELINE,
    ),
    Mutation(
        "a resume removes the rollout of the last step",
        "rl/rollout_file.py",
        'int(file.stem.split("_")[1]) > step',
        'int(file.stem.split("_")[1]) >= step',
        PIPELINE,
    ),
    Mutation(
        "the probe of a sync is left out",
        "rl/weight_sync.py",
        'self.config.sync_check != "full"',
        'self.config.sync_check != "off"',
        PIPELINE,
    ),
    Mutation(
        "two parts of a large tensor may change places",
        "weight_sync/digests.py",
        ".sum() + start * total",
        ".sum()",
        SYNC,
    ),
    Mutation(
        "weights that are sent again have the descriptions of those that were sent before",
        "weight_sync/sender.py",
        'return f"header/{meeting}/{version}/{bucket}"',
        'return f"header/{version}/{bucket}"',
        SYNC,
    ),
    Mutation(
        "documents count as much as samples",
        "rl/documents.py",
        "self.coef * language.total",
        "language.total",
        ("tests/train/test_document_gradients.py",),
    ),
]
