"""Every policy loss with every advantage estimator: from sampled ledgers to the gradient of an optimiser step, by the
suite's own way, and by formulas in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import credit_formulas
import numpy as np
import torch
from credit_formulas import Response
from gradients import kept_model, optimizer_gradient, own_numbers
from plain_models import Gradients, formula_gradients, outputs, reference_model
from policy_formulas import (
    CLIP,
    DPPO,
    DPPO_RATIO,
    HORIZON,
    KL_COV,
    TAU,
    TEMPERATURE,
    VALUE_CLIP,
    Sequence,
    corrected_loss,
    formula,
)
from splits import Split

from given import prompt
from rlhf_suite.config.declarations.algo import (
    AdvantageConfig,
    AlgoConfig,
    DistillTermConfig,
    KLConfig,
)
from rlhf_suite.config.declarations.models import ActorConfig, CriticConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.data.batch import take
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.trajectory import Experience, Trajectory, to_batch
from rlhf_suite.distributed.world import World
from rlhf_suite.registry import aggregation, estimator, policy_loss
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.mismatch import correct
from rlhf_suite.rl.objectives import PolicyObjective, ValueObjective
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.rl.shaping import Shaper
from rlhf_suite.rl.update import choose_tokens, step_indices
from rlhf_suite.train.task import Objective

PROMPTS, SAMPLES, STEP = 4, 4, 12  # responses of a rollout, and of its first optimiser step
SILENT = 6  # the response in which the model wrote nothing
NUMBERS = ("old_log_probs", "ref_log_probs", "teacher_log_probs", "values")
PARTS = ("answer", "format")  # of the rewards, for gdpo
PART_ROWS = np.random.default_rng(7).normal(size=(PROMPTS * (SAMPLES + 1), len(PARTS))).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A row of the matrix."""

    loss: str  # actor.policy_loss_type, or "value": the critic
    estimator: str
    mode: str

    @property
    def name(self) -> str:
        return f"{self.loss}, {self.estimator}"

    @property
    def head(self) -> str:
        return "value" if self.loss == "value" else "lm"


def usual_mode(loss: str, estimator: str) -> str:
    """What `experiment=` would average over."""
    if loss in ("gspo", "sapo"):
        return "seq-mean-token-mean"
    return "seq-mean-token-sum-norm" if estimator == "dr_grpo" and loss != "value" else "token-mean"


MATRIX = [Case(loss, each, usual_mode(loss, each)) for loss in policy_loss.names() for each in estimator.names()]
MATRIX.append(Case("value", "gae", "token-mean"))
MODES = [
    (loss, mode)
    for loss in policy_loss.names()
    for mode in aggregation.names()
    if not policy_loss.needs(loss, "sequences") or aggregation.needs(mode, "sequences")
]


# What was sampled: ledgers whose model tokens have gaps.


@dataclass(frozen=True)
class Rollout:
    """The sampled responses, after them the greedy ones, and the log-probs and values of all their tokens."""

    trajectories: list[Trajectory]
    scores: np.ndarray
    tokens: dict[str, torch.Tensor]  # each of NUMBERS, [T]


def ledger(generator: np.random.Generator, group: int, sample: int) -> Trajectory:
    """A prompt, and one to three turns of the model with an environment's tokens between them."""

    def ids(least: int, most: int) -> np.ndarray:
        return generator.integers(0, 256, generator.integers(least, most))

    asked = np.random.default_rng(group).integers(0, 256, 3 + group).tolist()
    result = Trajectory.start(prompt(group, asked), group, sample)
    for turn in range(generator.integers(1, 4)):
        if turn:
            result.append_environment(ids(1, 4).tolist())
        written = ids(1, 18)
        if group * SAMPLES + sample == SILENT:
            result.append_environment(written.tolist())
        else:
            result.append_model(written, np.zeros(len(written), np.float32), 0)
    result.ending = Ending.CUT if generator.random() < 0.3 else Ending.FINISHED
    result.greedy = sample == SAMPLES
    return result


@cache
def sampled_rollout(folder: Path) -> Rollout:
    """Seeded; log-probs and values are near those of the models, so that some ratios are clipped and some are not."""
    numbers = np.random.default_rng(3)
    trajectories = [ledger(numbers, group, sample) for group in range(PROMPTS) for sample in range(SAMPLES)]
    trajectories += [ledger(numbers, group, SAMPLES) for group in range(PROMPTS)]
    batch = to_batch(trajectories)
    generator = torch.Generator().manual_seed(5)
    noise = partial(torch.randn, batch.num_tokens, generator=generator)
    own, values = own_numbers(folder, batch)
    old = own + 0.3 * noise()
    engine = (old + 0.4 * noise()).numpy()
    for part, t in zip(np.split(engine, batch.lengths.cumsum(0)[:-1]), trajectories, strict=True):
        t.engine_log_probs = np.where(t.model_mask, part, 0).astype(np.float32)
    tokens = (old, old + 0.5 * noise(), old + 0.5 * noise(), values + 0.4 * noise())
    scores = numbers.normal(size=len(trajectories)).astype(np.float32)
    return Rollout(trajectories, scores, dict(zip(NUMBERS, tokens, strict=True)))


def scores_of(rollout: Rollout, case: Case) -> np.ndarray:
    """The scores of a case; those of successes are so large that no penalty makes them negative."""
    return np.abs(rollout.scores) + 0.8 if estimator.needs(case.estimator, "successes") else rollout.scores


def room(prompt_tokens: int) -> int:
    """How long a response may be."""
    return HORIZON - prompt_tokens


# The suite's own way.


def algo_config(case: Case) -> AlgoConfig:
    gamma, lambd = (credit_formulas.GAMMA, credit_formulas.LAMBDA)
    advantage = AdvantageConfig(
        estimator=case.estimator,
        gamma=gamma if case.estimator in ("gae", "reinforce") else 1.0,
        lambd=lambd if case.estimator == "gae" else 1.0,
        reward_parts=list(PARTS),
        reward_part_weights=list(credit_formulas.PART_WEIGHTS),
        pass_k=credit_formulas.BEST_OF,
        is_correction_level="geo" if case.loss == "gspo" else "token",
        is_correction_mode="clip",
        is_correction_threshold=[credit_formulas.MAX_WEIGHT],
    )
    teacher = DistillTermConfig(coef=float(estimator.needs(case.estimator, "teacher")))
    return AlgoConfig.of("ppo", advantage=advantage, kl=KLConfig(init_coef=credit_formulas.KL_COEF), distill=teacher)


def rewarded(folder: Path, case: Case) -> Experience:
    """What the estimators see: shaped rewards, and the numbers that the forward passes of a rollout give."""
    config, rollout = algo_config(case), sampled_rollout(folder)
    count = len(rollout.trajectories) if case.estimator == "remax" else PROMPTS * SAMPLES
    texts = ([""] * count,) * 2  # responses, queries
    given, scores = rollout.trajectories[:count], scores_of(rollout, case)[:count]
    shaping = RewardConfig.of(
        "ppo",
        clip_range=list(credit_formulas.CLIP_RANGE),
        overlong_buffer_len=credit_formulas.OVERLONG_BUFFER,
        overlong_penalty_factor=credit_formulas.OVERLONG_FACTOR,
        stop_properly_penalty_coef=credit_formulas.TRUNCATED_COEF,
    )
    scored = Shaper(shaping, room).shape(ScoredTrajectories(given, scores, scores, *texts, extra=[{}] * count))
    greedy = None if scored.greedy is None else torch.from_numpy(scored.greedy)
    batch = replace(to_batch(scored.trajectories), reward=torch.from_numpy(scored.rewards), greedy=greedy)
    used = {"teacher_log_probs": config.distill.coef > 0, "values": case.estimator == "gae"}
    given = {name: rollout.tokens[name][: batch.num_tokens] for name in NUMBERS if used.get(name, True)}
    return replace(batch, **given)


def experience(case: Case, batch: Experience) -> Experience:
    """With advantages, returns and correction, which are those of the whole rollout."""
    config = algo_config(case)
    parts = [dict(zip(PARTS, row.tolist(), strict=True)) for row in PART_ROWS[: len(batch)]]
    batch, _ = CreditAssigner(config).assign(batch, parts)
    batch, _ = correct(batch, config.advantage)
    actor = actor_config(case)
    return choose_tokens(batch, actor, (0, 0))[0] if actor.chooses_tokens else batch


def first_step(batch: Experience) -> Experience:
    """The responses of the rollout's first optimiser step."""
    return take(batch, step_indices(len(batch), STEP, 1, (0, 0))[0])


def objective(case: Case) -> Objective[Experience]:
    if case.loss == "value":
        return ValueObjective(CriticConfig.of("ppo", value_clip=VALUE_CLIP))
    return PolicyObjective(actor_config(case), KLConfig(), TEMPERATURE, HORIZON)


def actor_config(case: Case) -> ActorConfig:
    return ActorConfig.of(
        "ppo",
        policy_loss_type="ppo" if case.loss == "value" else case.loss,
        loss_agg_mode=case.mode,
        eps_clip_low_high=list(CLIP),
        sapo_tau_pos=TAU[True],
        sapo_tau_neg=TAU[False],
        dppo_tv_max=DPPO["tv"],
        dppo_kl_max=DPPO["kl"],
        dppo_ratio_max=DPPO_RATIO,
        clip_cov_ratio=credit_formulas.CLIP_COV_SHARE,
        clip_cov_range=list(credit_formulas.COV_BAND),
        kl_cov_ratio=credit_formulas.KL_COV_SHARE,
        kl_cov_coef=KL_COV,
    )


def gradient(world: World, folder: Path, case: Case, split: Split, batch: Experience) -> Gradients | None:
    """The gradient that the optimiser is given for the step of `batch`; runs on the ranks."""
    return optimizer_gradient(kept_model(world, folder, case.head, split), objective(case), split, batch)


# The formulas.


def responses(folder: Path, case: Case) -> list[Response]:
    """The rollout as the papers see it."""
    rollout, result, start = sampled_rollout(folder), [], 0
    for t, score, parts in zip(rollout.trajectories, scores_of(rollout, case), PART_ROWS, strict=True):
        own = start + np.flatnonzero(t.owner == 1)
        start += len(t.ids)
        old, reference, teacher, values = (rollout.tokens[name][own].tolist() for name in NUMBERS)
        others = int((t.owner == 2).sum())  # what an environment wrote took room
        limits = (room(int((t.owner == 0).sum())) - others, t.ending is Ending.CUT, t.greedy)
        engine = t.engine_log_probs[t.owner == 1].tolist()
        numbers = (old, reference, teacher, engine, values)
        result.append(Response(t.group, float(score), *limits, *numbers, tuple(parts.tolist())))
    return result


def by_formula(folder: Path, case: Case) -> Experience:
    """The rollout with the numbers of the formulas in float64."""
    rollout = sampled_rollout(folder)
    batch = to_batch(rollout.trajectories[: PROMPTS * SAMPLES])
    found = responses(folder, case)
    kept = found[: len(batch)]
    numbers = {
        "advantages": credit_formulas.advantages(case.estimator, found if case.estimator == "remax" else kept),
        "returns": credit_formulas.returns(kept),
        "correction": [credit_formulas.weights(each, case.loss == "gspo") for each in kept],
    }
    if case.loss in ("clip_cov", "kl_cov"):
        numbers["chosen"] = credit_formulas.chosen(case.loss, kept, numbers["advantages"])
    tokens = {name: rollout.tokens[name][: batch.num_tokens] for name in NUMBERS}
    for name, rows in numbers.items():
        tokens[name] = torch.zeros(batch.num_tokens, dtype=torch.float64)
        tokens[name][batch.mask.bool()] = torch.tensor([value for row in rows for value in row]).double()
    return replace(batch, **tokens)


def references(folder: Path, cases: list[Case], lora: bool) -> Iterator[tuple[Case, Gradients]]:
    """The gradient of every case's formula; every model reads the step's responses once."""
    for head in ("lm", "value"):
        chosen = [case for case in cases if case.head == head]
        if chosen:
            found = formula_gradients(reference_model(folder, head), lora, partial(losses, folder, head, chosen))
            yield from zip(chosen, found, strict=True)


def losses(folder: Path, head: str, cases: list[Case], model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The step's loss of each case; all have the same head."""
    plain = first_step(by_formula(folder, cases[0]))
    found = [outputs(model, head, plain.ids[plain.segments == row]) for row in range(len(plain))]
    if head == "lm":
        found = [(logits / TEMPERATURE).log_softmax(-1) for logits in found]
    for case in cases:
        batch = first_step(by_formula(folder, case))
        each = [Sequence(batch, row, out) for row, out in enumerate(found)]
        yield formula("value", each) if head == "value" else corrected_loss(case.loss, case.mode, each)
