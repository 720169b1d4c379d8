"""The samples of a run as its page shows them: texts, rewards and numbers of each, and the tokens of some.

If there are more tokens than a page holds, every file of samples gets a fair share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rlhf_suite.foreign_text import printable
from rlhf_suite.report.sample_files import (
    CALLS,
    NUMBERS_OF_TURN,
    OF_TURNS,
    TEXTS,
    TEXTS_OF_CALL,
    Reader,
    SampleFile,
    is_per_token,
    is_text,
    sample_files,
    shares,
)
from rlhf_suite.report.summary import response_of
from rlhf_suite.run_folders.run_folder import RunFolder

CHEAP = 8  # tokens without numbers that take the room of one with numbers
BINS = 24  # of the histogram of rewards
LARGEST, LEAST_WIDTH = 1e38, 1e-9  # of a reward in it; of all bins together, beside the largest reward
NOT_SHOWN = ("reward_query", "source", "finish_reason")  # columns of texts that others say better
UNKNOWN = -(2**15)  # a number that does not exist, among those of 16 bits

Columns = Mapping[str, NDArray[Any]]
# What a page shows of a token: its name, the columns of a rollout file that it needs, and the value.
CHANNELS: tuple[tuple[str, tuple[str, ...], Callable[..., NDArray[Any]]], ...] = (
    ("advantage", ("advantages",), lambda advantages: advantages),
    ("engine - trainer", ("engine_log_probs", "old_log_probs"), np.subtract),
    ("log-prob", ("old_log_probs",), lambda log_probs: log_probs),
    ("entropy", ("entropies",), lambda entropies: entropies),
    ("policy - reference", ("old_log_probs", "ref_log_probs"), np.subtract),
    ("policy - teacher", ("old_log_probs", "teacher_log_probs"), np.subtract),
    ("value", ("values",), lambda values: values),
    ("return", ("returns",), lambda returns: returns),
    ("turn reward", ("turn_rewards",), lambda rewards: rewards),
    ("correction", ("correction",), lambda weights: weights),
)


@dataclass(frozen=True)
class Room:
    """How much of a run its page holds, so that the page stays below 8 MB."""

    points: int = 2000  # of a curve; of a longer one every second, third, ... point is drawn
    samples: int = 10_000
    tokens: int = 100_000  # that models wrote, of the samples that are shown token by token
    turns: int = 20_000  # of agents, whose times and tool calls are shown
    characters: int = 10_000_000  # of all texts; the longest are cut

    def divide(self, runs: int) -> Room:
        """Return the part of each of several runs on one page."""
        points, others = max(100, self.points // runs), (self.samples, self.tokens, self.turns, self.characters)
        return Room(points, *(size // runs for size in others))


@dataclass
class Arrays:
    """Numbers of a page that are not JSON, end to end."""

    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, values: NDArray[Any]) -> dict[str, Any]:
        """Append an array; return where it is, in bytes, and its type."""
        content = values.tobytes()
        place = {"type": values.dtype.str[1:], "offset": self.size, "length": len(values)}
        self.parts.append(content + bytes(-len(content) % 4))
        self.size += len(self.parts[-1])
        return place

    def add_numbers(self, values: NDArray[Any]) -> dict[str, Any]:
        """Append floats as 16-bit integers and the factor that makes them floats again. NaN is `UNKNOWN`."""
        known = np.isfinite(values)
        largest = float(np.abs(values[known]).max(initial=0.0))
        scale = largest / (2**15 - 1) or 1.0
        whole = np.where(known, np.round(np.where(known, values, 0) / scale), UNKNOWN).astype("<i2")
        return self.add(whole) | {"scale": scale}


@dataclass
class Texts:
    """The different texts of a page. Many samples share a prompt, a label or a data source."""

    numbers: dict[str, int] = field(default_factory=dict)

    def add(self, text: str | None) -> int:
        """Return the number of a text."""
        return self.numbers.setdefault(text or "", len(self.numbers))

    def shorten(self, characters: int) -> list[str]:
        """Return the texts by their numbers, safe to look at, the longest of them cut to fit in `characters`."""
        lengths = shares([*map(len, self.numbers)], characters)
        return [safe(text, length) for text, length in zip(self.numbers, lengths, strict=True)]


@lru_cache(maxsize=30_000)
def safe(text: str, length: int) -> str:
    """Return a text that is safe to look at, cut to a length. A page that is made again asks for most of them again."""
    return printable(text, length, keep_lines=True)


def samples_of(
    folder: RunFolder, arrays: Arrays, spell: Callable[[Sequence[int]], list[str]], room: Room, reader: Reader
) -> dict[str, Any] | None:
    """Return what a page shows of the samples of a run; None if it has none. `spell` returns the texts of token ids."""
    files = sample_files(folder, room.samples, reader)
    if not files:
        return None
    texts, tables = Texts(), [reader.read(file.path, file.shown) for file in files]
    columns: dict[str, list[Any]] = {name: [] for name in ("kind", "step", *TEXTS)}
    for file in files:
        columns["kind"] += [int(file.kind == "evaluation")] * file.shown
        columns["step"] += [file.step] * file.shown
    alike = [pa.concat_tables(tables[first:end]) for first, end in stretches_alike(tables)]
    others = names_of_other_texts(tables)
    columns |= {name: [] for name in others}
    for table in alike:
        for name, numbers in text_columns(table, texts, others).items():
            columns[name] += numbers
    rewards = [reader.rewards(file.path) for file in files]
    turns = turns_of(tables, texts, room.turns)
    return {
        "total": sum(file.rows for file in files),
        "count": len(columns["step"]),
        "columns": {printable(name): arrays.add(np.asarray(values, "<i4")) for name, values in columns.items()},
        "numbers": {name: arrays.add(single(values)) for name, values in number_columns(alike)},
        "others": [printable(name) for name in others],
        "texts": texts.shorten(room.characters),
        "histogram": histogram(files, rewards),
        "tokens": tokens_of(tables, arrays, spell, room.tokens),
        "turns": turns,
    }


def single(values: NDArray[Any]) -> NDArray[Any]:
    """Return numbers in single precision; those that are too large for it are infinite."""
    with np.errstate(over="ignore"):
        return values.astype("<f4")


def turns_of(tables: Sequence[pa.Table], texts: Texts, limit: int) -> dict[int, list[list[Any]]]:
    """Return how the turns of the first samples of each file went, at most `limit` turns in all, by the number of the
    sample: where the turn ends, the seconds of sampling and of the answer, and for each tool call the numbers of its
    texts: name, arguments, problem and answer."""
    begins = np.append(0, np.cumsum([len(table) for table in tables]))
    columns = {place: table[OF_TURNS] for place, table in enumerate(tables) if OF_TURNS in table.column_names}
    counts = {place: np.asarray(pc.list_value_length(column).fill_null(0)) for place, column in columns.items()}
    turns: dict[int, list[list[Any]]] = {}
    for place, share in zip(columns, shares([int(count.sum()) for count in counts.values()], limit), strict=True):
        shown = int((counts[place].cumsum() <= share).sum())
        for row, records in enumerate(columns[place].slice(0, shown).to_pylist()):
            if records:
                turns[int(begins[place]) + row] = [turn_of(record, texts) for record in records if record]
    return turns


def turn_of(record: Mapping[str, Any], texts: Texts) -> list[Any]:
    """Return one turn as a page has it. Numbers that JSON does not have are None."""
    calls = [[texts.add(call[name]) for name in TEXTS_OF_CALL] for call in record[CALLS] or () if call]
    numbers = (record[name] for name in NUMBERS_OF_TURN)
    return [*(number if number is not None and math.isfinite(number) else None for number in numbers), calls]


def names_of_other_texts(tables: Sequence[pa.Table]) -> list[str]:
    """Return the columns of texts beside those that all samples have, such as the reasons of a judge."""
    texts = {name: is_text(table.schema.field(name).type) for table in tables for name in table.column_names}
    known = (*TEXTS, *NOT_SHOWN, "kind", "step")
    return sorted(name for name, holds_text in texts.items() if holds_text and name not in known)


def text_columns(table: pa.Table, texts: Texts, others: Sequence[str] = ()) -> dict[str, list[int]]:
    """Return the numbers of the texts of each sample."""
    names = (*TEXTS, *others)
    rows = table.select([name for name in (*names, "reward_query") if name in table.column_names]).to_pylist()
    values = [row | {"response": response_of(row) if "reward_query" in row else row["response"]} for row in rows]
    return {name: [texts.add(row.get(name)) for row in values] for name in names}


def number_columns(tables: Sequence[pa.Table]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield each number that samples have, as [samples], NaN for those that lack it: those of the file, and those that
    sum up its tokens."""
    numbers_of_tables = [numbers_in(table) | numbers_of_tokens(table) for table in tables]
    for name in dict.fromkeys(name for numbers in numbers_of_tables for name in numbers):
        missing = (np.full(len(table), np.nan) for table in tables)
        yield (
            name,
            np.concatenate([numbers.get(name, none) for numbers, none in zip(numbers_of_tables, missing, strict=True)]),
        )


def numbers_in(table: pa.Table) -> dict[str, NDArray[Any]]:
    """Return the columns with a number for each sample."""
    kinds = (pa.types.is_floating, pa.types.is_integer)
    names = [field.name for field in table.schema if any(is_kind(field.type) for is_kind in kinds)]
    return {name: table[name].to_numpy().astype(np.float64) for name in names}


def numbers_of_tokens(table: pa.Table) -> dict[str, NDArray[Any]]:
    """Return of each sample: how many tokens the model wrote, their mean advantage, and the largest difference between
    the log-probs of engine and trainer. Empty where the file has no tokens."""
    if "owner" not in table.column_names or not len(table):
        return {}
    columns, starts = token_columns(table)
    mask = columns["mask"] > 0  # what the model wrote
    length = np.add.reduceat(mask, starts, dtype=np.float64)
    result = {"length": length}
    if "advantages" in columns:
        total = np.add.reduceat(np.where(mask, columns["advantages"], 0), starts, dtype=np.float64)
        result["advantage"] = total / np.maximum(length, 1)
    if {"engine_log_probs", "old_log_probs"} <= columns.keys():
        gap = np.abs(columns["engine_log_probs"] - columns["old_log_probs"])
        result["mismatch"] = np.maximum.reduceat(np.where(mask, gap, 0), starts).astype(np.float64)
    return result


def token_columns(table: pa.Table) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
    """Return the columns with a number for each token, [T], and where each sample begins, [samples]. Lists of other
    things are left out."""
    lists = {field.name: table[field.name].combine_chunks() for field in table.schema if pa.types.is_list(field.type)}
    lengths = lists["owner"].value_lengths()
    flat = {name: column.flatten().to_numpy() for name, column in lists.items() if is_per_token(column, lengths)}
    return flat, np.append(0, np.asarray(lengths, np.int64).cumsum())[:-1]


def histogram(files: Sequence[SampleFile], rewards: Sequence[NDArray[Any]]) -> dict[str, Any]:
    """Return how many samples of each file have which reward: the edges of bins [BINS + 1], counts [files, BINS]. Files
    in which no reward is known, such as those of samples that clients have scored themselves, are left out."""
    finite = [values[np.isfinite(values)] for values in rewards]
    files = [file for file, values in zip(files, finite, strict=True) if len(values)]
    known = [values for values in finite if len(values)]
    edges = edges_of_bins(np.concatenate([np.zeros(0), *known]))
    counts = [np.histogram(values.clip(-LARGEST, LARGEST), edges)[0].tolist() for values in known]
    return {
        "edges": edges.tolist(),
        "counts": counts,
        "kinds": [file.kind for file in files],
        "steps": [file.step for file in files],
    }


def edges_of_bins(values: NDArray[Any]) -> NDArray[Any]:
    """Return the edges of BINS bins from the least to the largest value, [BINS + 1]. Values that are equal, or differ
    by no more than the error of a sum, are in the middle of bins around them."""
    low, high = (float(end) for end in (values.min(), values.max())) if len(values) else (0.0, 1.0)
    low, high = (min(max(end, -LARGEST), LARGEST) for end in (low, high))
    size = max(abs(low), abs(high))
    if high - low <= max(LEAST_WIDTH * size, float(np.finfo(np.float32).tiny)):
        margin = max(0.5, 1e-6 * size)
        low, high = low - margin, high + margin
    return np.linspace(low, high, BINS + 1)


def tokens_of(
    tables: Sequence[pa.Table], arrays: Arrays, spell: Callable[[Sequence[int]], list[str]], limit: int
) -> dict[str, Any] | None:
    """Return the tokens of the first samples of each file, T in all, with what is known of each; None if no file has
    tokens. `samples` has the number of each sample, `starts` where its tokens begin, and the end of the last."""
    parts = [*token_parts(tables, limit)]
    if not parts:
        return None
    names = set.intersection(*(set(columns) for _, columns, _ in parts))
    columns = {name: np.concatenate([part[name] for _, part, _ in parts]) for name in names}
    starts = np.append(0, np.concatenate([lengths for *_, lengths in parts]).cumsum())
    ids, places = np.unique(columns["ids"], return_inverse=True)
    is_written = columns["mask"] > 0
    channels = {
        name: arrays.add_numbers(np.where(is_written, value(*(columns[need] for need in needs)), np.nan))
        for name, needs, value in CHANNELS
        if names.issuperset(needs)
    }
    return {
        "samples": arrays.add(np.concatenate([rows for rows, *_ in parts]).astype("<i4")),
        "starts": arrays.add(starts.astype("<i4")),
        "vocabulary": [printable(text, keep_lines=True) for text in spell(ids.tolist())],
        "ids": arrays.add(places.astype("<u2" if len(ids) < 2**16 else "<i4")),
        "owner": arrays.add(columns["owner"].astype("<i2")),
        "version": arrays.add(columns["weight_version"].astype("<i4")),
        "channels": channels,
    }


def token_parts(
    tables: Sequence[pa.Table], limit: int
) -> Iterator[tuple[NDArray[Any], dict[str, NDArray[Any]], NDArray[Any]]]:
    """Yield for each stretch of files with the same columns, which have tokens, of the first samples of each file:
    their numbers among all samples of the page, the columns of their tokens, and how many each has."""
    begins = np.append(0, np.cumsum([len(table) for table in tables]))
    counts = dict.fromkeys(range(len(tables)), 0)
    room = {place: room_of_samples(table) for place, table in enumerate(tables) if "owner" in table.column_names}
    for place, share in zip(room, shares([int(tokens.sum()) for tokens in room.values()], limit), strict=True):
        counts[place] = int((room[place].cumsum() <= share).sum())
    for first, end in stretches_alike(tables):
        places = [place for place in range(first, end) if counts[place]]
        if places:
            table = pa.concat_tables([tables[place].slice(0, counts[place]) for place in places])
            numbers = np.concatenate([begins[place] + np.arange(counts[place]) for place in places])
            lengths = np.asarray(table["owner"].combine_chunks().value_lengths(), np.int64)
            yield numbers, token_columns(table)[0], lengths


def room_of_samples(table: pa.Table) -> NDArray[Any]:
    """Return of each sample the room that its tokens take: those that the model wrote, and CHEAP others as one."""
    columns, starts = token_columns(table.select(["owner", "mask"]))
    lengths = np.diff(np.append(starts, len(columns["mask"])))
    written = np.add.reduceat(columns["mask"] > 0, starts, dtype=np.int64) if len(starts) else lengths
    return np.asarray(written + lengths // CHEAP)


def stretches_alike(tables: Sequence[pa.Table]) -> list[tuple[int, int]]:
    """Return the stretches of neighbours that have the same columns: where each begins and ends. One large table takes
    far less time than the thousands that a long run has."""
    changes = [at for at in range(1, len(tables)) if not tables[at].schema.equals(tables[at - 1].schema)]
    return [*pairwise([0, *changes, len(tables)])] if tables else []
