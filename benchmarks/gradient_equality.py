"""How far each gradient is from its formula in float64: `python benchmarks/gradient_equality.py` writes
docs/gradient_equality.md, and prints one JSON line per way of computing the step."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "train")]

from gradients import (  # noqa: E402, I001 - they are found by the line above
    LENGTHS,
    OBJECTIVES,
    SPLITS,
    gradient,
    make_batch,
    make_models,
    reference,
    relative_error,
)
from ranks import Ranks  # noqa: E402

from rlhf_suite.data.batch import take  # noqa: E402

HEAD = f"""# One batch, one gradient

`python benchmarks/gradient_equality.py` writes this page. One batch of {len(LENGTHS)} sequences ({min(LENGTHS)} to
{max(LENGTHS)} tokens, masks with gaps, one sequence without a masked token) goes through a real optimiser step in
fp32, split in every way below. Each number is the largest relative error over all weight tensors, |g - g*| / |g*| in
the 2-norm, of the gradient that the optimiser is given. g* is computed in float64 from the plain transformers model and
the formula of the loss, one sequence at a time. About 2e-6 is fp32's own rounding: it is there without any split.

Micro-batches hold 5 packed sequences, on one rank without ZeRO, where nothing else is said. The PPO losses have
asymmetric clips, the dual clip, a k3 KL term and an entropy bonus. `tests/train/test_gradient_equality.py` holds every
number below 1e-5, and shows that the comparison sees a dropped mask, a wrong divisor and a forgotten rank.

"""


def errors() -> Iterator[tuple[str, list[float]]]:
    """For each split its error under each loss."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_models(Path(temporary))
        batch = make_batch(folder)
        ranks = {size: Ranks(size) for size in (1, 2)}
        for split in SPLITS:
            part, row = take(batch, split.sequences), []
            for loss in OBJECTIVES:
                found = ranks[split.ranks].call(gradient, folder, loss, split, part)[0]
                row.append(relative_error(found, reference(folder, loss, part, split.lora)))
            yield split.name, row
        for group in ranks.values():
            group.close()


def main() -> None:
    lines = ["| the step | " + " | ".join(OBJECTIVES) + " |", "|---" * (1 + len(OBJECTIVES)) + "|"]
    for name, row in errors():
        print(json.dumps({"name": name} | dict(zip(OBJECTIVES, row, strict=True))), flush=True)
        lines.append(f"| {name} | " + " | ".join(f"{error:.1e}" for error in row) + " |")
    (ROOT / "docs" / "gradient_equality.md").write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
