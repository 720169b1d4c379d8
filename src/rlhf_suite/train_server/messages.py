"""What clients send to be trained on and what they get back, in the protocol's form and in that of the suite.

A position i of the protocol is the input token i with the target token i that follows it; the numbers of a target stand
at i. In the suite they stand at the token itself, which is one place further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_suite.config.check.formatting import number_of
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.trajectory import Experience, Trajectory
from rlhf_suite.rl.datum import token_ids
from rlhf_suite.rl.primitives import CROSS_ENTROPY
from rlhf_suite.serving.http_server import BadRequest
from rlhf_suite.train_server.losses import NamedLoss
from rlhf_suite.train_server.wire import Field, Schema, decode, encode, make_map, read_fields

SPARSE: Schema = {1: Field("values", "bytes"), 2: Field("rows", "bytes"), 3: Field("columns", "bytes")}
TENSOR: Schema = {
    1: Field("dense", "bytes"),
    2: Field("sparse", SPARSE),
    3: Field("dtype", "int"),
    4: Field("shape", "int", many=True),
}
CHUNK: Schema = {1: Field("text", {1: Field("tokens", "bytes")}), 2: Field("image", {}), 3: Field("audio", {})}
DATUM: Schema = {1: Field("input", CHUNK, many=True), 2: make_map("numbers", TENSOR)}
REQUEST: Schema = {
    1: Field("model_id", "text"),
    2: Field("seq_id", "int"),
    3: Field("data", DATUM, many=True),
    4: Field("loss_fn", "text"),
    5: make_map("numbers", "double"),  # the settings of older clients
    6: Field("forward_only", "int"),
    7: make_map("settings", {1: Field("number", "double"), 2: Field("text", "text")}),
}
BATCHED: Schema = {1: Field("data", "bytes"), 2: Field("offsets", "bytes"), 3: Field("dtype", "int")}
RECORD: Schema = {1: Field("type", "text"), 2: make_map("fields", BATCHED), 3: Field("count", "int")}
OUTPUT: Schema = {
    1: Field("type", "text"),
    2: Field("records", RECORD, many=True),
    3: make_map("metrics", "double"),
}
SAMPLED: Schema = {1: Field("stop_reason", "int"), 2: Field("tokens", "bytes"), 3: Field("log_probs", "bytes")}
LIKELIEST: Schema = {
    1: Field("ids", "bytes"),
    2: Field("log_probs", "bytes"),
    3: Field("k", "int"),
    4: Field("length", "int"),
}
SAMPLES: Schema = {
    1: Field("sequences", SAMPLED, many=True),
    2: Field("prompt_log_probs", "bytes"),
    3: Field("likeliest", LIKELIEST),
}
NOTHING = -99999.0  # the protocol's log-prob of a token that there is not
FLOAT32, INT64, INT32 = 1, 2, 3  # the protocol's numbers of types
DTYPES: Mapping[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}
STOP, LENGTH = 0, 1  # its numbers of the reasons why a response ends


@dataclass(frozen=True)
class Pass:
    """A request for a forward pass, or for a forward and a backward pass."""

    model_id: str
    seq_id: int
    data: Sequence[Mapping[str, Any]]
    loss_fn: str
    settings: Mapping[str, float | str]
    forward_only: bool

    @staticmethod
    def whose(beginning: bytes) -> tuple[str, int]:
        """Return the model and the sequence number of a request of which only the beginning is there; 0 where it is
        not that of such a request."""
        fields: dict[int, int | bytes] = {}
        with suppress(BadRequest):  # it ends too early, within the data
            for number, _, raw in read_fields(beginning):
                fields.setdefault(number, raw)
        name, seq = fields.get(1), fields.get(2)
        return (name.decode(errors="replace"), seq) if isinstance(name, bytes) and isinstance(seq, int) else ("", 0)

    @classmethod
    def of(cls, body: bytes) -> Pass:
        """Return what a body asks for; raise BadRequest if it is not such a request."""
        fields = decode(REQUEST, body)
        settings: dict[str, float | str] = {**fields.get("numbers", {})}
        settings |= {
            key: (value or {}).get("text", (value or {}).get("number", 0.0))
            for key, value in fields.get("settings", {}).items()
        }
        return cls(
            fields.get("model_id", ""),
            fields.get("seq_id", 0),
            fields.get("data", []),
            fields.get("loss_fn", ""),
            settings,
            bool(fields.get("forward_only")),
        )


def read_tensor(tensor: Mapping[str, Any] | None, where: str, length: int) -> NDArray[Any]:
    """Return one number for each of `length` positions.

    Raises:
        BadRequest: it has another form.
    """
    tensor = tensor or {}
    dtype = DTYPES.get(tensor.get("dtype", 0))
    if dtype is None or "sparse" in tensor:
        raise BadRequest(f"{where} is not a dense tensor of float32 or int64. Send such a one")
    shape = tensor.get("shape") or [len(tensor.get("dense", b"")) // dtype.itemsize]
    if len(shape) != 1:
        raise BadRequest(f"{where} has the shape {shape}. This server takes one number for each position")
    data = tensor.get("dense", b"")
    if shape[0] != length or len(data) != length * dtype.itemsize:
        raise BadRequest(f"{where} has {number_of(shape[0], 'number')} for {number_of(length, 'position')}")
    values = np.frombuffer(data, dtype)
    if not np.isfinite(values).all():
        raise BadRequest(f"{where} has a number that is not finite")
    return values


def read_input(chunks: Sequence[Mapping[str, Any]], where: str) -> NDArray[np.int32]:
    """Return the input tokens of a datum."""
    if not all("text" in chunk for chunk in chunks):
        raise BadRequest(f"{where} has an image or audio. This server trains on text")
    numbers = [chunk["text"].get("tokens", b"") for chunk in chunks]
    if any(len(data) % 4 for data in numbers):
        raise BadRequest(f"{where} has tokens that are not numbers of 4 bytes. Send int32")
    parts = [np.frombuffer(data, "<i4") for data in numbers]
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not len(tokens):
        raise BadRequest(f"{where} has no tokens. Give at least one")
    return tokens


@dataclass(frozen=True)
class TargetRow:
    """A datum of the protocol: N positions, each with its target, and numbers [N] by name."""

    input: NDArray[np.int32]
    targets: NDArray[Any]
    numbers: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, datum: Mapping[str, Any], where: str, loss: NamedLoss) -> TargetRow:
        """Return a datum with what a loss reads of it."""
        tokens = read_input(datum.get("input", []), where)
        given = dict(datum.get("numbers", {}))
        if "target_tokens" not in given:
            raise BadRequest(f"{where} has no target_tokens. Give the token that follows each input token")
        targets = read_tensor(given.pop("target_tokens"), f"{where}: target_tokens", len(tokens))
        if missing := sorted(loss.needs - {*given}):
            raise BadRequest(f"{where} has no {missing[0]}, which {loss.name} reads. Give a number for each position")
        if unread := sorted({*given} - loss.reads):
            raise BadRequest(f"{where} has {unread[0]}, which this server does not read for {loss.name}. Remove it")
        numbers = {name: read_tensor(tensor, f"{where}: {name}", len(tokens)) for name, tensor in given.items()}
        return cls(tokens, targets, numbers)

    @property
    def follows(self) -> NDArray[np.bool_]:
        """Return where the target is the next token of the sequence, [N]: at the other positions nothing is known."""
        return np.append(self.targets[:-1] == self.input[1:], True)

    def column(self, name: str, default: float) -> NDArray[np.float32]:
        """Return numbers at the tokens themselves, [N + 1]."""
        values = self.numbers.get(name)
        own = np.full(len(self.input), default, np.float32) if values is None else values.astype(np.float32)
        return np.append(np.float32(0), own)


def to_batch(asked: Pass, loss: NamedLoss, vocabulary: int, max_len: int) -> Experience:
    """Return the data of a request laid end to end, with a mask over the positions whose target is the next token.

    Raises:
        BadRequest: a datum has another form, or trains on a target that is not the next token.
        UserError: a datum has tokens that are not in the vocabulary, or too many.
    """
    if not asked.data:
        raise BadRequest("there is no data. Send at least one datum")
    sequences = [TargetRow.of(datum, f"datum {number}", loss) for number, datum in enumerate(asked.data)]
    rows = [
        token_ids([*row.input.tolist(), int(row.targets[-1])], f"datum {number}", vocabulary, max_len)
        for number, row in enumerate(sequences)
    ]
    masks = [np.append(False, loss.mask(row.follows, row.numbers, f"datum {n}")) for n, row in enumerate(sequences)]

    def join(name: str, default: float = 0.0) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([row.column(name, default) for row in sequences]))

    columns: dict[str, Any] = (
        {"correction": join("weights", 1.0)}
        if loss.name == CROSS_ENTROPY
        else {"advantages": join("advantages"), "old_log_probs": join("logprobs")}
    )
    return Experience(
        ids=torch.from_numpy(np.concatenate(rows)),
        lengths=torch.tensor([len(row) for row in rows]),
        mask=torch.from_numpy(np.concatenate(masks).astype(np.float32)),
        index=torch.arange(len(rows)),
        **columns,
    )


def output_bytes(log_probs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Return the answer to a pass: the log-prob of each target, which are [N + 1] here, and metrics."""
    targets = [own[1:].astype("<f4") for own in log_probs]
    offsets = np.cumsum([0, *(own.nbytes for own in targets)]).astype("<i8")
    batched = {"data": b"".join(own.tobytes() for own in targets), "offsets": offsets.tobytes(), "dtype": FLOAT32}
    record = {"type": "ArrayRecord", "fields": {"logprobs": batched}, "count": len(targets)}
    return encode(OUTPUT, {"type": "ArrayRecord", "records": [record], "metrics": metrics})


@dataclass(frozen=True)
class PromptScores:
    """The log-probs of a prompt's n tokens, [n], and its k likeliest tokens with their log-probs at each place but the
    first, [n - 1, k]; None where they were not asked for."""

    log_probs: NDArray[np.float32] | None = None
    likeliest: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None


def samples_bytes(ledgers: Sequence[Trajectory], scores: PromptScores) -> bytes:
    """Return the answer to a request for samples. The first token of a prompt has no log-prob (NaN), and no token is
    likeliest there."""
    sequences = []
    for ledger in ledgers:
        written = ledger.model_mask
        sequences.append({
            "stop_reason": LENGTH if ledger.ending is Ending.CUT else STOP,
            "tokens": ledger.ids[written].astype("<i4").tobytes(),
            "log_probs": ledger.engine_log_probs[written].astype("<f4").tobytes(),
        })  # fmt: skip
    message: dict[str, Any] = {"sequences": sequences}
    if scores.log_probs is not None:
        message["prompt_log_probs"] = np.append(np.float32(np.nan), scores.log_probs[1:]).astype("<f4").tobytes()
    if scores.likeliest is not None:
        ids, log_probs = scores.likeliest
        ids = np.pad(ids, ((1, 0), (0, 0))).astype("<i4")
        log_probs = np.pad(log_probs, ((1, 0), (0, 0)), constant_values=NOTHING).astype("<f4")
        shape = {"k": ids.shape[1], "length": len(ids)}
        message["likeliest"] = {"ids": ids.tobytes(), "log_probs": log_probs.tobytes(), **shape}
    return encode(SAMPLES, message)
