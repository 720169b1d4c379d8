"""Everything that follows from the flags of a run and the machine: decided here, once, before anything starts.

The task and its workers get the plan or their part of it, `explain=true` prints it, and `config.yaml` of the run folder
holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal, Protocol, TypeGuard

from rlhf_suite.config.check.sources import BUILTIN
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.models import SEEING_MODEL
from rlhf_suite.config.declarations.reward import RewardConfig, judges_on_engines, reward_models
from rlhf_suite.config.declarations.rollout import RolloutConfig, VLLMConfig
from rlhf_suite.config.declarations.runs import Run, flags_of
from rlhf_suite.config.declarations.task_groups import PLANNED, REWARDED, RL, TRAINED
from rlhf_suite.config.declarations.teacher import TeacherConfig, teacher_models
from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.config.plan.object_store import object_store_mb
from rlhf_suite.config.plan.placement import Placement, Pool, Role, nodes_of
from rlhf_suite.config.plan.zero import decide_zero_stage

ACTOR, CRITIC, REFERENCE, TEACHER, REWARD = "actor", "critic", "ref", "teacher", "reward"
PROCESS, ENGINE, JUDGE = "reward.process", "engine", "judge"
# By task and model the demo that a built-in model is trained by before it is used: random weights are not worth
# strengthening, and nothing can be learned from them.
RECIPES = {
    "ppo": {ACTOR: "warm_start", TEACHER: "teacher", PROCESS: "prm", REWARD: "rm"},
    "distill": {TEACHER: "warm_start"},
    "generate": {ACTOR: "warm_start"},
    "score": {PROCESS: "prm", REWARD: "rm"},
}
IMAGE_RECIPE = "images_warm_start"
GPU_MEMORY_SHARED = 0.4  # for an engine: models, gradients and optimiser states want the rest


class ModelSection(Protocol):
    """The flags of a model."""

    model_name_or_path: str | None


class Ranked(ModelSection, Protocol):
    """The flags of a model with ranks of its own. Other models are held by the ranks that use them."""

    num_nodes: int
    num_gpus_per_node: int


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
    is_actor: bool = False  # it is the actor without its adapters, and loaded nowhere

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
    discards_weights: bool = False  # while they sleep; else they are in host memory


@dataclass(frozen=True)
class WorkerPlan:
    """The decisions about every run with workers: its models, and their devices."""

    models: Mapping[str, ModelPlan]  # that exist, by name
    placement: Placement
    object_store_mb: int  # of Ray, on each node
    zero_stage: int | None  # None: torch trains without DeepSpeed

    @property
    def device(self) -> str:
        return self.placement.device

    def hold(self, ds: DeepSpeedConfig) -> DeepSpeedConfig:
        """Return the flags of a run with its ZeRO stage decided: so its ranks hold their models."""
        return replace(ds, zero_stage=self.zero_stage) if ds.has("zero_stage") else ds


@dataclass(frozen=True)
class Plan(WorkerPlan):
    """The decisions about a run of reinforcement learning."""

    engines: EnginePlan
    rollouts_ahead: int  # steps by which the weights that write a rollout are older than those it trains
    optimizer_steps_per_rollout: int  # of a full rollout
    critic_warm_up: int  # RL steps at the start in which the critic alone is trained
    overlaps_sync: bool  # the next step trains while the engines load and prove the weights of a step
    overlaps_evaluation: bool  # and while they are evaluated, if nothing depends on the result

    def policy_steps(self, rollouts: int) -> int:
        """Return the optimiser steps of the policy in a run of so many rollouts."""
        return (rollouts - self.critic_warm_up) * self.optimizer_steps_per_rollout

    def critic_steps(self, rollouts: int) -> int:
        """Return the optimiser steps of the critic in a run of so many rollouts."""
        return rollouts * self.optimizer_steps_per_rollout


def resolve(run: Run, machine: Machine, routes: int = 0) -> WorkerPlan:
    """Return everything that is decided about a run whose flags have no problem. `routes`: the bytes that the routes of
    a token take (actor.routing_replay)."""
    known = models(run)
    store, stage = object_store_mb(run, known, machine.device, routes), zero_stage(run)
    axes = sequence_ranks(run), tensor_ranks(run)
    if run.task not in RL:
        pools_of_one = tuple(Pool((role,)) for role in roles(run))
        return WorkerPlan(known, Placement(machine.device, pools_of_one, *axes), store, stage)
    together = shares_all(run, machine)
    memory = run.vllm.gpu_memory_utilization
    if together and memory is None:
        memory = GPU_MEMORY_SHARED
    rollouts_ahead = run.train.async_queue_size if makes_rollouts_ahead(run.train) and not run.replays else 0
    overlaps = run.train.async_enable and rollouts_ahead > 0
    evaluation_decides = run.ckpt.keeps_best or run.train.early_stopping_patience is not None
    return Plan(
        models=known,
        placement=Placement(machine.device, pools(run, together), *axes),
        object_store_mb=store,
        zero_stage=stage,
        engines=EnginePlan(together, memory, sync_backend(run, machine, together), discards_weights(run)),
        rollouts_ahead=rollouts_ahead,
        optimizer_steps_per_rollout=optimizer_steps_per_rollout(run),
        critic_warm_up=run.critic.freezing_steps if CRITIC in model_sections(run) else 0,
        overlaps_sync=overlaps,
        overlaps_evaluation=overlaps and not evaluation_decides,
    )


def discards_weights(run: Run) -> bool:
    """Return whether engines that sleep discard their weights: where the next that happens to them is a sync that
    brings all weights and proves it. With adapters a sync does not bring the base model, and with filters a step may
    need another round of samples."""
    brings_all = run.ds.lora.rank == 0 or not run.vllm.sync_adapters
    sync_follows = makes_rollouts_ahead(run.train) or (
        not run.algo.filters and round_size(run.rollout) == run.rollout.batch_size
    )
    may_sleep = run.vllm.enable_sleep and run.vllm.sync_check != "off"
    return may_sleep and brings_all and sync_follows and not has_other_weights(run.vllm)


def has_other_weights(vllm: VLLMConfig) -> bool:
    """Return whether engines hold weights that no sync brings: those of a model that guesses tokens, and what vLLM
    makes of weights that it quantises."""
    guesses = bool(vllm.speculative_config) and vllm.speculative_config.get("method") != "ngram"
    return guesses or vllm.quantization is not None


def optimizer_steps_per_rollout(run: Run) -> int:
    """Return the optimiser steps that a full rollout is trained on in."""
    samples = run.rollout.batch_size * run.rollout.n_samples_per_prompt
    return -(-samples // run.train.batch_size) * run.train.max_epochs


def makes_rollouts_ahead(train: TrainConfig) -> bool:
    """Return whether a response may be trained on by later steps than the one in which it began."""
    return train.async_enable or (train.partial_rollout_enable and bool(train.colocate_all))


def round_size(rollout: RolloutConfig) -> int:
    """Return the number of prompts in a round of sampling."""
    return rollout.vllm_generate_batch_size or rollout.batch_size


def model_sections(run: Run) -> dict[str, ModelSection]:
    """Return the models that a run needs, by name, each with its section of flags: those whose flags it reads."""
    values, sections = all_values(run), dict[str, ModelSection]()
    for key, info in flags_of(run.task).items():
        name, _, last = key.rpartition(".")
        if last == "model_name_or_path" and all(condition.holds(values) for condition in info.meta.when):
            section: Any = reduce(getattr, name.split("."), run)
            sections[name] = section
    if run.task in REWARDED and not reward_models(run.reward):
        sections.pop(REWARD, None)  # something else scores
    if run.task in RL and not teacher_paths(run):
        sections.pop(TEACHER, None)  # the policy teaches itself, or somebody else does
    return sections


def teacher_paths(run: Run) -> dict[str, str]:
    """Return the paths of the teachers of a run of reinforcement learning, by their names in the plan."""
    return teacher_models(run.teacher) if run.task in RL and run.algo.distill.coef > 0 else {}


def model_paths(run: Run, name: str, section: ModelSection) -> dict[str, str | None]:
    """Return the paths of the models that a section of `model_sections` names, by the keys of what names each."""
    if isinstance(section, RewardConfig):
        return dict(reward_models(section))
    has_several = isinstance(section, TeacherConfig) and section.has("sources")
    return dict(teacher_paths(run)) if has_several else {name: section.model_name_or_path}


def ranked_sections(run: Run) -> dict[str, Ranked]:
    """Return the models that have ranks of their own, by name."""
    sections = model_sections(run).items()
    return {name: model for name, model in sections if has_ranks(model) and not is_actor(run, name, model)}


def is_actor(run: Run, name: str, section: ModelSection) -> bool:
    """Return whether a frozen model is the actor without its adapters: LoRA leaves the weights that the actor starts
    with as they are, so that its ranks have them, and no second copy is loaded."""
    teachers = teacher_paths(run)
    like = TEACHER if name in teachers else name
    if run.task not in TRAINED or run.ds.lora.rank == 0 or like not in (REFERENCE, TEACHER):
        return False
    if name == REFERENCE and section.model_name_or_path is None:
        return True
    path, recipes = run.actor.model_name_or_path, RECIPES.get(run.task, {})
    own = teachers.get(name, section.model_name_or_path)
    if path is None or own != path or (like == TEACHER and run.ds.load_in_4bit):
        return False
    return recipe_of(path, recipes.get(like)) == recipe_of(path, recipes.get(ACTOR))


def actor_path(run: Run) -> str:
    """Return the path of the model that is trained; the checks have made sure that there is one."""
    assert run.actor.model_name_or_path is not None
    return run.actor.model_name_or_path


def has_ranks(section: object) -> TypeGuard[Ranked]:
    """Return whether a model has ranks of its own in its task. isinstance says so of other tasks on Python 3.12."""
    return hasattr(section, "num_nodes")


def num_ranks(section: Ranked) -> int:
    """Return the ranks of a model."""
    return section.num_nodes * section.num_gpus_per_node


def sequence_ranks(run: Run) -> int:
    """Return how many ranks of a model split the tokens of each batch."""
    return run.ds.ring_attn_size if run.task in TRAINED else 1


def tensor_ranks(run: Run) -> int:
    """Return how many ranks of a model split the matrices of its layers."""
    return run.ds.tensor_parallel_size if run.task in TRAINED else 1


def zero_stage(run: Run) -> int | None:
    """Return the ZeRO stage of all models of a run; None: torch trains without DeepSpeed, or nothing is trained."""
    if run.task not in TRAINED:
        return None
    sections = ranked_sections(run).values()
    muon = any(getattr(section, "optim", "") == "muon" for section in sections)
    return decide_zero_stage(run.ds, max(map(num_ranks, sections)), by_muon=muon)


def data_ranks(run: Run, section: Ranked) -> int:
    """Return over how many ranks, or groups of ranks, the sequences of a batch are split."""
    return num_ranks(section) // (sequence_ranks(run) * tensor_ranks(run))


def models(run: Run) -> dict[str, ModelPlan]:
    """Return the models that a run needs, by name."""
    sections, judges, teachers = sections_of_models(run), judge_paths(run), teacher_paths(run)
    paths, likes = judges | teachers, {**dict.fromkeys(judges, REWARD), **dict.fromkeys(teachers, TEACHER)}
    plans: dict[str, ModelPlan] = {}
    for name, section in sections.items():
        path, like = paths.get(name, section.model_name_or_path), likes.get(name, name)
        if name == CRITIC and path is None and judges:
            path, like = next(iter(judges.values())), REWARD
        if name in (REFERENCE, CRITIC) and path is None:
            path, like = plans[ACTOR].path, ACTOR
        assert path is not None, f"{name}: checked with the flags"
        stands_in = is_actor(run, name, section)
        holder = section if has_ranks(section) and not stands_in else sections.get(ACTOR)
        plans[name] = ModelPlan(
            name,
            path,
            head="value" if name == CRITIC or name in judges or (name == ACTOR and run.task == "rm") else "lm",
            ranks=num_ranks(holder) if has_ranks(holder) else 1,
            offload=getattr(section, "offload", False),
            # A model whose word counts (reward model, teacher) keeps its precision; a reference is as its policy.
            load_in_4bit=run.task in TRAINED and run.ds.load_in_4bit and name in (ACTOR, CRITIC, REFERENCE),
            recipe=recipe_of(path, RECIPES.get(run.task, {}).get(like)),
            is_actor=stands_in,
        )
    return plans


def judge_paths(run: Run) -> dict[str, str]:
    """Return the paths of the reward models of a run, by their names in the plan."""
    if run.task in RL and run.replays:
        return {}
    return reward_models(run.reward) if run.task in (*RL, "score") else {}


def sections_of_models(run: Run) -> dict[str, ModelSection]:
    """Return what `model_sections` does, with an entry for each reward model and teacher: each has ranks of its own."""
    by_model, several = dict[str, ModelSection](), {REWARD: judge_paths(run), TEACHER: teacher_paths(run)}
    for name, section in model_sections(run).items():
        by_model |= dict.fromkeys(several.get(name) or (name,), section)
    return by_model


def recipe_of(path: str, recipe: str | None) -> str | None:
    """Return the demo that trains a built-in model before it is used: `recipe`, or for images that of images."""
    reads_images = path == SEEING_MODEL and recipe not in (None, "rm")
    return IMAGE_RECIPE if reads_images else recipe if path.startswith(BUILTIN) else None


def roles(run: Run) -> list[Role]:
    """Return the kinds of actors of a run: its models that have ranks, and the engines."""
    kinds = [
        Role(name, num_ranks(model), num_nodes=model.num_nodes)
        for name, model in sections_of_models(run).items()
        if has_ranks(model) and not is_actor(run, name, model)
    ]
    if run.has("generate") or (run.task in RL and not run.replays):
        kinds.insert(1, Role(ENGINE, run.vllm.num_engines, run.vllm.devices))
    if has_judge(run):
        kinds.append(Role(JUDGE, run.reward.judge.num_engines, run.reward.judge.tensor_parallel_size))
    return kinds


def has_judge(run: Run) -> bool:
    """Return whether engines of the run have a frozen model that judges responses."""
    return run.task == "ppo" and not run.replays and judges_on_engines(run.reward)


def is_on_ray(run: Run) -> bool:
    """Return whether the workers of a run are spread over a Ray cluster, which may have several nodes."""
    if run.task not in PLANNED:
        return False
    return run.task in RL or any(role.name == ENGINE or role.num_actors > 1 for role in roles(run))


def shares_all(run: Run, machine: Machine) -> bool:
    """Return whether all models and engines share the same devices.

    Where train.colocate_all does not say, they do on a machine with fewer GPUs than each of them having its own would
    take, if they are of equal size: one command line serves one GPU and many.
    """
    if run.train.colocate_all is not None:
        return run.train.colocate_all
    if machine.device != "cuda" or machine.num_gpus is None or run.train.async_enable:
        return False
    needed = sum(pool.num_devices for pool in pools(run, together=False))
    sizes = {role.num_devices for role in roles(run) if role.name != JUDGE}
    return machine.num_gpus < needed and len(sizes) == 1 and len(nodes_of(roles(run))) == 1


def pools(run: Run, together: bool) -> tuple[Pool, ...]:
    """Return which roles share devices: all of them (`together`) but the judge, which is asked while the models train
    and the engines sleep; or the pairs that the flags name."""
    left, shared = roles(run), list[Pool]()
    if together:
        alone = tuple(Pool((role,)) for role in left if role.name == JUDGE)
        return (Pool(tuple(role for role in left if role.name != JUDGE)), *alone)
    pairs = (
        (run.train.colocate_actor_ref, (ACTOR, REFERENCE)),
        (run.train.colocate_critic_reward, (CRITIC, *judge_paths(run))),
    )
    for is_asked, names in pairs:
        pair = tuple(role for role in left if is_asked and role.name in names)
        if pair:
            left = [role for role in left if role not in pair]
            shared.append(Pool(pair))
    return (*shared, *(Pool((role,)) for role in left))


def sync_backend(run: Run, machine: Machine, together: bool) -> str:
    """Return how weights travel: vllm.sync_backend=auto is memory that trainer and engines share, where they do."""
    if run.vllm.sync_backend != "auto":
        return run.vllm.sync_backend
    if machine.device == "cpu":
        return "gloo" if machine.num_gpus is None else "shm"
    return "ipc" if together else "nccl"
