"""Several models on one policy: LoRA adapters with an optimiser each, which take turns on the same ranks and engines.

The ranks hold one of them, the others are kept in their memory (`train.kept_state`). Gradients are not kept: where a
model has some that wait for an optimiser step, its passes are done again when its turn comes, and without dropout their
gradients are the same, bit for bit.

A state on disk is a checkpoint. `latest` is written with the optimiser step itself (ckpt.save_steps), before the client
learns that the step was taken: no step that a client knows of is lost with the server.
"""

from __future__ import annotations

import re
import shutil
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
from rlhf_suite.train_server.steps import PassSums, Steps

INITIAL = "base"  # what every model begins with, and what is sampled from without a model
LATEST = "latest"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
SCHEME, STATES, SAMPLERS = "tinker://", "weights", "sampler_weights"
MAX_SNAPSHOTS = 16  # for the engines, that are kept in memory


@dataclass
class Model:
    """A model that a client trains."""

    name: str
    step: int = 0  # optimiser steps that were taken
    line: int = 1  # grows where it goes on from a state: `latest` is that of the newest line of steps
    waiting: list[tuple[Experience, LossRequest]] = field(default_factory=list)  # passes with gradients that wait
    passes: PassSums = field(default_factory=PassSums)  # what these came to

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
        self.folder = Path(run.ckpt.path) if run.ckpt.path else started.record.path / "checkpoints"
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
            raise BadRequest(f"there is no model {name}. Create one: models end with the server")
        return self.models[name]

    def create(self, name: str, is_left: Callable[[str], bool] = lambda name: False) -> None:
        """Make a model with new adapters. Where there are too many, those go whose client `is_left`."""
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
        """Take an optimiser step, write it to disk as ckpt.save_steps says, and return its metrics."""
        model = self.activate(name)
        if not model.waiting:
            raise BadRequest("optim_step: no gradients wait. Call forward_backward first")
        metrics, passes = self.optim_step(adam), model.passes.means()
        model.forget_passes()
        if metrics["train/actor_skipped"]:
            raise BadRequest(
                "optim_step: the loss or its gradient is not finite, so nothing was updated, and the gradients are "
                "gone. Look at the data since the last step, or lower the learning rate"
            )
        model.step += 1
        every = self.run.ckpt.save_steps
        if every > 0 and model.step % every == 0:
            with self.on_disk("optim_step: the step was taken, but its state was not written"):
                self.save_latest(model)
        self.steps.log(passes | metrics)
        return metrics

    def save_latest(self, model: Model) -> None:
        """Write the state of a model whose client does not know yet of its last step."""
        folder = self.folder / model.name / STATES / LATEST
        self.saver(folder / f"v{model.line:06d}", model).save(model.step, "step")
        for old in sorted(folder.glob("v*"))[:-1]:
            shutil.rmtree(old)

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
        folder = self.folder / name / STATES / state
        if state == LATEST or (folder.exists() and not overwrite):
            problem = "is the name of the server's own" if state == LATEST else "exists already"
            raise BadRequest(f"save_weights: {state} {problem}. Choose another name")
        written = sorted(folder.glob("v*"))
        number = int(written[-1].name[1:]) + 1 if written else 1
        with self.on_disk("save_weights"):
            self.saver(folder / f"v{number:06d}", model).save(model.step, "step")
        for old in written:
            shutil.rmtree(old)
        return f"{SCHEME}{name}/{STATES}/{state}"

    def load(self, name: str, address: str, *, with_optimizer: bool) -> None:
        """Have a model go on from a state on disk, with new moments of the optimiser or those of the state."""
        folder = self.find(address, STATES)
        model = self.activate(name)
        self.policy.put_state(INITIAL).result()
        model.forget_passes()
        self._waiting = 0
        with self.on_disk("load_weights"):
            self.saver(folder, model, with_optimizer=with_optimizer).resume(show_line)
        model.line += 1
        if not with_optimizer:
            model.step = 0

    def find(self, address: str, kind: str) -> Path:
        """Return the folder of an address (tinker://<model>/weights/<name>); raise BadRequest if there is none."""
        parts = address.removeprefix(SCHEME).split("/")
        if not address.startswith(SCHEME) or len(parts) != 3 or parts[1] != kind:
            raise BadRequest(f"{address} is not an address of {kind}. Write {SCHEME}<model>/{kind}/<name>")
        folder = self.folder.joinpath(check_name(parts[0]), kind, check_name(parts[2]))
        versions = sorted(folder.glob("v*"))
        folder = versions[-1] if versions else folder
        if not folder.exists():
            raise BadRequest(
                f"there is nothing at {address} (looked in {folder}). Save it first, or correct the address"
            )
        return folder

    def snapshot(self, name: str, address: str, *, keeps: bool) -> dict[str, float]:
        """Bring the weights of a model to the engines, prove that they are there, and keep them as a snapshot; with
        `keeps` on disk too. Return metrics."""
        model = self.activate(name)
        if keeps:
            folder = self.folder / name / SAMPLERS / address.rpartition("/")[2]
            shutil.rmtree(folder, ignore_errors=True)
            with self.on_disk("save_weights_for_sampler"):
                self.saver(folder, model, with_optimizer=False).save(model.step, "step")
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
            folder = self.find(address, SAMPLERS)
            with self.on_disk("asample"):
                self.saver(folder, Model(""), with_optimizer=False).resume(show_line)
        self.save_weights_for_sampler()
        self.sampled = address


def check_name(name: str) -> str:
    """Return a part of an address; raise BadRequest if it could not be the name of a folder."""
    if not NAME.fullmatch(name):
        raise BadRequest(f"{name!r:.100} is not a name. Use letters, digits, and . _ : - between them")
    return name


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
