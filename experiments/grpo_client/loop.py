"""GRPO as your own training loop: the weights equal those of `python run.py task=ppo experiment=grpo`, bit for bit.

python experiments/grpo_client/loop.py steps=2 train.max_steps=40
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import yaml

import rlhf_suite as rs


def score(client: rs.Client, ledger: Any) -> float:
    """Return 1 for a response that is the label of its prompt, else 0: reward.rule=exact_match."""
    response = client.tokenizer.decode(ledger.response_ids, skip_special_tokens=True)
    return float(response.strip() == ledger.prompt.label.strip())


def standardize(rewards: np.ndarray) -> np.ndarray:
    """Return rewards [prompts, samples] less the mean of their group, over its deviation: group_norm."""
    centred = rewards - rewards.mean(1, dtype=np.float64, keepdims=True).astype(np.float32)
    variance = np.square(centred).sum(1, dtype=np.float64, keepdims=True) / (rewards.shape[1] - 1)
    return centred / (np.sqrt(variance).astype(np.float32) + np.float32(1e-9))


def train(steps: int, model_folder: str, **settings: Any) -> None:
    """Take RL steps with the flags of experiment=grpo and write the model."""
    with rs.Client(experiment="grpo", **settings) as client:
        for step in range(steps):
            groups = client.sample(client.prompts(step), step=step)
            rewards = np.array([[score(client, ledger) for ledger in group] for group in groups], np.float32)
            ledgers = [ledger for group in groups for ledger in group]
            old = client.compute_logprobs(ledgers)
            reference = client.compute_logprobs(ledgers, reference=True)
            columns = zip(ledgers, standardize(rewards).ravel(), old, reference, strict=True)
            data = [rs.Datum.of(*row) for row in columns]
            for chosen in client.minibatches(len(data), step):
                client.forward_backward([data[number] for number in chosen])
                client.optim_step()
            client.save_weights_for_sampler()
            print(f"step {step + 1}: reward {rewards.mean():.4f}", flush=True)
        client.save_model(model_folder)


if __name__ == "__main__":
    given = {name: yaml.safe_load(value) for name, value in (word.split("=", 1) for word in sys.argv[1:])}
    train(given.pop("steps", 2), given.pop("model_folder", "outputs/grpo_client"), **given)
