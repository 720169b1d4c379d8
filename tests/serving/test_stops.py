"""A server that is asked to stop answers the requests under way and ends normally, whichever signal asks."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import httpx
import pytest

from rlhf_suite.launch.stop import SIGNALS

# It answers when a line comes in; its first line is its port, the second one says that a request has arrived.
SERVER = """
import asyncio, socket, sys
from fastapi import FastAPI
from rlhf_suite.launch.stop import stoppable
from rlhf_suite.serving.http_server import serve

app = FastAPI()

@app.get("/")
async def answer():
    print("asked", flush=True)
    return (await asyncio.to_thread(sys.stdin.readline)).strip()

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
with stoppable():
    serve(app, listener)
"""
DEADLINE_S = 60.0


@pytest.mark.notices(
    "a server cuts its requests off when its terminal closes",
    "serving/http_server.py",
    "for number in (signal.SIGINT, *SIGNALS) if",
    "for number in (signal.SIGINT, signal.SIGTERM) if",
    cases="SIGHUP",
)
@pytest.mark.parametrize("number", [signal.SIGINT, *SIGNALS], ids=lambda number: number.name)
def test_a_request_under_way_is_answered_before_the_server_ends(number):
    answers = []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SERVER], **pipes, text=True) as server:
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}/"
            client = threading.Thread(target=lambda: answers.append(httpx.get(url, timeout=DEADLINE_S).json()))
            client.start()
            assert server.stdout.readline() == "asked\n"
            server.send_signal(number)
            assert server.stderr.readline().startswith(f"{number.name}: the run ends")
            server.stdin.write("answered\n")
            server.stdin.flush()
            client.join(DEADLINE_S)
            assert answers == ["answered"]
            assert server.wait(DEADLINE_S) == 0
        finally:
            server.kill()
