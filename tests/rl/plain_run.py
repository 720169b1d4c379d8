"""Whole RL runs in one process, without Ray and vLLM: one rank of each model, and an engine that samples from a
transformers model one token at a time. All the rest is the suite's own."""

from __future__ import annotations

from asyncio import Event
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rlhf_suite.config.declarations.reward import has_source
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR, CRITIC, REFERENCE, Machine, resolve
from rlhf_suite.data.generation import Generation, GenerationRequest
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.distributed.group import LocalGroup, ModelGroup
from rlhf_suite.errors import RunError
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.models.load import load_tokenizer, model_folder
from rlhf_suite.rewards.sources import Rewards
from rlhf_suite.rl.actors import Actors
from rlhf_suite.rl.build import RunData, build_pipeline
from rlhf_suite.rl.model_groups import CriticGroup, PolicyGroup, ReferenceGroup, WithoutAdaptersGroup
from rlhf_suite.rl.pipeline import Pipeline, total_steps
from rlhf_suite.rl.prompts import load_prompts
from rlhf_suite.rl.roles import CriticRole, PolicyRole, ReferenceRole, Role, WorkerSettings
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.metrics import read_rows
from rlhf_suite.weight_sync.digests import Manifest, SyncReport
from small_runs import check_declared

FLAG = "actor.model_name_or_path"
Trip = Callable[[str], None]


class PlainEngines:
    """In place of vLLM. `asked` is every request that it got; a deaf one receives weights and does not load them."""

    restarts = 0
    takes_adapters = False  # they are merged
    caches_prefixes = False

    def __init__(self, folder: str, is_deaf: bool = False, trip: Trip = lambda place: None) -> None:
        self.trip = trip
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.is_deaf, self.version, self.loop = is_deaf, -1, LoopThread("plain engines")
        self.lock, self.running, self.pauses = Lock(), Event(), 0
        self.running.set()
        self.busy: AbstractContextManager[None] = nullcontext()
        self.asked: list[GenerationRequest] = []

    def sync(
        self, backend: str, version: int, publish: Callable[[], list[Manifest]], members: object
    ) -> tuple[Manifest, list[SyncReport]]:
        self.trip("sync")
        (manifest,) = publish()
        assert manifest.path is not None
        size = manifest.entries[-1].offset + manifest.entries[-1].nbytes
        flat = torch.from_file(manifest.path, size=size, dtype=torch.uint8)
        with self.lock:  # between two responses
            if not self.is_deaf:
                self.model.load_state_dict({entry.name: entry.view(flat) for entry in manifest.entries}, strict=False)
            self.version = manifest.version
        count = len(manifest.entries)
        return manifest, [SyncReport(count, count, ())]

    def retire(self) -> None:
        self.loop.end(RunError("the run has ended"))

    def pause(self) -> None:
        self.running.clear()
        with self.lock:  # a response that is being written ends first
            self.pauses += 1

    def resume(self) -> None:
        self.loop.loop.call_soon_threadsafe(self.running.set)

    def start(self, work: Coroutine) -> Future:
        return self.loop.start(work)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked.append(request)
        self.trip("evaluation" if request.sampling.temperature == 0.9 else "generation")
        while True:
            await self.running.wait()
            with self.lock:  # of which `busy` is a part, so that a pause begins after it
                if self.running.is_set():
                    with self.busy:
                        return self.answer(request)

    @torch.no_grad()
    def answer(self, request: GenerationRequest) -> Generation:
        ids, chosen, log_probs, reason = list(request.prompt_ids), list[int](), list[float](), "length"
        generator, temperature = torch.Generator().manual_seed(request.seed), request.sampling.temperature
        for _ in range(request.max_new_tokens):
            scores = (self.model(torch.tensor([ids])).logits[0, -1] / (temperature or 1.0)).log_softmax(-1)
            drawn = scores.argmax() if temperature == 0 else torch.multinomial(scores.exp(), 1, generator=generator)
            chosen.append(int(drawn))
            log_probs.append(float(scores[chosen[-1]]))
            ids.append(chosen[-1])
            if chosen[-1] in request.sampling.stop_token_ids:
                reason = "stop"
                break
        versions = np.full(len(chosen), self.version, np.int32)
        return Generation(request.id, np.array(chosen, np.int32), np.array(log_probs, np.float32), reason, versions)

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
        self.trip("probe")
        return [[self.log_probs(ids) for ids in sequences]]

    def log_probs(self, ids: Sequence[int]) -> np.ndarray:
        scores = self.model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)[:-1]
        return np.array([0.0, *scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()], np.float32)


class TrippingGroup(LocalGroup):
    """One rank that tells what it is asked to do, before it does it."""

    trip: Trip

    def start(self, method: str, *args: Any) -> list[Any]:
        self.trip(f"{self.name}.{method}")
        return super().start(method, *args)


@dataclass
class Parts:
    """A run that is ready, its engine, and its models by name."""

    pipeline: Pipeline
    engines: PlainEngines
    policy: PolicyGroup
    critic: CriticGroup | None


def small(**changes: Any) -> Run:
    """Four prompts, two a step, two samples of each, of six tokens at most; `changes`: flags, `__` for each dot.

    The reward is shorter for longer responses, half of it for those that are cut off, less the KL penalty.
    """
    config = Run.of("ppo")
    flags: dict[str, Any] = {
        "actor.model_name_or_path": "builtin:tiny",
        "critic.model_name_or_path": "builtin:tiny",
        "actor.adam.lr": 1e-3,
        "actor.lr_scheduler": "linear",
        "actor.lr_warmup_ratio": 0.0,
        "critic.lr_scheduler": "linear",
        "critic.lr_warmup_ratio": 0.0,
        "algo.advantage.estimator": "rloo",
        "algo.kl.init_coef": 0.1,
        "algo.kl.target": 0.5,
        "algo.kl.horizon": 100,
        "reward.rule": "length",
        "reward.rules.length_limit": 4,
        "reward.stop_properly_penalty_coef": 0.5,
        "data.prompt_dataset": "builtin:reverse",
        "data.input_key": "input",
        "data.label_key": "label",
        "data.max_samples": 4,
        "data.max_len": 64,
        "data.cache_enable": False,
        "data.apply_chat_template": False,
        "rollout.batch_size": 2,
        "rollout.n_samples_per_prompt": 2,
        "rollout.max_new_tokens": 6,
        "rollout.temperature": 0.7,
        "rollout.micro_batch_size": 2,
        "train.batch_size": 4,
        "train.micro_batch_size": 2,
        "train.max_epochs": 1,
        "ds.zero_stage": 0,
        "ds.param_dtype": "fp32",
        "ds.packing_samples": True,
        "launch.device": "cpu",
        "logger.progress": False,
    }
    for key, value in (flags | {name.replace("__", "."): value for name, value in changes.items()}).items():
        section: Any = config
        *path, name = key.split(".")
        for part in path:
            section = getattr(section, part)
        assert hasattr(section, name), key
        setattr(section, name, value)
    return config


def models(config: Run, steps: int, trip: Trip = lambda place: None) -> dict[str, ModelGroup]:
    """Return the models that the run needs, each of one rank; `steps`: RL steps of the whole run."""
    plan = resolve(config, Machine("cpu", 0))
    settings = WorkerSettings(config.ds, config.train, config.rollout, config.data, plan.models[ACTOR].path)

    def group(cls: type[Role], name: str, *more: object) -> LocalGroup:
        result = TrippingGroup(cls, name, "cpu", (plan.models[name], settings, *more))
        result.trip = trip
        return result

    of_policy = (config.actor, config.algo.kl, plan.policy_steps(steps))
    found: dict[str, ModelGroup] = {"policy": PolicyGroup(group(PolicyRole, ACTOR, *of_policy))}
    if REFERENCE in plan.models:
        is_actor = plan.models[REFERENCE].is_actor
        found[REFERENCE] = (
            WithoutAdaptersGroup(found["policy"].group) if is_actor else ReferenceGroup(group(ReferenceRole, REFERENCE))
        )
    if CRITIC in plan.models:
        found["critic"] = CriticGroup(group(CriticRole, CRITIC, config.critic, plan.critic_steps(steps)))
    return found


def run(
    world: Any, folder: Path, config: Run, is_deaf: bool = False, trip: Trip = lambda place: None
) -> dict[str, float]:
    """Train to the end; the last metrics. Everything else is in `folder`. `trip` is told what engine and ranks are
    asked to do, and may raise."""
    path = config.actor.model_name_or_path
    assert path is not None
    tokenizer = load_tokenizer(path, config.data)
    prompts = load_prompts(config.data, config.eval, config.train.seed, tokenizer, config.agent.has_turns)
    order = BatchOrder(len(prompts.train), config.rollout.batch_size, config.train.seed)
    run_folder = RunFolder(folder)
    run_folder.start("plain")
    engines: Any = None if config.replays else PlainEngines(model_folder(path, FLAG), is_deaf, trip)
    groups: dict[str, Any] = models(config, total_steps(order, config.train), trip)
    actors = Actors(
        engines,
        groups["policy"],
        critic=groups.get("critic"),
        frozen={name: groups[name] for name in (REFERENCE,) if name in groups},
        rewards={},
        process=None,
    )
    with ExitStack() as stack:
        rewards = None
        if has_source(config.reward) and not config.replays:
            rewards = stack.enter_context(closing(Rewards(config.reward, folder / "reward.log")))
        journal = stack.enter_context(closing(Journal(config.logger, run_folder, "ppo")))
        data, plan = RunData(tokenizer, prompts, order), resolve(config, Machine("cpu", 0))
        last = build_pipeline(config, plan, run_folder, journal, data, actors, rewards).run()
    check_declared(read_rows(run_folder.metrics))
    return last
