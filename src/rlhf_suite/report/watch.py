"""A server of the page while its runs go on: `rlhf-suite watch <folder>`.

It serves the page that `html.py` writes, without data, and the data apart, which the page asks for every few seconds.
Nothing else of the folder can be asked for. Every address begins with a key that is new for each server, because other
users of a machine reach its loopback address too.

Data are read when a browser asks for them and a file of a run has changed; a folder that nobody looks at costs nothing.
After a reading that took S seconds the next one begins `REST` times S later at the earliest, so that a long run does
not lose a core to its page.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from rlhf_suite.errors import UserError
from rlhf_suite.foreign_text import printable
from rlhf_suite.locks import is_alive
from rlhf_suite.report import html
from rlhf_suite.report.html import Shown
from rlhf_suite.report.sample_files import Reader
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.serving.http_server import Guard, open_listening_socket, serve
from rlhf_suite.tracking.console import show_line

HOST = "127.0.0.1"
REST = 9  # how many times as long as the last reading took the next one waits
LEVEL = 1  # of gzip: a page is fetched from this machine, or through a tunnel
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


class Live:
    """The data of one page, read again when a file of its runs has changed. Only one thread reads at a time."""

    def __init__(self, choose: Callable[[], Shown], reader: Reader, up: str) -> None:
        self._choose, self._reader, self._up = choose, reader, up
        self._lock = threading.Lock()
        self._content, self._version, self._rest_until = b"", "", 0.0

    @property
    def version(self) -> str:
        """Return which data were read last."""
        return self._version

    def end_rest(self) -> None:
        """Have the next question look at the folders, however long the last reading took."""
        self._rest_until = 0.0

    def newer_than(self, version: str) -> bytes | None:
        """Return the packed data if a browser does not have them yet.

        Raises:
            UserError, OSError: a folder cannot be read now.
        """
        with self._lock:
            if time.monotonic() >= self._rest_until:
                self._look()
            return None if version == self._version else self._content

    def _look(self) -> None:
        """Read the folders if one has changed since they were read last."""
        began = time.monotonic()
        shown = self._choose()
        if (version := state_of(shown)) != self._version:
            data, arrays = html.content_of(shown, self._reader)
            data |= {"version": version, "up": self._up, "links": [link_to(folder) for folder in shown.folders]}
            packed = html.to_json(data) + b"\n" + b"".join(arrays.parts)
            self._content, self._version = gzip.compress(packed, LEVEL), version
        self._rest_until = time.monotonic() + REST * (time.monotonic() - began)


def state_of(shown: Shown) -> str:
    """Return a text that differs when a file of these runs has changed, or the process of one has ended."""
    state: list[Any] = [shown.title]
    for folder, name in zip(shown.folders, shown.names, strict=True):
        files = RunFolder(folder)
        paths = (files.status_file, files.metrics, files.timeline, files.config, files.rollouts, files.evaluations)
        state += [name, is_alive(files.status()), *(stamp_of(path) for path in paths)]
    return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file or the entries of a folder do; None if there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size


def link_to(folder: Path) -> str:
    """Return the address of the page of a run, below that of all runs."""
    return f"run/{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]}/"


class Site:
    """The pages of what `choose` returns: one of all runs, and where there are several one of each."""

    def __init__(self, choose: Callable[[], Shown], key: str) -> None:
        self._choose, self._key, self._reader = choose, key, Reader()
        self._page = html.page("", "", live=True)
        self._all = Live(choose, self._reader, "")
        self._runs: dict[str, Live] = {}

    def app(self) -> Starlette:
        """Return the routes."""
        places = ("/{key}/", "/{key}/run/{run}/")
        return Starlette(
            routes=[
                *(Route(place, self.page, methods=["GET"]) for place in places),
                *(Route(f"{place}data", self.data, methods=["GET"]) for place in places),
            ]
        )

    def page(self, request: Request) -> Response:
        """Answer with the page, which asks for its data."""
        try:
            live = self.find(request)
        except (UserError, OSError) as error:
            return unavailable(error)
        return missing() if live is None else HTMLResponse(self._page, headers=HEADERS)

    def data(self, request: Request) -> Response:
        """Answer with the data of a page, or with none if the browser has the newest."""
        try:
            live = self.find(request)
            if live is None:
                return missing()
            packed = live.newer_than(request.query_params.get("seen", ""))
        except (UserError, OSError) as error:
            return unavailable(error)
        if packed is None:
            return Response(status_code=204, headers=HEADERS)
        return Response(packed, headers=HEADERS | {"content-encoding": "gzip"}, media_type="application/octet-stream")

    def find(self, request: Request) -> Live | None:
        """Return the page that a request names; None if it does not have the key, or there is no such run."""
        if not hmac.compare_digest(request.path_params["key"].encode(), self._key.encode()):
            return None
        name = request.path_params.get("run")
        if name is None:
            return self._all
        if name not in self._runs:
            folder = next((place for place in self._choose().folders if link_to(place) == f"run/{name}/"), None)
            if folder is None:
                return None
            self._runs[name] = Live(lambda: html.choose_runs([folder]), self._reader, "../../")
        return self._runs[name]


def unavailable(error: Exception) -> Response:
    """Return the answer where a folder cannot be read now, because a run is deleted or begins again."""
    return PlainTextResponse(printable(str(error)), 503, HEADERS)


def missing() -> Response:
    """Return the answer to a request without the key, or for a run that does not exist."""
    return PlainTextResponse("There is no such page: use the address that rlhf-suite watch has printed.", 404, HEADERS)


def watch(choose: Callable[[], Shown], port: int) -> None:
    """Serve the page of the runs that `choose` returns until a signal asks to stop. Port 0 takes a free one.

    Raises:
        UserError: there is no run, or the port is in use.
    """
    choose()
    key = secrets.token_urlsafe(12)
    site = Site(choose, key)
    listener = listen(port)
    show_line(f"Watching at http://{HOST}:{listener.getsockname()[1]}/{key}/ (Ctrl-C ends it)")
    serve(Guard(site.app(), None), listener)


def listen(port: int) -> socket.socket:
    """Return a socket on the loopback address.

    Raises:
        UserError: the port is in use, or not allowed.
    """
    try:
        return open_listening_socket(HOST, port)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}. Choose another port, or leave it out") from None
