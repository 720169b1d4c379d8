"""How fast task=sft trains: sequences of uniformly random length, loss on every token, three ways to lay them out.

padded        one right-padded micro-batch
packed        the same sequences end to end, nothing padded
packed_full   micro-batches filled to a token budget, whatever their number of sequences
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from common import common_arguments, model_of, publish, scratch, suite_run

SEED = 0
LETTERS = "abcdefghijklmnopqrstuvwxyz "
FULL = 2048  # tokens of a filled micro-batch


def main() -> None:
    """Train for a few steps and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser)
    parser.add_argument("--mode", choices=("padded", "packed", "packed_full"), default="packed")
    parser.add_argument("--batch", type=int, default=16, help="sequences per optimiser step")
    parser.add_argument("--lengths", type=int, nargs=2, default=(20, 300), help="shortest and longest, in characters")
    parser.add_argument("--budget", type=int, default=FULL, help="tokens of a micro-batch with packed_full")
    parser.add_argument("--save", action="store_true", help="add the line to results/sft.jsonl")
    arguments = parser.parse_args()
    publish("sft", measure(arguments), arguments.save)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, and what it comes to per second and per CPU second."""
    model, warmup = model_of(arguments), arguments.warmup
    with scratch() as folder:
        texts = write_texts(folder / "texts.jsonl", arguments)
        run = suite_run(flags(arguments, model, folder / "texts.jsonl"), folder / "run")
    tokens = step_tokens(texts, model, arguments)
    counted, samples = sum(tokens[warmup:]), arguments.batch * (arguments.steps - warmup)
    return {
        "mode": arguments.mode,
        **run.rates(warmup, counted, samples),
        "final_loss": run.steps[-1]["train/gpt_loss"],
        "config": {
            "model": arguments.shape or arguments.model,
            "device": arguments.device,
            "dtype": arguments.dtype,
            "batch": arguments.batch,
            "lengths": list(arguments.lengths),
            "steps": arguments.steps,
            "tokens": counted,
        },
    }


def flags(arguments: argparse.Namespace, model: str, texts: Path) -> list[str]:
    """The command line of the run."""
    layout = {
        "padded": ["ds.packing_samples=false", f"train.micro_batch_size={arguments.batch}"],
        "packed": ["ds.packing_samples=true", f"train.micro_batch_size={arguments.batch}"],
        "packed_full": [
            "ds.packing_samples=true",
            "train.dynamic_batch_enable=true",
            f"train.max_tokens_per_gpu={arguments.budget}",
        ],
    }
    return [
        "task=sft",
        f"actor.model_name_or_path={model}",
        "actor.pretrain_mode_enable=true",
        f"data.dataset={texts}",
        f"data.max_len={arguments.lengths[1] + 1}",
        "data.input_template=null",
        f"train.batch_size={arguments.batch}",
        "train.max_epochs=1",
        f"train.seed={SEED}",
        f"ds.param_dtype={arguments.dtype}",
        f"launch.device={arguments.device}",
        *layout[arguments.mode],
        *arguments.set,
    ]


def write_texts(path: Path, arguments: argparse.Namespace) -> list[str]:
    """One random text per sequence of the run, one token per character with the builtin tokenizer."""
    rng = random.Random(SEED)
    low, high = arguments.lengths
    texts = ["".join(rng.choices(LETTERS, k=rng.randint(low, high))) for _ in range(arguments.batch * arguments.steps)]
    path.write_text("".join(json.dumps({"input": text}) + "\n" for text in texts))
    return texts


def step_tokens(texts: list[str], model: str, arguments: argparse.Namespace) -> list[int]:
    """Tokens of each optimiser step."""
    from rlhf_suite.config.data import SFTDataConfig
    from rlhf_suite.data.sampler import BatchOrder
    from rlhf_suite.models.load import load_tokenizer

    tokenizer = load_tokenizer(model, SFTDataConfig())
    lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    order = BatchOrder(len(texts), arguments.batch, SEED)
    return [sum(lengths[i] for i in order.indices(step)) for step in range(arguments.steps)]


if __name__ == "__main__":
    main()
