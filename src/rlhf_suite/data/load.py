"""From the sources that flags name to encoded items, for every task; encoded items are cached on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar

from rlhf_suite.config.check.sources import metric_names
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.cache import evict, fingerprint
from rlhf_suite.data.combine import combine
from rlhf_suite.data.encode import Encoder, FormattedEncoder, encode_rows
from rlhf_suite.data.row import BadRows, Row, RowError
from rlhf_suite.data.sources import Located, Sources, limit_rows, locate
from rlhf_suite.data.store import SUMMARY, Store, in_memory, open_folder, open_in_process, write_folder
from rlhf_suite.disk import cache_folder, sweep_abandoned, write_aside
from rlhf_suite.errors import UserError
from rlhf_suite.python_source import digests
from rlhf_suite.waits import waiting

Encoded = TypeVar("Encoded")
CACHE, GIB = "encoded", 1 << 30
Rows = Iterator[Row | RowError]
Shown = Callable[[Rows, int | None, str], Rows]  # passes rows on and may show how many there are, of about how many


def show_nothing(rows: Rows, total: int | None, unit: str) -> Rows:
    """Return the rows as they are."""
    return rows


@dataclass
class Loader(Generic[Encoded]):
    """Loads sources as the items that `encoder` makes of their usable rows. Other rows are counted in `bad`."""

    encoder: Encoder[Encoded]
    data: DataConfig
    seed: int
    bad: BadRows
    shown: Shown = show_nothing
    contents: list[list[str]] = field(default_factory=list)  # the digests of the files of each loaded source

    def __post_init__(self) -> None:
        if self.data.row_format is not None:
            own = " ".join(digests(self.data.row_format))
            self.encoder = FormattedEncoder(self.encoder, self.data.row_format, own)

    @property
    def contents_digest(self) -> str:
        """Return a digest of the file contents of all sources loaded so far, wherever the files are."""
        return hashlib.sha256(json.dumps(self.contents).encode()).hexdigest()

    def load(self, sources: Sources) -> Sequence[Encoded]:
        """Return the items of all sources."""
        return combine(self.parts(sources), sources, self.seed)

    def load_with_names(self, sources: Sources) -> tuple[Sequence[Encoded], Sequence[str]]:
        """Return the items of all sources, and for each item the name of its source in metrics."""
        parts = self.parts(sources)
        names = [[name] * len(part) for name, part in zip(metric_names(sources.names), parts, strict=True)]
        return combine(parts, sources, self.seed), combine(names, sources, self.seed)

    def parts(self, sources: Sources) -> list[Sequence[Encoded]]:
        """Return the items of each source. Afterwards, reduce the cache to its bound."""
        parts = [self.source(name, sources) for name in sources.names]
        if self.data.cache_enable:
            evict(cache_folder(CACHE), SUMMARY, self.data.cache_max_gb * GIB)
        return parts

    def source(self, name: str, sources: Sources) -> Sequence[Encoded]:
        """Return all items of one source, from the cache if they are there.

        Raises:
            UserError: the source has no usable row, or too many bad rows.
        """
        located = locate(name, sources.split, sources.flags)
        contents = located.contents
        self.contents.append(contents)
        is_cached = self.data.cache_enable and getattr(self.data, "image_key", None) is None
        folder = self.folder(contents, name, sources) if is_cached else None
        with waiting(f"the rows of {name}"):
            store, bad = (folder and open_folder(folder)) or self.encode(located, name, sources, folder)
        bad.check_share(self.data.max_skipped_share, f"{sources.flags.dataset}={name}")
        self.bad.merge(bad)
        return store

    def folder(self, contents: list[str], name: str, sources: Sources) -> Path:
        """Return the cache folder for the items of a source. Its name depends on everything that the
        items depend on."""
        taken = (name, sources.split, sources.max_samples, contents)
        return cache_folder(CACHE) / fingerprint(self.encoder, self.data.on_bad_row, taken)

    def encode(
        self, located: Located, name: str, sources: Sources, folder: Path | None
    ) -> tuple[Store[Encoded], BadRows]:
        """Encode the rows of one source into `folder`, or into memory where `folder` is None."""
        bad = BadRows(self.data.on_bad_row)
        rows = self.shown(
            limit_rows(located.rows(), sources.max_samples), estimate_rows(located, sources), f"rows of {name}"
        )
        items = encode_rows(self.encoder, rows, bad, self.data.dataloader_num_workers)
        first = next(items, None)
        if first is None:
            raise UserError(f"{sources.flags.dataset}: no usable row in {name!r}. {bad.summary()}".strip())
        items = chain([first], items)
        if folder is None:
            return in_memory(items), bad
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete entry; a complete one would have been opened
        sweep_abandoned(folder.parent)
        with write_aside(folder, keep=True) as aside:
            write_folder(items, aside, bad)
        return open_in_process(folder), bad


def estimate_rows(located: Located, sources: Sources) -> int | None:
    """Return about how many rows of a source are read, without a look at files of which only the beginning is."""
    return sources.max_samples or located.num_rows()
