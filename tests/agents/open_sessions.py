"""The program of the run that `endpoint_attacks.py` attacks: it opens sessions and leaves them to others."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import httpx

from rlhf_suite.agents.base import Task

FOLDER = Path(os.environ.get("OPEN_SESSIONS", "."))
LOCK = threading.Lock()


def run_agent(task: Task, base_url: str, api_key: str) -> float:
    """Say where the session is, and return when all attacks are over. Sessions with the label `over` end after a turn:
    an episode without one has failed."""
    if task.label == "over":
        head, body = {"authorization": f"Bearer {api_key}"}, {"messages": list(task.messages), "max_tokens": 1}
        httpx.post(f"{base_url}/chat/completions", json=body, headers=head, timeout=None, trust_env=False)
    with LOCK, (FOLDER / "sessions.jsonl").open("a") as file:
        file.write(json.dumps({"url": base_url, "key": api_key, "label": task.label}) + "\n")
    while task.label != "over" and not (FOLDER / "finished").exists():
        time.sleep(0.05)
    return 1.0
