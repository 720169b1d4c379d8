"""What the driver itself does in a step of reinforcement learning, on ledgers of random tokens: no model, no engine.

`python benchmarks/driver.py --responses 16384 --estimators gae group_norm --save`. The line has of each part its
seconds, CPU seconds of all threads, and the peak of the memory of this process above that of the ledgers and the batch
at its start. `us_per_token` is the CPU time of all parts, with the first estimator, over the tokens; credit is that of
assignment, with a KL penalty in the reward. `memory_over_batch` is the highest peak over the bytes of the batch.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
import torch

from common import publish
from rlhf_suite.algo.correction import mismatch
from rlhf_suite.config.algo import AdvantageConfig, AlgoConfig, KLConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.data.trajectory import Experience, Trajectory, to_batch
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.mismatch import corrected
from rlhf_suite.rl.rollout_file import write_rollouts
from rlhf_suite.rl.sample_metrics import sample_metrics
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.rl.sharding import balanced_parts, forward_groups, reassemble, shards, split
from rlhf_suite.rl.update import step_indices

Result = TypeVar("Result")
GROUP, VOCABULARY = 8, 150_000


def ledgers(count: int, longest: int, median: float) -> list[Trajectory]:
    """Prompts of 8 to 200 tokens and responses of lognormal lengths, one of them as long as any may be."""
    numbers = np.random.default_rng(0)
    lengths = np.clip(numbers.lognormal(np.log(median), 0.9, count), 1, longest).astype(int)
    lengths[-1] = longest
    made = []
    for row, length in enumerate(lengths.tolist()):
        prompt = numbers.integers(0, VOCABULARY, int(numbers.integers(8, 200))).tolist()
        one = Trajectory.start(row // GROUP, row // GROUP, row % GROUP, prompt)
        log_probs = -numbers.exponential(0.5, length).astype(np.float32)
        one.append_model(numbers.integers(0, VOCABULARY, length), log_probs, 1)
        one.finish_reason = "length" if length == longest else "stop"
        made.append(one)
    return made


def scored(made: list[Trajectory]) -> ScoredTrajectories:
    """Rewards of 0 and 1, and short texts."""
    rewards = np.random.default_rng(1).integers(0, 2, len(made)).astype(np.float32)
    texts = [f"text {row}" for row in range(len(made))]
    sources = ["synthetic"] * len(made)
    return ScoredTrajectories(made, rewards, rewards, texts, texts, texts, sources, texts, greedy=rewards)


def with_models(batch: Experience, samples: ScoredTrajectories) -> Experience:
    """What policy, reference and critic would have said, drawn at random."""
    noise = torch.Generator().manual_seed(2)

    def near(values: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.randn(len(values), generator=noise).mul_(scale).add_(values).mul_(batch.mask)

    assert batch.engine_log_probs is not None and samples.greedy is not None
    old = near(batch.engine_log_probs, 0.01)
    given = {"reward": torch.from_numpy(samples.rewards), "greedy": torch.from_numpy(samples.greedy)}
    return replace(batch, old_log_probs=old, ref_log_probs=near(old, 0.1), values=near(batch.mask, 0.1), **given)


class Parts:
    """Runs the parts of a step one after the other, and remembers what each took."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}

    def run(self, name: str, part: Callable[[], Result]) -> Result:
        gc.collect()
        before = reset_peak()
        wall, cpu = time.perf_counter(), time.process_time()
        result = part()
        took = {"s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        self.rows[name] = {key: round(value, 3) for key, value in took.items()} | {"peak_mb": round(peak() - before)}
        return result

    def cpu_s(self, left_out: list[str]) -> float:
        return sum(row["cpu_s"] for name, row in self.rows.items() if name not in left_out)


def reset_peak() -> float:
    """Begin to measure the peak anew where the kernel allows it; return the memory in use, in MiB."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return status("VmRSS")


def peak() -> float:
    """The most memory of this process since `reset_peak`, in MiB."""
    return status("VmHWM")


def status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def size_mb(batch: TokenBatch) -> float:
    return sum(each.nbytes for each in (batch.ids, *batch.columns("token").values())) / 2**20


def assigner(estimator: str) -> CreditAssigner:
    advantage = AdvantageConfig(estimator=estimator, gamma=0.99, lambd=0.95)
    return CreditAssigner(AlgoConfig(advantage=advantage, kl=KLConfig(init_coef=0.1)))


def forward(parts: Parts, batch: Experience, ranks: int) -> None:
    """What a forward pass on several ranks asks of the driver."""
    chosen = parts.run("balance", lambda: balanced_parts(batch, ranks))
    pieces = parts.run("shards", lambda: shards(batch, chosen))
    parts.run("reassemble", lambda: reassemble(batch, chosen, [piece.mask for piece in pieces]))


def update(parts: Parts, batch: Experience, steps: int, ranks: int) -> None:
    """What the optimiser steps ask of it."""
    chosen = step_indices(len(batch), -(-len(batch) // steps), 1, (0, 0))
    parts.run("split", lambda: split(batch, chosen, ranks))


def measure(arguments: argparse.Namespace) -> tuple[Parts, Experience]:
    """Run every part of a step in its order."""
    parts = Parts()
    samples = scored(ledgers(arguments.responses, arguments.longest, arguments.median))
    parts.run("sample_metrics", lambda: sample_metrics(samples))
    batch = with_models(parts.run("batch", lambda: to_batch(samples.trajectories)), samples)
    old, engine = batch.old_log_probs, batch.engine_log_probs
    assert old is not None and engine is not None
    forward(parts, batch, arguments.ranks)
    parts.run("mismatch", lambda: mismatch(engine, old, batch.mask))
    correction = AdvantageConfig(is_correction_level="token")
    batch, _ = parts.run("correction", lambda: corrected(batch, correction))
    for estimator in arguments.estimators:
        given = batch if estimator == "gae" else replace(batch, values=None)
        result, _ = parts.run(f"credit {estimator}", lambda: assigner(estimator).assign(given))  # noqa: B023 - now
    update(parts, result, arguments.steps, arguments.ranks)
    parts.run("micro_batches", lambda: forward_groups(result, 1, 2 * arguments.longest))
    with TemporaryDirectory(prefix="rlhf-suite-benchmark-") as folder:
        parts.run("rollout_file", lambda: write_rollouts(Path(folder), 1, samples, result))
    return parts, result


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=16_384)
    parser.add_argument("--longest", type=int, default=16_384, help="tokens of the longest response")
    parser.add_argument("--median", type=float, default=530, help="of the lengths of responses")
    parser.add_argument("--estimators", nargs="+", default=["group_norm", "gae"])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="optimiser steps per rollout")
    parser.add_argument("--save", action="store_true", help="add the line to results/driver.jsonl")
    arguments = parser.parse_args()
    parts, batch = measure(arguments)
    others = [f"credit {name}" for name in arguments.estimators[1:]]
    size = size_mb(batch)
    result = {
        "responses": len(batch),
        "tokens": batch.num_tokens,
        "batch_mb": round(size, 1),
        "us_per_token": round(1e6 * parts.cpu_s(others) / batch.num_tokens, 3),
        "memory_over_batch": round(max(row["peak_mb"] for row in parts.rows.values()) / size, 2),
        "parts": parts.rows,
    }
    publish("driver", result, arguments.save)


if __name__ == "__main__":
    main()
