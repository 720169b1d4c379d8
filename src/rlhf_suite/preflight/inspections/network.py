"""Test whether servers accept connections, all of them at the same time and with one short time limit."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from rlhf_suite.config.declarations.tools import THIS_MACHINE

Server = tuple[str, int]


def first_hop(url: str) -> Server:
    """Return the server to which a request for a URL connects: its own, or the proxy that the environment names."""
    from urllib.request import getproxies, proxy_bypass  # with a package of HTTP, which few command lines need

    parts = urlsplit(url)
    host = parts.hostname or ""
    is_direct = host in THIS_MACHINE or bool(proxy_bypass(host))
    proxy = None if is_direct else getproxies().get(parts.scheme)
    asked = urlsplit(proxy) if proxy else parts
    return asked.hostname or "", asked.port or (443 if asked.scheme == "https" else 80)


def unreachable(servers: Iterable[Server], timeout_s: float) -> dict[Server, str]:
    """Return the servers that do not accept a connection within `timeout_s` seconds, each with the reason.

    A query to a name server that hangs has no time-out, so threads that are late are abandoned.
    """
    reasons: dict[Server, str | None] = {}
    asked = list(dict.fromkeys(servers))
    threads = [threading.Thread(target=connect, args=(server, timeout_s, reasons), daemon=True) for server in asked]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    answers = {server: reasons.get(server, f"no answer within {timeout_s:g} s") for server in asked}
    return {answer: reason for answer, reason in answers.items() if reason is not None}


def connect(server: Server, timeout_s: float, reasons: dict[Server, str | None]) -> None:
    """Store in `reasons` why a connection to the server fails, or None if it succeeds."""
    try:
        socket.create_connection(server, timeout_s).close()
    except TimeoutError:
        reasons[server] = f"no answer within {timeout_s:g} s"
    except (OSError, UnicodeError) as error:
        reasons[server] = (error.strerror if isinstance(error, OSError) else None) or str(error)
    else:
        reasons[server] = None


def is_silent(url: str, timeout_s: float) -> bool:
    """Return whether a request for `url` has no answer of any kind within `timeout_s` seconds, as where something on
    the way takes connections and lets nothing through. Libraries would wait, and ask again, for minutes."""
    from urllib.request import Request, urlopen

    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # a refusal, or a certificate that only the library knows, is an answer
            urlopen(Request(url, method="HEAD"), timeout=2 * timeout_s).close()
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return not answered.wait(timeout_s)
