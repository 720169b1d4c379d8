"""A program that does to its conversations what harnesses do: all three APIs, histories that are compacted, shortened
and rewritten, sub-agents at the same time, requests that are sent again, and streams that are cut.

It waits for every turn that it asked for. What it did is in its metrics.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx

MAX_TOKENS = 12
APIS = ("chat/completions", "messages", "responses")
RETRIED = {"x-stainless-retry-count": "1"}


class Client:
    """Asks for turns in one of the APIs."""

    def __init__(self, base_url: str, api_key: str, api: str, done: Counter) -> None:
        self.url, self.api, self.done = f"{base_url}/{api}", api, done
        self.http = httpx.Client(headers={"authorization": f"Bearer {api_key}"}, timeout=120, verify=False)

    def body(self, system: str, messages: list[dict], stream: bool = False) -> dict:
        if self.api == "messages":
            return {"system": system, "messages": messages, "max_tokens": MAX_TOKENS, "stream": stream}
        if self.api == "responses":
            return {"instructions": system, "input": messages, "max_output_tokens": MAX_TOKENS, "stream": stream}
        whole = [{"role": "system", "content": system}, *messages]
        return {"messages": whole, "max_tokens": MAX_TOKENS, "temperature": 0.2, "stream": stream}

    def send(self, body: dict, headers: dict | None = None) -> dict:
        """Return the answer to a request, as a message."""
        response = self.http.post(self.url, json={**body, "stream": False}, headers=headers or {})
        response.raise_for_status()
        self.done[self.api] += 1
        return {"role": "assistant", "content": text_in(response.json())}

    def ask(self, system: str, messages: list[dict], how: str = "plain") -> dict:
        """Return the next turn. `how`: the first request may be cut off, or be made twice."""
        body = self.body(system, messages, stream=how in ("stream", "cut"))
        self.done[how] += 1
        if how == "plain":
            return self.send(body)
        if how == "timeout":  # the turn is still being written, or has just been
            with suppress(httpx.TimeoutException):
                self.http.post(self.url, json=body, timeout=httpx.Timeout(120, read=0.001))
        elif how == "twice":  # two samples, of which the second is gone on with
            self.send(body)
            return self.send(body)
        else:
            with self.http.stream("POST", self.url, json=body) as response:
                response.raise_for_status()
                for _ in response.iter_raw():
                    if how == "cut":
                        break
        return self.send(body, RETRIED)


def text_in(answer: dict) -> str:
    """Return the text of an answer of any of the APIs."""
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"] or ""
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    return "".join(block["text"] for block in answer["content"])


def said(text: str) -> dict:
    return {"role": "user", "content": text}


def run_agent(task, base_url, api_key):
    """Lead several conversations; the reward is a function of what the model wrote."""
    draw, done = random.Random(f"{task.label}{base_url}"), Counter()
    clients = [Client(base_url, api_key, api, done) for api in APIS]

    def sub_agent(number: int) -> str:
        client, system = clients[number % 3], f"You are helper {number}."
        messages = [said(f"part {number} of {task.label}")]
        for how in ("plain", "stream"):
            messages += [client.ask(system, messages, how), said("more")]
        return messages[-2]["content"]

    client, system = draw.choice(clients), "You are the main agent."
    messages = [dict(task.messages[-1])]
    for how in ("plain", "timeout", "cut"):
        messages += [client.ask(system, messages, how), said(f"go on {len(messages)}")]
    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(sub_agent, range(3)))
    messages += [client.ask(system, messages), said(" ".join(parts))]
    summary = client.ask("You write summaries.", [*messages, said("Write a summary.")])
    compacted = [said(f"So far: {summary['content']}"), said("go on")]  # all else is forgotten
    other = draw.choice(clients)  # another API leads the same conversation
    compacted += [other.ask(system, compacted), said("and on")]
    other.ask(system, compacted, "twice")
    edited = [messages[0], {"role": "assistant", "content": "rewritten"}, said("go on")]
    edited += [client.ask(system, edited), said("again")]
    client.ask(system, edited[:2] + edited[-1:])  # the middle is dropped
    last = client.ask(system, messages[:1] + messages[1:2] + [said("back to the first turn")])
    return {"reward": len(last["content"]) / 10, "metrics": {f"did/{name}": float(n) for name, n in done.items()}}
