"""Which roles of an RL run exist, how many actors each has, and which of them share devices."""

from __future__ import annotations

from dataclasses import replace

from rlhf_suite.config.placement import RankedConfig
from rlhf_suite.config.reward import reward_model
from rlhf_suite.config.runs import PPORun
from rlhf_suite.errors import UserError
from rlhf_suite.launch.placement import Plan, Pool, Role

ENGINE = "engine"
GPU_MEMORY_SHARED = 0.4  # for an engine: models, gradients and optimizer states want the rest
PROCESS = "reward.process"  # the process reward model; also its section of flags


def roles(config: PPORun) -> list[Role]:
    """The roles this configuration needs: no reference without a KL term, no teacher without its term, no critic
    without GAE."""
    engines = Role(ENGINE, config.vllm.num_engines, config.vllm.tensor_parallel_size)
    found = [Role("actor", _ranks(config.actor)), engines]
    if config.algo.kl.init_coef > 0:
        found.append(Role("ref", _ranks(config.ref)))
    if config.algo.distill.coef > 0:
        found.append(Role("teacher", _ranks(config.teacher)))
    if config.algo.advantage.needs("values"):
        found.append(Role("critic", _ranks(config.critic)))
    if reward_model(config.reward) is not None:
        found.append(Role("reward", _ranks(config.reward)))
    if config.reward.process.enable:
        found.append(Role(PROCESS, _ranks(config.reward.process)))
    return found


def settled(config: PPORun, device: str, num_gpus: int | None) -> PPORun:
    """The configuration with `train.colocate_all` decided, and with it an engine's share of its GPU's memory.

    Unset, all roles share devices where `num_gpus` are too few for each to have its own: one command line serves one
    GPU and many. None: their number is not known.
    """
    together = config.train.colocate_all
    if together is None:
        too_few = device == "cuda" and num_gpus is not None and num_gpus < plan(config, device).num_devices
        together = too_few and len({(role.num_actors, role.devices_per_actor) for role in roles(config)}) == 1
    vllm = config.vllm
    if together and vllm.gpu_memory_utilization is None:
        vllm = replace(vllm, gpu_memory_utilization=GPU_MEMORY_SHARED)
    return replace(config, train=replace(config.train, colocate_all=together), vllm=vllm)


def plan(config: PPORun, device: str) -> Plan:
    """The placement of a run on `device` ("cpu" or "cuda"); asks nobody, so it can be shown without running.

    Raises:
        UserError: roles that are to share devices differ in size.
    """
    sharing: list[tuple[str, set[str]]] = []
    if config.train.colocate_all:
        sharing.append(("train.colocate_all", {"actor", "ref", "teacher", "critic", "reward", PROCESS, ENGINE}))
    else:
        if config.train.colocate_actor_ref:
            sharing.append(("train.colocate_actor_ref", {"actor", "ref"}))
        if config.train.colocate_critic_reward:
            sharing.append(("train.colocate_critic_reward", {"critic", "reward"}))
    left, pools = roles(config), []
    for flag, names in sharing:
        together = tuple(role for role in left if role.name in names)
        left = [role for role in left if role.name not in names]
        if together:
            _check_equal(flag, together, config)
            pools.append(Pool(together))
    return Plan(device, tuple(pools + [Pool((role,)) for role in left]))


def _ranks(section: RankedConfig) -> int:
    return section.num_nodes * section.num_gpus_per_node


def _check_equal(flag: str, together: tuple[Role, ...], config: PPORun) -> None:
    wide = [role for role in together if role.devices_per_actor > 1]
    if wide:
        raise UserError(
            f"{flag}=true with vllm.tensor_parallel_size={wide[0].devices_per_actor}: an engine on several devices "
            "shares none; set vllm.tensor_parallel_size=1 and as many vllm.num_engines as the actor has ranks"
        )
    if len({role.num_actors for role in together}) > 1:
        sizes = ", ".join(f"{_size_flags(role)} = {role.num_actors}" for role in together)
        raise UserError(f"{flag}=true needs the same number of devices for each: {sizes}")


def _size_flags(role: Role) -> str:
    return "vllm.num_engines" if role.name == ENGINE else f"{role.name}.num_nodes x {role.name}.num_gpus_per_node"


def sync_backend(config: PPORun, device: str) -> str:
    """What vllm.sync_backend=auto stands for: memory that trainer and engines share, where they do."""
    if config.vllm.sync_backend != "auto":
        return config.vllm.sync_backend
    if device == "cpu":
        return "shm" if config.actor.num_nodes == 1 else "gloo"
    return "ipc" if config.train.colocate_all else "nccl"
