"""What a run would do: the arithmetic of its batches, its plan and the origin of each value, as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from rlhf_suite.composition.arguments import CommandLine
from rlhf_suite.composition.compose import Source, hydra_ready, list_sources
from rlhf_suite.config.check.formatting import number_of
from rlhf_suite.config.check.names import unread
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.check.sources import BUILTIN
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.rollout import most_sequences
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import PLANNED, RL, TRAINED
from rlhf_suite.config.plan.micro_batches import trained_micro_batches
from rlhf_suite.config.plan.object_store import samples_of_step
from rlhf_suite.config.plan.placement import Role
from rlhf_suite.config.plan.run_plan import ACTOR, Plan, WorkerPlan, resolve, round_size
from rlhf_suite.config.plan.zero import overlaps_reduction, persistent_size, scatters_gradients
from rlhf_suite.models.families import Family, family_of
from rlhf_suite.models.prompt_format import FILE
from rlhf_suite.models.rows import rows_of
from rlhf_suite.preflight.devices import device_problems, devices_of, no_gpu_here, remarks
from rlhf_suite.preflight.inspections.model_files import files_of
from rlhf_suite.preflight.inspections.models import folder_of
from rlhf_suite.preflight.inspections.routing import route_bytes
from rlhf_suite.preflight.jobs import Preflight
from rlhf_suite.tracking.tables import show_table

Rows = Iterator[tuple[str, ...]]


def show_explanation(console: Console, line: CommandLine, checked: Preflight) -> list[Problem]:
    """Print tables about the run, or about the first one of a sweep, to a console; return what its devices lack."""
    run = checked.runs[0]
    devices = devices_of(run, checked)
    if run.task in PLANNED:
        plan = resolve(run, devices.machine, route_bytes(run))
        if run.task in TRAINED:
            show_table(console, "Batches", ("what", "how", "number"), batches(run, plan))
        show_table(console, "Placement", ("devices", "models and engines", "number"), placement(plan))
        show_table(console, "Decisions", ("what", "how", "value"), decisions(run, plan))
    idle = unread(run.task, all_values(run))  # such as the flags of models that the run lacks
    values = (row for row in origins(run, line, checked) if row[0] not in idle)
    show_table(console, "Values that differ from the defaults", ("flag", "value", "default", "from"), values)
    for remark in (*checked.notes, *remarks(run, devices), checked.first_of_several):
        console.print(Text(remark), end="\n" if remark else "")
    return [] if no_gpu_here(run, devices) else device_problems(checked)


def batches(run: Run, plan: WorkerPlan) -> Rows:
    """Return the numbers from prompts to micro-batches, each with its equation."""
    train, ranks, sequence = run.train, plan.models[ACTOR].ranks, plan.placement.sequence
    tensor, shared = plan.placement.tensor, plan.placement.sequence * plan.placement.tensor
    if run.task in RL and isinstance(plan, Plan):
        prompts, samples = run.rollout.batch_size, run.rollout.n_samples_per_prompt
        yield "prompts per RL step", "rollout.batch_size", f"{prompts}"
        yield "samples per RL step", f"x rollout.n_samples_per_prompt = {prompts} x {samples}", f"{prompts * samples}"
        how = f"samples / train.batch_size x epochs = {prompts * samples} / {train.batch_size} x {train.max_epochs}"
        yield "optimiser steps per RL step", how, f"{plan.optimizer_steps_per_rollout}"
    yield "sequences per optimiser step", "train.batch_size", f"{train.batch_size}"
    yield "actor ranks", "actor.num_nodes x actor.num_gpus_per_node", f"{ranks}"
    if sequence > 1:
        yield "ranks that split the tokens of a batch", f"ds.ring_attn_size, {run.ds.ring_attn_mode}", f"{sequence}"
    if tensor > 1:
        yield "ranks that split the matrices of a model", "ds.tensor_parallel_size", f"{tensor}"
    if shared > 1:
        yield "parts of a batch", f"{ranks} / {shared}", f"{ranks // shared}"
        ranks //= shared
    yield from layout(run, plan.models[ACTOR].path)
    share = train.batch_size // ranks
    yield "sequences per rank and optimiser step", f"{train.batch_size} / {ranks}", f"{share}"
    limit = trained_micro_batches(train)
    if limit.tokens is not None:
        times_ranks = f" x {sequence} ranks" if sequence > 1 else ""
        tokens = f"<= {limit.tokens * sequence} tokens"
        if plan.device == "cuda" and train.max_tokens_per_gpu is None:
            tokens += ", or more by the plan of its GPUs"
        yield "micro-batches per rank", f"as many as train.max_tokens_per_gpu{times_ranks} needs", tokens
    if limit.rows is not None:
        how = f"/ train.micro_batch_size = {share} / {limit.rows}"
        yield "micro-batches per rank and optimiser step", how, f"{share // limit.rows}"


def layout(run: Run, path: str) -> Rows:
    """Return whether the rows of a batch are packed or padded."""
    family = known_family(path)
    if family is None:
        yield (
            "rows of a micro-batch",
            "the family of the model is known when it has been fetched",
            "packed where it can",
        )
        return
    rows = rows_of(family, run)
    reason = rows.why_padded or f"ds.packing_samples={spell(run.ds.packing_samples)}, {rows.attention} attention"
    yield "rows of a micro-batch", reason, "packed" if rows.packed else "padded"


def known_family(path: str) -> Family | None:
    """Return the family of a model; None for a model of the hub that is not in the cache."""
    if path.startswith(BUILTIN):
        return Family("built-in model", ())
    folder = folder_of(path)
    return None if folder is None else family_of(files_of(folder).config or {})


def placement(plan: WorkerPlan) -> Rows:
    """Return pools of devices, and who shares them."""
    unit = "GPU" if plan.device == "cuda" else "CPU process"
    for pool in plan.placement.pools:
        members = ", ".join(map(members_of, pool.roles))
        yield unit, members + (" (sharing)" if len(pool.roles) > 1 else ""), f"{pool.num_devices}"


def members_of(role: Role) -> str:
    size = f" x {role.devices_per_actor} devices" if role.devices_per_actor > 1 else ""
    return f"{role.num_actors} {role.name}{size}"


def decisions(run: Run, plan: WorkerPlan) -> Rows:
    """Return what follows from the flags: the models and where each comes from, and how engines get their weights."""
    for name, model in plan.models.items():
        first = f", trained with demo={model.recipe} first" if model.recipe else ""
        how = ", in host memory" if model.offload else ""
        how = ", the actor without its adapters: not loaded again" if model.is_actor else how
        yield name, f"{model.path}{first}{how}", number_of(model.ranks, "rank")
    if run.task in TRAINED:
        yield from of_trainer(run, plan)
    if not (run.task in RL and isinstance(plan, Plan)):
        return
    samples, engines = samples_of_step(run), plan.engines
    yield "sequences of an engine", f"vllm.max_num_seqs={spell(run.vllm.max_num_seqs)}", sequences_of(run, plan)
    how = f"launch.object_store_mb: {samples} samples of data.max_len={run.data.max_len} tokens at one time"
    yield "object store of Ray", how, f"{plan.object_store_mb} MiB"
    yield "weight sync", f"vllm.sync_backend={run.vllm.sync_backend}", engines.sync_backend
    if plan.device == "cuda":
        memory = "vLLM's default" if engines.gpu_memory_utilization is None else f"{engines.gpu_memory_utilization}"
        if run.vllm.enable_sleep:
            how = "a sync brings all of them again" if engines.discards_weights else "the next sync may not bring them"
            yield "weights of an engine that sleeps", how, "discarded" if engines.discards_weights else "in host memory"
        yield "GPU memory of an engine", "sharing its GPU" if engines.shares_gpu else "alone on its GPU", memory
    if run.agent.has_workers:
        yield "processes that run episodes", "agent.num_workers", f"{run.agent.num_workers}"
    yield from schedule(run, plan)
    if plan.critic_warm_up:
        yield "RL steps of the critic alone", "critic.freezing_steps", f"{plan.critic_warm_up}"


def of_trainer(run: Run, plan: WorkerPlan) -> Rows:
    """Return what is decided about the trainer by its ranks and its device."""
    ds = plan.hold(run.ds)
    how = "2 for several ranks and for flags that ask for DeepSpeed, else none"
    stage = "none: torch alone" if ds.zero_stage is None else f"{ds.zero_stage}"
    yield "ZeRO stage", f"ds.zero_stage={spell(run.ds.zero_stage)}" + (f": {how}" * (run.ds.zero_stage is None)), stage
    if plan.device == "cuda" and plan.models[ACTOR].ranks > 1 and ds.zero_stage is not None:
        when = "while the backward pass runs" if overlaps_reduction(ds, plan.device) else "after the backward pass"
        how = ", scattered" if scatters_gradients(ds, plan.device) else ""
        yield "reduction of gradients", f"ds.overlap_comm={spell(ds.overlap_comm)}", f"{when}{how}"
    if plan.device == "cuda" and ds.zero_stage == 3:
        how = f"ds.persistence_threshold={spell(ds.persistence_threshold)}"
        yield "parameters that stay whole", how, f"<= {persistent_size(ds, plan.device)} numbers"
    if plan.device == "cuda" and ds.use_liger_kernel is None:
        yield "Liger's kernels", "ds.use_liger_kernel=null", "where installed and known"


def sequences_of(run: Run, plan: Plan) -> str:
    """Return how many sequences an engine runs at once."""
    if plan.device == "cuda" and run.vllm.max_num_seqs is None:
        return "vLLM's own number"
    return f"{most_sequences(run.vllm, plan.device)}"


def schedule(run: Run, plan: Plan) -> Rows:
    """Return what happens while the policy trains."""
    if plan.rollouts_ahead:
        how = "train.async_queue_size: rollout k is written by the weights of step k - this number"
        if run.train.partial_rollout_enable or round_size(run.rollout) > run.rollout.batch_size:
            how = "train.async_queue_size: no token is older than this number of steps"
        yield "rollouts made ahead", how, f"{plan.rollouts_ahead}"
    if (prompts := round_size(run.rollout)) != run.rollout.batch_size:
        yield "prompts per round of sampling", "rollout.vllm_generate_batch_size", f"{prompts}"
    if plan.overlaps_sync:
        yield "weight syncs", "train.async_enable", "while the next step trains"
    if plan.overlaps_sync and run.eval.dataset is not None:
        if plan.overlaps_evaluation:
            yield "evaluations", "no checkpoint depends on them", "while the next step trains"
        else:
            how = "the best checkpoint (ckpt.best_metric_key) or train.early_stopping_patience depends on them"
            yield "evaluations", how, "before the next step"


def origins(run: Run, line: CommandLine, checked: Preflight) -> Rows:
    """Return each value that is not the default of its flag, and who set it."""
    defaults = all_values(Run.of(run.task))
    with hydra_ready():
        sources = list_sources(checked.composed_of, checked.hydra.searchpath)
    for key, value in all_values(run).items():
        default = defaults.get(key)  # an entry of a table has none
        if value != default and key != "explain":
            yield key, spell(value), spell(default), line.from_file.get(key) or origin(key, checked, sources)


def origin(key: str, checked: Preflight, sources: list[Source]) -> str:
    if key in checked.adopted:
        return f"{FILE} of the model"
    if any(key == given or key.startswith(f"{given}.") for given in checked.given):
        return "command line"
    return next((source.name for source in sources if key in source.keys), "command line")
