"""Python in fences: a model learns to write code instead of guessing a sum. Half of the examples that it first learns
from are guesses.

    python experiments/agents/fences/agent.py /tmp/fences
    python run.py task=sft actor.model_name_or_path=builtin:tiny data.dataset=/tmp/fences/taught.jsonl \
        data.input_template=null data.max_len=256 data.output_key=output data.pack_to_max_len=true \
        ds.param_dtype=fp32 train.batch_size=16 train.max_epochs=6 actor.adam.lr=5e-3 \
        run_dir=/tmp/fences/sft
    python run.py task=ppo actor.model_name_or_path=/tmp/fences/sft/model experiment=rloo data.input_template=null \
        data.prompt_dataset=/tmp/fences/asked.jsonl data.label_key=label data.max_len=128 agent.kind=python \
        agent.max_turns=2 agent.python_allow_weaker=true reward.rule=exact_match rollout.batch_size=16 \
        rollout.n_samples_per_prompt=8 train.batch_size=128 train.micro_batch_size=32 rollout.micro_batch_size=64 \
        ds.param_dtype=fp32 actor.adam.lr=1e-3 train.max_steps=20
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path


def question(draw: random.Random) -> tuple[int, int, dict[str, str]]:
    """Return two numbers, and the row that asks for their sum."""
    a, b = draw.randint(10, 99), draw.randint(10, 99)
    return a, b, {"input": f"{a} + {b} =", "label": str(a + b)}


def lesson(draw: random.Random) -> dict[str, str]:
    """Return a response with code and its output, or a guess."""
    a, b, row = question(draw)
    guess = str(draw.randint(20, 198))
    code = f"\n```python\n{a} + {b}\n```\n```output\n{a + b}\n```\n{a + b}"
    return row | {"output": code if draw.random() < 0.5 else guess}


if __name__ == "__main__":
    folder, draw = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    taught, asked = [lesson(draw) for _ in range(6000)], [question(draw)[2] for _ in range(320)]
    for name, rows in (("taught", taught), ("asked", asked)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
