"""A vLLM engine in this process, built from what a run says of it (`EngineSpec`)."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rlhf_suite.config.check.engine_arguments import CPU_BLOCK_SIZE
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.launch import trusts_code
from rlhf_suite.config.declarations.rollout import VLLMConfig, most_sequences
from rlhf_suite.engines.cpu_kernels import check_head_size
from rlhf_suite.engines.spec import (
    CPU_BATCHED_TOKENS,
    CPU_KV_CACHE_MB,
    GPU_MEMORY_ALONE,
    EngineSpec,
    caches_prefixes,
)
from rlhf_suite.engines.speculation import repeat_for_guesses, speculation_args
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.placement import Slot
from rlhf_suite.launch.wait import CAUSE_S
from rlhf_suite.models.families import family_of

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.config import ModelConfig

KERNEL = "rms_norm"  # one that every build of vLLM has
NO_SHARE = 0.01  # that vLLM asks to be free as it starts; it takes no 0
VLLM_MEMORY = "/dev/shm/psm_"  # how the names of its shared memory begin: those of Python's multiprocessing
# A line of a log that ends a traceback, after what vLLM puts before each line.
EXCEPTION = re.compile(r"(?:^|[])] )((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)


def load_kernels() -> bool:
    """Load vLLM's kernels into this process; return whether they are there."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # it logs what is missing, and goes on
    return hasattr(torch.ops._C, KERNEL)


def build_engine(spec: EngineSpec, log: Path | None = None, workers: Sequence[Slot] = ()) -> LLMEngine:
    """Return a vLLM engine in this process. Its workers are processes only if it has several devices: Ray actors where
    these are on several nodes, in the slots `workers`, with logs beside `log`.

    If a worker process ends, this process ends too, so the engine is started again as a whole.
    """
    # At import vLLM logs that Triton has no CPU backend, whatever its logging level.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    with import_for_good():
        from rlhf_suite.engines import worker  # noqa: F401, I001 - before vLLM
        from pydantic import ValidationError
        from vllm import EngineArgs, LLMEngine
        from vllm.usage.usage_lib import UsageContext

        from rlhf_suite.weight_sync import receiver

    arguments = EngineArgs(**engine_args(spec, receiver.backend_name(spec.sync_backend)))
    if workers:
        from rlhf_suite.engines.nodes import NodesExecutor

        NodesExecutor.slots, NodesExecutor.log = workers, log
        arguments.distributed_executor_backend = NodesExecutor
    try:
        # With vLLM's own numbers for offline inference: on large GPUs twice as many tokens per step as for a server.
        config = arguments.create_engine_config(UsageContext.LLM_CLASS)
        if config.lora_config is not None and not adapts(config.model_config, spec.device):
            config.lora_config = None
        if spec.device == "cpu":
            prepare_speculation(spec.vllm)
            check_head_size(config.model_config)
        if spec.image_token is not None:
            prepare_images(config.model_config)
        engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    except (ValueError, TypeError) as error:  # raised by vLLM for settings that it does not support
        if isinstance(error, TypeError) and not spec.vllm.engine_args:
            raise
        reason = "; ".join(map(what_is_wrong, error.errors())) if isinstance(error, ValidationError) else str(error)
        raise UserError(
            f"vLLM cannot serve {spec.model} with data.max_len={spec.max_len}, vllm.kv_cache_mb="
            f"{spec.vllm.kv_cache_mb}, vllm.tensor_parallel_size={spec.vllm.tensor_parallel_size}, "
            f"vllm.pipeline_parallel_size={spec.vllm.pipeline_parallel_size}, "
            f"vllm.engine_args={spell(spec.vllm.engine_args)}: {reason}"
        ) from None
    engine.set_weight_version("0")
    if spec.vllm.devices > 1:
        engine.model_executor.register_failure_callback(lambda: os._exit(1))
        engine.collective_rpc(unname_shared_memory)
        unname_shared_memory()
    return engine


@contextmanager
def name_cause(log: Path | None) -> Iterator[None]:
    """Add to an error of the block the last exception that has been logged meanwhile: where vLLM has failed in another
    process, its own message only refers to the log."""
    start = log.stat().st_size if log is not None else 0
    try:
        yield
    except Exception as error:
        cause = None if log is None else last_exception(log, start)
        if log is None or cause is None or cause.partition(": ")[2] in str(error):
            raise
        message = f"{error}\nThe cause is in {log}: {cause}"
        if isinstance(error, UserError):
            raise UserError(message) from None
        traceback.print_exception(error)  # to the log
        raise RunError(f"the engine failed while starting: {type(error).__name__}: {message}") from None


def last_exception(log: Path, start: int) -> str | None:
    """Return the last exception with a message that a log has after its first `start` bytes."""
    with log.open("rb") as file:
        file.seek(start)
        exceptions = EXCEPTION.findall(file.read().decode(errors="replace"))
    return exceptions[-1] if exceptions else None


def adapts(config: ModelConfig, device: str) -> bool:
    """Return whether vLLM's model can have adapters. Without a GPU that of a mixture of experts cannot, wherever its
    adapters are: vLLM then computes all experts by kernels of Triton."""
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models import supports_lora

    return supports_lora(get_model_cls(config)) and not (device == "cpu" and config.is_moe)


def prepare_images(config: ModelConfig) -> None:
    """Let vLLM read the images of a model as the trainer does."""
    images = family_of(config.hf_config.to_dict()).images
    if images is not None and images.has_newlines:
        from rlhf_suite.engines.whole_images import keep_newlines

        keep_newlines()


def what_is_wrong(error: Mapping[str, Any]) -> str:
    """Return one of pydantic's errors in words, after the name of the argument if it has one."""
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}".removeprefix(": ")


@contextmanager
def import_for_good() -> Iterator[None]:
    """Import in the block what stays to the end of the process, and never search it for garbage. Searches would take
    nearly a third of the time in which vLLM is imported and an engine is built: vLLM asks for five of its own."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def unname_shared_memory(worker: Any = None) -> None:
    """Remove the names of the shared memory through which an engine and its workers talk. All of them have opened it,
    and without a name its memory is free when the last one ends, however it ends."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if (path := line.rpartition(" ")[2]).startswith(VLLM_MEMORY):
            Path(path).unlink(missing_ok=True)


def end_with_a_worker(engine: LLMEngine, error: BaseException) -> None:
    """End this process if one of the engine's worker processes has ended. The others may report that they lost it a
    moment before its end is known."""
    executor: Any = engine.model_executor
    if hasattr(executor, "has_lost_a_worker"):
        is_lost = executor.has_lost_a_worker(CAUSE_S)
    else:
        is_lost = bool(wait([worker.proc.sentinel for worker in getattr(executor, "workers", ())], CAUSE_S))
    if is_lost:
        traceback.print_exception(error)
        os._exit(1)


def prepare_speculation(config: VLLMConfig) -> None:
    """Replace a kernel of vLLM's build for CPUs that repeats a value of each request for its guesses, such as its
    temperature: it writes into a copy of any tensor that is not of integers, so the guesses would be judged by
    uninitialised numbers.

    Raises:
        ValueError: the engine has workers in other processes, which would have the kernel of vLLM.
    """
    if not config.speculative_config:
        return
    if config.devices > 1:
        raise ValueError("speculative decoding on CPUs takes one device: vllm.tensor_parallel_size=1")
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = repeat_for_guesses  # which a worker registers when it starts


def engine_args(spec: EngineSpec, backend: str) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs."""
    from vllm.config import WeightTransferConfig
    from vllm.config.lora import MaxLoRARanks

    config, cpu = spec.vllm, spec.device == "cpu"
    cache_mb = config.kv_cache_mb or (CPU_KV_CACHE_MB if cpu else None)
    arguments: dict[str, Any] = {
        "model": spec.model,
        "dtype": spec.dtype,
        "trust_remote_code": trusts_code(),
        "seed": spec.seed,
        "max_model_len": spec.max_len,
        "load_format": "auto" if spec.load_weights else "dummy",
        "generation_config": "vllm",  # not that of the model folder: the caller decides how to sample
        "skip_tokenizer_init": not spec.detokenize and spec.image_token is None,
        "logprobs_mode": "processed_logprobs",  # under the sampling temperature
        "max_num_seqs": most_sequences(config, "cpu") if cpu and config.max_num_seqs is None else config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "distributed_executor_backend": "mp" if config.devices > 1 else "uni",
        "enforce_eager": config.enforce_eager or cpu,
        "enable_prefix_caching": caches_prefixes(config, spec.device),
        "quantization": config.quantization,
        "weight_transfer_config": WeightTransferConfig(backend=backend),
        # Worker processes register the transfer backends by importing this class.
        "worker_extension_cls": "rlhf_suite.engines.worker.WorkerExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if spec.returns_routes and not cpu:
        arguments["enable_return_routed_experts"] = True
    if spec.adapter is not None:
        rank = next(size for size in get_args(MaxLoRARanks) if size >= spec.adapter.rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        arguments["lora_target_modules"] = list(spec.adapter.modules)
    if cache_mb is not None:
        arguments["kv_cache_memory_bytes"] = cache_mb << 20
    if cpu:
        arguments["block_size"] = CPU_BLOCK_SIZE
        # A prompt prefilled in two steps would rewind its random generator; those of the CPU cannot do that.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(CPU_BATCHED_TOKENS, spec.max_len)
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization or GPU_MEMORY_ALONE
        arguments["enable_sleep_mode"] = spec.enable_sleep
    arguments |= image_args(spec) | speculation_args(config.speculative_config) | config.engine_args
    if spec.kv_blocks is not None:
        arguments |= cache_args(spec.kv_blocks, arguments)
    return arguments | {"hf_overrides": missing_settings(Path(spec.model)) | arguments.get("hf_overrides", {})}


def cache_args(blocks: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an engine in the place of one whose KV cache had so many blocks. Models have memory on a
    shared GPU by now, so vLLM must neither measure what is free nor ask for its share: the blocks fit before."""
    # With a size vLLM measures nothing; with a number of blocks the size itself is not used.
    size = {"kv_cache_memory_bytes": arguments.get("kv_cache_memory_bytes", 1 << 20), "num_gpu_blocks_override": blocks}
    return size | ({"gpu_memory_utilization": NO_SHARE} if "gpu_memory_utilization" in arguments else {})


def image_args(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments about images. For a run of text alone vLLM would ask for the processor of a model that could
    read them."""
    if spec.image_token is None:
        return {"language_model_only": True}
    return {"limit_mm_per_prompt": {"image": spec.max_images, "video": 0}}


def missing_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that vLLM's model reads and the config.json of a folder does not have: where transformers
    knows one value, it does not write it."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    text = config.get("text_config")
    known = config if text is None else text
    missing = {name: value for name, value in family_of(config).completed.items() if name not in known}
    return {"text_config": missing} if missing and text is not None else missing
