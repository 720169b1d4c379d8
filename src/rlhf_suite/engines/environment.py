"""The environment a rollout engine's process must be born with: vLLM, torch and OpenMP read it when they are imported.

Ray passes it to the actor: `ray.remote(Engine).options(runtime_env={"env_vars": engine_env(device)})`.
"""

from __future__ import annotations

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
    # The only compiled function left under enforce_eager ranks log-probs; building it costs seconds and gains nothing.
    "TORCHDYNAMO_DISABLE": "1",
    # Spinning OpenMP threads of several processes on few cores slow each other down tenfold.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def engine_env(device: str) -> dict[str, str]:
    """Environment variables of an engine actor on `device` ("cpu" or "cuda").

    The engine core runs in the actor's process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`): no second import of vLLM, no
    second process to lose, and tensors can be handed to it without serialisation.
    """
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return in_process | _QUIET | (_CPU if device == "cpu" else {})
