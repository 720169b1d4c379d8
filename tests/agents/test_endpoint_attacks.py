"""What clients can do to the endpoint of agents: other sessions are served, and the run trains in the end.

A run of `task=ppo agent.kind=endpoint` is started as a user starts it. Its 72 episodes do nothing but wait, and this
process is the client of all of them. After each attack, and in the middle of those that last, another session asks for
a turn of one token: its status and its seconds are what the attack cost the others. At the end the run has to train.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from attack_page import Section
from rlhf_suite.tasks.warm_start import warm_start

pytestmark = pytest.mark.proof

ROOT = Path(__file__).parents[2]
SESSIONS, SAMPLES = 64, 8
START_S, ASK_S = 300.0, 120.0
IDLE_S = 33.0  # more than the 30 s that a client has for a whole request
WORDS = (
    "task=ppo algo.advantage.estimator=rloo algo.kl.init_coef=0 reward.rule=null agent.kind=endpoint "
    "agent.sampling=refuse "
    f"train.agent_func_path={ROOT}/tests/agents/open_sessions.py data.input_key=messages data.label_key=label "
    f"data.apply_chat_template=true data.tokenizer_chat_template={ROOT}/experiments/agents/tools.jinja "
    "agent.max_turns=64 data.max_len=1024 rollout.max_new_tokens=900 rollout.batch_size=9 "
    f"rollout.n_samples_per_prompt={SAMPLES} "
    "rollout.micro_batch_size=72 train.batch_size=72 train.max_steps=1 eval.dataset=null eval.steps=-1 "
    "train.dynamic_batch_enable=true ds.packing_samples=true ds.param_dtype=fp32"
)
SECTION = Section(
    "## What clients can do to the endpoint of agents",
    f"A run of `agent.kind=endpoint agent.sampling=refuse` has {SESSIONS} open sessions, and one process is the "
    "client of all of them. "
    "The last column is a turn of one token that another session asks for after the attack (load average "
    f"{os.getloadavg()[0]:.0f}, two cores). ",
    ("attack", "what limits it", "answer", "a turn of another session"),
)
# What an answer matches; the others are refused with 400.
ANSWERS = {
    "no key": "401 ",
    "the key of another session": "401 ",
    "a session that does not exist": "404 ",
    "a session whose episode is over": "404 ",
    "a body of 64 MiB": "413 ",
    "the same without saying its length": "413 ",
    "600 half-sent requests": r"\d+ connections open",
    f"the same, {IDLE_S:g} s later": "0 connections open",
    f"{SESSIONS} sessions at a time": rf"{SESSIONS} conversations of 3 turns .* {SESSIONS} of them differ",
    "1,000 requests at a time in one session": r"\d+ x 200, \d+ x 400$",
    "100 clients ask and hang up": "nobody is there",
}
Result = tuple[str, str, str]  # attack, what limits it, answer


@dataclass(frozen=True)
class Session:
    """An open session, seen by its client."""

    url: str
    key: str
    label: str

    def post(self, body: object, key: str | None = None, **headers: str) -> httpx.Response:
        """Send the body of a request for a turn: an object, or bytes as they are."""
        content = body if isinstance(body, bytes | Iterator) else json.dumps(body).encode()
        head = {"authorization": f"Bearer {self.key if key is None else key}", **headers}
        return httpx.post(f"{self.url}/chat/completions", content=content, headers=head, timeout=ASK_S, trust_env=False)

    def said(self, body: object, key: str | None = None, **headers: str) -> str:
        """Return the status and the reason of what was answered."""
        try:
            answer = self.post(body, key, **headers)
        except httpx.HTTPError as error:
            return f"the connection was closed ({type(error).__name__})"
        if answer.status_code == 200:
            return "200"
        if "json" not in answer.headers.get("content-type", ""):
            return f"{answer.status_code} {answer.text}"[:150]
        error = answer.json()["error"]
        return f"{answer.status_code} {error['message'] if isinstance(error, dict) else error}"[:150]

    def turn(self) -> httpx.Response:
        """Ask for one token."""
        return self.post({"messages": [user("go on")], "max_tokens": 1})


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Target:
    """The sessions of a run. Attacks come from the first one; the second one has an honest client."""

    sessions: list[Session]
    over: Session

    @property
    def own(self) -> Session:
        return self.sessions[0]

    @property
    def other(self) -> Session:
        return self.sessions[1]

    def send(self, data: bytes) -> socket.socket:
        """Open a connection and send bytes."""
        connection = socket.create_connection(("127.0.0.1", urlsplit(self.own.url).port))
        connection.sendall(data)
        return connection

    def cost(self) -> str:
        """Return what a turn of another session brings now."""
        began = time.perf_counter()
        try:
            status = str(self.other.turn().status_code)
        except httpx.HTTPError as error:
            status = type(error).__name__
        return f"{status} after {time.perf_counter() - began:.2f} s"


def keys(target: Target) -> Iterator[Result]:
    own, body = target.own, {"messages": [user("x")], "max_tokens": 1}
    yield "no key", "a key for each session", own.said(body, authorization="")
    yield "the key of another session", "a key for each session", own.said(body, key=target.other.key)
    strange = Session(own.url.replace(own.url.split("/")[4], "0" * 16), own.key, "")
    yield "a session that does not exist", "names that cannot be guessed", strange.said(body)
    yield "a session whose episode is over", "the life of an episode", target.over.said(body)


def bodies(target: Target) -> Iterator[Result]:
    own, size, text = target.own, "size of a body", "checked requests"
    yield "a body of 64 MiB", size, own.said(b" " * (64 << 20))
    parts = (b" " * (1 << 20) for _ in range(64))
    yield "the same without saying its length", size, own.said(iter(parts))
    yield "invalid UTF-8", text, own.said(b'{"messages": ["\xff"]}')
    yield "100,000 lists in one another", text, own.said(b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    yield "an integer of 5,000 digits", text, own.said(b'{"max_tokens": ' + b"9" * 5000 + b"}")
    yield "half a surrogate pair", text, own.said(b'{"messages": [{"role": "user", "content": "\\ud800"}]}')


def long_conversations(target: Target) -> Iterator[Result]:
    own, limit = target.own, "characters of a conversation"
    yield "one message of 15 MB", limit, own.said({"messages": [user("x" * 15_000_000)]})
    yield "400,000 empty messages", limit, own.said({"messages": [user("")] * 400_000})
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 15_000_000}}
    yield (
        "a tool with 15 MB of description",
        "characters of tools",
        own.said({"messages": [user("x")], "tools": [tool]}),
    )
    yield "a call with 15 MB of arguments", limit, own.said(with_call("f", json.dumps({"x": "y" * 15_000_000})))
    deep = '{"x": ' + "[" * 900 + "]" * 900 + "}"
    yield "a call with 900 lists in one another", "checked requests", own.said(with_call("f", deep))
    yield "half a surrogate pair in a call", "checked requests", own.said(with_call("\ud800", '{"x": "\\ud800"}'))


def with_call(name: str, arguments: str) -> dict[str, object]:
    """Return the body of a request after a call of a tool."""
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"messages": [user("x"), called, user("x")], "max_tokens": 1}


def sampling(target: Target) -> Iterator[Result]:
    own, rule = target.own, "sampling belongs to the run"
    forced = {"temperature": 0.0, "top_p": 0.5, "n": 4, "logit_bias": {"5": 100}, "seed": 1, "logits_processors": ["f"]}
    for name, value in forced.items():
        yield f"`{name}={json.dumps(value)}`", rule, own.said({"messages": [user("x")], name: value})


def slow_clients(target: Target) -> Iterator[Result]:
    head = (
        f"POST {urlsplit(target.own.url).path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n".encode()
    )
    connections = [target.send(head) for _ in range(600)]
    yield "600 half-sent requests", "number of connections", f"{still_open(connections)} connections open"
    time.sleep(IDLE_S)
    yield f"the same, {IDLE_S:g} s later", "30 s for a request", f"{still_open(connections)} connections open"
    for connection in connections:
        connection.close()


def still_open(connections: list[socket.socket]) -> int:
    """Return how many connections the server has not closed."""
    count = 0
    for each in connections:
        each.setblocking(False)
        try:
            each.recv(1)
        except BlockingIOError:
            count += 1
        except OSError:
            continue
    return count


def many_requests(target: Target) -> Iterator[Result]:
    found = statuses(lambda number: target.own.post({"messages": [user(f"try {number}")], "max_tokens": 1}), 1000)
    yield "1,000 requests at a time in one session", "number of requests, `agent.max_turns`", found
    gone = json.dumps({"messages": [user("a long story")]}).encode()
    head = f"POST {urlsplit(target.own.url).path}/chat/completions HTTP/1.1\r\nHost: x\r\n"
    head += f"Authorization: Bearer {target.own.key}\r\nContent-Length: {len(gone)}\r\n\r\n"
    for _ in range(100):
        target.send(head.encode() + gone).close()
    yield "100 clients ask and hang up", "number of requests, `agent.max_turns`", "nobody is there to be answered"


def statuses(ask: Callable[[int], httpx.Response], count: int) -> str:
    """Return how often each status was the answer to requests of so many threads."""
    with ThreadPoolExecutor(count) as pool:
        found = [answer.status_code for answer in pool.map(ask, range(count))]
    return ", ".join(f"{found.count(status)} x {status}" for status in sorted({*found}))


def all_sessions(target: Target) -> Iterator[Result]:
    """Lead a conversation of three turns in each session at the same time; each has to go on from its own tokens."""

    def talk(number: int) -> bool:
        session, messages, before = target.sessions[number], [user(f"number {number}")], []
        for _ in range(3):
            answer = session.post({"messages": messages, "max_tokens": 8}).json()
            if answer["prompt_token_ids"][: len(before)] != before:
                return False
            before = before or answer["prompt_token_ids"]
            messages += [answer["choices"][0]["message"], user("go on")]
        prompts.add(tuple(before))
        return True

    prompts: set[tuple[int, ...]] = set()
    with ThreadPoolExecutor(SESSIONS) as pool:
        right = sum(pool.map(talk, range(SESSIONS)))
    what = f"{right} conversations of 3 turns go on from their own tokens, {len(prompts)} of them differ"
    yield f"{SESSIONS} sessions at a time", "a ledger for each session", what


ATTACKS = (keys, bodies, long_conversations, sampling, slow_clients, all_sessions, many_requests)


@dataclass
class Attacked:
    """A run whose sessions are open."""

    target: Target
    folder: Path
    process: subprocess.Popen[bytes]
    rss: int  # of the driver, before the attacks

    def grown_mib(self) -> float:
        """Return by how much the memory of the driver has grown."""
        return (psutil.Process(self.process.pid).memory_info().rss - self.rss) / 2**20

    def train(self) -> int:
        """Let the episodes end and the run train; return its exit code."""
        (self.folder / "finished").touch()
        return self.process.wait(START_S)


@contextmanager
def attacked(folder: Path) -> Iterator[Attacked]:
    """Start the run and wait until its sessions are open; on leaving, end it."""
    rows = [{"messages": [user("reverse 321 =")], "label": "over" if number == 0 else "open"} for number in range(9)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = warm_start("builtin:tiny", prompts="builtin:reverse")
    words = [*WORDS.split(), f"actor.model_name_or_path={model}", f"data.prompt_dataset={folder / 'rows.jsonl'}"]
    command = [sys.executable, str(ROOT / "run.py"), *words, f"hydra.run.dir={folder / 'run'}", "logger.progress=false"]
    place, deadline = folder / "sessions.jsonl", time.monotonic() + START_S
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=os.environ | {"OPEN_SESSIONS": str(folder)}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        while not place.exists() or len(place.read_text().splitlines()) < SESSIONS + SAMPLES:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the run did not open its sessions:\n{(folder / 'log').read_text()[-4000:]}")
            time.sleep(0.2)
        sessions = [Session(**json.loads(line)) for line in place.read_text().splitlines()]
        by_label = {label: [each for each in sessions if each.label == label] for label in ("open", "over")}
        target = Target(by_label["open"], by_label["over"][0])
        yield Attacked(target, folder, process, psutil.Process(process.pid).memory_info().rss)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with attacked(tmp_path_factory.mktemp("attacked")) as run:
        yield run


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_what_a_client_does_costs_other_sessions_nothing(run, section, attack):
    for name, limit, answer in attack(run.target):
        cost = run.target.cost()
        section.add(name, limit, answer, cost)
        assert re.match(ANSWERS.get(name, "400 "), answer), (name, answer)
        assert cost.startswith("200 "), name


def test_the_run_trains_on_what_is_left(run, section):
    grown = run.grown_mib()
    code = run.train()
    metrics = [json.loads(line) for line in (run.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = sum("train/policy_loss" in row for row in metrics)
    traces = (run.folder / "log").read_text().count("Traceback")
    section.text += (
        f"The run then trained {steps} step on these episodes and ended with exit code {code} and {traces} tracebacks; "
        f"its driver had grown by {grown:.0f} MiB."
    )
    assert (steps, code, traces) == (1, 0, 0)
