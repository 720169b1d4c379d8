"""Several models on one policy: LoRA adapters with an optimiser each, which take turns on the same ranks and engines.

The ranks hold one of them, the others are kept in their memory (`train.kept_state`). Gradients are not kept: where a
model has some that wait for an optimiser step, its passes are done again when its turn comes, and without dropout their
gradients are the same, bit for bit.

A state on disk is a checkpoint. `latest` is written with the optimiser step itself (ckpt.save_steps), before the client
learns that the step was taken: no step that a client knows of is lost with the server. Where it cannot be written, the
step counts all the same and the client is told so; it is written with the next one, or when the client asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_suite.config.plan.run_plan import ACTOR
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.errors import RunError
from rlhf_suite.rl.client import Started, TrainingClient
from rlhf_suite.rl.datum import Adam, LossOutput
from rlhf_suite.rl.primitives import LossRequest
from rlhf_suite.serving.http_server import BadRequest
from rlhf_suite.tracking.console import show_line
from rlhf_suite.train.saving import Saver, TrainingRows
from rlhf_suite.train_server.states import LATEST, NAME, SAMPLERS, SCHEME, STATES, StateFolders, address_of
from rlhf_suite.train_server.steps import PassSums, Steps

INITIAL = "base"  # what every model begins with, and what is sampled from without a model
MAX_SNAPSHOTS = 16  # for the engines, that are kept in memory


@dataclass
class Model:
    """A model that a client trains."""

    name: str
    step: int = 0  # optimiser steps that were taken
    line: int = 1  # grows where it goes on from a state: `latest` is that of the newest line of steps
    waiting: list[tuple[Experience, LossRequest]] = field(default_factory=list)  # passes with gradients that wait
    passes: PassSums = field(default_factory=PassSums)  # what these came to
    metrics: dict[str, float] = field(default_factory=dict)  # of the last step
    is_due: bool = False  # the last step has to be on disk before its client may know of it, and is not yet

    def forget_passes(self) -> None:
        """Begin another optimiser step."""
        self.waiting.clear()
        self.passes = PassSums()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it beside the weights and the optimiser."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do the inverse of `state_dict`."""
        self.step = state["step"]


class Models(TrainingClient):
    """The models of a server, and the weights that its engines have. One thread makes all calls."""

    def __init__(self, started: Started, steps: Steps) -> None:
        super().__init__()
        self._parts, self.steps = started, steps
        run = started.run
        self.run, self.policy = run, started.policy
        folder = Path(run.ckpt.path) if run.ckpt.path else started.record.path / "checkpoints"
        self.states = StateFolders(folder, run.ckpt)
        self.models: dict[str, Model] = {}
        self.active = ""  # the model whose state the ranks hold; empty: that of a snapshot
        self.snapshots: list[str] = []  # kept weights for the engines, the oldest first
        self.policy.keep_state(INITIAL).result()
        self.sampled = INITIAL  # the weights that the engines have
        self.save_weights_for_sampler()

    @property
    def unfinished(self) -> str:
        """Return the model whose gradients wait on the ranks for an optimiser step; empty: none."""
        model = self.models.get(self.active)
        return self.active if model is not None and model.waiting else ""

    def model(self, name: str) -> Model:
        """Return a model; raise BadRequest if there is none."""
        if name not in self.models:
            problem = f"there is no model {name:.200}. Create it first: a server forgets all models when it stops"
            latest = f"{SCHEME}{name}/{STATES}/{LATEST}"
            has_state = NAME.fullmatch(name) and self.states.versions(self.states.path_of(latest, STATES))
            raise BadRequest(f"{problem}. Its last state is at {latest}" if has_state else problem)
        return self.models[name]

    def create(self, name: str, is_left: Callable[[str], bool] = lambda name: False) -> None:
        """Make a model with new adapters. Where there are too many, those go whose client `is_left`."""
        if name in self.models:
            raise BadRequest(f"there is a model {name} already. Go on with it")
        for left in [other for other in self.models if is_left(other)]:
            self.unload(left)
        limit = self.run.serve.max_models if self.run.ds.lora.rank > 0 else 1
        if len(self.models) >= limit:
            more = (
                "raise serve.max_models" if self.run.ds.lora.rank > 0 else "start the server with ds.lora.rank above 0"
            )
            raise BadRequest(f"this server has {limit} model(s), which is its limit. Unload one, or {more}")
        self.leave()
        self.policy.put_state(INITIAL).result()
        self.models[name], self.active, self._waiting = Model(name), name, 0

    def leave(self) -> None:
        """Keep the state of the model that the ranks hold."""
        if self.active:
            self.policy.keep_state(self.active).result()
        self.active = ""

    def activate(self, name: str) -> Model:
        """Have the ranks hold a model, with the gradients that wait in it."""
        model = self.model(name)
        if self.active != name:
            self.leave()
            self.policy.put_state(name).result()
            self.active, self._waiting = name, 0
            for batch, request in model.waiting:
                self.run_pass(batch, request, backward=True, divides=False)
        return model

    def unload(self, name: str) -> None:
        """Drop a model. Its states on disk stay."""
        self.model(name)
        if self.active == name:
            self.active = ""
        del self.models[name]
        self.policy.forget_state(name).result()

    def compute(self, name: str, batch: Experience, request: LossRequest, *, backward: bool) -> LossOutput:
        """Compute a loss; with `backward` add its gradient to those that wait for an optimiser step."""
        model = self.activate(name)
        output = self.run_pass(batch, request, backward=backward, divides=False)
        if backward:
            model.waiting.append((batch, request))
            model.passes.add(request.name, batch, output)
        return output

    def update(self, name: str, adam: Adam) -> dict[str, float]:
        """Take an optimiser step, write it to disk as ckpt.save_steps says, and return its metrics. Without gradients,
        write the last step if that was due and could not be written."""
        model = self.activate(name)
        if model.waiting:
            self.take_step(model, adam)
        elif not model.is_due:
            raise BadRequest("optim_step: no gradients wait. Call forward_backward first")
        else:
            self.write_step(model)
        return model.metrics

    def take_step(self, model: Model, adam: Adam) -> None:
        """Take an optimiser step with the gradients that wait, and write its state and its metrics."""
        metrics, passes = self.optim_step(adam), model.passes.means()
        model.forget_passes()
        if metrics["train/actor_skipped"]:
            raise BadRequest(
                "optim_step: the loss or its gradient is not finite, so nothing was updated, and the gradients are "
                "gone. Look at the data since the last step, or lower the learning rate"
            )
        model.step, model.metrics = model.step + 1, metrics
        every = self.run.ckpt.save_steps
        model.is_due |= every > 0 and model.step % every == 0
        try:
            self.write_step(model)
        except BadRequest:  # the step counts
            self.steps.log(passes | metrics)
            raise
        self.steps.log(passes | metrics)

    def write_step(self, model: Model) -> None:
        """Write the state of a model, if that is due, before its client knows of its last step."""
        if not model.is_due:
            return
        state = self.states.path_of(address_of(model.name, STATES, LATEST), STATES)
        advice = "optim_step without new gradients writes only the state"
        with (
            self.on_disk(
                f"optim_step: step {model.step} of the model was taken and counts, so do not send its passes again. "
                f"Only its state is not on disk, and is lost if the server ends now; {advice}"
            ),
            self.states.new_version(state, model.line) as folder,
        ):
            self.saver(folder, model).save(model.step, "step")
        model.is_due = False

    @contextmanager
    def on_disk(self, call: str) -> Iterator[None]:
        """Refuse a call whose state cannot be written or read. What the ranks cannot survive ends the server."""
        try:
            yield
        except (RunError, OSError) as error:
            self.policy.forget_state("").result()  # fails where a rank has died
            raise BadRequest(f"{call}: {error}") from error

    def saver(self, folder: Path, model: Model, *, with_optimizer: bool = True) -> Saver:
        """Return what writes the state of a model to a folder, and reads it, with or without the optimiser's part."""
        started = self._of("save_weights")
        config = replace(self.run.ckpt, path=str(folder), load_enable=True)
        config = replace(config, reset_optimizer=not with_optimizer, disable_ds=not with_optimizer)
        rows = TrainingRows("data.prompt_dataset", "")
        return Saver(config, started.record, {ACTOR: self.policy}, "eval/pass1", rows, {"model": model})

    def save(self, name: str, state: str, *, overwrite: bool) -> str:
        """Write the state of a model to disk, and return its address."""
        model = self.activate(name)
        if model.waiting:
            raise BadRequest("save_weights: gradients wait, which a state does not hold. Call optim_step first")
        address = address_of(name, STATES, state)
        folder = self.states.path_of(address, STATES)
        if state == LATEST or (self.states.versions(folder) and not overwrite):
            problem = "is the name of the server's own" if state == LATEST else "exists already"
            raise BadRequest(f"save_weights: {state} {problem}. Choose another name")
        with self.on_disk("save_weights"), self.states.new_version(folder) as version:
            self.saver(version, model).save(model.step, "step")
        return address

    def load(self, name: str, address: str, *, with_optimizer: bool) -> None:
        """Have a model go on from a state on disk, with new moments of the optimiser or those of the state. If that
        fails, the model is what it was."""
        folder = self.states.find(address, STATES)
        model = self.activate(name)
        step = model.step
        self.leave()
        self.policy.put_state(INITIAL).result()
        try:
            with self.on_disk("load_weights"):
                self.read(self.saver(folder, model, with_optimizer=with_optimizer), address)
        except BadRequest:
            model.step = step
            raise
        self.policy.forget_state(name).result()
        model.forget_passes()
        self.active, self._waiting, model.is_due = name, 0, False
        model.line += 1
        if not with_optimizer:
            model.step = 0

    def read(self, saver: Saver, address: str) -> None:
        """Have the ranks hold the newest state of a folder; raise BadRequest where it is damaged."""
        newest, loaded = saver.store.list_all()[0], saver.resume(show_line)
        if loaded != newest.step:
            raise BadRequest(
                f"{address}: {newest.path} is damaged. The state before it is that of step {loaded}: delete this "
                "folder to go on from there"
            )

    def snapshot(self, name: str, address: str, *, keeps: bool) -> dict[str, float]:
        """Bring the weights of a model to the engines, prove that they are there, and keep them as a snapshot; with
        `keeps` on disk too. Return metrics."""
        model = self.activate(name)
        if keeps:
            folder = self.states.path_of(address, SAMPLERS)
            with self.on_disk("save_weights_for_sampler"), self.states.new_version(folder) as version:
                self.saver(version, model, with_optimizer=False).save(model.step, "step")
        self.policy.keep_state(address, with_optimizer=False).result()
        self.snapshots = [*(other for other in self.snapshots if other != address), address]
        for oldest in self.snapshots[:-MAX_SNAPSHOTS]:
            self.policy.forget_state(oldest).result()
        self.snapshots = self.snapshots[-MAX_SNAPSHOTS:]
        metrics = self.save_weights_for_sampler()
        self.sampled = address
        return metrics

    def bring_to_engines(self, address: str) -> None:
        """Have the engines sample from a snapshot."""
        if self.sampled == address:
            return
        self.leave()
        if address in (INITIAL, *self.snapshots):
            self.policy.put_state(address, with_optimizer=False).result()
        else:
            if address.startswith(SCHEME) is False:
                raise BadRequest("these weights are no longer kept: the server keeps the newest. Save them again")
            folder = self.states.find(address, SAMPLERS)
            with self.on_disk("asample"):
                self.read(self.saver(folder, Model(""), with_optimizer=False), address)
        self.save_weights_for_sampler()
        self.sampled = address


def adam_of(given: Mapping[str, Any]) -> Adam:
    """Return the settings of an optimiser step; raise BadRequest if they are not those of AdamW."""
    known = {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    if unknown := sorted({*given} - {*known}):
        raise BadRequest(f"optim_step: {unknown[0]} is not a setting of AdamW, by which this server trains")
    values = {**known, **given}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise BadRequest(f"optim_step: {key}={value!r:.40} is not a number of at least 0")
    for key in ("beta1", "beta2"):
        if values[key] >= 1:
            raise BadRequest(f"optim_step: {key}={values[key]} is not below 1")
    return Adam(
        values["learning_rate"],
        (values["beta1"], values["beta2"]),
        values["eps"],
        values["weight_decay"],
        values["grad_clip_norm"],
    )
