"""Everything that follows from the flags of an RL run and the machine: decided here, before anything starts.

Actors get the plan or their part of it, `explain=true` prints it, and `config.yaml` of the run folder holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlhf_suite.config.models import ReferenceConfig, RLTeacherConfig, TrainedModelConfig
from rlhf_suite.config.reward import ProcessRewardConfig, RewardConfig, reward_model
from rlhf_suite.config.runs import PPORun, SupervisedRun
from rlhf_suite.config.sources import BUILTIN

Section = TrainedModelConfig | ReferenceConfig | RLTeacherConfig | RewardConfig | ProcessRewardConfig

ACTOR, CRITIC, REFERENCE, TEACHER, REWARD = "actor", "critic", "ref", "teacher", "reward"
PROCESS = "reward.process"
ENGINE = "engine"
# The demo that a built-in model is trained by before it is used: random weights are not worth strengthening.
RECIPES = {ACTOR: "warm_start", TEACHER: "teacher", PROCESS: "prm"}
GPU_MEMORY_SHARED = 0.4  # for an engine: models, gradients and optimiser states want the rest


@dataclass(frozen=True)
class Machine:
    """What a run knows of the devices it gets."""

    device: str  # "cpu" or "cuda"
    num_gpus: int | None  # None: not known, since the cluster is more than this machine


@dataclass(frozen=True)
class ModelPlan:
    """One model of a run: where it comes from, and how its ranks hold it."""

    name: str  # that of its section of flags
    path: str
    head: Literal["lm", "value"] = "lm"
    ranks: int = 1
    offload: bool = False  # its weights stay in host memory
    load_in_4bit: bool = False
    recipe: str | None = None  # the demo that trains it first

    @property
    def flag(self) -> str:
        """Return the flag that names the model."""
        return f"{self.name}.model_name_or_path"


@dataclass(frozen=True)
class EnginePlan:
    """What is decided for the rollout engines."""

    shares_gpu: bool  # with the models
    gpu_memory_utilization: float | None  # None: vLLM's part of a GPU of its own
    sync_backend: str


@dataclass(frozen=True)
class Role:
    """A kind of actor: how many of them, and how many devices each one drives by itself (tensor parallel engines)."""

    name: str
    num_actors: int
    devices_per_actor: int = 1


@dataclass(frozen=True)
class Pool:
    """Devices and the roles that run on them. All roles of a pool have the same number and size of actors."""

    roles: tuple[Role, ...]

    def __post_init__(self) -> None:
        assert len({(role.num_actors, role.devices_per_actor) for role in self.roles}) == 1, self.roles

    @property
    def name(self) -> str:
        return "+".join(role.name for role in self.roles)

    @property
    def num_devices(self) -> int:
        return self.roles[0].num_actors * self.roles[0].devices_per_actor

    @property
    def share(self) -> float:
        """Return the part of a device that one actor takes."""
        return 1 / len(self.roles)


@dataclass(frozen=True)
class Placement:
    """Which roles run on which devices. Pools do not overlap."""

    device: str
    pools: tuple[Pool, ...]

    @property
    def num_devices(self) -> int:
        return sum(pool.num_devices for pool in self.pools)

    @property
    def num_actors(self) -> int:
        return sum(role.num_actors for pool in self.pools for role in pool.roles)

    def lines(self) -> list[str]:
        """Return one line per pool, for people."""
        unit = "GPU" if self.device == "cuda" else "CPU slot"
        return [f"{pool.num_devices} x {unit}: " + ", ".join(map(described, pool.roles)) for pool in self.pools]


def described(role: Role) -> str:
    each = f" of {role.devices_per_actor}" if role.devices_per_actor > 1 else ""
    return f"{role.name} x {role.num_actors}{each}"


@dataclass(frozen=True)
class Plan:
    """The decisions about a run."""

    models: Mapping[str, ModelPlan]  # that exist, by name
    engines: EnginePlan
    placement: Placement
    rollouts_ahead: int  # steps by which the weights that write a rollout are older than those it trains
    optimizer_steps_per_rollout: int  # of a full rollout
    critic_warm_up: int  # RL steps at the start in which the critic alone is trained

    @property
    def device(self) -> str:
        return self.placement.device

    def policy_steps(self, rollouts: int) -> int:
        """Return the optimiser steps of the policy in a run of so many rollouts."""
        return (rollouts - self.critic_warm_up) * self.optimizer_steps_per_rollout

    def critic_steps(self, rollouts: int) -> int:
        """Return the optimiser steps of the critic in a run of so many rollouts."""
        return rollouts * self.optimizer_steps_per_rollout


def resolve(run: PPORun, machine: Machine) -> Plan:
    """Return everything that is decided about a run whose flags have no problem."""
    together = shares_all(run, machine)
    memory = run.vllm.gpu_memory_utilization
    if together and memory is None:
        memory = GPU_MEMORY_SHARED
    samples = run.rollout.batch_size * run.rollout.n_samples_per_prompt
    return Plan(
        models=models(run),
        engines=EnginePlan(together, memory, sync_backend(run, machine.device, together)),
        placement=Placement(machine.device, pools(run, together)),
        rollouts_ahead=run.train.async_queue_size if run.train.async_enable else 0,
        optimizer_steps_per_rollout=-(-samples // run.train.batch_size) * run.train.max_epochs,
        critic_warm_up=run.critic.freezing_steps if needs_critic(run) else 0,
    )


def needs_critic(run: PPORun) -> bool:
    """Return whether the estimator of advantages reads values."""
    return run.algo.advantage.needs("values")


def model_sections(run: PPORun) -> dict[str, Section]:
    """Return the models that a run needs, by name, each with its section of flags."""
    found: dict[str, Section] = {ACTOR: run.actor}
    if needs_critic(run):
        found[CRITIC] = run.critic
    if run.algo.kl.init_coef > 0:
        found[REFERENCE] = run.ref
    if run.algo.distill.coef > 0:
        found[TEACHER] = run.teacher
    if reward_model(run.reward) is not None:
        found[REWARD] = run.reward
    if run.reward.process.enable:
        found[PROCESS] = run.reward.process
    return found


def actor_path(run: SupervisedRun | PPORun) -> str:
    """Return the path of the model that is trained; the checks have made sure that there is one."""
    assert run.actor.model_name_or_path is not None
    return run.actor.model_name_or_path


def num_ranks(section: Section) -> int:
    """Return the ranks of a model."""
    return section.num_nodes * section.num_gpus_per_node


def models(run: PPORun) -> dict[str, ModelPlan]:
    """Return the models that a run needs, by name."""
    judge = reward_model(run.reward)
    named = {
        ACTOR: run.actor.model_name_or_path,
        REFERENCE: run.ref.model_name_or_path,
        TEACHER: run.teacher.model_name_or_path,
        CRITIC: run.critic.model_name_or_path or judge,
        REWARD: judge,
        PROCESS: run.reward.process.model_name_or_path,
    }
    found = {}
    for name, section in model_sections(run).items():
        path, recipe = named[name], RECIPES.get(name)
        if path is None and name in (REFERENCE, CRITIC):
            path, recipe = named[ACTOR], RECIPES[ACTOR]
        assert path is not None, f"{name}: checked with the flags"
        found[name] = ModelPlan(
            name,
            path,
            head="value" if name in (CRITIC, REWARD) else "lm",
            ranks=num_ranks(section),
            offload=isinstance(section, ReferenceConfig | RLTeacherConfig | RewardConfig) and section.offload,
            # A model whose word counts (reward model, teacher) keeps its precision; a reference is as its policy.
            load_in_4bit=run.ds.load_in_4bit and name in (ACTOR, CRITIC, REFERENCE),
            recipe=recipe if path.startswith(BUILTIN) else None,
        )
    return found


def roles(run: PPORun) -> list[Role]:
    """Return the kinds of actors of a run: its models, and the engines."""
    actor, *others = [Role(name, num_ranks(section)) for name, section in model_sections(run).items()]
    return [actor, Role(ENGINE, run.vllm.num_engines, run.vllm.tensor_parallel_size), *others]


def shares_all(run: PPORun, machine: Machine) -> bool:
    """Return whether all models and engines share the same devices.

    Where train.colocate_all does not say, they do on a machine with fewer GPUs than each of them having its own would
    take, if they are of equal size: one command line serves one GPU and many.
    """
    if run.train.colocate_all is not None:
        return run.train.colocate_all
    if machine.device != "cuda" or machine.num_gpus is None or run.train.async_enable:
        return False
    needed = sum(pool.num_devices for pool in pools(run, together=False))
    sizes = {(role.num_actors, role.devices_per_actor) for role in roles(run)}
    return machine.num_gpus < needed and len(sizes) == 1


def pools(run: PPORun, together: bool) -> tuple[Pool, ...]:
    """Return which roles share devices: all of them (`together`), or the pairs that the flags name."""
    left, found = roles(run), list[Pool]()
    if together:
        return (Pool(tuple(left)),)
    pairs = ((run.train.colocate_actor_ref, (ACTOR, REFERENCE)), (run.train.colocate_critic_reward, (CRITIC, REWARD)))
    for is_asked, names in pairs:
        pair = tuple(role for role in left if is_asked and role.name in names)
        if pair:
            left = [role for role in left if role not in pair]
            found.append(Pool(pair))
    return (*found, *(Pool((role,)) for role in left))


def sync_backend(run: PPORun, device: str, together: bool) -> str:
    """Return how weights travel. vllm.sync_backend=auto stands for memory that trainer and engines share, where they
    do."""
    if run.vllm.sync_backend != "auto":
        return run.vllm.sync_backend
    if device == "cpu":
        return "shm" if run.actor.num_nodes == 1 else "gloo"
    return "ipc" if together else "nccl"
