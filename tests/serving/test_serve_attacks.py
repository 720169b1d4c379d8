"""What clients can do to `task=serve_rm`: the others are served, and nothing is left.

A server with a tiny reward model is started as a user starts it. Each attack ends with a small request of another
client: its status and its seconds are what the attack cost the others.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from attack_page import Section

pytestmark = pytest.mark.proof

ROOT = Path(__file__).parents[2]
SECTION = Section(
    "## What clients can do to a reward server",
    "The status and the seconds of a small request after each attack, or of the attack itself if it is one "
    "request. Before: the first edition.",
    ("attack", "before", "after"),
)
HEADERS = b"POST /get_reward HTTP/1.1\r\nHost: localhost\r\n"
START_S, ASK_S = 300.0, 300.0
IDLE_S = 33.0  # more than the 30 s that a client has for a whole request
TEXT = "x" * 4000
# What this script found of the first edition, commit 0a659a5, on two loaded cores.
BEFORE = {
    "20 clients send 16 texts of 4,000 tokens and hang up": "200 after 153 s",
    "520 half-sent requests": "503",
    "the same, 33 s later": "503, 520 connections open",
    "one text of 15 MB": "200 after 99 s",
    "invalid UTF-8": "500, a traceback",
    "100,000 lists in one another": "500, a traceback",
    "an integer of 5,000 digits": "500, a traceback",
    "half a surrogate pair beside a good row": "500 for both rows",
    "Host: evil.example": "200",
    "96 requests of up to 16 texts": "memory 0.45 -> 1.10 GiB",
}
# How an outcome begins, where it is not "200 ".
REFUSED = {
    "invalid UTF-8": "422 ",
    "100,000 lists in one another": "422 ",
    "an integer of 5,000 digits": "422 ",
    "Host: evil.example": "421 ",
    "96 requests of up to 16 texts": "memory ",
}
Result = tuple[str, str]  # attack, outcome


class Server:
    """A running serve_rm."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.port, self.log = psutil.Process(process.pid), url, urlsplit(url).port, log

    def ask(self, query: list[str] | bytes, **headers: str) -> str:
        """Return status, seconds, and for a refusal its reason."""
        body = query if isinstance(query, bytes) else json.dumps({"query": query}).encode()
        began = time.perf_counter()
        try:
            answer = httpx.post(self.url, content=body, headers=headers, timeout=ASK_S, trust_env=False)
        except httpx.HTTPError as error:
            return f"{type(error).__name__} after {time.perf_counter() - began:.2f} s"
        is_right = answer.status_code == 200 and not any(answer.json()["errors"])
        reason = "" if is_right else answer.text[:100]
        return f"{answer.status_code} after {time.perf_counter() - began:.2f} s {reason}".strip()

    def send(self, data: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(data)
        return connection

    @property
    def memory_gib(self) -> float:
        return self.process.memory_info().rss / 2**30


def hang_up(server: Server) -> Iterator[Result]:
    body = json.dumps({"query": [TEXT] * 16}).encode()
    for _ in range(20):
        server.send(HEADERS + b"Content-Length: %d\r\n\r\n" % len(body) + body).close()
    yield "20 clients send 16 texts of 4,000 tokens and hang up", server.ask(["a"])


def half_send(server: Server) -> Iterator[Result]:
    connections = [server.send(HEADERS) for _ in range(520)]
    yield "520 half-sent requests", server.ask(["a"])
    time.sleep(IDLE_S)
    outcome = server.ask(["a"])
    left = sum(
        each.status == psutil.CONN_ESTABLISHED and each.laddr.port == server.port  # others are of its process group
        for each in server.process.net_connections()
    )
    yield f"the same, {IDLE_S:g} s later", f"{outcome}, {left} connections open"
    for connection in connections:
        connection.close()


def large_text(server: Server) -> Iterator[Result]:
    letters = random.Random(0)
    yield "one text of 15 MB", server.ask(["".join(letters.choices("abcdefgh ijklm\n", k=15_000_000))])


def bad_rows(server: Server) -> Iterator[Result]:
    yield "invalid UTF-8", server.ask(b'{"query": ["\xff"]}')
    yield "100,000 lists in one another", server.ask(b'{"query": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    yield "an integer of 5,000 digits", server.ask(b'{"query": [' + b"9" * 5000 + b"]}")
    yield "half a surrogate pair beside a good row", server.ask(b'{"query": ["good", "\\ud800"]}')
    yield "Host: evil.example", server.ask(["a"], Host="evil.example")


def much_work(server: Server) -> Iterator[Result]:
    before = server.memory_gib

    def client(seed: int) -> None:
        sizes = random.Random(seed)
        for _ in range(12):
            server.ask(["x" * sizes.randint(10, 4000) for _ in range(sizes.randint(1, 16))])

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    yield "96 requests of up to 16 texts", f"memory {before:.2f} -> {server.memory_gib:.2f} GiB"


ATTACKS: tuple[Callable[[Server], Iterator[Result]], ...] = (hang_up, half_send, large_text, bad_rows, much_work)


def create_reward_model(path: Path) -> None:
    """A tiny model with one random score."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification

    from rlhf_suite.models.builtin import builtin_folder

    base = builtin_folder("builtin:tiny", "reward.model_name_or_path")
    torch.manual_seed(1)
    Qwen3ForSequenceClassification(AutoConfig.from_pretrained(base, num_labels=1)).save_pretrained(path)
    AutoTokenizer.from_pretrained(base).save_pretrained(path)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Start the server, wait until it has answered a first request, and end it."""
    create_reward_model(folder / "rm")
    words = [
        f"reward.model_name_or_path={folder / 'rm'}",
        "serve.port=0",
        "launch.device=cpu",
        f"run_dir={folder / 'run'}",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RLHF_SUITE_REWARD_TOKEN"}
    command = [sys.executable, str(ROOT / "run.py"), "task=serve_rm", *words]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    place, deadline = folder / "run" / "server.json", time.monotonic() + START_S
    try:
        while not place.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start:\n{(folder / 'log').read_text()}")
            time.sleep(0.2)
        server = Server(process, json.loads(place.read_text())["url"], folder / "log")
        server.ask(["a"])
        yield server
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_what_a_client_does_costs_the_others_nothing(server, section, attack):
    for name, outcome in attack(server):
        section.add(name, BEFORE[name], outcome)
        assert outcome.startswith(REFUSED.get(name, "200 ")), name
        assert "connections open" not in outcome or ", 0 connections open" in outcome


def test_no_request_ends_in_a_traceback(server):
    assert server.ask(["a"]).startswith("200 ") and "Traceback" not in server.log.read_text()
