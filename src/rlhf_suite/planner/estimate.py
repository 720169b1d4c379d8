"""What a whole run needs: memory of each device, of the host and of /dev/shm, space on disk, and the time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from rlhf_suite.config.declarations.ds import load_settings
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.config.declarations.rollout import most_sequences
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RL
from rlhf_suite.config.plan.micro_batches import rollout_micro_batches, trained_micro_batches
from rlhf_suite.config.plan.placement import Role
from rlhf_suite.config.plan.run_plan import (
    ACTOR,
    CRITIC,
    ENGINE,
    JUDGE,
    REFERENCE,
    TEACHER,
    ModelPlan,
    Plan,
    WorkerPlan,
    data_ranks,
    num_ranks,
    resolve,
    round_size,
)
from rlhf_suite.machine_limits import cpu_count
from rlhf_suite.models.families import bytes_of_routes
from rlhf_suite.models.judge import JUDGE_FLAG, judge_engines, judge_length, judge_path
from rlhf_suite.models.load import checkpoint_precision, model_config, model_folder
from rlhf_suite.models.rows import rows_of
from rlhf_suite.planner import memory
from rlhf_suite.planner.budget import decide_budget, with_budget
from rlhf_suite.planner.checkpointing import Decisions, decide, models_to_decide, with_decisions
from rlhf_suite.planner.devices import Device, Model, flops_per_token
from rlhf_suite.planner.memory import EngineMemory, Memory, Shares
from rlhf_suite.planner.needs import DeviceUse, Estimate, Process, Target, gib, peak_of
from rlhf_suite.planner.trace import Parameters, Tokens, Use, meta_model, parameters, trace

UTILISATION = 0.4  # of a GPU's peak, where no rate is given
CPU_UTILISATION = 0.66  # of the measured rate of matrix products: packed SFT in benchmarks/README.md
DECODING = 0.6  # of a GPU's bandwidth, likewise
BYTES_PER_ROLLOUT_TOKEN = 40  # columns of `rollouts/step_<n>.parquet` before compression, and the text


def estimate(run: Run, target: Target) -> Estimate:
    """Return what a run needs, with the decisions that it leaves to the plan.

    Raises:
        UserError: a model cannot be read, or does not run on tensors without content.
    """
    plan = resolve(run, target.machine, route_bytes(run))
    decisions = decide_checkpointing(run, plan, target)
    run = with_decisions(run, decisions)
    planner_of = partial(Planner, plan=plan, target=target)
    budget = decide_budget(run, target, lambda run: planner_of(run).seconds(ACTOR), lambda run: planner_of(run).peak())
    planner = planner_of(with_budget(run, budget))
    processes = planner.processes()
    return Estimate(
        target,
        planner.devices(processes),
        host=planner.host(processes),
        shared_memory=planner.shared_memory(),
        disk=planner.disk(),
        times=planner.times(),
        silences=planner.silences(),
        timeout_s=run.launch.timeout_s,
        tokens=planner.tokens(ACTOR),
        engine=planner.engine if run.task in RL else None,
        longest=run.data.max_len,
        at_once=planner.at_once() if run.task in RL else 1.0,
        rows=str(rows_of(meta_model(planner.use(plan.models[ACTOR])).family, run)),
        judge=planner.judge if JUDGE in processes else None,
        judge_longest=judge_length(run) if JUDGE in processes else 0,
        checkpointing=decisions,
        budget=budget,
    )


def decide_checkpointing(run: Run, plan: WorkerPlan, target: Target) -> dict[str, bool]:
    """Return for each model that a run leaves open whether it recomputes activations on these devices."""

    def peak(decisions: Decisions) -> int:
        return Planner(with_decisions(run, decisions), plan, target).peak()

    def supports(name: str) -> bool:
        use = Planner(run, plan, target).use(plan.models[name])
        return bool(meta_model(use).model.supports_gradient_checkpointing)

    return decide(models_to_decide(run), target, peak, supports)


def route_bytes(run: Run) -> int:
    """Return the bytes that the routes of a token take (actor.routing_replay)."""
    path = run.actor.model_name_or_path
    if run.task not in RL or not run.actor.routing_replay or path is None:
        return 0
    config = model_config(model_folder(path, "actor.model_name_or_path"), "lm", run.ds)
    return bytes_of_routes(lambda name: getattr(config, name, None))


class Planner:
    """The parts of an estimate of one run."""

    def __init__(self, run: Run, plan: WorkerPlan, target: Target) -> None:
        self.run, self.plan, self.target = replace(run, ds=plan.hold(run.ds)), plan, target
        self.on_gpu = target.device is not None

    def section(self, name: str) -> TrainedModelConfig | None:
        """Return the flags of a model that is trained; None for others."""
        if name == ACTOR:
            return self.run.actor
        return self.run.critic if name == CRITIC and self.run.task in RL else None

    def use(self, model: ModelPlan) -> Use:
        return Use.of(model, self.run.ds, self.section(model.name), self.on_gpu)

    def parameters(self, model: ModelPlan) -> Parameters:
        return parameters(self.use(model))

    def shares(self, ranks: int) -> Shares:
        return Shares(self.run.ds, max(1, ranks // self.run.ds.tensor_parallel_size), self.on_gpu)

    def processes(self) -> dict[str, Process]:
        """Return one process of each kind that a run has, by its name."""
        return {role.name: self.process(role) for pool in self.plan.placement.pools for role in pool.roles}

    def peak(self) -> int:
        """Return the bytes of the fullest device, or of the machine."""
        processes = self.processes()
        return peak_of(self.target, self.devices(processes), self.host(processes))

    def devices(self, processes: dict[str, Process]) -> tuple[DeviceUse, ...]:
        """Return which processes share devices."""
        pools = self.plan.placement.pools
        return tuple(DeviceUse(pool.num_devices, tuple(processes[role.name] for role in pool.roles)) for pool in pools)

    def process(self, role: Role) -> Process:
        """Return what one process of a role holds."""
        if role.name == ENGINE:
            return Process(ENGINE, role.num_actors, self.with_context(self.engine.memory), role.devices_per_actor)
        if role.name == JUDGE:
            return Process(JUDGE, role.num_actors, self.with_context(self.judge.memory), role.devices_per_actor)
        model = self.plan.models[role.name]
        terms = (
            self.estimate_trained(model) if self.section(role.name) else self.estimate_frozen(model, role.num_actors)
        )
        return Process(role.name, role.num_actors, self.with_context(terms))

    def with_context(self, terms: Memory) -> Memory:
        return terms.also(always={"GPU context": memory.GPU_PROCESS}) if self.on_gpu else terms

    def estimate_trained(self, model: ModelPlan) -> Memory:
        """Return the terms of a rank of a trained model, and of the frozen ones that it holds as well."""
        counts, use, tokens = self.parameters(model), self.use(model), self.tokens(model.name)
        terms = memory.sum_trained(counts, self.shares(model.ranks), trace(use, tokens))
        terms = terms.also(moments=self.beside_the_passes(counts, use, model, tokens))
        if self.run.task in RL and model.name == ACTOR and self.run.train.enable_ema:
            holders = model.ranks if self.plan.placement.tensor == 1 else 1
            average = {"average of the weights": 4 * counts.trained // holders}
            terms = terms.also(host=average) if self.on_gpu else terms.also(always=average)
        for guest in self.guests() if model.name == ACTOR else ():
            held = self.estimate_frozen(guest, model.ranks)
            terms = terms.also(always=held.always, moments=held.moments, host=held.host)
        return terms

    def beside_the_passes(self, counts: Parameters, use: Use, model: ModelPlan, tokens: Tokens) -> dict[str, int]:
        """Return what a trained model takes at moments other than its forward and backward passes."""
        moments: dict[str, int] = {}
        if self.run.task in RL and isinstance(self.plan, Plan):
            rollout = self.tokens(model.name, rollout=True)
            moments["log-probs of a rollout"] = trace(use, rollout).inference
            if model.name == ACTOR:
                moments["weight sync"] = memory.sync_buffers(counts, self.plan.engines.sync_backend)
        if self.run.ds.ring_attn_size > 1:
            # Keys and values of all ranks, and their gradients, beside what a rank's own tokens take.
            kv = counts.kv_per_token * memory.SIZES[self.run.ds.precision] * tokens.total * self.run.ds.ring_attn_size
            layers = 4 * kv // max(1, counts.attention // max(1, counts.hidden))
            moments["gathered keys and values"] = trace(use, tokens).training + layers
        if TEACHER in self.plan.models:
            logits = memory.logits_of_a_teacher(counts.vocabulary)
            moments["probabilities of the teacher"] = trace(use, tokens).training + logits
        return moments

    def guests(self) -> Iterator[ModelPlan]:
        """Return the frozen models that the ranks of the actor hold too: those of supervised tasks."""
        placed = {role.name for pool in self.plan.placement.pools for role in pool.roles}
        for model in self.plan.models.values():
            cached = model.name == REFERENCE and getattr(getattr(self.run, "ref", None), "cache_enable", False)
            if model.name not in placed and not model.is_actor and not cached:
                yield model

    def estimate_frozen(self, model: ModelPlan, ranks: int) -> Memory:
        """Return the terms of a rank of a frozen model."""
        use = self.use(model)
        tokens = self.tokens(model.name, rollout=self.run.task in RL)
        return memory.sum_frozen(
            parameters(use),
            self.shares(ranks),
            trace(use, tokens),
            offload=model.offload,
            four_bit=model.load_in_4bit,
            name=model.name,
        )

    def tokens(self, name: str, rollout: bool = False) -> Tokens:
        """Return the longest micro-batch of a rank; `rollout`: of its passes over a rollout. Every sequence is taken to
        be as long as data.max_len, which a rank has its part of."""
        run, sequence, longest = self.run, self.run.ds.ring_attn_size, self.run.data.max_len
        longest = -(-longest // sequence)
        limit = trained_micro_batches(run.train)
        if rollout and run.task in RL:
            limit = rollout_micro_batches(run.rollout, run.train)
        share, whole = max(1, run.train.batch_size // max(1, data_ranks(run, run.actor))), self.sequences_per_row()
        rows = limit.rows or max(1, (limit.tokens or 0) // (longest * whole))
        return Tokens(min(rows, share) * self.sequences_per_row(name), longest)

    def sequences_per_row(self, name: str | None = None) -> int:
        """Return the sequences of a row, or those of its sequences that a pass of the model `name` has: a pair has two.
        In KTO a row has a mismatched answer beside its own, which the actor is not trained on."""
        run = self.run
        if run.task == "kto" and (run.algo.loss == "vanilla" or name == ACTOR):
            return 1
        return run.data.sequences_per_row

    @property
    def engine(self) -> EngineMemory:
        """Return what a device of an engine holds."""
        assert isinstance(self.plan, Plan)
        ds = self.run.ds
        plain = load_settings(param_dtype=ds.param_dtype, experts_implementation=ds.experts_implementation)
        counts = parameters(Use.of(self.plan.models[ACTOR], plain, None, self.on_gpu))
        capacity = self.target.memory if self.on_gpu else None
        share = self.plan.engines.gpu_memory_utilization
        size = memory.SIZES[ds.precision]
        held = memory.engine(counts, self.run.vllm, size, self.run.data.max_len, capacity, share)
        return replace(held, memory=replace(held.memory, host={})) if self.plan.engines.discards_weights else held

    @property
    def judge(self) -> EngineMemory:
        """Return what a device of an engine of the judge holds, in the precision of its checkpoint."""
        model, config = ModelPlan(JUDGE, judge_path(self.run)), judge_engines(self.run)
        precision = checkpoint_precision(model.path, JUDGE_FLAG)
        use = Use.of(model, load_settings(param_dtype=precision), None, self.on_gpu)
        counts = parameters(replace(use, flag=JUDGE_FLAG))
        capacity = self.target.memory if self.on_gpu else None
        return memory.engine(counts, config, memory.SIZES[precision], judge_length(self.run), capacity, None)

    def host(self, processes: dict[str, Process]) -> dict[str, int]:
        """Return what all processes take of host memory, as if all were on one node."""
        terms: dict[str, int] = {}
        for process in processes.values():
            is_engine = process.name in (ENGINE, JUDGE)
            own = memory.ENGINE_PROCESS if is_engine else memory.RANK_PROCESS
            device = 0 if self.on_gpu else process.memory.peak
            terms[f"{process.name} x {process.count}"] = process.count * (
                own + (device if not is_engine else device * process.devices) + sum(process.memory.host.values())
            )
        if self.run.task in RL and self.run.agent.has_workers and not self.run.replays:
            count = self.run.agent.num_workers
            terms[f"episode workers x {count}"] = count * memory.EPISODE_PROCESS
        if self.run.task in RL or sum(process.count for process in processes.values()) > 1:
            terms["driver and Ray"] = memory.DRIVER_PROCESS + memory.RAY_DAEMONS
        if self.run.task in RL and self.keeps_a_copy(self.run):
            *_, size = self.weights_on_their_way(self.run).values()
            terms["weights of the last sync, for engines that start again"] = size
        return terms | self.shared_memory()

    def shared_memory(self) -> dict[str, int]:
        """Return what /dev/shm must hold, on one node."""
        if not (self.run.task in RL and isinstance(self.plan, Plan)):
            return {}
        terms = {"object store of Ray": self.plan.object_store_mb * memory.MIB}
        if self.plan.engines.sync_backend == "shm":
            terms |= self.weights_on_their_way(self.run)
        return terms

    def keeps_a_copy(self, run: Run) -> bool:
        """Return whether rank 0 of the actor copies what it streams to engines (`rl/weight_sync.py`). The weights that
        go through /dev/shm stay there, which counts them, and those of CUDA IPC are not kept."""
        assert isinstance(self.plan, Plan)
        streams = self.plan.engines.sync_backend in ("gloo", "nccl")
        return streams and run.train.async_enable and run.vllm.max_restarts > 0

    def weights_on_their_way(self, run: Run) -> dict[str, int]:
        """Return what is sent to engines of this node. Adapters are merged into weights, or sent alone at every sync
        but the first one, which brings the model without them; where engines may be started again it stays there."""
        size, counts = memory.SIZES[run.ds.precision], self.parameters(self.plan.models[ACTOR])
        if not run.ds.lora.rank:
            return {"weights on their way to the engines": size * counts.total}
        if not run.vllm.sync_adapters:
            return {"weights on their way to the engines": size * counts.frozen}
        model = {"the model without adapters, for the engines": size * counts.frozen}
        return model | {"adapters on their way to the engines": size * counts.trained}

    def disk(self) -> dict[str, int]:
        """Return what a run writes: checkpoints with the one that is being written, the model, and the rollouts of all
        steps, or those of each where train.max_steps does not say how many there will be."""
        ckpt, size = self.run.ckpt, memory.SIZES[self.run.ds.precision]
        models = [(model, self.parameters(model)) for model in self.plan.models.values() if self.section(model.name)]
        average = self.run.task in RL and self.run.train.enable_ema
        one = sum(
            memory.checkpoint(counts, with_optimizer=not ckpt.disable_ds, average=average and model.name == ACTOR)
            for model, counts in models
        )
        exported = sum(size * counts.total for model, counts in models if model.name == ACTOR) * (2 if average else 1)
        one += exported if ckpt.save_hf else 0
        kept = ckpt.max_num + 2 if ckpt.save_steps > 0 else 0  # the best one, and the one that is being written
        terms = {"final model": exported, f"checkpoints ({kept} of {gib(one)})": kept * one}
        if self.run.task in RL:
            samples = self.run.rollout.batch_size * self.run.rollout.n_samples_per_prompt
            step = samples * self.run.data.max_len * BYTES_PER_ROLLOUT_TOKEN
            steps = self.run.train.max_steps
            terms[f"rollouts of {steps} steps" if steps else "rollouts of each step"] = step * (steps or 1)
        return terms

    def times(self) -> dict[str, float]:
        """Return the seconds of the phases of a step at most: all sequences are as long as data.max_len."""
        seconds: dict[str, float] = {}
        if self.target.flops is not None:
            for name, model in self.plan.models.items():
                ranks = num_ranks(self.run.actor) if name != CRITIC else model.ranks
                ranks = ranks if self.on_gpu else min(ranks, cpu_count())
                seconds[f"{name}: passes over a step"] = self.operations(model) / (self.target.flops * ranks)
        if self.run.task in RL and self.target.device is not None:
            once, times = self.decoding(self.target.device)
            seconds["generation"] = once * times
        return seconds

    def operations(self, model: ModelPlan) -> float:
        """Return the operations of all passes of a model in a step of the run."""
        run, longest = self.run, self.run.data.max_len
        if run.task in RL:
            sequences = run.rollout.batch_size * run.rollout.n_samples_per_prompt
            epochs = run.train.max_epochs
        else:
            sequences, epochs = run.train.batch_size * self.sequences_per_row(model.name), 1
        per_token = once = self.matrices(model).forward_flops(longest)
        if (section := self.section(model.name)) is not None:
            passes = self.operations_of_passes(model, section)
            per_token = epochs * passes + (once if run.task in ("kto", *RL) else 0)
        return per_token * sequences * longest

    def matrices(self, model: ModelPlan) -> Model:
        """Return what a token is multiplied with."""
        counts = self.parameters(model)
        return Model(counts.matrices_trained, counts.matrices_frozen, counts.attention)

    def operations_of_passes(self, model: ModelPlan, section: TrainedModelConfig) -> float:
        """Return the operations per token of a forward and backward pass of a trained model."""
        matrices, longest = self.matrices(model), self.run.data.max_len
        again = matrices.forward_flops(longest) if section.gradient_checkpointing_enable else 0
        return flops_per_token(matrices, longest) + again

    def silences(self) -> dict[str, float]:
        """Return for how many seconds a process may show no sign of life: each micro-batch and each response is one."""
        seconds: dict[str, float] = {}
        for name in self.plan.models:
            if self.section(name) is not None and self.target.flops is not None:
                seconds[f"a micro-batch of the {name}"] = self.seconds(name)
        if self.run.task in RL and self.target.device is not None:
            seconds["the first responses of an engine"] = self.decoding(self.target.device)[0]
        return seconds

    def seconds(self, name: str) -> float:
        """Return the seconds that the longest micro-batch of a trained model computes for."""
        section, flops = self.section(name), self.target.flops
        assert section is not None and flops is not None
        return self.operations_of_passes(self.plan.models[name], section) * self.tokens(name).total / flops

    def at_once(self) -> float:
        """Return the sequences that an engine would run at one time, if its KV cache had the room."""
        of_round = round_size(self.run.rollout) * self.run.rollout.n_samples_per_prompt
        most = most_sequences(self.run.vllm, self.plan.device)
        return max(1.0, min(of_round / self.run.vllm.num_engines, most))

    def decoding(self, device: Device) -> tuple[float, float]:
        """Return the seconds in which an engine writes as many responses as it runs at one time, and how often it does
        so in a step of the run: each step of a batch reads the weights and the KV cache of its sequences once from the
        memory of the GPU."""
        engine, run, size = self.engine, self.run, memory.SIZES[self.run.ds.precision]
        longest = run.data.max_len
        samples = run.rollout.batch_size * run.rollout.n_samples_per_prompt / run.vllm.num_engines
        at_once = max(1.0, min(self.at_once(), engine.kv_tokens / longest))
        policy = parameters(self.use(self.plan.models[ACTOR]))
        per_token = size * policy.kv_per_token / memory.kv_parts(policy, run.vllm)
        read = engine.memory.always["weights"] + at_once * per_token * longest / 2
        tokens = run.rollout.max_new_tokens or longest
        return tokens * read / (DECODING * device.bandwidth), samples / at_once
