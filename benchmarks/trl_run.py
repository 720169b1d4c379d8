"""Train a task by TRL, as a process of the environment that has it, which benchmarks/beside_trl.py starts.

It writes a line per step into <folder>/metrics.jsonl with the names that the suite gives to them, so that both are
measured by the same code. The rows are taken in the order of the file. It imports nothing of the suite.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

TRAINERS = {
    "sft": (SFTConfig, SFTTrainer),
    "rm": (RewardConfig, RewardTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "kto": (KTOConfig, KTOTrainer),
    "grpo": (GRPOConfig, GRPOTrainer),
}
SAMPLES = 8  # of a prompt


class Steps(TrainerCallback):
    """Note when each step ended, and how long its responses were."""

    def __init__(self, file: Path) -> None:
        self.file, self.began = file, 0.0
        self.lengths: list[int] = []

    def reward(self, completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Return the rewards of responses: the share of letters that are a."""
        self.lengths += map(len, completion_ids)
        return [text.count("a") / max(1, len(text)) for text in completions]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.time()
        with self.file.open("a") as file:
            length = sum(self.lengths) / max(1, len(self.lengths))
            row = {"time": now, "timing/step_total": now - self.began, "train/response_length": length}
            file.write(json.dumps(row) + "\n")
        self.lengths.clear()


def columns(task: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the names that TRL reads."""
    if task == "sft":
        return [{"text": row["input"]} for row in rows]
    if task == "kto":
        return [{"prompt": row["input"], "completion": row["output"], "label": bool(row["label"])} for row in rows]
    return rows


def main() -> None:
    """Train once over the rows."""
    task, model, source, folder, batch, longest, device, *options = sys.argv[1:]
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    config, trainer = TRAINERS[task]
    loads = AutoModelForSequenceClassification if task == "rm" else AutoModelForCausalLM
    labels = {"num_labels": 1} if task == "rm" else {}
    network = loads.from_pretrained(model, dtype=torch.float32, **labels)
    network.config.pad_token_id = tokenizer.pad_token_id
    lengths = {"max_length": int(longest)}
    if task == "grpo":  # the batch is one of responses
        lengths = {"max_completion_length": int(longest), "num_generations": SAMPLES, "shuffle_dataset": False}
    settings = config(
        output_dir=folder,
        per_device_train_batch_size=int(batch),
        **lengths,
        num_train_epochs=1,
        use_cpu=device == "cpu",
        bf16=device == "cuda",  # by autocast over weights in fp32, which is TRL's default
        gradient_checkpointing="recompute" in options,
        optim="adamw_torch",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )

    class InOrder(trainer):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    steps = Steps(Path(folder) / "metrics.jsonl")
    used, more = (trainer, {"reward_funcs": steps.reward}) if task == "grpo" else (InOrder, {})
    used(
        model=network,
        args=settings,
        train_dataset=Dataset.from_list(columns(task, rows)),
        processing_class=tokenizer,
        callbacks=[steps],
        **more,
    ).train()


if __name__ == "__main__":
    main()
