"""The actors of a run: one worker group per model, the engines, and what runs episodes. All start at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR, CRITIC, ENGINE, JUDGE, PROCESS, Plan, judge_paths
from rlhf_suite.distributed.group import ModelGroup
from rlhf_suite.distributed.workers import GroupOptions, WorkerGroup
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.engines.spec import AdapterSpec
from rlhf_suite.engines.start import start_engines, start_judge
from rlhf_suite.launch.environment import runtime_env
from rlhf_suite.launch.placement import Slot
from rlhf_suite.rl.episode_workers import EpisodeWorkers, start_episode_workers
from rlhf_suite.rl.judge import Judge
from rlhf_suite.rl.model_groups import (
    CriticGroup,
    PolicyGroup,
    ProcessRewardGroup,
    ReferenceGroup,
    RewardGroup,
    WithoutAdaptersGroup,
)
from rlhf_suite.rl.roles import CriticRole, PolicyRole, ReferenceRole, Role, WorkerSettings

G = TypeVar("G", bound=ModelGroup)
PolicyKind = tuple[type[PolicyGroup], type[PolicyRole]]  # the handle on its ranks, and what each of them is


@dataclass(frozen=True)
class Actors:
    """Everything that runs beside the driver. A model that the run does not need is None."""

    engines: EnginePool | None
    policy: PolicyGroup
    critic: CriticGroup | None
    frozen: Mapping[str, ReferenceGroup]  # language models whose log-probs the run needs, by their names in the plan
    rewards: Mapping[str, RewardGroup]  # by their names in the plan
    process: ProcessRewardGroup | None
    episodes: EpisodeWorkers | None = None  # None: the driver runs them, or there is no agent
    judge: EnginePool | None = None  # a frozen chat model that scores; None: nobody judges, or servers do

    def ready(self) -> None:
        """Wait until all actors are up."""
        if self.episodes is not None:
            self.episodes.ready()
        for group in (self.policy, self.critic, *self.frozen.values(), *self.rewards.values(), self.process):
            if group is not None:
                group.ready()
        for engines in (self.engines, self.judge):
            if engines is not None:
                engines.ready()


def start_actors(  # noqa: PLR0913, PLR0917 - all that actors differ by
    run: Run,
    plan: Plan,
    slots: Mapping[str, list[Slot]],
    log_dir: Path,
    rollouts: int,
    image_token: int | None = None,
    adapter: AdapterSpec | None = None,
    trained: PolicyKind = (PolicyGroup, PolicyRole),
) -> Actors:
    """Create all actors in their slots, waiting only for engines that share their GPU. `rollouts`: those of the whole
    run, which set the schedules; `image_token`: the placeholder of images, if the run has any; `adapter`: what engines
    get beside the model's weights, if they do; `trained`: the classes of the policy."""
    axes = plan.placement.sequence, plan.placement.tensor
    shares = any(len(pool.roles) > 1 for pool in plan.placement.pools)
    options = GroupOptions(plan.device, log_dir, run.launch.timeout_s, runtime_env(plan.device), *axes, shares)
    settings = WorkerSettings(plan.hold(run.ds), run.train, run.rollout, run.data, tokenizer=plan.models[ACTOR].path)

    def start(handle: type[G], cls: type[Role], name: str, *more: object) -> G:
        return handle(WorkerGroup(cls, name, slots[name], options, (plan.models[name], settings, *more)))

    def group(handle: type[G], cls: type[Role], name: str, *more: object) -> G | None:
        return start(handle, cls, name, *more) if name in plan.models else None

    def judge(handle: type[G], name: str) -> G:
        worker = (plan.models[name], settings.ds, settings.micro_batches, run.train)
        return handle(WorkerGroup(Judge, name, slots[name], options, worker))

    engines = None if run.replays else start_engines(run, plan, slots[ENGINE], log_dir, image_token, adapter)
    if engines is not None and plan.engines.shares_gpu and plan.device == "cuda":
        engines.ready()  # vLLM measures how much memory is free while it starts: nobody else may take or give any
        engines.sleep()
    judges = judge_paths(run)
    policy = start(*trained, ACTOR, run.actor, run.algo.kl, plan.policy_steps(rollouts))
    read = [model for name, model in plan.models.items() if name not in (ACTOR, CRITIC, PROCESS, *judges)]
    return Actors(
        engines,
        policy,
        critic=group(CriticGroup, CriticRole, CRITIC, run.critic, plan.critic_steps(rollouts)),
        frozen={
            model.name: WithoutAdaptersGroup(policy.group)
            if model.is_actor
            else start(ReferenceGroup, ReferenceRole, model.name)
            for model in read
        },
        rewards={name: judge(RewardGroup, name) for name in judges},
        process=judge(ProcessRewardGroup, PROCESS) if PROCESS in plan.models else None,
        episodes=None if engines is None else start_episode_workers(run, plan, engines, log_dir),
        judge=start_judge(run, plan.device, slots[JUDGE], log_dir) if JUDGE in slots else None,
    )
