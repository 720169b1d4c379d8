"""Mistakes in optimiser steps, models and supervised tasks."""

from __future__ import annotations

from mutation import Mutation
from mutation_list_rl import TOKENS


def formula(keywords: str) -> tuple[str, ...]:
    """The gradient comparisons of the supervised tasks whose names have these words."""
    return ("tests/train/test_task_gradients.py", "-k", f"formula and {keywords}")


STEPS = [
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
        "(counts / whole).sum())",
        "mask.float().sum())",
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
        "the load-balancing loss of experts is not part of the step",
        "train/step.py",
        "ALL_TOKENS: model.config.aux_loss_coef * balance}",
        "ALL_TOKENS: 0.0 * balance}",
        ("tests/train/test_mixture.py", "-k", "micro"),
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
        "self.engine.backward(loss * self.world.mesh.replicas)",
        "self.engine.backward(loss)",
        (TOKENS, "-k", "formula and ranks"),
    ),
    Mutation(
        "batches that fill a rank up weigh something",
        "data/batch.py",
        "mask=torch.zeros_like(batch.mask)",
        "mask=batch.mask",
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
        "the reference is the model that is trained",
        "train/frozen.py",
        "load_role(models[role], start",
        "load_role(models[ACTOR], start",
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
        "-F.logsigmoid(chosen - rejected - margin)",
        "-F.logsigmoid(chosen - rejected + margin)",
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
        "map_logits(model, batch, at, reward_logits)",
        "map_logits(model, batch, at - 1, reward_logits)",
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
        "coef * self.algo.temperature**2 * distance",
        "coef * distance",
        formula("distill and not LoRA"),
    ),
    Mutation(
        "adapters are not merged into the weights that leave the trainer",
        "models/weights.py",
        "        merged = merged_tensors(self.adapter, exact)\n",
        "        merged = dict(stored_tensors(base_of(self.adapter)))\n",
        ("tests/models/test_save.py", "-k", "merged"),
    ),
    Mutation(
        "every epoch has the same order",
        "data/sampler.py",
        "np.random.PCG64([seed, epoch])",
        "np.random.PCG64([seed, 0])",
        ("tests/data/test_sampler.py",),
    ),
]
