"""The primitives of training over actors that are up: each call is a part of what task=ppo does, by the same trainer
and engines. `api.client.Client` has them for a program of one's own, and task=serve_train serves them over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_suite.config.declarations.models import AdamConfig, chooses_tokens
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR, REFERENCE, Plan
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.data.render import begin_ids, tokens
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import Experience, Trajectory
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.registry import policy_loss
from rlhf_suite.rl.actors import Actors
from rlhf_suite.rl.datum import NEEDED, Adam, Datum, LossOutput, Tokens, as_datum, split, to_experience, token_ids
from rlhf_suite.rl.primitives import CROSS_ENTROPY, LossRequest, SteppedPolicyGroup, make_objective
from rlhf_suite.rl.sampling import TRAINING, Sampler, stop_token_ids
from rlhf_suite.rl.sharding import ForwardBatch
from rlhf_suite.rl.update import step_indices
from rlhf_suite.rl.weight_sync import WeightSync
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.console import show_line
from rlhf_suite.train.saving import Saver, Stateful, TrainingRows
from rlhf_suite.train.schedules import learning_rate_factor
from rlhf_suite.train.step import ALL_TOKENS, count_units
from rlhf_suite.waits import result

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Count = float | Mapping[str, float]


@dataclass(frozen=True)
class Started:
    """The parts of a client that is up."""

    run: Run
    plan: Plan
    record: RunFolder
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt] | None  # of data.prompt_dataset; None: the call names none
    policy: SteppedPolicyGroup
    actors: Actors
    engines: EnginePool
    weights: WeightSync

    def saver(self, folder: Path, client: Stateful) -> Saver:
        """Return what writes the state of the policy and of a client to `folder`, and reads it."""
        config = replace(self.run.ckpt, path=str(folder), load_enable=True)
        rows = TrainingRows("data.prompt_dataset", "")
        return Saver(config, self.record, {ACTOR: self.policy}, "eval/pass1", rows, {"client": client})


class TrainingClient:
    """A policy that is trained, and the engines that sample from it."""

    def __init__(self) -> None:
        self.step = 0  # optimiser steps that were taken
        self.version = -1  # of the weights that the engines have
        self.samplings = 0  # calls of `sample`
        self._waiting = 0  # passes whose gradients wait for an optimiser step
        self._parts: Started | None = None

    def _of(self, call: str) -> Started:
        """Return the parts of the client for a call."""
        if self._parts is None:
            raise UserError(f"{call}: the client is closed. Make a new one")
        return self._parts

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model."""
        return self._of("tokenizer").tokenizer

    def forward_backward(
        self, data: Sequence[Datum], loss: str | None = None, count: Count | None = None
    ) -> LossOutput:
        """Add the gradient of a loss over `data` to the gradients that wait for `optim_step`.

        Args:
            data: the sequences, in the order in which micro-batches take them.
            loss: "cross_entropy" or a policy loss (docs/flags.md); None: actor.policy_loss_type. Flags say the rest:
                clip ranges, actor.loss_agg_mode, the KL and entropy terms.
            count: by what the sum of losses is divided: a number, or what `count_units` says of all data of the
                optimiser step. None: the units of this call (tokens with a weight, or sequences by
                actor.loss_agg_mode), so that the loss is a mean.
        """
        self._of("forward_backward")
        return self.run_pass(*self._request(data, loss, count), backward=True, divides=True)

    def forward(self, data: Sequence[Datum], loss: str | None = None, count: Count | None = None) -> LossOutput:
        """Compute the loss that `forward_backward` computes, without dropout and without a gradient."""
        self._of("forward")
        return self.run_pass(*self._request(data, loss, count), backward=False, divides=True)

    def count_units(self, data: Sequence[Datum], loss: str | None = None) -> dict[str, float]:
        """Return the number of each unit of a loss over `data`: the `count` of calls that each take a part of it."""
        batch, request = self._request(data, loss, None)
        return {name: float(number) for name, number in count_units(self._objective(request), batch).items()}

    def optim_step(self, adam: Adam | None = None) -> dict[str, float]:
        """Update the weights with the gradients that were added since the last update; return metrics.

        The learning rate is that of the flags: actor.adam.lr by actor.lr_scheduler over the optimiser steps of
        train.max_steps RL steps, or that of `adam`.
        """
        run = self._of("optim_step").run
        if not self._waiting:
            raise UserError("optim_step: no gradients wait. Call forward_backward first")
        adam = adam or Adam()
        if run.actor.optim != "adam" and adam != Adam():
            raise UserError(
                f"optim_step: actor.optim={run.actor.optim} uses only the settings of the flags. Call it without adam"
            )
        if adam.lr is None:
            self._check_schedule()
        betas = run.actor.adam.betas if adam.betas is None else [*adam.betas]
        flags = run.actor.adam
        settings = AdamConfig(
            betas=betas,
            eps=flags.eps if adam.eps is None else adam.eps,
            weight_decay=flags.weight_decay if adam.weight_decay is None else adam.weight_decay,
        )
        max_norm = run.actor.max_norm if adam.max_norm is None else adam.max_norm
        self._waiting = 0
        metrics = self._of("optim_step").policy.optim_step(self.step, settings, adam.lr, max_norm).result()
        self.step += 1
        return metrics

    def _check_schedule(self) -> None:
        """Refuse a step that the schedule of the flags does not have."""
        parts = self._of("optim_step")
        actor, steps = parts.run.actor, parts.run.train.max_steps
        if steps is None:
            if learning_rate_factor(0, 1, actor) == learning_rate_factor(1, 2, actor) == 1.0:
                return
            raise UserError(
                f"optim_step: actor.lr_scheduler={actor.lr_scheduler} goes by train.max_steps, which is null. Set it, "
                "or give adam=rs.Adam(lr=...)"
            )
        total = parts.plan.policy_steps(steps)
        if self.step >= total:
            raise UserError(
                f"optim_step: the schedule ends after {total} optimiser steps (train.max_steps={steps}). Raise it, or "
                "give adam=rs.Adam(lr=...)"
            )

    def sample(
        self,
        prompts: Sequence[Prompt | str | Tokens],
        num_samples: int | None = None,
        *,
        step: int | None = None,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
    ) -> list[list[Trajectory]]:
        """Return responses to prompts by the engines, as ledgers [prompt][sample]: the tokens, who wrote each, the
        engine's log-prob and the weight version.

        Args:
            prompts: texts, token ids, or what `prompts` returns.
            num_samples: of each prompt; None: rollout.n_samples_per_prompt.
            step: the number of the RL step. Random numbers depend on train.seed, it, the prompt's number and the
                sample's; None: the number of earlier calls.
            temperature: None: rollout.temperature.
            max_new_tokens: None: rollout.max_new_tokens.
        """
        parts = self._of("sample")
        if isinstance(prompts, str | Prompt):
            raise UserError("sample: prompts is one prompt. Give a list of prompts")
        run, chosen = parts.run, [self._prompt(prompt, number) for number, prompt in enumerate(prompts)]
        if temperature is not None and not 0 <= temperature <= 2:
            raise UserError(f"sample: temperature={temperature} is not between 0 and 2")
        for name, number in (("num_samples", num_samples), ("max_new_tokens", max_new_tokens)):
            if number is not None and number < 1:
                raise UserError(f"sample: {name}={number} is below 1")
        check_step("sample", self.samplings if step is None else step)
        rollout = replace(run.rollout, max_new_tokens=max_new_tokens or run.rollout.max_new_tokens)
        stop_ids = stop_token_ids(parts.plan.models[ACTOR].path, parts.tokenizer)
        sampler = Sampler(rollout, parts.engines, stop_ids, seed=run.train.seed, max_len=run.data.max_len)
        sampling = sampler.settings(rollout.temperature if temperature is None else temperature)
        samples = num_samples or rollout.n_samples_per_prompt
        stream = TRAINING, self.samplings if step is None else step
        started = [sampler.begin(group, prompt, samples, sampling, stream) for group, prompt in enumerate(chosen)]
        self.samplings += 1
        return [result(future, "samples") for future in started]

    def compute_logprobs(
        self, sequences: Sequence[Datum | Trajectory | Tokens], *, reference: bool = False
    ) -> list[NDArray[np.float32]]:
        """Return the policy's log-probs of sequences at rollout.temperature, [T] each, in nats: of the tokens that the
        model wrote in a ledger, of those with a weight in a datum, and else of all but the first; 0 elsewhere.
        `reference`: those of the reference, which there is with algo.kl.init_coef above 0."""
        parts = self._of("compute_logprobs")
        batch = to_experience([*map(as_datum, sequences)], self._vocabulary, parts.run.data.max_len)
        model = parts.actors.frozen.get(REFERENCE) if reference else parts.policy
        if model is None:
            raise UserError("compute_logprobs: there is no reference. Make the client with algo.kl.init_coef above 0")
        return split(batch, model.log_probs(ForwardBatch(batch), parts.run.rollout.temperature, "log-probs").result())

    def save_weights_for_sampler(self) -> dict[str, float]:
        """Bring the weights of the policy to the engines, and prove by digests and log-probs that they have them.
        Return metrics; the version of the weights grows by 1."""
        parts = self._of("save_weights_for_sampler")
        self.version += 1
        return parts.weights.sync(self.version) | parts.weights.check()

    def save_state(self, path: str | Path) -> Path:
        """Write weights, optimiser, random states and the counts of this client as a checkpoint into the folder `path`,
        whole or not at all, and return its folder. The newest ckpt.max_num checkpoints there stay."""
        self._refuse_gradients("save_state")
        saver = self._of("save_state").saver(Path(path), self)
        saved: list[Path] = []
        saver.on_checkpoint = saved.append
        saver.save(self.step, "step")
        return saved[0]

    def load_state(self, path: str | Path) -> int:
        """Go on from the newest sound checkpoint in the folder `path`, and return its optimiser steps. The engines get
        its weights. Flags that change results must be those with which it was saved, but for ckpt.allow_changes.

        Raises:
            UserError: there is none, or it is of other flags or another model.
            RunError: all checkpoints there are damaged.
        """
        self._refuse_gradients("load_state")
        parts = self._of("load_state")
        saver = parts.saver(Path(path), self)
        if not saver.store.list_all():
            raise UserError(f"load_state: {path} has no checkpoint. Give the folder that save_state wrote to")
        self.step = saver.resume(show_line)
        parts.weights.sync(self.version)
        parts.weights.check()
        return self.step

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of this client, for a checkpoint."""
        return {"version": self.version, "samplings": self.samplings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do the inverse of `state_dict`."""
        self.version, self.samplings = state["version"], state["samplings"]

    def _refuse_gradients(self, call: str) -> None:
        """Refuse a call while gradients wait, which no checkpoint holds."""
        if self._waiting:
            raise UserError(f"{call}: gradients wait, which a checkpoint does not hold. Call optim_step first")

    def save_model(self, path: str | Path) -> Path:
        """Write the model in HF format, adapters merged, into the folder `path`, and return it.

        Raises:
            RunError: a part of it could not be written.
        """
        folder = Path(path).resolve()
        if problems := self._of("save_model").policy.export(folder):
            raise RunError(f"{folder} has its weights, but {'. '.join(problems)}")
        return folder

    def prompts(self, step: int) -> list[Prompt]:
        """Return the prompts of RL step `step` (from 0): those that task=ppo takes from data.prompt_dataset."""
        parts = self._of("prompts")
        if parts.prompts is None:
            raise UserError("prompts: the client has no data. Make it with data=..., or sample from your own prompts")
        check_step("prompts", step)
        order = BatchOrder(len(parts.prompts), parts.run.rollout.batch_size, parts.run.train.seed)
        return [parts.prompts[row] for row in order.indices(step)]

    def minibatches(self, count: int, step: int) -> list[list[int]]:
        """Return which of `count` samples each optimiser step of RL step `step` (from 0) takes, as task=ppo does:
        train.max_epochs shuffles by train.seed, cut into train.batch_size."""
        train = self._of("minibatches").run.train
        check_step("minibatches", step)
        return step_indices(count, train.batch_size, train.max_epochs, (train.seed, step))

    @property
    def _vocabulary(self) -> int:
        """The number of token ids."""
        return len(self.tokenizer)

    def _prompt(self, prompt: Prompt | str | Tokens, number: int) -> Prompt:
        """Return a prompt, which a response may follow."""
        parts = self._of("sample")
        if isinstance(prompt, str):
            prompt = tokens(parts.tokenizer, prompt, begin_ids(parts.tokenizer))
        given, max_len = prompt.ids if isinstance(prompt, Prompt) else prompt, parts.run.data.max_len
        ids = token_ids(given, f"prompt {number}", self._vocabulary, max_len)
        if len(ids) == max_len:
            problem = f"its {max_len} tokens fill data.max_len={max_len}, so no response fits after it"
            raise UserError(f"prompt {number}: {problem}. Raise the flag, or cut the prompt")
        return prompt if isinstance(prompt, Prompt) else as_prompt(ids.tolist(), number)

    def _request(self, data: Sequence[Datum], loss: str | None, count: Count | None) -> tuple[Experience, LossRequest]:
        """Return data laid end to end, and the loss that is asked for."""
        run = self._of("forward_backward").run
        name = loss or run.actor.policy_loss_type
        if name not in (CROSS_ENTROPY, run.actor.policy_loss_type):
            check_loss(name)
        needed = () if name == CROSS_ENTROPY else (*NEEDED, *(("ref_log_probs",) if run.algo.kl.use_loss else ()))
        batch = to_experience(data, self._vocabulary, run.data.max_len, needed)
        request = LossRequest(name, run.algo.kl.init_coef, None)
        if isinstance(count, Mapping):
            return batch, replace(request, counts=count)
        if count is not None and not count > 0:
            raise UserError(f"count={count} is not above 0. Give the number by which the sum of losses is divided")
        if count is not None:
            units = count_units(self._objective(request), batch)
            request = replace(request, counts=dict.fromkeys(units, float(count)))
        return batch, request

    def _objective(self, request: LossRequest) -> Any:
        """Return what a request asks to be minimised."""
        run = self._of("forward_backward").run
        horizon = run.rollout.max_new_tokens or run.data.max_len
        return make_objective(request, run.actor, run.algo.kl, run.rollout.temperature, horizon)

    def run_pass(self, batch: Experience, request: LossRequest, *, backward: bool, divides: bool) -> LossOutput:
        """Compute a loss over a batch, and with `backward` add its gradient to those that wait. Without `divides` its
        sums are not divided, but for the load-balancing loss of a mixture of experts."""
        policy = self._of("forward_backward").policy
        if not divides:
            counts = count_units(self._objective(request), batch)
            request = replace(request, counts={n: float(c) if n == ALL_TOKENS else 1.0 for n, c in counts.items()})
        self._waiting += backward
        compute = policy.forward_backward if backward else policy.measure_loss
        return self._output(batch, *compute(batch, request).result())

    def _output(
        self, batch: TokenBatch, metrics: dict[str, float], log_probs: torch.Tensor, loss_sum: float
    ) -> LossOutput:
        return LossOutput(metrics, split(batch, log_probs * batch.mask), loss_sum)


def check_step(call: str, step: int) -> None:
    """Refuse what is not the number of an RL step."""
    if not isinstance(step, int | np.integer) or step < 0:
        raise UserError(f"{call}: step={step!r:.80} is not a whole number of at least 0. RL steps count from 0")


def check_loss(name: str) -> None:
    """Refuse a loss that there is not, or that a client cannot compute."""
    known = policy_loss.names()
    if name not in known:
        raise UserError(f"loss={name}: there is no such loss. There are {', '.join((CROSS_ENTROPY, *known))}")
    if chooses_tokens(name):
        raise UserError(f"loss={name} chooses tokens of a whole rollout, which a client does not know")


def as_prompt(ids: Sequence[int], index: int) -> Prompt:
    """Return tokens as the prompt with number `index`."""
    return Prompt([*ids], "", "", "", f"prompt {index}", index=index)
