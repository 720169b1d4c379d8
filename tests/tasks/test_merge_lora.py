"""`ckpt.save_adapter` and `task=merge_lora` together give the model that the run exported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from rlhf_suite.composition.arguments import parse
from rlhf_suite.preflight.inspections.inspect_runs import inspect
from rlhf_suite.preflight.jobs import preflight
from small_runs import small_run

RUN = Path(__file__).parents[2] / "run.py"


def test_a_merged_adapter_is_the_exported_model(ranks, tmp_path):
    line = "task=sft train.max_steps=2 ds.lora.rank=4 ckpt.save_adapter=true"
    ranks(1).call(small_run, tmp_path / "run", line)
    words = [
        "task=merge_lora",
        "actor.model_name_or_path=builtin:tiny",
        f"lora.path={tmp_path}/run/model_adapter",
        f"ckpt.output_dir={tmp_path}/merged",
        f"hydra.run.dir={tmp_path}/merge",
    ]
    done = subprocess.run([sys.executable, RUN, *words], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "14 layers merged" in done.stdout
    exported, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("run/model", "merged"))
    assert exported.keys() == merged.keys()
    for name, weight in exported.items():
        torch.testing.assert_close(merged[name], weight, rtol=1e-6, atol=1e-7)


def test_the_output_replaces_neither_the_base_nor_the_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    words = ["task=merge_lora", f"lora.path={tmp_path}", f"ckpt.output_dir={tmp_path}"]
    found = preflight(parse([*words, "actor.model_name_or_path=builtin:tiny"]))
    assert "ckpt.output_dir" in [problem.key for problem in inspect(found.runs)]
    (missing,) = [each for each in preflight(parse(words)).problems if each.key.startswith("actor")]
    assert missing.fix == "add actor.model_name_or_path=<HF folder or hub name>"
