"""A reward server whose answers a test writes: on a free port of this machine, one thread per request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# status, and what is sent: an object as JSON, or bytes as they are, which may be said to be encoded
Reply = tuple[int, Any] | tuple[int, Any, str]


class RewardServer:
    """`answer(body)` makes the replies, `headers` go with each; `seen` has the bodies, `tokens` what stood in
    Authorization."""

    def __init__(self, answer: Callable[[dict[str, Any]], Reply], headers: Mapping[str, str] | None = None) -> None:
        self.seen: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()
        ours = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with ours.lock:
                    ours.seen.append(body)
                    ours.tokens.append(self.headers.get("Authorization"))
                    ours.under_way += 1
                    ours.most_under_way = max(ours.most_under_way, ours.under_way)
                status, reply, *encoding = answer(body)
                with ours.lock:
                    ours.under_way -= 1
                content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                if encoding:
                    self.send_header("Content-Encoding", encoding[0])
                self.end_headers()
                with suppress(OSError):  # the client has read enough
                    self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/get_reward"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
