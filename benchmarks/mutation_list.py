"""Mistakes that a post-training system can make without a crash: one edit of a file each, and what is to notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`before` stands once in `file` (below src/rlhf_suite) and becomes `after`; `tests` (pytest's words) must fail."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


def formula(keywords: str) -> tuple[str, ...]:
    """The gradient comparisons of the supervised tasks whose names have these words."""
    return ("tests/train/test_task_gradients.py", "-k", f"formula and {keywords}")


TOKENS = "tests/train/test_gradient_equality.py"
MUTATIONS = [
    Mutation(
        "the mask is dropped from sums over tokens",
        "losses/reduce.py",
        "    return torch.where(mask.bool(), values, 0).sum()",
        "    return values.sum()",
        ("tests/losses/test_language.py",),
    ),
    Mutation(
        "a mean over sequences divides by tokens",
        "losses/reduce.py",
        "    return counted_sequences(mask, segments, num_sequences).sum()",
        "    return mask.float().sum()",
        ("tests/losses/test_reduce.py",),
    ),
    Mutation(
        "each micro-batch is divided by its own count",
        "train/step.py",
        "    counts = global_counts(objective, micro_batches, world)",
        "    counts = global_counts(objective, micro_batches[:1], world)",
        (TOKENS, "-k", "formula and micro"),
    ),
    Mutation(
        "each rank divides by its own count",
        "train/step.py",
        "zip(names, world.sum(local).tolist(), strict=True)",
        "zip(names, local.tolist(), strict=True)",
        (TOKENS, "-k", "formula and ranks"),
    ),
    Mutation(
        "gradients are averaged over ranks, not added",
        "train/strategy.py",
        "self.engine.backward(loss * self.world.size)",
        "self.engine.backward(loss)",
        (TOKENS, "-k", "formula and ranks"),
    ),
    Mutation(
        "batches that fill a rank up weigh something",
        "train/step.py",
        '"mask": torch.zeros_like(batch.tokens["mask"])',
        '"mask": batch.tokens["mask"]',
        (TOKENS, "-k", "formula and ranks"),
    ),
    Mutation(
        "a step that is not finite updates the weights",
        "train/optim.py",
        "                parameter.grad = None",
        "                pass",
        ("tests/train/test_step.py", "-k", "not_finite and 1-ZeRO-0"),
    ),
    Mutation(
        "packed sequences see each other",
        "models/attention.py",
        "runs = tuple(zip(counts.tolist(), values.tolist(), strict=True))",
        "runs = ((1, total),)",
        ("tests/models/test_forward.py", "-k", "layout"),
    ),
    Mutation(
        "positions go on from one packed sequence to the next",
        "models/attention.py",
        "torch.arange(total, device=lengths.device) - starts[segments]  # [T]",
        "torch.arange(total, device=lengths.device)",
        ("tests/models/test_forward.py", "-k", "layout or first_tokens"),
    ),
    Mutation(
        "log-probs forget the sampling temperature",
        "models/head.py",
        "    return logits.div_(temperature)",
        "    return logits",
        ("tests/models/test_head.py",),
    ),
    Mutation(
        "a value is read at its own token, one too late",
        "models/forward.py",
        "    shifted = F.pad(own[:-1], (1, 0))",
        "    shifted = own",
        ("tests/models/test_forward.py", "-k", "values"),
    ),
    Mutation(
        "a score is read one token early",
        "models/forward.py",
        "outputs.values[batch.starts + batch.lengths - 1]",
        "outputs.values[batch.starts + batch.lengths - 2]",
        ("tests/models/test_forward.py", "-k", "score"),
    ),
    Mutation(
        "the surrogate takes the larger of both terms",
        "losses/policy.py",
        "    gain = torch.minimum(plain, clipped)",
        "    gain = torch.maximum(plain, clipped)",
        ("tests/losses/test_policy.py",),
    ),
    Mutation(
        "the lower clip is used above as well",
        "losses/policy.py",
        "    low, high = config.eps_clip_low_high\n    return low, high",
        "    low, high = config.eps_clip_low_high\n    return low, low",
        ("tests/losses/test_policy.py",),
    ),
    Mutation(
        "the entropy bonus is a penalty",
        "losses/policy.py",
        "    return LossSum(-coef * masked_sum(entropy, mask)",
        "    return LossSum(coef * masked_sum(entropy, mask)",
        ("tests/losses/test_policy.py",),
    ),
    Mutation(
        "old log-probs are those of the moving policy",
        "rl/objectives.py",
        'old_log_probs=batch.tokens.get("old_log_probs", log_probs.detach())',
        "old_log_probs=log_probs.detach()",
        (TOKENS, "-k", "formula and ppo"),
    ),
    Mutation(
        "the value clip is left out",
        "losses/value.py",
        "(values - old_values).clamp(-clip, clip)",
        "(values - old_values)",
        ("tests/losses/test_value.py",),
    ),
    Mutation(
        "KL is measured from the reference to the policy",
        "algo/kl.py",
        "    log_ratio = log_probs - reference_log_probs",
        "    log_ratio = reference_log_probs - log_probs",
        ("tests/algo/test_kl.py",),
    ),
    Mutation(
        "KL is a bonus in the reward",
        "algo/advantage.py",
        "torch.where(mask, -inputs.kl_penalty, 0)",
        "torch.where(mask, inputs.kl_penalty, 0)",
        ("tests/rl/test_credit.py",),
    ),
    Mutation(
        "the baseline is that of all groups together",
        "algo/advantage.py",
        "inputs.groups.unique(return_inverse=True)",
        "torch.zeros_like(inputs.groups).unique(return_inverse=True)",
        ("tests/algo/test_advantage.py",),
    ),
    Mutation(
        "leave-one-out leaves nothing out",
        "algo/advantage.py",
        "group_sum(inputs.rewards, inputs) - inputs.rewards  # [B] sum over the other rows",
        "group_sum(inputs.rewards, inputs)",
        ("tests/algo/test_advantage.py",),
    ),
    Mutation(
        "advantages are whitened row by row",
        "algo/advantage.py",
        "    centred = torch.where(mask, advantages - chosen.mean(), 0)",
        "    centred = torch.where(mask, advantages - advantages.mean(1, keepdim=True), 0)",
        ("tests/algo/test_advantage.py",),
    ),
    Mutation(
        "GAE bootstraps from tokens that the model did not write",
        "algo/advantage.py",
        "        following_value = torch.where(mask[:, t], values[:, t], following_value)",
        "        following_value = values[:, t]",
        ("tests/algo/test_advantage.py",),
    ),
    Mutation(
        "GAE forgets lambda",
        "algo/advantage.py",
        "delta + config.gamma * config.lambd * following_advantage",
        "delta + config.gamma * following_advantage",
        ("tests/algo/test_advantage.py",),
    ),
    Mutation(
        "the reward stands at the last token of the row, written by the model or not",
        "algo/advantage.py",
        "    is_last = mask & (following == 1)",
        "    is_last = torch.arange(mask.shape[1]) == mask.shape[1] - 1",
        ("tests/algo/test_advantage.py",),
    ),
    Mutation(
        "the reference is the model that is trained",
        "train/frozen.py",
        "    path = role.path or start",
        "    path = start",
        formula("dpo and not LoRA"),
    ),
    Mutation(
        "the reference keeps the adapters on",
        "models/lora.py",
        "        layer._disable_adapters = True  #",
        "        layer._disable_adapters = False  #",
        formula("LoRA and (dpo or kto or distill)"),
    ),
    Mutation(
        "chosen and rejected are swapped",
        "tasks/dpo.py",
        "tokens[i::2]) for i in (0, 1))",
        "tokens[i::2]) for i in (1, 0))",
        formula("dpo and not LoRA"),
    ),
    Mutation(
        "SimPO's log-probs are not divided by lengths",
        "losses/preference.py",
        "    gap = chosen.mean_log_probs - rejected.mean_log_probs",
        "    gap = chosen.log_probs - rejected.log_probs",
        ("tests/losses/test_preference.py",),
    ),
    Mutation(
        "a margin makes the task easier",
        "losses/preference.py",
        "-F.logsigmoid(gap - margin)",
        "-F.logsigmoid(gap + margin)",
        ("tests/losses/test_preference.py",),
    ),
    Mutation(
        "KTO's reference point is that of the last micro-batch",
        "tasks/kto.py",
        "sums[label] += torch.stack(",
        "sums[label] = torch.stack(",
        formula("kto"),
    ),
    Mutation(
        "KTO's reference point is that of each rank",
        "tasks/kto.py",
        "reference_point(*total(sums).T)",
        "reference_point(*sums.T)",
        ("tests/train/test_task_gradients.py", "-k", "point_of_kto_is_one"),
    ),
    Mutation(
        "a step's reward is read at the token before its placeholder",
        "tasks/prm.py",
        "read_logits(model, batch, at, reward_logits)",
        "read_logits(model, batch, at - 1, reward_logits)",
        formula("prm"),
    ),
    Mutation(
        "teacher and student change places",
        "losses/distillation.py",
        "    return kl(teacher, student)",
        "    return kl(student, teacher)",
        ("tests/losses/test_distillation.py",),
    ),
    Mutation(
        "the divergence is not scaled with the temperature",
        "tasks/distill.py",
        "coef * self.algo.temperature**2 * divergence",
        "coef * divergence",
        formula("distill and not LoRA"),
    ),
    Mutation(
        "adapters are not merged into the weights that leave the trainer",
        "models/weights.py",
        "return merged(weight, down, up, layer.scaling[ADAPTER])",
        "return weight",
        ("tests/models/test_save.py", "-k", "merged"),
    ),
    Mutation(
        "every epoch has the same order",
        "data/sampler.py",
        "np.random.PCG64([seed, epoch])",
        "np.random.PCG64([seed, 0])",
        ("tests/data/test_sampler.py",),
    ),
    Mutation(
        "a part of the sequences comes back in another order",
        "rl/sharding.py",
        "torch.cat(results)[torch.argsort(order)]",
        "torch.cat(results)",
        ("tests/rl/test_sharding.py",),
    ),
]
