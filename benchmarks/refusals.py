"""What families of models cannot do is refused before anything is loaded: the seconds of whole commands.

`python benchmarks/refusals.py` writes a section of docs/model_families.md."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from common import ROOT, scratch, write_section

sys.path.insert(0, str(ROOT / "tests"))

import families

PAGE, HEADING = ROOT / "docs" / "model_families.md", "## Refusals"
SFT = ["task=sft", "data.dataset=builtin:reverse", "data.output_key=output", "data.max_len=256"]
PPO = [
    *("task=ppo", "data.prompt_dataset=builtin:reverse", "data.max_len=256", "rollout.max_new_tokens=64"),
    *(
        "data.label_key=label",
        "reward.rule=exact_match",
        "algo.advantage.estimator=rloo",
        "rollout.n_samples_per_prompt=4",
        "launch.device=cpu",
    ),
]
RANKS = "actor.num_gpus_per_node=2"
# The type of the model, and what is asked of it. The last one is given a tower.
CASES: list[tuple[str, list[str]]] = [
    ("llama4_text", [*SFT, "ds.packing_samples=true"]),
    ("gemma2", [*SFT, RANKS, "ds.ring_attn_size=2", "ds.ring_attn_mode=ring"]),
    ("qwen3_5_text", [*SFT, RANKS, "ds.tensor_parallel_size=2"]),
    ("kimi_linear", PPO),
    ("gemma4", [*SFT, "data.apply_chat_template=true", "data.image_key=image"]),
]
REASONS = {
    "llama4_text": "counts the positions of its attention temperature",
    "gemma2": "has a soft cap in its attention",
    "qwen3_5_text": "has gated-delta layers",
    "kimi_linear": "needs kernels of Triton",
    "gemma4": "see later ones in its layers with a window alone",
}
ROUNDS = 3
TEXT = f"""{HEADING}

The checks read the config.json of the model, and refuse what its family cannot do before anything is loaded. The table
has the wall seconds of the whole command on two CPU cores, the shortest of {ROUNDS} (`python benchmarks/refusals.py`
writes this section):

| type | asked for | refused after |
|---|---|---|
{{rows}}
"""


def make(folder: Path, kind: str) -> None:
    """Write the tiny model of a type; Gemma 4 gets the configuration of one with a tower."""
    if kind != "gemma4":
        families.make_typed(folder, kind)
        return
    families.make_typed(folder, "gemma4_text")
    (folder / "config.json").write_text('{"model_type": "gemma4", "vision_config": {}}')


def seconds(words: list[str], kind: str) -> float:
    """Return the wall seconds of a command, which must be refused because of the family."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "run.py", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    spent = time.perf_counter() - began
    said = done.stderr + done.stdout
    assert done.returncode == 2 and REASONS[kind] in " ".join(said.split()), said
    return spent


def main() -> None:
    rows = []
    with scratch() as folder:
        for kind, words in CASES:
            make(folder / kind, kind)
            given = [*words, f"actor.model_name_or_path={folder / kind}", f"ckpt.output_dir={folder / 'out'}"]
            best = min(seconds(given, kind) for _ in range(ROUNDS))
            asked = [word for word in words if word not in SFT and word != RANKS and word not in PPO]
            shown = " ".join(asked) or "task=ppo launch.device=cpu"
            rows.append(f"| {kind} | `{shown}` | {best:.1f} s |")
            print(rows[-1], flush=True)
    write_section(PAGE, HEADING, TEXT.format(rows="\n".join(rows)))


if __name__ == "__main__":
    main()
