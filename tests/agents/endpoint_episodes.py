"""Episodes of the endpoint: a model that writes what a test wants, and the requests of its programs."""

from __future__ import annotations

from functools import partial

import httpx
import numpy as np

from rlhf_suite.data.generation import Generation
from rlhf_suite.data.trajectory import to_batch

# Without the certificates of https, which would be read again for each request.
get, post = partial(httpx.get, verify=False), partial(httpx.post, verify=False)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Model:
    """Writes `reply(prompt)`, each token with a log-prob that no other token has. `gate` holds it back."""

    def __init__(self, tokenizer, reply) -> None:
        self.tokenizer, self.reply, self.gate = tokenizer, reply, None
        self.written: list[float] = []
        self.asked: list[list[int]] = []

    async def generate(self, request) -> Generation:
        self.asked.append(list(request.prompt_ids))
        if self.gate is not None:
            await self.gate.wait()
        text = self.reply(self.tokenizer.decode(request.prompt_ids))
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], request.sampling.stop_token_ids[0]]
        reason = "stop" if len(ids) <= request.max_new_tokens else "length"
        ids = ids[: request.max_new_tokens]
        log_probs = np.array([-(len(self.written) + n + 1) / 1024 for n in range(len(ids))], np.float32)
        self.written += log_probs.tolist()
        return Generation(request.id, np.array(ids, np.int32), log_probs, reason, np.zeros(len(ids), np.int32))


def echo(prompt: str) -> str:
    return f"answer {prompt.count('user')}"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def client(base_url: str, api_key: str, **more):
    from openai import OpenAI  # seconds, which other files of tests need not wait

    return OpenAI(base_url=base_url, api_key=api_key, **more)


def ask(base_url: str, api_key: str, messages: list, headers=None, **more) -> httpx.Response:
    body = {"model": "policy", "messages": messages, **more}
    head = {"authorization": f"Bearer {api_key}"} | (headers or {})
    return post(f"{base_url}/chat/completions", json=body, headers=head, timeout=30)


def trained(ledgers) -> list[float]:
    batch = to_batch(ledgers)
    return sorted(batch.engine_log_probs[batch.mask.bool()].tolist())


def said_by_call(arguments: str) -> dict:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def status_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


def head(api_key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"}
