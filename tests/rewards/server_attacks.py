"""What a hostile reward server may answer, and what comes of it.

Every attack is the answer to a request for two rows, asked for by a process of its own, whose peak memory is measured.
`outcome` is what the rows get; an exception there would have ended the run, whatever reward.on_error says.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

LARGE = 512 << 20  # bytes of the large answers
DEADLINE_S = 5.0  # reward.http.timeout_s
SHOWN = 130  # characters of an outcome
Send = Callable[[socket.socket], None]


def answer(body: bytes, *headers: str) -> Send:
    """A whole answer at once."""

    def send(line: socket.socket) -> None:
        head = "\r\n".join(["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers, "", ""])
        line.sendall(head.encode() + body)

    return send


def endless(begin: bytes, more: bytes, pause_s: float, pieces: int) -> Send:
    """`begin`, and then `more` again and again."""

    def send(line: socket.socket) -> None:
        line.sendall(begin)
        for _ in range(pieces):
            line.sendall(more)
            time.sleep(pause_s)

    return send


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"
# Name -> (what limits it, the answer). BEFORE is what this script found of the first edition, commit 0a659a5.
ATTACKS: dict[str, tuple[str, Callable[[], Send]]] = {
    "integer of 400 digits": ("digits", lambda: answer(b'{"rewards": [1' + b"0" * 399 + b", 1]}")),
    "100,000 lists in one another": ("depth", lambda: answer(b"[" * 100_000)),
    f"{LARGE >> 20} MiB of blanks": ("size", lambda: endless(HEAD, b" " * (1 << 20), 0, LARGE >> 20)),
    f"gzip bomb of {LARGE >> 20} MiB": (
        "size after decompression",
        lambda: answer(gzip.compress(bytes(LARGE), 6), "Content-Encoding: gzip"),
    ),
    "compression that was not asked for": ("encodings", lambda: answer(b"x", "Content-Encoding: br")),
    "a byte every 10 ms": ("deadline of the whole answer", lambda: endless(HEAD, b" ", 0.01, 3000)),
    "endless header": ("size", lambda: endless(b"HTTP/1.1 200 OK\r\nX: ", b"x" * (1 << 16), 0, 3000)),
    "not a number, infinity": ("checked answers", lambda: answer(b'{"rewards": [NaN, Infinity]}')),
    "one reward for two rows": ("checked answers", lambda: answer(b'{"rewards": [1]}')),
    "nested values for numbers": ("checked answers", lambda: answer(b'{"rewards": [[[]], {}]}')),
    "reason of 900,000 characters that clears the screen": (
        "what is shown",
        lambda: answer(b'{"rewards": [0, 0], "errors": ["\\u001b[2J' + b"x" * 900_000 + b'", "x"]}'),
    ),
    "half a surrogate pair in a reason": (
        "what is shown",
        lambda: answer(b'{"rewards": [0, 0], "errors": ["\\ud800", "x"]}'),
    ),
    "name of a metric that clears the screen": (
        "names",
        lambda: answer(b'{"rewards": [1, 1], "extra_logs": {"\\u001b[2J": [1, 1]}}'),
    ),
    "page of a proxy that is not JSON": ("checked answers", lambda: answer(b"<html>\x1b[31mBad gateway</html>")),
}
ENDED = "THE RUN ENDS: ExceptionGroup"
BEFORE = {
    "integer of 400 digits": ENDED,
    "100,000 lists in one another": ENDED,
    f"{LARGE >> 20} MiB of blanks": "timeout, 392 MiB",
    f"gzip bomb of {LARGE >> 20} MiB": "timeout 1.9 s late, 545 MiB",
    "compression that was not asked for": "error: the answer is not JSON: 'x'",
    "reason of 900,000 characters that clears the screen": "error: the whole reason, and it clears the screen",
    "half a surrogate pair in a reason": "error; printing it ended the run",
    "name of a metric that clears the screen": "scored 1.0, and the name in every log",
}


def tried(name: str) -> dict[str, object]:
    """What came of an attack, in a process of its own."""
    send = ATTACKS[name][1]()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener, send), daemon=True).start()
    command = [sys.executable, __file__, f"http://127.0.0.1:{listener.getsockname()[1]}/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    listener.close()
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def serve(listener: socket.socket, send: Send) -> None:
    """Answer every request in the same way, until the listener is closed."""
    with contextlib.suppress(OSError):
        while True:
            line, _ = listener.accept()
            threading.Thread(target=answered, args=(line, send), daemon=True).start()


def answered(line: socket.socket, send: Send) -> None:
    with line, contextlib.suppress(OSError):
        line.recv(1 << 16)
        send(line)
        line.shutdown(socket.SHUT_WR)
        while line.recv(1 << 16):
            pass


def ask(url: str) -> None:
    """Ask the server for the rewards of two rows, and print what they get."""
    from rlhf_suite.config.declarations.reward import HttpConfig
    from rlhf_suite.rewards.base import RewardFailure, Sample
    from rlhf_suite.rewards.remote import RemoteReward

    rows = [Sample("query", "prompt", "response", "", "default")] * 2
    reward, before = RemoteReward([url], HttpConfig(num_retries=0, timeout_s=DEADLINE_S)), peak_mib()
    began = time.perf_counter()
    try:
        first = reward.score(rows)[0]
        said = f"{first.kind}: {first.reason}" if isinstance(first, RewardFailure) else f"scored {first.reward}"
    except BaseException as error:
        said = f"THE RUN ENDS: {type(error).__name__}: {error}"
    seconds = round(time.perf_counter() - began, 2)
    said = said.replace(url, "URL")
    acts = "" if said.isprintable() else " (WITH control characters)"
    shown = said if len(said) <= SHOWN else f"{said[:SHOWN]}... ({len(said)} characters)"
    outcome = shown.encode("unicode_escape").decode() if acts else shown
    print(json.dumps({"outcome": outcome + acts, "seconds": seconds, "more_mib": round(peak_mib() - before)}))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    ask(sys.argv[1])
