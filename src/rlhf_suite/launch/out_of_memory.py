"""What to say of an error that means that memory is used up, of a GPU or of the machine."""

from __future__ import annotations

# As torch, its allocators, CUDA and vLLM say it.
MARKS = ("out of memory", "can't allocate memory", "cannot allocate memory", "free memory on device")
ADVICE = (
    "The memory is used up. `rlhf-suite plan` with the words of this run shows what takes it and which flags make it "
    "fit: fewer tokens in a micro-batch (train.max_tokens_per_gpu), recomputed activations "
    "(actor.gradient_checkpointing_enable=true), a smaller share for engines (vllm.gpu_memory_utilization), or engines "
    "and optimiser that sleep in turn (vllm.enable_sleep, ds.enable_sleep)."
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory is used up."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(mark in said for mark in MARKS)


def advise(error: BaseException) -> str:
    """Return a line that says what helps against this error; empty if it is about something else."""
    return f"\n{ADVICE}" if is_out_of_memory(error) else ""
