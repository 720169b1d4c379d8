"""What each family of models can do, measured: `python benchmarks/support.py` measures what benchmarks/results lacks
and writes docs/support.md. Words choose rows by their types, `--columns` chooses columns, and `--again` measures what
they choose once more."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / part) for part in ("", "train", "models", "engines")]

import families  # noqa: E402, I001 - they are found by the line above
import family_engines  # noqa: E402
import image_engines  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
import family_errors  # noqa: E402
import image_errors  # noqa: E402
import image_families  # noqa: E402
from family_engines import SERVED, Engines, Served  # noqa: E402
from gradients import gradient  # noqa: E402
from image_engines import ImageEngines  # noqa: E402
from plain_models import relative_error  # noqa: E402
from ranks import Ranks  # noqa: E402
from splits import Split  # noqa: E402
from transformers import AutoConfig  # noqa: E402
from vision import Seeing  # noqa: E402

from rlhf_suite.data.trajectory import Experience  # noqa: E402
from rlhf_suite.errors import UserError  # noqa: E402
from rlhf_suite.models.families import BLOCKS, BY_TYPE, ENGINE, PACKED, SEQUENCE, TENSOR, Family  # noqa: E402
from rlhf_suite.train.tensor_parallel import check_plan  # noqa: E402

PAGE, RESULTS = ROOT / "docs" / "support.md", ROOT / "benchmarks" / "results" / "support.jsonl"
HEAD = """# Families of models

`python benchmarks/support.py` writes this page, with tiny random models on a CPU, in fp32 where nothing else is said.
It measures what `benchmarks/results/support.jsonl` lacks; `--again --columns <columns>` and the names of types choose
what is measured once more. A number of the columns up to **tensor** is the relative error `|g - g*| / |g*|` of a
gradient, for the weight tensor with the largest error; g* is that of transformers' own eager forward pass, one
sequence at a time. The columns of ranks compare two ranks with one. Errors up to 1e-5 come from the order in which
fp32 numbers are added. Decay rates of states have gradients that are small differences of large numbers: those of
Qwen3.5-MoE are 4e-5 apart between the sdpa and the eager attention of transformers alone.

- **attention**: what `ds.attn_implementation=null`, the default, is for this type
- **sft**: next tokens in padded rows (`ds.packing_samples=false`); **packed**: the same in packed rows that
  share prefixes, which is the default where this column has a number; **dpo**: pairs of answers, in the default rows
- **rm**: pairs of scores, in the default rows; the critic of `ppo` has the same head
- **LoRA**: the adapters of all linear layers, in the default rows
- **gather, ring**, **ulysses**: `ds.ring_attn_size=2`; **tensor**: `ds.tensor_parallel_size=2`
- **engine**: vLLM without a GPU; how far its log-probs are from those of transformers after two weight syncs of other
  weights, in a prompt and in what it samples: the largest difference. Every tensor is read back after each sync
- **engine, adapter**: the same where syncs bring an adapter alone, which the engine applies
- a dash: refused before or while the model is loaded, or not applied; the reasons are below the table

"""
IMAGES = """
## Families that read images

The same of tiny models with a tower, for sequences with one image, none, two and one; [vision.md](vision.md) says what
else they can do. Gradients are those of the whole model. The biases of keys in the towers of Idefics3, LLaVA and Gemma
3 have none: what rounding leaves of it, up to 3e-8, is the largest error in their columns **sft** and **packed**.

- **sft**: answers in padded rows; **packed**: in packed rows, the default; **dpo**: pairs of answers, and **rm**: pairs
  of scores, both in packed rows; the critic of `ppo` has the same head
- **engine**: log-probs of what is sampled, in prompts with two images, one, none, and one twice, after two weight syncs
  of other weights: the largest difference from packed and from padded rows. Every tensor that vLLM has is read back

"""
WHOLE = Split("one micro-batch", micro=99)
BY_BLOCKS = [Split(mode, ranks=2, sequence=2, mode=mode) for mode in ("gather", "ring")]
BY_HEADS, BY_MATRICES = [Split("ulysses", ranks=2, sequence=2, mode="ulysses")], [Split("tensor", ranks=2, tensor=2)]
REFUSED = re.compile(r"UserError: (.+)")  # in what a rank says


@dataclass(frozen=True)
class Result:
    """A cell of the table: a number and a remark on it, or None with the reason."""

    type: str
    column: str
    value: float | None
    note: str = ""


class Processes:
    """Ranks and engines, which are started when they are needed, and again when a call has ended them."""

    def __init__(self) -> None:
        self.ranks: dict[tuple[int, int], Ranks] = {}
        self._engines: dict[type, object] = {}

    def gradient(self, folder: Path, split: Split) -> dict:
        key = (split.ranks, split.tensor)
        if key not in self.ranks or not self.ranks[key].alive:
            self.ranks[key] = Ranks(split.ranks)
        return self.ranks[key].call(gradient, folder, "next token", split, experience())[0]

    def engines(self, kind: type) -> object:
        """Return the process that builds engines of a class."""
        if not self._engines:
            for module in (family_engines, image_engines):
                ray.cloudpickle.register_pickle_by_value(module)
            ray.init(address="local", include_dashboard=False, num_cpus=2, logging_level="ERROR")
        if kind not in self._engines:
            self._engines[kind] = kind.remote()
        return self._engines[kind]

    def forget_engines(self) -> None:
        for kind, engines in self._engines.items():
            ray.kill(engines)
            self._engines[kind] = kind.remote()

    def close(self) -> None:
        for group in self.ranks.values():
            group.close()
        ray.shutdown()


def experience() -> Experience:
    """The batch of `family_errors` for a step."""
    plain = family_errors.batch()
    mask = plain.mask.clone()
    mask[plain.starts] = 0
    return Experience(plain.ids, plain.lengths, mask, torch.arange(len(plain)))


class Refused(Exception):
    """The reason of a dash."""


@dataclass
class Model:
    """A tiny model of a type, and what measures it."""

    kind: str
    folder: Path
    processes: Processes

    @cached_property
    def path(self) -> str:
        families.make_typed(self.folder / "lm", self.kind)
        return str(self.folder / "lm")

    @property
    def family(self) -> Family:
        return BY_TYPE[self.kind]

    @property
    def packs(self) -> bool:
        return self.family.why_not(PACKED) is None

    def need(self, *features: str) -> None:
        """Raise Refused with the reason of the first feature that the family does not have."""
        for feature in features:
            if (why := self.family.why_not(feature)) is not None:
                raise Refused(why)

    def packed(self) -> float:
        self.need(PACKED)
        return family_errors.language_errors(self.path, packed=True)[1]

    def pairs(self) -> float:
        return family_errors.language_errors(self.path, packed=self.packs, loss=family_errors.preference)[1]

    def scores(self) -> float:
        return family_errors.score_error(self.path, packed=self.packs)

    def splits(self, splits: list[Split], *features: str) -> float:
        self.need(PACKED, *features)
        if TENSOR in features and not check_plan(AutoConfig.from_pretrained(self.path), 2):
            raise Refused("transformers has no plan for splitting its matrices")
        assert self.path
        wanted = self.processes.gradient(self.folder, WHOLE)
        return max(relative_error(self.processes.gradient(self.folder, split), wanted) for split in splits)

    def engine(self) -> tuple[float, str]:
        self.need(ENGINE)
        errors, _ = family_engines.weight_errors(self.processes.engines(Engines), self.folder / "served", self.kind)
        return summary(errors, SERVED[self.kind])

    def engine_adapter(self) -> tuple[float, str]:
        self.need(ENGINE)
        errors, why = family_engines.adapter_errors(self.processes.engines(Engines), self.folder / "adapted", self.kind)
        if not errors:
            raise Refused(f"syncs bring merged weights: {why}")
        return summary(errors, SERVED[self.kind])


@dataclass
class SeeingModel:
    """A tiny model of a type that reads images, and what measures it."""

    kind: str
    folder: Path
    processes: Processes

    @cached_property
    def seeing(self) -> Seeing:
        return Seeing(self.folder / "seeing", self.kind)

    def rows(self, packed: bool) -> float:
        return image_errors.language_error(self.seeing, packed, image_errors.answers(self.seeing))

    def engine(self) -> tuple[float, str]:
        if (why := BY_TYPE[self.kind].why_not(ENGINE)) is not None:
            raise Refused(why)
        engines = self.processes.engines(ImageEngines)
        syncs, _ = image_engines.sync_errors(engines, self.folder / "served", self.kind)
        return summary([errors for sync in syncs for errors in sync], image_engines.SERVED[self.kind])


def summary(errors: list, served: Served) -> tuple[float, str]:
    """Return the largest error, or in bf16 the largest mean, and the remark on it."""
    in_fp32 = served.dtype == torch.float32
    return max(float(error.max() if in_fp32 else error.mean()) for error in errors), served.note


Columns = dict[str, Callable[[Any], float | tuple[float, str]]]
COLUMNS: Columns = {
    "sft": lambda model: family_errors.language_errors(model.path, packed=False)[1],
    "packed": Model.packed,
    "dpo": Model.pairs,
    "rm": Model.scores,
    "LoRA": lambda model: family_errors.adapter_error(model.path, packed=model.packs),
    "gather, ring": lambda model: model.splits(BY_BLOCKS, SEQUENCE, BLOCKS),
    "ulysses": lambda model: model.splits(BY_HEADS, SEQUENCE),
    "tensor": lambda model: model.splits(BY_MATRICES, TENSOR),
    "engine": Model.engine,
    "engine, adapter": Model.engine_adapter,
}
IMAGE_COLUMNS: Columns = {
    "sft": lambda model: model.rows(packed=False),
    "packed": lambda model: model.rows(packed=True),
    "dpo": lambda model: image_errors.language_error(model.seeing, True, image_errors.preferred(model.seeing)),
    "rm": lambda model: image_errors.score_error(model.seeing, True),
    "engine": SeeingModel.engine,
}


@dataclass(frozen=True)
class Table:
    """A table of the page: what stands before it, its rows and columns, and what measures a row."""

    head: str
    types: tuple[str, ...]
    columns: Columns
    model: type


TABLES = (
    Table(HEAD, tuple(families.TYPES), COLUMNS, Model),
    Table(IMAGES, ("idefics3", *image_families.SHAPES), IMAGE_COLUMNS, SeeingModel),
)


def measure(model: Model | SeeingModel, column: str, columns: Columns) -> Result:
    """Return a number, or the reason why the suite refuses."""
    try:
        value = columns[column](model)
    except (Refused, UserError) as error:
        return Result(model.kind, column, None, reason(str(error), model))
    except AssertionError as error:  # of a rank
        said = REFUSED.search(str(error))
        if said is None:
            raise
        return Result(model.kind, column, None, reason(said[1], model))
    return Result(model.kind, column, *(value if isinstance(value, tuple) else (value,)))


def reason(said: str, model: Model | SeeingModel) -> str:
    """Return what was said, without the folder of the tiny model."""
    return said.replace(str(model.folder / "lm"), "the model").strip()


def read_results() -> dict[tuple[str, str], Result]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    results = (Result(**json.loads(line)) for line in lines)
    return {(result.type, result.column): result for result in results}


def in_order(results: dict[tuple[str, str], Result]) -> list[Result]:
    """Return the results by rows; those of types and columns that are no longer here are left out."""
    return [result for table in TABLES for result in in_table(results, table)]


def in_table(results: dict[tuple[str, str], Result], table: Table) -> list[Result]:
    places = [(kind, column) for kind in table.types for column in table.columns]
    return [results[place] for place in places if place in results]


def write(results: dict[tuple[str, str], Result]) -> None:
    RESULTS.write_text("".join(json.dumps(asdict(result)) + "\n" for result in in_order(results)))
    PAGE.write_text(page(results))


def page(results: dict[tuple[str, str], Result]) -> str:
    """Return the text of docs/support.md."""
    return "".join(section(results, table) for table in TABLES)


def section(results: dict[tuple[str, str], Result], table: Table) -> str:
    """Return a table with what stands before and below it."""
    names = ("type", "family", "attention", *table.columns)
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for kind in table.types:
        cells = [shown(results.get((kind, column))) for column in table.columns]
        lines.append("| " + " | ".join((kind, BY_TYPE[kind].title, BY_TYPE[kind].attention[0], *cells)) + " |")
    found = in_table(results, table)
    return table.head + "\n".join([*lines, *remarks(found, dash=True), *remarks(found, dash=False)]) + "\n"


def shown(result: Result | None) -> str:
    if result is None:
        return "not measured"
    return "-" if result.value is None else f"{result.value:.0e}".replace("e-0", "e-")


def remarks(results: list[Result], dash: bool) -> list[str]:
    """Return the reasons of dashes, or the remarks on numbers, each with its columns and types."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for result in results:
        if result.note and (result.value is None) == dash:
            kinds.setdefault(result.note, {}).setdefault(result.type, []).append(result.column)
    lines = ["", "Dashes:" if dash else "Remarks:", ""] if kinds else []
    for note, columns in kinds.items():
        groups: dict[str, list[str]] = {}
        for kind, names in columns.items():
            groups.setdefault(", ".join(f"**{name}**" for name in names), []).append(kind)
        lines += [f"- {names} of {', '.join(group)}: {note}" for names, group in groups.items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of the names of types")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=[*COLUMNS])
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    options = parser.parse_args()
    results, processes = read_results(), Processes()
    try:
        for table in TABLES:
            for kind in table.types:
                if not options.words or any(word in kind for word in options.words):
                    columns = [column for column in table.columns if column in options.columns]
                    wanted = [c for c in columns if options.again or (kind, c) not in results]
                    measure_row(results, processes, table, kind, wanted)
    finally:
        processes.close()
    write(results)


def measure_row(
    results: dict[tuple[str, str], Result], processes: Processes, table: Table, kind: str, columns: list[str]
) -> None:
    """Measure columns of a type, and write each result."""
    with tempfile.TemporaryDirectory() as temporary:
        model = table.model(kind, Path(temporary), processes)
        for column in columns:
            try:
                results[kind, column] = measure(model, column, table.columns)
            except ray.exceptions.RayError as error:  # an engine cannot be built where one has failed
                print(kind, column, error, flush=True)
                processes.forget_engines()
                continue
            print(results[kind, column], flush=True)
            write(results)
        family_errors.alone.cache_clear()


if __name__ == "__main__":
    main()
