"""What a host that nobody has invited gets to hear: `stranger.py <head of Ray> <address> ...` tries each address."""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor

ANSWER_S = 2.0


def ask(address: str) -> str:
    """Return the first line of the answer to a request of HTTP, or why there is none."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            return connection.recv(200).split(b"\r\n")[0].decode(errors="replace")
    except OSError as error:
        return type(error).__name__


def join(address: str) -> str:
    """Return the kind of error with which Ray refuses a client without a token, or what it lets him do."""
    import ray

    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except Exception as error:
        return type(error).__name__
    return f"joined {len(ray.nodes())} nodes"


if __name__ == "__main__":
    places = sys.argv[2:]
    with ThreadPoolExecutor(len(places)) as pool:
        for place, answer in zip(places, pool.map(ask, places), strict=True):
            print(place, ascii(answer), flush=True)
    print("ray.init:", join(sys.argv[1]), flush=True)
