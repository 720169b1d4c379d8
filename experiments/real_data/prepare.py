"""Make what the experiments of this folder read: held-out splits of real files, and a small untrained model.

    python experiments/real_data/prepare.py <folder with the downloaded files> <output folder>

Rows are split by the digest of their question, so that no question is on both sides. The model is a Qwen3 of 4 million
parameters with a BPE tokenizer of 4,096 tokens learnt from the training side; `task=sft` teaches it the texts first.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Row = dict[str, Any]
VOCABULARY = 4096
HELD_OUT = 0.2  # of the questions
GROUPS = 10  # of held-out questions: how much a metric differs between them says how sure it is
PAIRS_PER_QUESTION = 4


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def is_held_out(question: str) -> bool:
    return digest(question) % 1000 < HELD_OUT * 1000


def digest(question: str) -> int:
    return int(hashlib.sha256(question.encode()).hexdigest(), 16)


def solution_pairs(rows: list[Row]) -> Iterator[Row]:
    """Right and wrong solutions of the same question."""
    by_question: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for row in rows:
        by_question[row["question"]][row["is_correct"]].append(row["solution"])
    for question, (wrong, right) in by_question.items():
        for chosen, rejected in itertools.islice(itertools.product(right, wrong), PAIRS_PER_QUESTION):
            yield {"question": question, "chosen": chosen, "rejected": rejected}


def first_turns(dialogue: str) -> str:
    """A dialogue up to its last answer."""
    return dialogue.rpartition("\n\nAssistant:")[0]


def sets(source: Path) -> dict[str, tuple[list[Row], list[str]]]:
    """Rows of every experiment, each with the text that decides on which side of the split it goes."""
    preferences = read(source / "hh_rlhf_train.jsonl")
    solutions = read(source / "gsm8k_solutions.jsonl")
    pairs = list(solution_pairs(solutions))
    steps = read(source / "prm_steps_train.jsonl")
    instructions = read(source / "instruct_2k.jsonl")
    for row in instructions:
        row["prompt"] = f"{row['instruction']}\n{row['input']}".strip()
    return {
        "preferences": (preferences, [first_turns(row["chosen"]) for row in preferences]),
        "solutions": (solutions, [row["question"] for row in solutions]),
        "solution_pairs": (pairs, [row["question"] for row in pairs]),
        "steps": (steps, [row["question"] for row in steps]),
        "instructions": (instructions, [row["prompt"] for row in instructions]),
    }


def texts(name: str, rows: list[Row]) -> Iterator[str]:
    """What a language model reads of a set's training rows."""
    for row in rows:
        if name == "preferences":
            yield row["chosen"].strip()
        elif name == "solutions":
            yield f"Question: {row['question']}\nAnswer: {row['solution']}"
        elif name == "steps":
            yield "\n".join([row["question"], *row["steps"]])
        elif name == "instructions":
            yield f"User: {row['prompt']}\nAssistant: {row['output']}"


def tokenizer_of(corpus: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, learnt."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|reward|>", "<|good|>", "<|bad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=special[0], eos_token=special[1], model_max_length=2048
    )


def write_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        initializer_range=0.03,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters() / 1e6:.1f} M parameters, {len(tokenizer)} tokens")


def main(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    corpus: dict[bool, list[str]] = {True: [], False: []}
    for name, (rows, keys) in sets(source).items():
        train = [row for row, key in zip(rows, keys, strict=True) if not is_held_out(key)]
        held_out = [
            (row, digest(key) // 1000 % GROUPS) for row, key in zip(rows, keys, strict=True) if is_held_out(key)
        ]
        write(target / f"{name}_train.jsonl", train)
        for group in range(GROUPS):
            write(target / f"{name}_held_out_{group}.jsonl", (row for row, of in held_out if of == group))
        corpus[False] += texts(name, train)
        corpus[True] += texts(name, [row for row, _ in held_out])
        print(f"{name}: {len(train)} to train on, {len(held_out)} held out")
    for is_out, name in ((False, "texts_train"), (True, "texts_held_out")):
        write(target / f"{name}.jsonl", ({"text": text} for text in dict.fromkeys(corpus[is_out])))
    write_model(target / "untrained", tokenizer_of(corpus[False]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
