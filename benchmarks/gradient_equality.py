"""How far each gradient is from its formula in float64: `python benchmarks/gradient_equality.py` computes every loss in
every split and writes docs/gradient_equality.md; with words only the losses whose names have one of them, and with
`--missing` only the rows that the page does not have, beside the rows that it has."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "train")]

import gradients  # noqa: E402, I001 - they are found by the line above
import task_gradients  # noqa: E402
import policy_matrix  # noqa: E402
from plain_models import Gradients, make_models, relative_error  # noqa: E402
from policy_formulas import OBJECTIVES  # noqa: E402
from ranks import Ranks  # noqa: E402
from splits import SEQUENCE_SPLITS, SPLITS, TENSOR_SPLITS, Split  # noqa: E402
from task_cases import CASES, ROWS  # noqa: E402

from rlhf_suite.data.batch import TokenBatch, take  # noqa: E402

PAGE = ROOT / "docs" / "gradient_equality.md"
HEAD = """# One batch, one gradient

`python benchmarks/gradient_equality.py` writes this page. One batch goes through a real optimiser step in fp32, split
in each of the ways below. Each number is the relative error of the gradient that the optimiser gets, `|g - g*| / |g*|`
in the 2-norm, for the weight tensor with the largest error. g* is computed in float64 from the plain transformers
model and the formula of the loss, one sequence at a time (`tests/train/policy_formulas.py`, `credit_formulas.py`,
`task_formulas.py`). Errors of a few 1e-6 come from the rounding of fp32 and also occur without any split.

Unless a column says otherwise, micro-batches have 4 packed rows, on one rank without ZeRO. `micro 2` means
micro-batches of 2 rows, so a step adds up several of them. The tests `test_gradient_equality.py`,
`test_policy_gradients.py` and `test_task_gradients.py` in tests/train require errors below 1e-5 for every loss,
estimator and split. They also show that the comparison notices a dropped mask, a wrong divisor, a forgotten rank, the
baseline of another group, and other mistakes.

"""


Errors = Iterator[tuple[str, list[float]]]  # losses, each with its error in each split


class AllRanks(dict[tuple[int, int], Ranks]):
    """Ranks by their number and by how many of them split the matrices, which DeepSpeed keeps for the life of a
    process. They are started when they are first asked for."""

    def __missing__(self, key: tuple[int, int]) -> Ranks:
        return self.setdefault(key, Ranks(key[0]))


@dataclass(frozen=True)
class Part:
    """One table: its rows and columns, and how the errors of some of the rows are found."""

    title: str
    losses: list[str]
    splits: list[Split]
    errors: Callable[[Path, AllRanks, list[str]], Errors]

    @property
    def header(self) -> str:
        return "| loss | " + " | ".join(split.name for split in self.splits) + " |"


def token_batch(folder: Path, split: Split) -> TokenBatch:
    batch = gradients.make_batch(folder)
    return take(batch, split.chosen(len(batch)))


def of_tokens(folder: Path, ranks: Ranks, loss: str, split: Split) -> Gradients:
    return ranks.call(gradients.gradient, folder, loss, split, token_batch(folder, split))[0]


def tokens_wanted(folder: Path, loss: str, split: Split) -> Gradients:
    return gradients.reference(folder, loss, token_batch(folder, split), split.lora)


def of_task(folder: Path, ranks: Ranks, loss: str, split: Split) -> Gradients:
    return ranks.call(task_gradients.gradient, folder, loss, split)[0]


def by_loss(
    found: Callable[[Path, Ranks, str, Split], Gradients],
    wanted: Callable[[Path, str, Split], Gradients],
    splits: list[Split],
    folder: Path,
    ranks: AllRanks,
    losses: list[str],
) -> Errors:
    """The gradient that the optimiser is given against that of the formula, one loss after the other."""
    for loss in losses:
        formula = {(split.lora, split.rows): split for split in splits}
        right = {key: wanted(folder, loss, split) for key, split in formula.items()}
        row = []
        for split in splits:
            gradient = found(folder, ranks[split.ranks, split.tensor], loss, split)
            row.append(relative_error(gradient, right[split.lora, split.rows]))
        yield loss, row


def of_policies(folder: Path, ranks: AllRanks, losses: list[str]) -> Errors:
    """Losses x estimators: split by split, because the models of a split stay for all of them."""
    cases = [case for case in policy_matrix.MATRIX if case.name in losses]
    steps = {
        case: policy_matrix.first_step(policy_matrix.experience(case, policy_matrix.rewarded(folder, case)))
        for case in cases
    }
    rows: dict[str, list[float]] = {case.name: [] for case in cases}
    right = {lora: dict(policy_matrix.references(folder, cases, lora)) for lora in (False, True) if cases}
    for split in POLICY_SPLITS:
        for case in cases:
            found = ranks[split.ranks, split.tensor].call(policy_matrix.gradient, folder, case, split, steps[case])[0]
            rows[case.name].append(relative_error(found, right[split.lora][case]))
        print(json.dumps({"split": split.name, "largest": max(row[-1] for row in rows.values())}), flush=True)
    yield from rows.items()


LENGTHS = gradients.LENGTHS
POLICY_SPLITS = [
    split
    for split in SPLITS
    if split.rows is None and not split.checkpointing and split.zero != 1 and split.name != "padded, one micro-batch"
]
PARTS = (
    Part(
        f"Supervised tasks: {ROWS} rows (pairs, answers or solutions) of up to {2 * 64} tokens",
        list(CASES),
        SPLITS,
        partial(by_loss, of_task, task_gradients.wanted, SPLITS),
    ),
    Part(
        "The same on ranks that split the tokens of each batch (`ds.ring_attn_size`, `ds.ring_attn_mode`); `2 x`: on "
        "four ranks, of which each two share a batch",
        list(CASES),
        SEQUENCE_SPLITS,
        partial(by_loss, of_task, task_gradients.wanted, SEQUENCE_SPLITS),
    ),
    Part(
        "The same on ranks that split the matrices of each layer (`ds.tensor_parallel_size`); `2 x`: on four ranks, "
        "two for each batch",
        list(CASES),
        TENSOR_SPLITS,
        partial(by_loss, of_task, task_gradients.wanted, TENSOR_SPLITS),
    ),
    Part(
        f"Tokens with a mask: {len(LENGTHS)} sequences of {min(LENGTHS)} to {max(LENGTHS)} tokens, masks with gaps, "
        "one sequence without a masked token; the policy losses with asymmetric clips, the dual clip, a k3 KL term and "
        "an entropy bonus",
        list(OBJECTIVES),
        SPLITS,
        partial(by_loss, of_tokens, tokens_wanted, SPLITS),
    ),
    Part(
        "Tokens with a mask, on ranks that split the matrices of each layer",
        list(OBJECTIVES),
        TENSOR_SPLITS,
        partial(by_loss, of_tokens, tokens_wanted, TENSOR_SPLITS),
    ),
    Part(
        f"Policy losses x advantage estimators: {policy_matrix.PROMPTS} prompts x {policy_matrix.SAMPLES} responses of "
        f"several turns, {policy_matrix.STEP} of them in the step; clipped and penalised rewards, KL in the reward, "
        "correction weights, means as in the presets",
        [case.name for case in policy_matrix.MATRIX],
        POLICY_SPLITS,
        of_policies,
    ),
)


@contextmanager
def started() -> Iterator[tuple[Path, AllRanks]]:
    """The models' folder, and ranks."""
    with tempfile.TemporaryDirectory() as temporary:
        ranks = AllRanks()
        try:
            yield make_models(Path(temporary)), ranks
        finally:
            for group in ranks.values():
                group.close()


def table(part: Part, wanted: argparse.Namespace, known: dict[str, str], folder: Path, ranks: AllRanks) -> str:
    """Rows are losses, columns are splits."""
    chosen = [loss for loss in part.losses if not wanted.words or any(word in loss for word in wanted.words)]
    chosen = [loss for loss in chosen if not wanted.missing or loss not in known]
    for loss, row in part.errors(folder, ranks, chosen) if chosen else ():
        errors = {split.name: error for split, error in zip(part.splits, row, strict=True)}
        print(json.dumps({"loss": loss} | errors), flush=True)
        known[loss] = f"| {loss} | " + " | ".join(f"{error:.1e}".replace("e-0", "e-") for error in row) + " |"
    rows = [known[loss] for loss in part.losses if loss in known]
    missing = [loss for loss in part.losses if loss not in known]
    note = f"\n\nNot computed yet: {'; '.join(missing)}." if missing else ""
    return "\n".join([part.header, "|---" * (1 + len(part.splits)) + "|", *rows]) + note


def rows_of(part: Part, page: str) -> dict[str, str]:
    """The rows that the page has; none if its table has other columns."""
    columns = part.header.count("|")
    lines = [line for line in page.splitlines() if line.startswith("| ") and line.count("|") == columns]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if part.header in page}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--missing", action="store_true", help="only the rows that the page does not have yet")
    wanted = parser.parse_args()
    page = PAGE.read_text()
    with started() as (folder, ranks):
        tables = {part.title: table(part, wanted, rows_of(part, page), folder, ranks) for part in PARTS}
    PAGE.write_text(HEAD + "\n\n".join(f"## {title}\n\n{rows}" for title, rows in tables.items()) + "\n")


if __name__ == "__main__":
    main()
