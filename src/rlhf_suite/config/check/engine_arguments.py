"""`vllm.engine_args`: which arguments of vLLM's EngineArgs a run may set, who decides the others, and what the engine's
own precision needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlhf_suite.config.check.problems import Problem

KEY, SPECULATIVE, QUANTIZATION = "vllm.engine_args", "vllm.speculative_config", "vllm.quantization"
METHODS = ("ngram", "draft_model")  # of guesses: from the text so far, or by a model that does not change
CPU_BLOCK_SIZE = 32  # tokens of a block of the KV cache; vLLM's default of 128 never caches a short prompt
BY_FLAG = {  # the flag that decides an argument
    "dtype": "ds.param_dtype",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "enable_return_routed_experts": "actor.routing_replay",
    "enable_sleep_mode": "vllm.enable_sleep",
    "enforce_eager": "vllm.enforce_eager",
    "gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "kv_cache_memory_bytes": "vllm.kv_cache_mb",
    "limit_mm_per_prompt": "data.max_images_per_prompt",
    "language_model_only": "data.image_key",
    "max_model_len": "data.max_len",
    "max_num_seqs": "vllm.max_num_seqs",
    "model": "actor.model_name_or_path",
    "pipeline_parallel_size": "vllm.pipeline_parallel_size",
    "quantization": "vllm.quantization",
    "spec_method": "vllm.speculative_config",
    "spec_model": "vllm.speculative_config",
    "spec_tokens": "vllm.speculative_config",
    "speculative_config": "vllm.speculative_config",
    "tensor_parallel_size": "vllm.tensor_parallel_size",
    "tokenizer": "actor.model_name_or_path",
    "trust_remote_code": "launch.trust_remote_code",
}
OTHER_WEIGHTS = "a weight sync sends whole weights in ds.param_dtype, and compares them with those of the trainer"
OTHER_TOKENS = "it changes the sampling distribution, so the trainer's log-probs would not fit the samples"
PLACEMENT = "the suite places the engines, vllm.num_engines of them"
REQUESTS = "the suite makes the requests and reads the answers"
BY_SUITE = {  # why the suite itself decides an argument
    "disable_log_stats": REQUESTS,
    "generation_config": OTHER_TOKENS,
    "logits_processors": OTHER_TOKENS,
    "logprobs_mode": REQUESTS,
    "override_generation_config": OTHER_TOKENS,
    "runner": REQUESTS,
    "skip_tokenizer_init": REQUESTS,
    "use_tqdm_on_load": REQUESTS,
    "convert": OTHER_WEIGHTS,
    "default_mm_loras": OTHER_WEIGHTS,
    "enable_lora": OTHER_WEIGHTS,
    "load_format": OTHER_WEIGHTS,
    "quantization_config": OTHER_WEIGHTS,
    "per_request_spec_decode_metrics": REQUESTS,
    "weight_transfer_config": OTHER_WEIGHTS,
    "distributed_executor_backend": PLACEMENT,
    "master_addr": PLACEMENT,
    "master_port": PLACEMENT,
    "nnodes": PLACEMENT,
    "node_rank": PLACEMENT,
    "worker_cls": PLACEMENT,
    "worker_extension_cls": PLACEMENT,
    "hf_token": "keys come from the environment: export HF_TOKEN",
    "seed": "the seed of each response comes from that of the run",
}
DATA_PARALLEL = "data_parallel_"
NOT_ON_CPU = {
    "enable_chunked_prefill": "a prompt that the CPU engine reads in two steps would change its random numbers"
}
ROUNDED = "kv_cache_dtype"  # sampled log-probs are then further from the trainer's


def owned_problems(arguments: Iterable[str], device: str) -> Iterator[Problem]:
    """Yield why arguments of EngineArgs cannot be set with `vllm.engine_args`."""
    for name in arguments:
        reason = BY_SUITE.get(name) or (PLACEMENT if name.startswith(DATA_PARALLEL) else None)
        if device == "cpu":
            reason = reason or NOT_ON_CPU.get(name)
        if name in BY_FLAG:
            yield Problem(f"{KEY}.{name}", f"{BY_FLAG[name]} decides it", f"write {BY_FLAG[name]}=...")
        elif reason is not None:
            yield Problem(f"{KEY}.{name}", f"cannot be chosen: {reason}", f"remove {name}")


def speculation_problems(config: Mapping[str, Any], others: Mapping[str, bool]) -> Iterator[Problem]:
    """Yield what is wrong with the settings of speculative decoding. `others`: flags that vLLM does not know for
    several tokens at once, or for which a guess that is dropped leaves a trace, and whether the run uses them."""
    if not config:
        return
    method, example = config.get("method"), "{method: ngram, num_speculative_tokens: 3}"
    if method not in METHODS:
        problem = f"method {method} is not one of {', '.join(METHODS)}"
        if method is not None:
            problem += ": the weights of other methods belong to one policy, and a weight sync does not update them"
        yield Problem(SPECULATIVE, problem, f"write '{SPECULATIVE}={example}'")
        return
    tokens = config.get("num_speculative_tokens")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        problem = f"num_speculative_tokens is {tokens}, and not a number of guesses"
        yield Problem(SPECULATIVE, problem, f"write '{SPECULATIVE}={example}'")
    if (method == METHODS[1]) != (config.get("model") is not None):
        is_missing = method == METHODS[1]
        problem = (
            f"method {method} needs a draft model, and there is none" if is_missing else f"{method} reads no model"
        )
        yield Problem(SPECULATIVE, problem, "add model: <HF folder or hub name>" if is_missing else "remove model")
    for flag in (flag for flag, is_used in others.items() if is_used):
        yield Problem(SPECULATIVE, f"cannot be done together with {flag}", f"remove it, or {flag}")


def rounding_problems(quantization: str | None, arguments: Mapping[str, Any], is_corrected: bool) -> Iterator[Problem]:
    """Yield a problem of weights or of a KV cache of lower precision where nothing corrects for it."""
    rounded = {QUANTIZATION: quantization or "auto", f"{KEY}.{ROUNDED}": arguments.get(ROUNDED, "auto")}
    for key, value in rounded.items():
        if value != "auto" and not is_corrected:
            problem = f"{value} makes the log-probs of the engine differ from those of the trainer"
            fix = "add correction=tis (or icepop) and algo.mismatch_max=<nats>, or remove it"
            yield Problem(key, problem, fix)
