"""A page of the suite, read back from its file."""

import base64
import gzip
import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np


class Page(HTMLParser):
    """The parts of a page: its scripts by id, its security policy, and every tag."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.blocks: dict[str, str] = {}
        self.policy, self.tags, self.block = "", [], None
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag == "script":
            self.block = found.get("id", "script")
            self.blocks[self.block] = ""
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]

    def handle_endtag(self, tag):
        self.block = None if tag == "script" else self.block

    def handle_data(self, data):
        if self.block is not None:
            self.blocks[self.block] += data

    def unpacked(self, name: str) -> bytes:
        return gzip.decompress(base64.b64decode(self.blocks[name], validate=True))

    @property
    def data(self) -> dict:
        return json.loads(self.unpacked("data"))

    @property
    def runs(self) -> list[dict]:
        return self.data["runs"]

    def array(self, place: dict) -> np.ndarray:
        return np.frombuffer(self.unpacked("arrays"), f"<{place['type']}", place["length"], place["offset"])
