"""What each family of models can do, measured: `python benchmarks/support.py` writes docs/support.md; with words only
the rows of types with one of them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "train"), str(ROOT / "tests" / "models")]

import families  # noqa: E402, I001 - they are found by the line above
import torch  # noqa: E402
import family_errors  # noqa: E402
from gradients import gradient  # noqa: E402
from plain_models import relative_error  # noqa: E402
from ranks import Ranks  # noqa: E402
from splits import Split  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from rlhf_suite.data.trajectory import Experience  # noqa: E402
from rlhf_suite.errors import UserError  # noqa: E402
from rlhf_suite.models.families import BLOCKS, BY_TYPE, PACKED, SEQUENCE, TENSOR  # noqa: E402
from rlhf_suite.preflight.inspections.model_files import scorer_types  # noqa: E402
from rlhf_suite.train.tensor_parallel import check_plan  # noqa: E402

PAGE = ROOT / "docs" / "support.md"
HEAD = """# Families of models

`python benchmarks/support.py` writes this page, with tiny random models in fp32 on a CPU. A number is the relative
error |g - g*| / |g*| of a gradient, for the weight tensor with the largest error; g* is that of transformers' own
eager forward pass, one sequence at a time. The columns of ranks compare two ranks with one. Errors up to 1e-5 come
from the order in which fp32 numbers are added. Decay rates of states have gradients that are small differences of
large numbers: those of Qwen3.5-MoE are 4e-5 apart between the sdpa and the eager attention of transformers alone.

- **attention**: what `ds.attn_implementation=null`, the default, is for this type
- **sft**: next tokens, padded; **packed**: the same with `ds.packing_samples=true`; **dpo**: pairs of answers, packed
- **rm**: pairs of scores, packed (padded where packing is refused); the critic of `ppo` has the same head
- **gather, ring**, **ulysses**: `ds.ring_attn_size=2`; **tensor**: `ds.tensor_parallel_size=2`
- a dash: refused before or while the model is loaded, with the reason

"""
COLUMNS = ("type", "family", "attention", "sft", "packed", "dpo", "rm", "gather, ring", "ulysses", "tensor")
WHOLE = Split("one micro-batch", micro=99)
BY_BLOCKS = [Split(mode, ranks=2, sequence=2, mode=mode) for mode in ("gather", "ring")]
BY_HEADS, BY_MATRICES = [Split("ulysses", ranks=2, sequence=2, mode="ulysses")], [Split("tensor", ranks=2, tensor=2)]
NONE = "-"


class Groups:
    """Ranks that are started again when a call has ended them."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], Ranks] = {}

    def gradient(self, folder: Path, split: Split) -> dict:
        key = (split.ranks, split.tensor)
        if key not in self.known or not self.known[key].alive:
            self.known[key] = Ranks(split.ranks)
        return self.known[key].call(gradient, folder, "next token", split, experience())[0]

    def close(self) -> None:
        for group in self.known.values():
            group.close()


def experience() -> Experience:
    """The batch of `family_errors` for a step."""
    plain = family_errors.batch()
    mask = plain.mask.clone()
    mask[plain.starts] = 0
    return Experience(plain.ids, plain.lengths, mask, torch.arange(len(plain)))


def cell(measure: Callable[[], float], possible: bool = True) -> str:
    """A number, or a dash where the suite refuses."""
    if not possible:
        return NONE
    try:
        return f"{measure():.0e}".replace("e-0", "e-")
    except UserError:
        return NONE
    except AssertionError as error:  # of a rank
        if "UserError" not in str(error):
            raise
        return NONE


def row(kind: str, folder: Path, groups: Groups) -> Iterator[str]:
    """The cells of a type."""
    family, path = BY_TYPE[kind], str(folder / "lm")
    packs = family.why_not(PACKED) is None
    config = AutoConfig.from_pretrained(path)
    yield from (kind, family.title, family.attention[0])
    yield cell(lambda: family_errors.language_errors(path, packed=False)[1])
    yield cell(lambda: family_errors.language_errors(path, packed=True)[1], packs)
    yield cell(lambda: family_errors.language_errors(path, packed=packs, loss=family_errors.preference)[1])
    yield cell(lambda: family_errors.score_error(path, packed=packs), kind in scorer_types())

    def split_error(splits: list[Split]) -> float:
        wanted = groups.gradient(folder, WHOLE)
        return max(relative_error(groups.gradient(folder, split), wanted) for split in splits)

    splits_tokens = packs and family.why_not(SEQUENCE) is None
    yield cell(lambda: split_error(BY_BLOCKS), splits_tokens and family.why_not(BLOCKS) is None)
    yield cell(lambda: split_error(BY_HEADS), splits_tokens)
    yield cell(lambda: split_error(BY_MATRICES), packs and family.why_not(TENSOR) is None and has_plan(config))


def has_plan(config: AutoConfig) -> bool:
    """Whether the layers of a model can be split over two ranks."""
    try:
        return bool(check_plan(config, 2))
    except UserError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    page = PAGE.read_text() if PAGE.exists() else ""
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}
    groups = Groups()
    try:
        for kind in families.TYPES:
            if words and not any(word in kind for word in words):
                continue
            with tempfile.TemporaryDirectory() as temporary:
                families.make_typed(Path(temporary) / "lm", kind)
                rows[kind] = "| " + " | ".join(row(kind, Path(temporary), groups)) + " |"
                family_errors.alone.cache_clear()
            print(rows[kind], flush=True)
    finally:
        groups.close()
    table = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    table += [rows[kind] for kind in families.TYPES if kind in rows]
    PAGE.write_text(HEAD + "\n".join(table) + "\n")


if __name__ == "__main__":
    main()
