"""A command that plays an episode and fails in the way that its prompt says: `python failing_harness.py` with the
variables of `agent.command`. It needs nothing but Python, so that it starts at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

PROMPT = os.environ["AGENT_PROMPT"]
URL, KEY = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
BODY = {"model": "policy", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}


def ask(messages: list[dict]) -> dict:
    """Return the message of the model after others."""
    head = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(URL, json.dumps(BODY | {"messages": messages}).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


def die_while_a_turn_is_written() -> None:
    """Send a request and be killed before its answer."""
    parts, body = urlsplit(URL), json.dumps(BODY | {"max_tokens": 64}).encode()
    connection = socket.create_connection((parts.hostname, parts.port), timeout=60)
    lines = [f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}", f"Authorization: Bearer {KEY}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    os.kill(os.getpid(), signal.SIGKILL)


if "silent" in PROMPT:
    sys.exit()
if "unreachable" in PROMPT:  # nobody listens at this port of its own, which is closed again
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    URL = f"http://127.0.0.1:{port}/v1/chat/completions"
if "refused" in PROMPT:
    KEY = "wrong"
first = ask(BODY["messages"])
if "dies" in PROMPT:
    BODY["messages"] += [first, {"role": "user", "content": "go on"}]
    die_while_a_turn_is_written()
if "exits" in PROMPT:
    sys.exit("the tests broke")
if "hangs" in PROMPT:
    time.sleep(10_000)
Path("answer.txt").write_text(first["content"])
