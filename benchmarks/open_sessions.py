"""The program of the run that `endpoint_attacks.py` attacks: it opens sessions and leaves them to others."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

from rlhf_suite.agents.base import Task

FOLDER = Path(os.environ.get("OPEN_SESSIONS", "."))
LOCK = threading.Lock()


def run_agent(task: Task, base_url: str, api_key: str) -> float:
    """Say where the session is, and return when all attacks are over. Sessions with the label `over` end at once."""
    with LOCK, (FOLDER / "sessions.jsonl").open("a") as file:
        file.write(json.dumps({"url": base_url, "key": api_key, "label": task.label}) + "\n")
    while task.label != "over" and not (FOLDER / "finished").exists():
        time.sleep(0.05)
    return 1.0
