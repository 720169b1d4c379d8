"""The teachers of on-policy distillation: who judges the tokens of each row, and which prompt a teacher reads.

A kind of teacher says whose weights it has. Each row has one teacher: the only one, or of `teacher.sources` the one
that has its dataset. A row may have a prompt of its own for teachers (`data.teacher_prompt_key`); they read the
response after it, and say how likely each of its tokens is there. What a teacher cannot say is never 0: it ends the
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.teacher import NAMED, TeacherConfig, TeacherSourceConfig, list_teachers
from rlhf_suite.data.batch import Example, TokenBatch, collate, require_column, take
from rlhf_suite.data.trajectory import Experience, Trajectory
from rlhf_suite.errors import UserError
from rlhf_suite.registry import teacher
from rlhf_suite.rl.model_groups import PolicyGroup, ReferenceGroup
from rlhf_suite.rl.sharding import ForwardBatch
from rlhf_suite.rl.teacher_endpoint import Endpoint


class Answer(Protocol):
    """The log-probs of the masked tokens of a batch that a teacher is asked for, [T]."""

    def result(self) -> torch.Tensor:
        """Wait for them."""
        ...


Ask = Callable[[ForwardBatch, float], Answer]  # of a batch, at a temperature


@dataclass(frozen=True)
class TeacherSetup:
    """What a teacher is made of."""

    key: str  # of its section of flags
    source: TeacherSourceConfig
    config: TeacherConfig
    policy: PolicyGroup
    model: ReferenceGroup | None  # the ranks of its own model, where it has one


@teacher(needs=("model",))
def model(setup: TeacherSetup) -> Ask:
    """A model that does not change, in ranks of its own; with LoRA and the actor's path, the actor without adapters."""
    assert setup.model is not None, "the plan has it"
    return setup.model.log_probs


@teacher(needs=("server", "temperature"))
def endpoint(setup: TeacherSetup) -> Ask:
    """A model behind HTTP, at a server with vLLM's /v1/completions and the vocabulary of the student."""
    return Endpoint(f"{setup.key}.remote_url", setup.source.remote_url or "", setup.config.http).log_probs


@teacher(needs=("prompt",))
def policy(setup: TeacherSetup) -> Ask:
    """The policy itself as it is in each step, which reads another prompt: self-distillation."""
    return setup.policy.log_probs


@teacher(needs=("average",))
def average(setup: TeacherSetup) -> Ask:
    """The moving average of the policy's weights (train.enable_ema), which follows the policy slowly."""
    return setup.policy.log_probs_of_average


@dataclass(frozen=True)
class Part:
    """The rows of a rollout that one teacher has, and its answer to them."""

    name: str  # of the teacher, in metrics
    kind: str  # of the teacher
    places: torch.Tensor  # [T] bool, the tokens that the model wrote in its rows
    mask: torch.Tensor  # [T_part] bool, the same tokens as the teacher reads them
    answer: Answer


@dataclass(frozen=True)
class Taught:
    """What the teachers of a rollout are asked."""

    num_tokens: int  # T, of the rollout
    parts: Sequence[Part]

    def result(self) -> torch.Tensor:
        """Wait for all teachers; return the log-prob of each token that the model wrote, [T]; 0 elsewhere."""
        whole = torch.zeros(self.num_tokens)
        for part in self.parts:
            whole[part.places] = read_answer(part.kind, part.answer, len(part.mask))[part.mask]
        return whole

    def metrics(self, batch: Experience) -> dict[str, float]:
        """Return how far the policy is from each of several teachers, over the tokens of its rows."""
        if len(self.parts) < 2:
            return {}
        gaps = require_column(batch.old_log_probs, "old_log_probs") - require_column(batch.teacher_log_probs, "taught")
        return {f"train/teacher_kl/{part.name}": float(gaps[part.places].mean()) for part in self.parts}


def make_ask(setup: TeacherSetup) -> Ask:
    """Return what asks a teacher.

    Raises:
        WrongResult: a kind of the user's own returns something else.
    """
    ask: Ask = teacher.load(setup.source.kind)(setup)
    if not callable(ask):
        raise teacher.wrong_result(setup.source.kind, ask, "a function of a batch and a temperature")
    return ask


def read_answer(kind: str, answer: Answer, num_tokens: int) -> torch.Tensor:
    """Wait for a teacher, and return the log-probs of all tokens of the batch that it was asked for, [T].

    Raises:
        WrongResult: a kind of the user's own returns something else.
    """
    values = answer.result() if hasattr(answer, "result") else answer
    if not (isinstance(values, torch.Tensor) and values.is_floating_point() and values.shape == (num_tokens,)):
        wanted = f"from its function an object whose result() is the log-prob of each token, [{num_tokens}]"
        raise teacher.wrong_result(kind, values, wanted)
    return values


class Teachers:
    """Asks the teacher of each row."""

    def __init__(self, asked: Mapping[str, Ask], config: TeacherConfig) -> None:
        self.asked, self.by_dataset = asked, find_teachers(config)
        self.kinds = {key: source.kind for key, source in list_teachers(config).items()}

    def ask(self, trajectories: Sequence[Trajectory], batch: Experience, temperature: float) -> Taught:
        """Start to ask all teachers at the same time."""
        teachers = [self.by_dataset.get(t.prompt.datasource, self.by_dataset.get(None)) for t in trajectories]
        of_tokens = torch.repeat_interleave(batch.lengths)  # [T] the row of each token
        parts = []
        for key, ask in self.asked.items():
            rows = [row for row, name in enumerate(teachers) if name == key]
            is_own = torch.tensor([name == key for name in teachers])
            places = batch.mask.bool() & is_own[of_tokens]
            if places.any():
                view = ForwardBatch(as_teachers_read(trajectories, batch, rows))
                answer = ask(view, temperature)
                mask = view.tokens.mask.bool()
                parts.append(Part(key.removeprefix(NAMED), self.kinds[key], places, mask, answer))
        return Taught(batch.num_tokens, parts)


def as_teachers_read(trajectories: Sequence[Trajectory], batch: Experience, rows: Sequence[int]) -> TokenBatch:
    """Return these rows with the prompts of teachers in place of those of the policy, where rows have some."""
    if all(trajectories[row].prompt.teacher_ids is None for row in rows):
        return batch if len(rows) == len(batch) else take(batch, rows)
    return collate([as_teacher_reads(trajectories[row]) for row in rows], TokenBatch)


def as_teacher_reads(trajectory: Trajectory) -> Example:
    """Return a ledger after the prompt that teachers read."""
    own, given = trajectory.prompt.ids, trajectory.prompt.teacher_ids
    ids, mask = trajectory.ids, trajectory.model_mask
    if given is not None:
        assert np.array_equal(ids[: len(own)], own), "the ledger begins with its prompt"
        ids = np.concatenate([np.array(given, ids.dtype), ids[len(own) :]])
        mask = np.concatenate([np.zeros(len(given), bool), mask[len(own) :]])
    return Example(ids.tolist(), mask.astype(int).tolist())


def find_teachers(config: TeacherConfig) -> dict[str | None, str]:
    """Return the key of the teacher of each dataset; that of all others under None."""
    by_dataset: dict[str | None, str] = {}
    for key, source in list_teachers(config).items():
        datasets = getattr(source, "datasets", None)
        by_dataset |= dict.fromkeys(datasets, key) if datasets is not None else {None: key}
    return by_dataset


def check_teachers(config: TeacherConfig, rows: Iterable[tuple[str, str]]) -> None:
    """Refuse rows (where, datasource) that no teacher has."""
    known = find_teachers(config)
    for where, datasource in rows:
        if None not in known and datasource not in known:
            names = ", ".join(sorted(name for name in known if name is not None))
            raise UserError(
                f"{where}: its datasource {datasource!r} has no teacher. teacher.sources teach {names}: add it to the "
                "datasets of one of them, or leave out the datasets of one, which then teaches all others"
            )


def make_teachers(run: Run, policy: PolicyGroup, models: Mapping[str, ReferenceGroup]) -> Teachers | None:
    """Return the teachers of a run; None without distillation. `models`: frozen models by the keys of their flags."""
    if run.algo.distill.coef == 0:
        return None
    setups = [
        TeacherSetup(key, source, run.teacher, policy, models.get(key))
        for key, source in list_teachers(run.teacher).items()
    ]
    return Teachers({setup.key: make_ask(setup) for setup in setups}, run.teacher)
