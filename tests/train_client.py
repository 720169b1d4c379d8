"""A server of task=serve_train, and a client that speaks its protocol by plain HTTP, as the package `tinker` does."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from rlhf_suite.train_server.messages import DTYPES, FLOAT32, INT64, OUTPUT, REQUEST, SAMPLES
from rlhf_suite.train_server.wire import decode, encode

ROOT = Path(__file__).resolve().parents[1]
START_S = 420.0
ASK_S = 120.0
RANK = 4
SETTINGS = (
    "task=serve_train",
    "actor.model_name_or_path=builtin:tiny",
    "ds.param_dtype=fp32",
    "data.max_len=64",
    "serve.port=0",
    "launch.device=cpu",
)


class Refused(Exception):
    """The server has answered a request with an error; the text is its reason."""


class Client:
    """A session with a server."""

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {} if key is None else {"X-API-Key": key}
        self.http = httpx.Client(base_url=f"{url}/api/v1/", headers=headers, timeout=ASK_S, trust_env=False)
        self.session = self.post("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")["session_id"]
        self.models = self.samplers = 0

    def post(self, route: str, content: bytes | None = None, /, **body):
        answer = self.http.post(route, json=body) if content is None else self.http.post(route, content=content)
        if answer.status_code != 200:
            raise Refused(f"{answer.status_code}: {answer.json().get('detail', answer.json().get('error'))}")
        return answer.json()

    def wait(self, future: dict):
        """Return the answer to a request."""
        while True:
            answer = self.http.post("retrieve_future", json={"request_id": future["request_id"]})
            if answer.status_code == 408:
                continue
            if answer.headers["content-type"] == "application/x-protobuf":
                return answer.content
            if "error" in answer.json() or answer.status_code != 200:
                raise Refused(f"{answer.json().get('category')}: {answer.json().get('error', answer.text)}")
            return answer.json()

    def create(self, rank: int = RANK, base: str = "builtin:tiny") -> Model:
        number, self.models = self.models, self.models + 1
        asked = {"session_id": self.session, "model_seq_id": number, "base_model": base, "lora_config": {"rank": rank}}
        return Model(self, self.wait(self.post("create_model", **asked))["model_id"])

    def load(self, path: str, *, optimizer: bool) -> Model:
        number, self.models = self.models, self.models + 1
        asked = {"session_id": self.session, "model_seq_id": number, "path": path, "optimizer": optimizer}
        return Model(self, self.wait(self.post("load_weights", **asked))["model_id"])

    def sampler(self, **source: str) -> str:
        number, self.samplers = self.samplers, self.samplers + 1
        asked = {"session_id": self.session, "sampling_session_seq_id": number, **source}
        return self.post("create_sampling_session", **asked)["sampling_session_id"]

    def likeliest(self, sampler: str, tokens: list[int], seq: int, k: int):
        """Return the log-probs of a prompt, and its k likeliest tokens at each place with theirs."""
        fields = self.ask_for_samples(sampler, tokens, seq, prompt_logprobs=True, topk_prompt_logprobs=k)
        found = fields["likeliest"]
        ids, log_probs = np.frombuffer(found["ids"], "<i4"), np.frombuffer(found["log_probs"], "<f4")
        shape = found["length"], found["k"]
        return np.frombuffer(fields["prompt_log_probs"], "<f4"), ids.reshape(shape), log_probs.reshape(shape)

    def sample(self, sampler: str, tokens: list[int], seq: int, count: int = 1, scores: bool = False, **parameters):
        """Return the tokens and log-probs of samples, and the log-probs of the prompt."""
        more = {"num_samples": count, "sampling_params": parameters, "prompt_logprobs": scores}
        fields = self.ask_for_samples(sampler, tokens, seq, **more)
        pairs = [
            (np.frombuffer(one["tokens"], "<i4").tolist(), np.frombuffer(one["log_probs"], "<f4"))
            for one in fields["sequences"]
        ]
        return pairs, np.frombuffer(fields.get("prompt_log_probs", b""), "<f4")

    def ask_for_samples(self, sampler: str, tokens: list[int], seq: int, **more):
        """Return the fields of the answer to a request for samples."""
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            "sampling_params": {"max_tokens": 1},
            **more,
        }
        return decode(SAMPLES, self.wait(self.post("asample", **body)))


class Model:
    """A model that a client trains; every call waits for its answer, but `start` and those that it makes."""

    def __init__(self, client: Client, name: str) -> None:
        self.client, self.name, self.seq = client, name, 0

    def start(self, route: str, /, **body):
        self.seq += 1
        return self.client.post(route, model_id=self.name, seq_id=self.seq, **body)

    def begin(
        self, data: list[dict], loss: str, *, forward_only: bool = False, seq: int | None = None, **settings: float
    ):
        if seq is None:
            self.seq += 1
        message = {
            "model_id": self.name,
            "seq_id": self.seq if seq is None else seq,
            "data": [to_message(datum) for datum in data],
            "loss_fn": loss,
            "forward_only": int(forward_only),
            "settings": {key: {"number": value} for key, value in settings.items()},
        }
        return self.client.post("forward_backward", encode(REQUEST, message))

    def compute(self, data: list[dict], loss: str = "cross_entropy", **more):
        """Return the sum of a loss, and the log-probs of the targets of each datum."""
        fields = decode(OUTPUT, self.client.wait(self.begin(data, loss, **more)))
        (record,) = fields["records"]
        column = record["fields"]["logprobs"]
        ends = np.frombuffer(column["offsets"], "<i8") // DTYPES[FLOAT32].itemsize
        values = np.frombuffer(column["data"], DTYPES[FLOAT32])
        return fields["metrics"]["loss:sum"], [values[a:b] for a, b in itertools.pairwise(ends)]

    def step(self, **adam: float):
        return self.client.wait(self.start("optim_step", adam_params={"learning_rate": 1e-2} | adam))["metrics"]

    def ask(self, route: str, /, **body):
        return self.client.wait(self.start(route, **body))


def to_message(datum: dict) -> dict:
    """Return `input` and `target_tokens` (ids) and further numbers of a datum as its message."""
    numbers = {
        name: {"dense": np.asarray(values, DTYPES[kind]).tobytes(), "dtype": kind, "shape": [len(values)]}
        for name, values in datum.items()
        if name != "input"
        for kind in [INT64 if name == "target_tokens" else FLOAT32]
    }
    return {"input": [{"text": {"tokens": np.asarray(datum["input"], "<i4").tobytes()}}], "numbers": numbers}


def shifted(tokens: list[int], **numbers) -> dict:
    """Return a sequence as a datum: each token's target is the next one."""
    return {"input": tokens[:-1], "target_tokens": tokens[1:], **numbers}


@contextmanager
def serving(folder: Path, *words: str, env: dict[str, str] | None = None):
    """Start a server with its run folder in `folder`; yield its process and URL, and end it."""
    environment = {name: value for name, value in os.environ.items() if name != "RLHF_SUITE_TRAIN_TOKEN"} | (env or {})
    command = [sys.executable, str(ROOT / "run.py"), *SETTINGS, f"run_dir={folder / 'run'}", *words]
    place, log = folder / "run" / "server.json", folder / "log"
    place.unlink(missing_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + START_S
    try:
        while not place.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield process, json.loads(place.read_text())["url"]
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        process.wait(60)
