"""How long a connection may take to say what it wants: uvicorn itself waits forever for the rest of a request.

Each connection has READ_S for a whole request, headers and body. Where there are MAX_CONNECTIONS already, the one that
has waited for its request the longest gives way to a new one, so that idle connections keep nobody out.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

READ_S = 30.0
MAX_CONNECTIONS = 512


class Protocol(H11Protocol):
    """A connection that is closed unless its request arrives in time. `reading_since` is None while it is answered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deadline: asyncio.TimerHandle | None = None
        self.reading_since: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > MAX_CONNECTIONS:
            self.make_room()
        self.watch()

    def make_room(self) -> None:
        """Close the connection that has been waiting for its request the longest; this one where all are answered."""
        waiting = [each for each in self.connections if isinstance(each, Protocol) and each.reading_since is not None]
        min(waiting, key=lambda each: each.reading_since or 0.0, default=self).end()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_watch()
        super().connection_lost(exc)

    def watch(self) -> None:
        """Start the clock where a request is awaited, and stop it where one is whole."""
        is_whole = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)
        if is_whole or self.transport.is_closing():
            self.stop_watch()
        elif self.deadline is None:
            self.reading_since = self.loop.time()
            self.deadline = self.loop.call_later(READ_S, self.end)

    def stop_watch(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = self.reading_since = None

    def end(self) -> None:
        """Close at once, without waiting for the other side to read what is left."""
        self.stop_watch()
        self.connections.discard(self)
        self.transport.abort()
