"""The actors of a run: one worker group per model, and the engines; all start at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlhf_suite.config.runs import PPORun
from rlhf_suite.distributed.group import ModelGroup
from rlhf_suite.distributed.workers import GroupOptions, WorkerGroup
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.engines.start import start_engines
from rlhf_suite.launch.environment import runtime_env
from rlhf_suite.launch.placement import Slot
from rlhf_suite.launch.run_placement import PROCESS
from rlhf_suite.rl.model_groups import CriticGroup, PolicyGroup, ProcessRewardGroup, ReferenceGroup, RewardGroup
from rlhf_suite.rl.roles import CriticRole, PolicyRole, ProcessRole, ReferenceRole, RewardRole, TeacherRole
from rlhf_suite.rl.update import steps_per_rollout, warm_up_steps

G = TypeVar("G", bound=ModelGroup)


@dataclass(frozen=True)
class Actors:
    """Everything that runs beside the driver. A model that the run does not need is None."""

    engines: EnginePool
    policy: PolicyGroup
    critic: CriticGroup | None
    reference: ReferenceGroup | None
    teacher: ReferenceGroup | None
    reward: RewardGroup | None
    process: ProcessRewardGroup | None

    def ready(self) -> None:
        """Wait until all are up."""
        for group in (self.policy, self.critic, self.reference, self.teacher, self.reward, self.process):
            if group is not None:
                group.ready()
        self.engines.ready()


def start_actors(
    config: PPORun, device: str, slots: dict[str, list[Slot]], log_dir: Path, optimizer_steps: int
) -> Actors:
    """Create all actors in their slots, waiting only for engines that share their GPU.

    `optimizer_steps` of the whole run set the schedules.
    """
    options = GroupOptions(device, log_dir, config.launch.timeout_s, runtime_env(device))

    def group(handle: type[G], cls: type, name: str, *args: object) -> G | None:
        return handle(WorkerGroup(cls, name, slots[name], options, args)) if name in slots else None

    engines = start_engines(config, slots["engine"], device, log_dir)
    if config.train.colocate_all and device == "cuda":
        engines.ready()  # vLLM measures how much memory is free while it starts: nobody else may take or give any
        engines.sleep()
    frozen = warm_up_steps(config) * steps_per_rollout(config)
    policy = group(PolicyGroup, PolicyRole, "actor", config, optimizer_steps - frozen)
    assert policy is not None
    critic = group(CriticGroup, CriticRole, "critic", config, optimizer_steps)
    reference = group(ReferenceGroup, ReferenceRole, "ref", config)
    teacher = group(ReferenceGroup, TeacherRole, "teacher", config)
    reward = group(RewardGroup, RewardRole, "reward", config)
    process = group(ProcessRewardGroup, ProcessRole, PROCESS, config)
    return Actors(engines, policy, critic, reference, teacher, reward, process)
