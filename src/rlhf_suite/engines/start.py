"""Starting the rollout engines of a run, and the environment variables of their processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR, ENGINE, JUDGE, ModelPlan, Plan
from rlhf_suite.engines.actor import Engine
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.engines.spec import AdapterSpec, EngineSpec
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.environment import runtime_env
from rlhf_suite.launch.placement import Slot
from rlhf_suite.models.adapters import adapted_modules
from rlhf_suite.models.judge import JUDGE_FLAG, judge_engines, judge_length, judge_path
from rlhf_suite.models.load import checkpoint_precision, model_folder

LARGEST_RANK = 512  # of an adapter that vLLM applies
ENGINE_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def start_engines(
    run: Run,
    plan: Plan,
    slots: Sequence[Slot],
    log_dir: Path,
    image_token: int | None = None,
    adapter: AdapterSpec | None = None,
) -> EnginePool:
    """Start one actor per engine with random weights; the first sync brings the policy's weights. Does not wait.
    `image_token`: the placeholder of images, if the run has any; `adapter`: what syncs bring beside the model."""
    actor = plan.models[ACTOR]
    spec = EngineSpec(
        model=model_folder(actor.path, actor.flag),
        dtype=ENGINE_DTYPES[run.ds.precision],
        device=plan.device,
        max_len=run.data.max_len,
        seed=run.train.seed,
        vllm=replace(run.vllm, gpu_memory_utilization=plan.engines.gpu_memory_utilization),
        sync_backend=plan.engines.sync_backend,
        load_weights=False,
        enable_sleep=run.vllm.enable_sleep,
        discards_weights=plan.engines.discards_weights,
        image_token=image_token,
        max_images=run.data.max_images_per_prompt if image_token is not None else 0,
        adapter=adapter,
        returns_routes=run.actor.routing_replay,
        detokenize=run.rollout.stop is not None or run.agent.needs_stop_strings or run.task == "serve_train",
    )
    return start(spec, slots, log_dir, run.launch.timeout_s)


def engine_adapter(run: Run, actor: ModelPlan) -> tuple[AdapterSpec | None, str]:
    """Return the adapter that engines get beside the weights of the model; None if adapters are merged, and why."""
    if run.ds.lora.rank == 0 or run.replays:
        return None, "there are no adapters"
    if not run.vllm.sync_adapters:
        return None, "vllm.sync_adapters=false"
    if run.data.image_key is not None:
        return None, "the model reads images"
    if run.ds.lora.rank > LARGEST_RANK:
        return None, f"ds.lora.rank={run.ds.lora.rank} is above vLLM's {LARGEST_RANK}"
    names, problem = adapted_modules(actor.path, actor.flag, run.ds)
    if problem is not None:
        return None, problem
    return AdapterSpec(run.ds.lora.rank, tuple(sorted({name.rpartition(".")[2] for name in names}))), ""


def describe_syncs(engines: EnginePool, why: str) -> str:
    """Return a line that says what weight syncs of a run with adapters bring. `why`: why they are merged."""
    if engines.takes_adapters:
        return "Weight syncs: only the adapters; the first sync also sends the base model"
    return f"Weight syncs: whole weights with adapters merged ({why or 'vLLM does not adapt this model'})"


def start_generators(config: Run, model: str, slots: Sequence[Slot], device: str, log_dir: Path) -> EnginePool:
    """Start one actor per engine with the weights of `model`. Does not wait."""
    spec = EngineSpec(
        model=model_folder(model, "actor.model_name_or_path"),
        dtype=ENGINE_DTYPES[config.ds.precision],
        device=device,
        max_len=config.data.max_len,
        seed=config.rollout.seed,
        vllm=config.vllm,
        detokenize=config.rollout.stop is not None,
    )
    return start(spec, slots, log_dir, config.launch.timeout_s)


def start_judge(run: Run, device: str, slots: Sequence[Slot], log_dir: Path) -> EnginePool:
    """Start one actor per engine with the weights of the judge, which no sync changes. Does not wait."""
    path = judge_path(run)
    spec = EngineSpec(
        model=model_folder(path, JUDGE_FLAG),
        dtype=ENGINE_DTYPES[checkpoint_precision(path, JUDGE_FLAG)],
        device=device,
        max_len=judge_length(run),
        seed=run.train.seed,
        vllm=judge_engines(run),
    )
    return start(spec, slots, log_dir, run.launch.timeout_s, JUDGE)


def start(spec: EngineSpec, slots: Sequence[Slot], log_dir: Path, timeout_s: float, name: str = ENGINE) -> EnginePool:
    """Start one actor per engine; `name` begins its name. Does not wait."""
    environment = {"env_vars": runtime_env(spec.device) | engine_env(spec.device)}
    members = [Member(f"{name}-{i}", log_dir / f"{name}-{i}.log") for i in range(len(slots))]

    def create(number: int, kv_blocks: int | None = None) -> Any:
        slot, own = slots[number], replace(spec, kv_blocks=kv_blocks)
        engine = ray.remote(Engine).options(**slot.options(), runtime_env=environment)
        return engine.remote(own, members[number].log.absolute(), slot.gpus, slot.workers)

    handles = [create(number) for number in range(len(slots))]
    return EnginePool(handles, members, timeout_s, create, spec.vllm.max_restarts)


_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}

_CPU = {
    # With enforce_eager one compiled function remains, which ranks log-probs; compiling it takes seconds for no gain.
    "TORCHDYNAMO_DISABLE": "1",
    # Busy-waiting OpenMP threads of several processes on few cores slow each other down by a factor of ten.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def engine_env(device: str) -> dict[str, str]:
    """Return the environment variables of an engine actor on `device` ("cpu" or "cuda").

    vLLM, torch and OpenMP read them when they are imported, so the process must have them from its start. The engine
    core runs in the actor's process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`): vLLM is not imported twice, no second process
    can be lost, and tensors reach the engine without serialisation.
    """
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return in_process | _QUIET | (_CPU if device == "cpu" else {})
