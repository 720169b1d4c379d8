"""How far each gradient is from its formula in float64: `python benchmarks/gradient_equality.py` computes every loss in
every split and writes docs/gradient_equality.md; with words only the losses whose names have one of them, beside the
rows that the page has."""

from __future__ import annotations

import argparse
import json
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

from rlhf_suite.data.batch import TokenBatch, take  # noqa: E402

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
    """One table: its losses, the gradient that the optimiser is given, and that of the formula."""

    title: str
    losses: list[str]
    found: Callable[[Path, Ranks, str, Split], Gradients]
    wanted: Callable[[Path, str, Split], Gradients]


def token_batch(folder: Path, split: Split) -> TokenBatch:
    batch = gradients.make_batch(folder)
    return take(batch, split.chosen(len(batch)))


def of_tokens(folder: Path, ranks: Ranks, loss: str, split: Split) -> Gradients:
    return ranks.call(gradients.gradient, folder, loss, split, token_batch(folder, split))[0]


def tokens_wanted(folder: Path, loss: str, split: Split) -> Gradients:
    return gradients.reference(folder, loss, token_batch(folder, split), split.lora)


def of_task(folder: Path, ranks: Ranks, loss: str, split: Split) -> Gradients:
    return ranks.call(task_gradients.gradient, folder, loss, split)[0]


LENGTHS = gradients.LENGTHS
PARTS = (
    Part(
        f"Supervised tasks: {ROWS} rows (pairs, answers or solutions) of up to {2 * 64} tokens",
        list(CASES),
        of_task,
        task_gradients.wanted,
    ),
    Part(
        f"Tokens with a mask: {len(LENGTHS)} sequences of {min(LENGTHS)} to {max(LENGTHS)} tokens, masks with gaps, "
        "one sequence without a masked token; the policy losses with asymmetric clips, the dual clip, a k3 KL term and "
        "an entropy bonus",
        list(OBJECTIVES),
        of_tokens,
        tokens_wanted,
    ),
)
HEADER = "| loss | " + " | ".join(split.name for split in SPLITS) + " |"


def errors(part: Part, losses: list[str]) -> Iterator[tuple[str, list[float]]]:
    """For each loss its error in each split."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_models(Path(temporary))
        ranks = {size: Ranks(size) for size in (1, 2)}
        for loss in losses:
            formula = {(split.lora, split.rows): split for split in SPLITS}
            wanted = {key: part.wanted(folder, loss, split) for key, split in formula.items()}
            row = []
            for split in SPLITS:
                found = part.found(folder, ranks[split.ranks], loss, split)
                row.append(relative_error(found, wanted[split.lora, split.rows]))
            yield loss, row
        for group in ranks.values():
            group.close()


def table(part: Part, words: list[str], known: dict[str, str]) -> str:
    """Rows are losses, columns are splits."""
    for loss, row in errors(part, [loss for loss in part.losses if not words or any(word in loss for word in words)]):
        print(json.dumps({"loss": loss} | {s.name: error for s, error in zip(SPLITS, row, strict=True)}), flush=True)
        known[loss] = f"| {loss} | " + " | ".join(f"{error:.1e}".replace("e-0", "e-") for error in row) + " |"
    rows = [known[loss] for loss in part.losses if loss in known]
    missing = [loss for loss in part.losses if loss not in known]
    note = f"\n\nNot computed yet: {'; '.join(missing)}." if missing else ""
    return "\n".join([HEADER, "|---" * (1 + len(SPLITS)) + "|", *rows]) + note


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    text = PAGE.read_text()
    known = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    known = known if HEADER in text else {}  # rows of other columns
    tables = {part.title: table(part, words, known) for part in PARTS}
    PAGE.write_text(HEAD + "\n\n".join(f"## {title}\n\n{rows}" for title, rows in tables.items()) + "\n")


if __name__ == "__main__":
    main()
