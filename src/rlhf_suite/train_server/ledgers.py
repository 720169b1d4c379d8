"""What clients have sampled, kept as rollouts are: `rollouts/step_<n>.parquet` has the samples that were drawn before
optimiser step n, with who wrote each token, the engine's log-prob and the weight version. Rewards are the client's.

All files together have `serve.rollouts_mb`: the oldest make room for new ones.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rlhf_suite.data.trajectory import Trajectory, to_batch
from rlhf_suite.disk import DiskError
from rlhf_suite.errors import UserError
from rlhf_suite.foreign_files import parquet
from rlhf_suite.rl.rollout_file import SampleFiles, append_rows
from rlhf_suite.rl.sample_table import SHOWN, columns_of, token_columns
from rlhf_suite.run_folders.run_folder import list_samples_files, samples_file
from rlhf_suite.tracking.console import show_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WRITTEN_TOKENS = 2**18  # that wait to be written, at most; a server that is killed loses these
STEP_TOKENS = 2**22  # of one step that are kept


@dataclass(frozen=True)
class Drawn:
    """The samples of a request, by which names its client knows them, and the address of the weights they are from."""

    ledgers: Sequence[Trajectory]
    names: Sequence[str]
    weights: str

    @property
    def tokens(self) -> int:
        """The tokens of all ledgers, prompts included."""
        return sum(len(ledger.ids) for ledger in self.ledgers)


class Ledgers:
    """Keeps samples of a server. Calls may come from several threads."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, room_mb: float, step: int) -> None:
        self.folder, self.tokenizer, self.room = folder, tokenizer, int(room_mb * 2**20)
        self.files, self.lock = SampleFiles(), threading.Lock()
        self.begin_step(step + 1)
        path = samples_file(folder, step + 1)
        if path.exists():  # those after the last step of an earlier server
            with parquet(path) as file:
                self.requests = int(file.metadata.num_rows)

    def begin_step(self, step: int) -> None:
        """Keep samples for the file of a step."""
        self.step, self.requests, self.kept, self.left_out = step, 0, 0, 0
        self.waiting: list[Drawn] = []

    def add(self, drawn: Drawn) -> None:
        """Keep the samples of a request, if there is room for more of this step."""
        with self.lock:
            if self.room == 0:
                return
            if self.kept + drawn.tokens > STEP_TOKENS:
                self.left_out += len(drawn.ledgers)
                return
            prompt = replace(drawn.ledgers[0].prompt, index=self.requests)
            own = [replace(ledger, prompt=prompt, group=self.requests) for ledger in drawn.ledgers]
            self.waiting.append(replace(drawn, ledgers=own))
            self.requests += 1
            self.kept += drawn.tokens
            if sum(request.tokens for request in self.waiting) >= WRITTEN_TOKENS:
                self.write()

    def end_step(self) -> dict[str, float]:
        """Write what was drawn before the step that was taken now; return how many samples there was no room for."""
        with self.lock:
            self.write()
            left_out = self.left_out
            self.begin_step(self.step + 1)
        return {"rollout/not_recorded": float(left_out)} if left_out else {}

    def write(self) -> None:
        """Have the samples written that wait for it."""
        if self.waiting:
            self.files.write(partial(self.append, samples_file(self.folder, self.step), self.waiting))
            self.waiting = []

    def append(self, path: Path, drawn: Sequence[Drawn]) -> None:
        """Write samples to a file. A full disk loses samples, but neither a step nor the server."""
        try:
            append_rows(path, self.columns(drawn), tokens_of(drawn))
            files = [*list_samples_files(self.folder).values()]
            sizes = [file.stat().st_size for file in files]
            for number, file in enumerate(files[:-1]):
                if sum(sizes[number:]) > self.room:
                    file.unlink()
        except (OSError, UserError, DiskError) as error:
            show_line(f"Warning: {path} was not written, so it lacks samples: {error}", to_stderr=True)

    def columns(self, drawn: Sequence[Drawn]) -> dict[str, pa.Array]:
        """Return what a person reads of each ledger. Nobody here knows its reward."""
        prompts = [self.tokenizer.decode(request.ledgers[0].prompt.ids) for request in drawn]
        ledgers = [
            replace(ledger, prompt=replace(ledger.prompt, text=text))
            for request, text in zip(drawn, prompts, strict=True)
            for ledger in request.ledgers
        ]
        shown = columns_of([column for column in SHOWN if column[0] not in ("label", "datasource", "source")], ledgers)
        return shown | {
            "response": pa.array([self.tokenizer.decode(ledger.response_ids) for ledger in ledgers]),
            "reward": pa.nulls(len(ledgers), pa.float32()),
            "sequence_id": pa.array([name for request in drawn for name in request.names]),
            "weights": pa.array([request.weights for request in drawn for _ in request.ledgers]),
        }

    def close(self) -> None:
        """Write what there is, and end the thread."""
        with self.lock:
            self.write()
        self.files.close()


def tokens_of(drawn: Sequence[Drawn]) -> dict[str, pa.Array]:
    """Return the columns of numbers per token."""
    batch = to_batch([ledger for request in drawn for ledger in request.ledgers])
    per_token = {"ids": batch.ids.int(), **batch.columns("token")}
    return token_columns({name: values.numpy() for name, values in per_token.items()}, batch.lengths.tolist())
