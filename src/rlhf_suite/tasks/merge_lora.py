"""task=merge_lora: a LoRA adapter and its base model become one Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from rlhf_suite.config.runs import MergeLoRARun
from rlhf_suite.models.merge import merge_lora, read_adapter
from rlhf_suite.train.run_folder import RunFolder


def run(config: MergeLoRARun, folder: Path) -> dict[str, float]:
    """Merge and write; the model is in `ckpt.output_dir`, or `<folder>/model`."""
    base, path = config.actor.model_name_or_path, config.lora.path
    assert base is not None and path is not None
    output = Path(config.ckpt.output_dir) if config.ckpt.output_dir else RunFolder(folder).model

    def say(line: str) -> None:
        Console().print(line, soft_wrap=True)

    count = merge_lora(base, read_adapter(path), output.absolute(), config.ds.param_dtype, say)
    say(f"{count} layers merged; the model is in {output}")
    return {"merged_layers": float(count)}
