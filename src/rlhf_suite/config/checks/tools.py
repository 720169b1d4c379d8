"""Rules between the flags of tasks that train nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rlhf_suite.config.problems import Problem
from rlhf_suite.config.runs import ChatRun, MergeLoRARun


def adapter_is_named(run: MergeLoRARun) -> Iterator[Problem]:
    key, path = "lora.path", run.lora.path
    if path is None:
        yield Problem(key, "no adapter is named", f"add {key}=<folder of a LoRA adapter>")
    elif not (Path(path).expanduser() / "adapter_config.json").is_file():
        yield Problem(key, f"{path} holds no adapter_config.json", f"write {key}=<folder of a LoRA adapter>")


def room_for_a_message(run: ChatRun) -> Iterator[Problem]:
    if run.chat.max_len <= run.chat.max_new_tokens:
        what = f"{run.chat.max_len} tokens leave no room for a message beside chat.max_new_tokens"
        fix = f"write chat.max_len={4 * run.chat.max_new_tokens}, or a smaller chat.max_new_tokens"
        yield Problem("chat.max_len", what, fix)


MERGE: tuple[Callable[[MergeLoRARun], Iterable[Problem]], ...] = (adapter_is_named,)
CHAT: tuple[Callable[[ChatRun], Iterable[Problem]], ...] = (room_for_a_message,)
