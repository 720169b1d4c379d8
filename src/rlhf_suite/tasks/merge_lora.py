"""task=merge_lora: merge a LoRA adapter into its base model and write a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.errors import RunError
from rlhf_suite.models.merge import Merged, merge_lora, read_adapter
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.console import show_line
from rlhf_suite.train.output import deliver, final_folder


def run(config: Run, folder: Path) -> dict[str, float]:
    """Merge the adapter and write the model to `ckpt.output_dir`, or to `<folder>/model`. Return the merged layers."""
    base, path = config.actor.model_name_or_path, config.lora.path
    assert base is not None and path is not None
    record = RunFolder(folder)
    output = final_folder(config.ckpt.output_dir, record)
    adapter, done = read_adapter(path), list[Merged]()

    def write(place: Path) -> None:
        done.append(merge_lora(base, adapter, place, config.ds.param_dtype, show_line))

    place = deliver(write, output, record, "model")
    merged = done[-1]
    show_line(f"{merged.modules} layers merged; the model is in {place}")
    if merged.lacking:
        raise RunError(f"{place} has its weights, but {'; '.join(merged.lacking)}")
    return {"merged_layers": float(merged.modules)}
