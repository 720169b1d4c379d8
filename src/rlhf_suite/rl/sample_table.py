"""Samples as a table with one row per ledger: the one form in which they are kept, for readers and for the suite.

What people and reports read: texts, rewards, how the episode ended, and each number that a reward or an agent gave, as
the column `reward/<name>` or `agent/<name>`; empty where it gave none. What training reads: a list for each number per
token. In a checkpoint a row also has what only a continued run needs, so that what is read equals what was written.

Of an agent, `turns` has for each turn that was sampled into a ledger where it ends, the seconds of sampling and of the
answer, and its tool calls. What a judge wrote is in `reward/reason`, or `reward/<source>/reason`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlhf_suite.data.ending import Ending
from rlhf_suite.data.store import IMAGES, PromptCodec, read_images
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import CallRecord, Trajectory, TurnRecord, routes_of
from rlhf_suite.foreign_files import parquet
from rlhf_suite.rl.samples import ScoredTrajectories

FILE = "samples.parquet"  # in a folder of a checkpoint
OF_PROMPT, OF_AGENT, OF_REWARD = "prompt.", "agent/", "reward/"  # begin the names of columns
OF_EPISODE = "episode."  # of the numbers that an agent gave, before a reward was asked
OF_TEXTS = {"text": "prompt", "label": "label", "datasource": "datasource"}  # fields of a prompt that people read
BASELINE, RETRIES = "greedy_reward", "reward_retries"
Column = tuple[str, pa.DataType, Callable[[Trajectory], Any]]

TEXT, WHOLE, REAL = pa.string(), pa.int64(), pa.float64()
# What a row says of its ledger: the column, its type, and the value.
SHOWN: tuple[Column, ...] = (
    ("prompt", TEXT, lambda t: t.prompt.text),
    ("label", TEXT, lambda t: t.prompt.label),
    ("datasource", TEXT, lambda t: t.prompt.datasource),
    ("source", TEXT, lambda t: t.prompt.source),
    ("prompt_index", WHOLE, lambda t: t.prompt.index),
    ("group", WHOLE, lambda t: t.group),
    ("sample", WHOLE, lambda t: t.sample),
    ("ledger", WHOLE, lambda t: t.fork),
    ("finish_reason", TEXT, lambda t: t.ending.finish_reason),
    ("ending", TEXT, lambda t: t.ending.value),
)
ROLE: Column = ("role", TEXT, lambda t: t.role)  # a column that a file lacks where no episode has roles
CONTINUED: tuple[Column, ...] = (  # what a checkpoint has besides
    ("is_greedy", pa.bool_(), lambda t: t.greedy),
    ("failure", TEXT, lambda t: t.failure),
    ("environment_reward", REAL, lambda t: t.reward),
    ("environment_score", REAL, lambda t: t.score),
    ("images", IMAGES, lambda t: [vars(image) for image in t.images]),
)
TOKENS = {"ids": "ids", "owner": "owner", "engine_log_probs": "engine_log_probs", "weight_version": "version"}
CALLS = pa.struct([(name, pa.string()) for name in ("name", "arguments", "problem", "answer")])
RECORDS = pa.list_(
    pa.struct([("end", pa.int32()), ("sampling_s", REAL), ("answer_s", REAL), ("calls", pa.list_(CALLS))])
)
OF_TURNS = "turns"  # the column of the records, which a file lacks where there are none
TURNS = "turn_rewards"  # a column of tokens that a file lacks where nobody gave any
ROUTES = "routes"  # one with M lists of K numbers per token, which a file lacks where nothing was recorded


def columns(samples: ScoredTrajectories) -> dict[str, pa.Array]:
    """Return what a person reads of each ledger. `reward_query` is the whole text as rewards saw it; the metric
    `reward/<name>` is the mean of the column of that name."""
    given = {
        "response": pa.array(samples.responses),
        "reward_query": pa.array(samples.queries),
        "reward": pa.array(samples.rewards),
        "score": pa.array(samples.scores),
        RETRIES: None if samples.retries is None else pa.array(samples.retries),
        BASELINE: None if samples.greedy is None else pa.array(samples.greedy),
    }
    known = {name: column for name, column in given.items() if column is not None}
    known |= numbers(samples.extra, number_column) | numbers(samples.reasons or (), number_column, TEXT)
    shown = (*SHOWN, ROLE) if any(t.role for t in samples.trajectories) else SHOWN
    return columns_of(shown, samples.trajectories) | known | turn_column(samples.trajectories)


def turn_column(trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    """Return the column of the records of turns, if there are any."""
    if not any(t.turn_records for t in trajectories):
        return {}
    return {OF_TURNS: pa.array([[asdict(record) for record in t.turn_records] for t in trajectories], RECORDS)}


def columns_of(of: Sequence[Column], trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    """Return these columns of ledgers."""
    return {name: pa.array([value(t) for t in trajectories], kind) for name, kind, value in of}


def numbers(
    given: Sequence[Mapping[str, Any]], column: Callable[[str], str], kind: pa.DataType = REAL
) -> dict[str, pa.Array]:
    """Return a column for each number (or text) that some rows have, null in the others. `column`: its name, by the
    number's."""
    names = sorted({name for numbers in given for name in numbers})
    return {column(name): pa.array([numbers.get(name) for numbers in given], kind) for name in names}


def number_column(name: str) -> str:
    """Return the name in metrics and files of a number of samples: agents have names of their own."""
    return name if name.startswith(OF_AGENT) else f"{OF_REWARD}{name}"


def token_columns(values: Mapping[str, NDArray[Any]], lengths: Sequence[int]) -> dict[str, pa.Array]:
    """Return columns with the numbers per token [T] of each ledger. None of them is missing: a file that allows for it
    takes half as long again to write."""
    offsets = pa.array(np.append(0, np.cumsum(lengths)).astype(np.int32))

    def column(of_tokens: NDArray[Any]) -> pa.Array:
        values = pa.array(of_tokens.reshape(-1))
        for size in reversed(of_tokens.shape[1:]):
            values = pa.FixedSizeListArray.from_arrays(values, size)
        number = pa.field("element", values.type, nullable=False)
        return pa.ListArray.from_arrays(offsets, values, type=pa.list_(number))

    return {name: column(of_tokens) for name, of_tokens in values.items()}


def write_table(file: Path, shown: Mapping[str, pa.Array], tokens: Mapping[str, pa.Array]) -> None:
    """Write a file with these columns; `tokens` are those with lists of numbers."""
    write_rows(file, make_table(shown, tokens))


def make_table(shown: Mapping[str, pa.Array], tokens: Mapping[str, pa.Array]) -> pa.Table:
    """Return a table with these columns; `tokens` are those with lists of numbers."""
    fields = [pa.field(name, column.type) for name, column in shown.items()]
    fields += [pa.field(name, column.type, nullable=False) for name, column in tokens.items()]
    return pa.table({**shown, **tokens}, pa.schema(fields))


def write_rows(file: Path, table: pa.Table) -> None:
    """Write a table of samples."""
    # Nothing reads statistics. A dictionary pays for texts only: of ids it saves a byte each, and takes long.
    shown = [column.name for column in table.schema if column.nullable]
    pq.write_table(table, file, write_statistics=False, use_dictionary=shown)


def write_samples(folder: Path, samples: ScoredTrajectories) -> None:
    """Write samples into a folder of a checkpoint; `read_samples` returns them as they are."""
    trajectories = samples.trajectories
    values = {name: np.concatenate([getattr(t, field) for t in trajectories]) for name, field in TOKENS.items()}
    values[TURNS] = np.concatenate([t.turn_rewards for t in trajectories])
    values["ids"] = values["ids"].astype(np.int32)
    if (routes := routes_of(trajectories)) is not None:
        values[ROUTES] = routes
    kept = columns_of(CONTINUED, trajectories) | numbers(
        [t.extra for t in trajectories], lambda name: OF_EPISODE + name
    )
    shown = columns(samples) | kept | prompt_columns([t.prompt for t in trajectories])
    write_table(folder / FILE, shown, token_columns(values, [len(t.ids) for t in trajectories]))


def prompt_columns(prompts: Sequence[Prompt]) -> dict[str, pa.Array]:
    """Return what a checkpoint has of prompts beside the columns that people read, in the first row of each prompt."""
    first = {prompt.index: prompt for prompt in reversed(prompts)}
    unseen = dict(zip(first, range(len(first)), strict=True))
    places = pa.array([unseen.pop(prompt.index, None) for prompt in prompts], WHOLE)
    stored = PromptCodec().columns([*first.values()])
    return {f"{OF_PROMPT}{name}": column.take(places) for name, column in stored.items() if name not in OF_TEXTS}


def read_records(rows: Sequence[Mapping[str, Any]]) -> list[TurnRecord]:
    """Return the records of the turns of a ledger."""
    return [TurnRecord(**{**row, "calls": [CallRecord(**call) for call in row["calls"]]}) for row in rows]


def has_samples(folder: Path) -> bool:
    """Return whether `write_samples` wrote into the folder."""
    return (folder / FILE).exists()


def read_samples(folder: Path) -> ScoredTrajectories:
    """Return what `write_samples` wrote."""
    return read_table(folder / FILE)


def read_table(file: Path) -> ScoredTrajectories:
    """Return the samples in a file of this form. What it has no column for is as it is by default."""
    with parquet(file) as table:
        return Rows(table.read()).samples()


class Rows:
    """The rows of a table of samples."""

    def __init__(self, table: pa.Table) -> None:
        self.table, self.names = table.combine_chunks(), table.column_names

    def samples(self) -> ScoredTrajectories:
        """Return the samples that the rows are of."""
        given = [name for name in self.names if name.startswith((OF_AGENT, OF_REWARD))]
        reasons = [name for name in given if self.table.field(name).type == TEXT]
        of_reward = [name for name in given if name not in reasons]
        return ScoredTrajectories(
            self.trajectories(),
            rewards=self.array("reward", np.float32),
            scores=self.array("score", np.float32),
            responses=self.values("response"),
            queries=self.values("reward_query"),
            extra=self.numbers({name: name.removeprefix(OF_REWARD) for name in of_reward}),
            greedy=self.array(BASELINE, np.float32) if BASELINE in self.names else None,
            retries=self.array(RETRIES, np.int32) if RETRIES in self.names else None,
            reasons=self.numbers({name: name.removeprefix(OF_REWARD) for name in reasons}) if reasons else None,
        )

    def trajectories(self) -> list[Trajectory]:
        """Return the ledgers."""
        types: dict[str, type[np.generic]] = {
            "ids": np.int64,
            "owner": np.int8,
            "engine_log_probs": np.float32,
            "weight_version": np.int32,
        }
        per_token = [self.tokens(name, kind) for name, kind in types.items()]
        none = [np.zeros(len(ids), np.float32) for ids in per_token[0]]
        per_token.append(self.tokens(TURNS, np.float32) if TURNS in self.names else none)
        own = [name for name in self.names if name.startswith(OF_EPISODE)]
        rest: dict[str, Sequence[Any] | None] = {
            "fork": self.values("ledger"),
            "ending": [Ending(ending) for ending in self.values("ending")],
            "routes": self.routes() if ROUTES in self.names else None,
            "images": [read_images(images) for images in self.table["images"]] if "images" in self.names else None,
            "extra": self.numbers({name: name.removeprefix(OF_EPISODE) for name in own}),
            "failure": self.values("failure", ""),
            "reward": self.values("environment_reward"),
            "score": self.values("environment_score"),
            "role": self.values("role", ""),
            "greedy": self.values("is_greedy", False),
            "turn_records": [read_records(records) for records in self.values(OF_TURNS, ())],
        }
        rows = zip(self.prompts(), self.values("group"), self.values("sample"), *per_token, strict=True)
        return [
            Trajectory(*row, **{name: column[place] for name, column in rest.items() if column is not None})
            for place, row in enumerate(rows)
        ]

    def prompts(self) -> list[Prompt]:
        """Return the prompt of each row, one object for all rows of a prompt. Without the columns that a checkpoint
        has, it is its texts alone."""
        stored = {name.removeprefix(OF_PROMPT): name for name in self.names if name.startswith(OF_PROMPT)}
        columns = {**OF_TEXTS, **stored}
        table, codec = pa.table({name: self.table[column] for name, column in columns.items()}), PromptCodec()
        known: dict[int, Prompt] = {}
        places = zip(self.values("prompt_index"), self.values("source"), strict=True)
        for row, (index, source) in enumerate(places):
            if index not in known:
                texts = {name: table[name][row].as_py() for name in OF_TEXTS}
                prompt = codec.item(table, row) if stored else Prompt(ids=[], where="", **texts)
                known[index] = replace(prompt, index=index, source=source)
        return [known[index] for index in self.values("prompt_index")]

    def values(self, name: str, default: Any = None) -> list[Any]:
        """Return the values of a column, or `default` for each row where there is no column of this name."""
        return list(self.table[name].to_pylist()) if name in self.names else [default] * len(self.table)

    def array(self, name: str, kind: type[np.generic]) -> NDArray[Any]:
        """Return a column of numbers, as an array of its own."""
        numbers: NDArray[Any] = self.table[name].to_numpy().astype(kind)
        return numbers

    def numbers(self, columns: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the numbers, or texts, that each row has; `columns`: the name of each by that of its column."""
        values = {name: self.values(column) for column, name in columns.items()}
        return [
            {name: column[row] for name, column in values.items() if column[row] is not None}
            for row in range(len(self.table))
        ]

    def tokens(self, name: str, kind: type[np.generic]) -> list[NDArray[Any]]:
        """Return what each row has for its tokens."""
        return [part.astype(kind) for part in self.parts(name)]

    def routes(self) -> list[NDArray[Any] | None]:
        """Return the routes of each row; None where it has none."""
        return [part.copy() if (part >= 0).any() else None for part in self.parts(ROUTES)]

    def parts(self, name: str) -> list[NDArray[Any]]:
        """Return the numbers of each row for its tokens, [T, ...]."""
        column = self.table[name].combine_chunks()
        values, shape = column.values, list[int]()
        while pa.types.is_fixed_size_list(values.type):
            shape.append(values.type.list_size)
            values = values.flatten()
        return np.split(values.to_numpy().reshape(-1, *shape), column.offsets.to_numpy()[1:-1])
