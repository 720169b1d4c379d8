"""A process reward model of task=prm read by transformers alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class PlainJudge:
    """Of a model whose every character is a step and whose config.json says nothing of templates: P(good) of each step
    of "prompt 6;1;", read from the logits at each ;."""

    def __init__(self, path: Path) -> None:
        self.form = json.loads((path / "config.json").read_text())["process_reward"]
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    @torch.no_grad()
    def scores(self, prompt: str, response: str) -> list[float]:
        """Those of the steps that fit into the longest sequence of training."""
        mark, names = self.form["placeholder_token"], self.form["reward_tokens"]
        steps = "".join(f"{char}{mark}" for char in response if char != " ")
        ids = self.tokenizer(f"{prompt} {steps}")["input_ids"][: self.form["max_len"]]
        columns = [self.tokenizer(name)["input_ids"][0] for name in names]
        logits = self.model(torch.tensor([ids])).logits[0]
        (placeholder,) = self.tokenizer(mark)["input_ids"]
        return [float(logits[at][columns].softmax(-1)[0]) for at, token in enumerate(ids) if token == placeholder]
