"""How far each gradient is from its formula in float64: `python benchmarks/gradient_equality.py` computes every loss in
every split and writes docs/gradient_equality.md; with the name of a part (`supervised`, `rl`) that part alone."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "train")]

import gradients  # noqa: E402, I001 - they are found by the line above
import task_gradients  # noqa: E402
from plain_models import Gradients, make_models, relative_error  # noqa: E402
from policy_formulas import OBJECTIVES  # noqa: E402
from ranks import Ranks  # noqa: E402
from splits import SPLITS, Split  # noqa: E402
from task_cases import CASES, ROWS  # noqa: E402

from rlhf_suite.data.batch import take  # noqa: E402

PAGE = ROOT / "docs" / "gradient_equality.md"
HEAD = """# One batch, one gradient

`python benchmarks/gradient_equality.py` writes this page. One batch goes through a real optimiser step in fp32, split
in every way below. Each number is the largest relative error over all weight tensors, |g - g*| / |g*| in the 2-norm, of
the gradient that the optimiser is given. g* is computed in float64 from the plain transformers model and the formula of
the loss, one sequence at a time (`tests/train/policy_formulas.py`, `tests/train/task_formulas.py`). A few 1e-6 are
fp32's own rounding: they are there without any split.

Micro-batches hold 4 packed rows, on one rank without ZeRO, where nothing else is said; `micro 2` is micro-batches of 2
rows, so several of them are added up for a step. `tests/train/test_gradient_equality.py` and `test_task_gradients.py`
hold every loss and every split once below 1e-5, and show that the comparison sees a dropped mask, a wrong divisor and a
forgotten rank.

"""


@dataclass(frozen=True)
class Part:
    """One table: its losses, and (found, wanted) of a loss in a split."""

    title: str
    losses: list[str]
    both: Callable[[Path, dict[int, Ranks], str, Split], tuple[Gradients, Gradients]]


def masked_tokens(folder: Path, ranks: dict[int, Ranks], loss: str, split: Split) -> tuple[Gradients, Gradients]:
    batch = gradients.make_batch(folder)
    batch = take(batch, split.chosen(len(batch)))
    found = ranks[split.ranks].call(gradients.gradient, folder, loss, split, batch)[0]
    return found, gradients.reference(folder, loss, batch, split.lora)


def task(folder: Path, ranks: dict[int, Ranks], loss: str, split: Split) -> tuple[Gradients, Gradients]:
    found = ranks[split.ranks].call(task_gradients.gradient, folder, loss, split)[0]
    return found, task_gradients.wanted(folder, loss, split)


LENGTHS = gradients.LENGTHS
PARTS = {
    "supervised": Part(
        f"Supervised tasks: {ROWS} rows (pairs, answers or solutions) of up to {2 * 64} tokens", list(CASES), task
    ),
    "rl": Part(
        f"Tokens with a mask: {len(LENGTHS)} sequences of {min(LENGTHS)} to {max(LENGTHS)} tokens, masks with gaps, "
        "one sequence without a masked token; the policy losses with asymmetric clips, the dual clip, a k3 KL term and "
        "an entropy bonus",
        list(OBJECTIVES),
        masked_tokens,
    ),
}


def errors(part: Part) -> Iterator[tuple[str, list[float]]]:
    """For each loss its error in each split."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_models(Path(temporary))
        ranks = {size: Ranks(size) for size in (1, 2)}
        for loss in part.losses:
            yield loss, [relative_error(*part.both(folder, ranks, loss, split)) for split in SPLITS]
        for group in ranks.values():
            group.close()


def table(part: Part) -> str:
    """Rows are losses, columns are splits."""
    lines = ["| loss | " + " | ".join(split.name for split in SPLITS) + " |", "|---" * (1 + len(SPLITS)) + "|"]
    for loss, row in errors(part):
        print(json.dumps({"loss": loss} | {s.name: error for s, error in zip(SPLITS, row, strict=True)}), flush=True)
        lines.append(f"| {loss} | " + " | ".join(f"{error:.1e}".replace("e-0", "e-") for error in row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", choices=[[], *PARTS], help="all of them by default")
    chosen = parser.parse_args().part or list(PARTS)
    known = dict(re.findall(r"^## (.*?)\n\n(.*?)\n*(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    tables = {part.title: table(part) if name in chosen else known[part.title] for name, part in PARTS.items()}
    PAGE.write_text(HEAD + "\n\n".join(f"## {title}\n\n{rows}" for title, rows in tables.items()) + "\n")


if __name__ == "__main__":
    main()
