"""How prompts looked to a model when it was trained: `prompt_format.json` in its folder, for the tasks that use it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RENDERED
from rlhf_suite.disk import write_json
from rlhf_suite.foreign_files import MIB, UNREADABLE, DamagedFile, check_types, content, parse_json

FILE = "prompt_format.json"
FIELDS = {"apply_chat_template": bool, "input_template": str | None, "chat_template_kwargs": list[str]}
# The flags of which one alone says how prompts look.
CHOICES = ("data.apply_chat_template", "data.input_template")
KWARGS = "data.chat_template_kwargs"


@dataclass(frozen=True)
class PromptFormat:
    """The flags of `data` that make a prompt of a row's text or messages."""

    apply_chat_template: bool = False
    input_template: str | None = None
    chat_template_kwargs: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: DataConfig) -> PromptFormat | None:
        """Return how the prompts of a section look; None if it says so in another way (solutions with marked steps)."""
        if data.apply_chat_template:
            return cls(True, None, tuple(data.chat_template_kwargs))
        if data.has("steps_key") and data.steps_key is None:
            return None
        return cls(False, None if holds_dialogues(data) else data.input_template)

    def write(self, folder: Path) -> None:
        """Write it into the folder of a model."""
        write_json(folder / FILE, asdict(self), durable=False)

    def __str__(self) -> str:
        """Return the flags as one writes them, on one line."""
        if not self.apply_chat_template:
            return f"{CHOICES[1]}={'null' if self.input_template is None else repr(self.input_template)}"
        variables = f" {KWARGS}=[{','.join(self.chat_template_kwargs)}]" if self.chat_template_kwargs else ""
        return f"{CHOICES[0]}=true{variables}"


def read(folder: Path) -> PromptFormat | None:
    """Return what the folder of a model says; None if it says nothing. Raises DamagedFile."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        table = check_types(parse_json(content(path, MIB, follow=True)), FIELDS, path)
    except DamagedFile:
        raise
    except UNREADABLE:
        raise DamagedFile(f"{path} is damaged: it is not JSON") from None
    return PromptFormat(
        table.get("apply_chat_template", False),
        table.get("input_template"),
        tuple(table.get("chat_template_kwargs", ())),
    )


def holds_dialogues(data: DataConfig) -> bool:
    """Return whether texts hold whole dialogues, which `data.input_template` is not put around."""
    if data.TASK in ("rm", "dpo") and data.prompt_key is None:
        return True
    return data.has("turn_markers") and data.turn_markers is not None


def format_of(run: Run) -> PromptFormat | None:
    """Return how the prompts of a run look; None for a run that makes none."""
    pretrains = run.has("actor") and run.actor.pretrains
    return PromptFormat.of(run.data) if run.task in RENDERED and not pretrains else None


def adopt_prompts(run: Run, recorded: PromptFormat, chosen: Collection[str]) -> dict[str, Any]:
    """Return the flags of `run.data`, by name, that a run takes from the record of its model: those that nobody has
    chosen, and whose value would be another."""
    used = format_of(run)
    if used is None:
        return {}
    data = run.data
    values: dict[str, Any] = {}
    if not {*CHOICES} & {*chosen}:
        values["apply_chat_template"] = recorded.apply_chat_template
        if not recorded.apply_chat_template and not holds_dialogues(data):
            values["input_template"] = recorded.input_template
    renders = values.get("apply_chat_template", used.apply_chat_template)
    if renders and recorded.apply_chat_template and KWARGS not in chosen:
        values["chat_template_kwargs"] = list(recorded.chat_template_kwargs)
    return {name: value for name, value in values.items() if getattr(data, name) != value}
