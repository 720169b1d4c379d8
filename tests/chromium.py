"""A headless Chromium for tests of pages: it opens a file, runs JavaScript in it, and takes pictures.

It is driven by the DevTools protocol. The browser has no network: a proxy that does not exist stands before every host
but this machine.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT_S = 240
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
           "--disable-background-networking", "--hide-scrollbars", "--proxy-server=127.0.0.1:9",
           "--remote-debugging-port=0")  # fmt: skip


class Browser:
    """A browser with one page. `problems` are the errors and warnings of the page, those of its security policy too."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [PROGRAM, *OPTIONS, f"--user-data-dir={self.profile.name}", "about:blank"]
        environment = os.environ | {"HOME": self.profile.name}
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stderr is not None
        line = next(line for line in self.process.stderr if "DevTools listening on " in line)
        self.opened = ExitStack()
        self.socket = self.opened.enter_context(connect(line.split(" on ")[1].strip(), max_size=None))
        self.numbers = itertools.count(1)
        self.session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.loaded = False  # whether the page that was asked for is there
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self.numbers)
        session = {} if self.session is None else {"sessionId": self.session}
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters, **session}))
        while True:
            message = json.loads(self.socket.recv(WAIT_S))
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self.note(message)

    def note(self, event: dict[str, Any]) -> None:
        """Remember what an event says of a problem, or of a request."""
        kind, content = event.get("method"), event.get("params", {})
        if kind == "Page.loadEventFired":
            self.loaded = True
        elif kind == "Runtime.exceptionThrown":
            details = content["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif kind == "Log.entryAdded" and content["entry"]["level"] in ("error", "warning"):
            self.problems.append(content["entry"]["text"])
        elif kind == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning"):
            self.problems.append(" ".join(str(each.get("value")) for each in content["args"]))
        elif kind == "Network.requestWillBeSent":
            self.requests.append(content["request"]["url"])

    def show(self, path: Path | str, part: str = "", width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a page, a file or an address, at one of its parts, and wait until it is ready."""
        phone = width < 760
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        address = path if isinstance(path, str) else path.resolve().as_uri()
        for url in ("about:blank", f"{address}{part}"):
            self.loaded = False
            self.call("Page.navigate", url=url)
            while not self.loaded:
                self.note(json.loads(self.socket.recv(WAIT_S)))
        self.until("'ready' in document.documentElement.dataset")

    def run(self, script: str) -> Any:
        """Return the value of an expression, of a promise when it is fulfilled."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        look = f"const look = () => ({condition}) ? done(true) : requestAnimationFrame(look); look();"
        assert self.run(f"new Promise((done) => {{ {look} }})") is True

    def drawn(self) -> None:
        """Wait until every chart that can be seen is drawn."""
        self.until(
            "[...document.querySelectorAll('.plot')].every((plot) => plot.getBoundingClientRect().top > innerHeight"
            " || plot.getBoundingClientRect().bottom < 0 || plot.querySelector('.main-svg'))"
        )

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write what the page looks like as a PNG file, its `whole` length or what can be seen."""
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            width = self.run("innerWidth")
            self.call("Emulation.setDeviceMetricsOverride", width=width, height=min(6000, int(size["height"])),
                      deviceScaleFactor=1, mobile=width < 760)  # fmt: skip
        self.drawn()
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self.opened.close()
        self.process.terminate()
        self.process.wait(WAIT_S)
        self.profile.cleanup()
