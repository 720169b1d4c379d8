"""Mistakes in losses, credit, roles and metrics, found by a second round of trials."""

from __future__ import annotations

from mutation import Mutation

ROLES = ("tests/rl/test_roles.py",)
ROUNDING = ("tests/algo/test_rounding.py",)
TERMS = ("tests/algo/test_corrected_objective.py",)
NOTHING = ("tests/rl/test_no_metric_of_nothing.py",)

NUMBERS: list[Mutation] = [
    Mutation(
        "documents are those of step 0 for ever",
        "rl/roles.py",
        "self.documents.step(step)",
        "self.documents.step(0)",
        ROLES,
    ),
    Mutation(
        "forward passes have dropout on",
        "rl/roles.py",
        "        self.model.module.eval()\n",
        "        self.model.module.train()\n",
        ROLES,
    ),
    Mutation(
        "the average of the weights is forgotten at a resume",
        "rl/roles.py",
        "            self.average.load_state(folder)\n",
        "            pass\n",
        ROLES,
    ),
    Mutation(
        "the weights are exported in place of their average",
        "rl/roles.py",
        "            with self.average.in_place():\n",
        "            with nullcontext():\n",
        ROLES,
    ),
    Mutation(
        "a student learns what the teacher says of padding rows",
        "tasks/distill.py",
        "logits[:, : self.vocabulary]",
        "logits",
        ("tests/tasks/test_distill.py",),
    ),
    Mutation(
        "a tie of two answers counts as right",
        "losses/preference.py",
        "(chosen > rejected).float()",
        "(chosen >= rejected).float()",
        ("tests/losses/test_preference.py",),
    ),
    Mutation(
        "a replay takes the trainer's log-probs for the engine's",
        "rl/replay.py",
        'tokens("engine_log_probs")',
        'tokens("old_log_probs")',
        ("tests/rl/test_recorded_rollouts.py",),
    ),
    Mutation(
        "rounding inside a group is a difference",
        "algo/advantage.py",
        "spread <= ROUNDING * largest",
        "spread < 0 * largest",
        ROUNDING,
    ),
    Mutation(
        "whitening blows rounding up",
        "algo/advantage.py",
        "centred.abs().max() <= ROUNDING",
        "centred.abs().max() < 0 * ROUNDING",
        ROUNDING,
    ),
    Mutation(
        "scores are equal only bit for bit",
        "algo/scores.py",
        "<= ROUNDING * max(map(abs, scores))",
        "<= 0 * max(map(abs, scores))",
        ROUNDING,
    ),
    Mutation(
        "a model scores equal texts each by itself",
        "rl/reward_models.py",
        "places.setdefault(key(sample), len(places))",
        "places.setdefault(len(places), len(places))",
        ROUNDING,
    ),
    Mutation(
        "whole rewards are those without the turns",
        "rl/credit.py",
        "                totals=rewards,\n",
        "                totals=rewards if turns is None else besides_turns(rewards, turns, batch),\n",
        ROUNDING,
    ),
    Mutation(
        "of the rewards of turns only a first token counts",
        "rl/scoring.py",
        "for each in ledgers for reward in each.turn_rewards.tolist()",
        "for each in ledgers for reward in each.turn_rewards.tolist()[:1]",
        ROUNDING,
    ),
    Mutation(
        "the KL ignores the correction",
        "rl/objectives.py",
        "mask, self.kl_coef, batch.correction)",
        "mask, self.kl_coef)",
        TERMS,
    ),
    Mutation(
        "the entropy has the weight of the sampled token",
        "losses/policy.py",
        "torch.where(correction > 0, entropy, 0)",
        "entropy * correction",
        TERMS,
    ),
    Mutation(
        "the distance of stale tokens is that of all tokens",
        "rl/experience.py",
        "batch.mask * ~is_new",
        "batch.mask",
        ("tests/rl/test_experience.py",),
    ),
    Mutation(
        "a mean over no tokens is 0",
        "rl/credit.py",
        "masked_sum(each, mask) / count) for name, each in values.items()} if count > 0 else {}",
        "masked_sum(each, mask) / count.clamp(min=1)) for name, each in values.items()}",
        NOTHING,
    ),
    Mutation(
        "one sample has a spread",
        "rl/sample_metrics.py",
        "    if len(groups) > 1:\n",
        "    if len(groups) > 0:\n",
        NOTHING,
    ),
    Mutation(
        "a unit of less than one counts as one",
        "train/step.py",
        "counts[name] or 1.0",
        "max(counts[name], 1.0)",
        ("tests/train/test_step.py", "-k", "less_than_one"),
    ),
    Mutation(
        "tools leave an episode the room of a single turn",
        "rl/shaping.py",
        "(trajectory.owner == PROMPT).sum())) - others",
        "(trajectory.owner == PROMPT).sum())) - 0 * others",
        ("tests/rl/test_rollout.py",),
    ),
    Mutation(
        "steps and prompts are shuffled by one draw",
        "rl/update.py",
        "[*seed, SHUFFLE]",
        "[*seed]",
        ("tests/rl/test_update.py",),
    ),
    Mutation(
        "the direction of a metric is looked up by the name of its set",
        "config/metrics.py",
        'last = metric.rpartition("/")[2]\n    return HIGHER',
        'last = metric.split("/")[1]\n    return HIGHER',
        ("tests/config/test_directions.py",),
    ),
]
