"""What is wrong with the files of a model that cannot be loaded, as one message that names the flag."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging as transformers_logging

from rlhf_suite.errors import RunError, UserError

SPOKEN = (OSError, ValueError)  # errors whose text needs no name of a class before it
MISFIT = "Error(s) in loading state_dict"  # how transformers begins to say under ZeRO-3 that tensors do not fit
HUB_ADVICE = (
    "Give a Hugging Face folder; for a hub name check the spelling, the network and HF_TOKEN, and that HF_HUB_OFFLINE "
    "is unset"
)
FOLDER_ADVICE = "Check that the files of this folder are complete and that its config.json is right, or copy it again"


@contextmanager
def explain_load_errors(flag: str, path: str) -> Iterator[None]:
    """Turn the errors that transformers raises for an unusable model into a UserError that names the flag."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_of_the_model(error):
            raise
        advice = FOLDER_ADVICE if Path(path).is_dir() else HUB_ADVICE
        raise UserError(f"{flag}={path}: cannot be loaded ({reason_of(error)}). {advice}") from error


def is_of_the_model(error: Exception) -> bool:
    """Return whether an error says that the files of a model are wrong, for which transformers and torch raise errors
    of any kind. Too little memory is not such an error, nor what ZeRO-3 raises where another rank has failed."""
    if isinstance(error, RunError | AssertionError | MemoryError | torch.OutOfMemoryError):
        return False
    if not isinstance(error, RuntimeError):
        return True
    said = str(error)
    return said.startswith(MISFIT) or not (is_deepspeed_zero3_enabled() or "memory" in said or "CUDA" in said)


def reason_of(error: Exception) -> str:
    """Return the first line of what an error says, and the next one where the first one only introduces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    if isinstance(error, SPOKEN) and said:
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the load report of transformers: missing tensors are checked here, and surplus ones (another head) are
    expected."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def find_misfit(info: Mapping[str, Any], may_lack: Collection[str] = ()) -> str | None:
    """Return which tensors a checkpoint lacks or has in another shape than its model; None if it fits. `info` is what
    `from_pretrained` says with `output_loading_info` and `ignore_mismatched_sizes`: otherwise it names no tensor."""
    for name, stored, needed in sorted(info["mismatched_keys"]):
        return f"the checkpoint has {name} with the shape {[*stored]}, and its model needs {[*needed]}"
    missing = sorted({*info["missing_keys"]} - {*may_lack})
    return f"the checkpoint lacks {list_tensors(missing)}" if missing else None


def list_tensors(names: list[str]) -> str:
    """Return the first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
