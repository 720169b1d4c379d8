"""A program that rewrites its history, so that its episodes have several ledgers, and a model that ends its turns with
tokens that no template has."""

from __future__ import annotations

import json
from pathlib import Path

# Three turns, the third after an edited history, or after another one. Most turns end with a token that the template
# does not write there, so that each has a ledger of its own.
PROGRAM = """
import httpx

def run_agent(task, base_url, api_key):
    def ask(messages):
        headers = {"authorization": f"Bearer {api_key}"}
        body = {"messages": messages, "max_tokens": 12}
        answer = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=60, verify=False)
        answer.raise_for_status()
        return answer.json()["choices"][0]

    messages = list(task.messages)
    first = ask(messages)
    ask([*messages, first["message"], {"role": "user", "content": "go on"}])
    edited = [*messages, first["message"], {"role": "user", "content": "once more"}]
    last = ask(edited if len(task.label) % 2 else [{"role": "user", "content": "so far: nothing"}])
    return {"reward": len(last["token_ids"]) / 4, "metrics": {"first": len(first["token_ids"])}}
"""
FLAGS = {
    "agent.kind": "endpoint",
    "data.apply_chat_template": True,
    "data.max_len": 400,
    "reward.rule": None,
    "rollout.max_new_tokens": 60,
    "actor.loss_agg_mode": "seq-mean-token-mean",
}


def write_program(folder: Path) -> str:
    """Return the file of the program, in a folder."""
    file = folder / "program.py"
    file.write_text(PROGRAM)
    return str(file)


def add_stops(model: Path) -> None:
    """Let a model of bytes end its turns with any of 55 more tokens."""
    file = model / "generation_config.json"
    settings = json.loads(file.read_text())
    stops = settings["eos_token_id"]
    settings["eos_token_id"] = [*(stops if isinstance(stops, list) else [stops]), *range(200, 255)]
    file.write_text(json.dumps(settings))
