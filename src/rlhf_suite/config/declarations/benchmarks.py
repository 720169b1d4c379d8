"""Benchmarks of `eval.benchmark`: for each its prompt, its rule and how it is sampled, declared once.

A prompt is fixed: two numbers of a benchmark can be compared if they have the same prompt, the same rule, the same
sampling and the same questions. `fingerprint` is a digest of these; results carry it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

UNCOUNTED = ("extraction", "source", "label", "shares", "packages")  # of a benchmark, in its fingerprint
REASON = "\n\nReason step by step, and write the final answer in \\boxed{} at the end."


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark is asked and scored. The prompts are zero-shot: they have no examples."""

    source: str  # the data set on the Hugging Face hub, whose files are read
    split: str  # of a folder with several
    question: tuple[str, ...]  # the column with the question; the first of these that a row has
    answer: tuple[str, ...]  # and that with the right answer
    prompt: str  # with {question}
    rule: str  # what scores an answer (reward.rule)
    extraction: str  # which part of an answer counts, in words
    samples: int = 1  # of each question
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    max_new_tokens: int = 2048
    label: tuple[str, ...] = ()  # columns that are the right answer together, as JSON; empty: `answer` is
    # Metrics that are the sum of a number over the answers divided by the sum of another one, by their names.
    shares: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    packages: tuple[str, ...] = ()  # that its rule needs beside those of the suite


BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark(
        source="openai/gsm8k",
        split="test",
        question=("question",),
        answer=("answer",),
        prompt="{question}\n\nReason step by step. End with a line of four hash signs, a space and the number, as in "
        "#### 42",
        rule="gsm8k",
        extraction="pass1: the number after the first ####; flexible: the last number of the answer",
        max_new_tokens=1024,
    ),
    "math500": Benchmark(
        source="HuggingFaceH4/MATH-500",
        split="test",
        question=("problem",),
        answer=("answer",),
        prompt="{question}" + REASON,
        rule="math",
        extraction="the last box, else what follows 'the answer is' or the last expression",
    ),
    "aime": Benchmark(
        source="Maxwell-Jia/AIME_2024, math-ai/aime25",
        split="train",
        question=("Problem", "problem", "Question"),
        answer=("Answer", "answer"),
        prompt="{question}" + REASON,
        rule="math",
        extraction="the last box, else what follows 'the answer is' or the last expression",
        samples=8,
        temperature=0.6,
        top_p=0.95,
        max_new_tokens=16384,
    ),
    "ifeval": Benchmark(
        source="google/IFEval",
        split="train",
        question=("prompt",),
        answer=(),
        label=("instruction_id_list", "kwargs"),
        prompt="{question}",
        rule="ifeval",
        extraction="pass1: all instructions of a prompt are followed; loose: by one of eight variants of the answer",
        max_new_tokens=1280,
        shares={"inst_strict": ("followed", "instructions"), "inst_loose": ("followed_loose", "instructions")},
        packages=("langdetect", "nltk"),
    ),
}


def named_benchmarks(text: str | None) -> Iterator[tuple[str, str]]:
    """Yield the name and the place of each entry of eval.benchmark, as they are written; a place may be empty."""
    for entry in (text or "").split(","):
        if entry.strip():
            name, _, place = entry.strip().partition(":")
            yield name, place


def fingerprint(benchmark: Benchmark, questions: Sequence[tuple[str, str]], shown: dict[str, object]) -> str:
    """Return a digest of all that a number of a benchmark depends on beside the model and the seed: prompt, rule,
    sampling, the `questions` with their answers, and what is `shown` around the prompt. The words of the extraction and
    of the source do not count, nor do the columns of the answer and the names of shares."""
    declared = {name: value for name, value in asdict(benchmark).items() if name not in UNCOUNTED}
    content = json.dumps([declared, list(questions), shown], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
