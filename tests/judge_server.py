"""A scripted judge: a server of chat completions whose replies a test writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from reward_server import Reply, RewardServer

RUBRIC = """Grade the answer to a customer.
{prompt}
{response}

## Criteria
- correct (3): What it says is true.
- polite: It thanks for the question.
"""


def nonce_of(body: dict[str, Any]) -> str:
    """Return the number of a request's quotations, as an honest judge reads it."""
    found = re.search(r"^VERDICT (\w+) ", body["messages"][0]["content"], re.MULTILINE)
    assert found is not None
    return found[1]


def quoted(body: dict[str, Any]) -> list[str]:
    """Return what a request quotes, in order."""
    nonce = nonce_of(body)
    return re.findall(rf"^BEGIN {nonce}\n(.*?)\nEND {nonce}$", body["messages"][1]["content"], re.DOTALL | re.MULTILINE)


def completion(text: str | None, tokens: int = 100, ending: str = "stop") -> dict[str, Any]:
    """Return a chat completion with one message."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": ending}
    return {"choices": [choice], "usage": {"total_tokens": tokens}}


def verdict(body: dict[str, Any], **parts: Any) -> Reply:
    """Return an honest reply with a reason and a verdict."""
    return 200, completion(f"It is fine.\nVERDICT {nonce_of(body)} {json.dumps(parts)}")


class JudgeServer(RewardServer):
    """`answer(body)` makes the replies; `base` is the address that reward.judge.url takes."""

    def __init__(self, answer: Callable[[dict[str, Any]], Reply], headers: dict[str, str] | None = None) -> None:
        super().__init__(answer, headers)
        self.base = self.url.replace("/get_reward", "/v1")
