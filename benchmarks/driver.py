"""What the driver itself does in a step of reinforcement learning, on ledgers of random tokens: no engine, no model.

`python benchmarks/driver.py --responses 16384 --save` runs the suite's own parts of a step, one after the other. The
ranks of its models answer at once with random numbers, and what that takes is left out. Each estimator runs in a step
of its own: gae with a critic, all with a reference, the correction of each token and a KL penalty in the reward.

The line has of each part its seconds, CPU seconds of all threads, and the peak of the memory of this process above that
at its start. `us_per_token` is the CPU time of all parts of a step over its tokens; `memory_over_batch` is the highest
peak over the bytes of the batch. The first step also takes the memory that later ones use again. Beside the steps,
`texts_us_per_token` is what it takes to decode the texts that rewards read, in their thread while the engines write.
"""

from __future__ import annotations

import argparse
import gc
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch

from common import publish
from rlhf_suite.config.declarations.algo import AdvantageConfig, AlgoConfig, KLConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.processes import keep_freed_memory
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.experience import ExperienceMaker
from rlhf_suite.rl.model_groups import CriticGroup, PolicyGroup, ReferenceGroup
from rlhf_suite.rl.pipeline import staleness
from rlhf_suite.rl.rollout_file import write_rollouts
from rlhf_suite.rl.sample_metrics import sample_metrics
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.rl.scoring import query_texts
from rlhf_suite.rl.shaping import Shaper
from rlhf_suite.rl.update import Updater

Result = TypeVar("Result")
GROUP, VOCABULARY, VERSION = 8, 150_000, 1


def ledgers(count: int, longest: int, median: float) -> list[Trajectory]:
    """Prompts of 8 to 200 tokens and responses of lognormal lengths, one of them as long as any may be."""
    numbers = np.random.default_rng(0)
    lengths = np.clip(numbers.lognormal(np.log(median), 0.9, count), 1, longest).astype(int)
    lengths[-1] = longest
    made = []
    for row, length in enumerate(lengths.tolist()):
        ids = numbers.integers(0, VOCABULARY, int(numbers.integers(8, 200))).tolist()
        prompt = Prompt(ids, f"text {row}", f"text {row}", "synthetic", "", index=row // GROUP)
        one = Trajectory.start(prompt, row // GROUP, row % GROUP)
        log_probs = -numbers.exponential(0.5, length).astype(np.float32)
        one.append_model(numbers.integers(0, VOCABULARY, length), log_probs, VERSION)
        one.ending = Ending.CUT if length == longest else Ending.FINISHED
        made.append(one)
    return made


def scored(made: list[Trajectory]) -> ScoredTrajectories:
    """Rewards of 0 and 1, and short texts."""
    rewards = np.random.default_rng(1).integers(0, 2, len(made)).astype(np.float32)
    texts = [f"text {row}" for row in range(len(made))]
    return ScoredTrajectories(made, rewards, rewards, texts, texts, greedy=rewards)


@dataclass
class InstantRanks:
    """The ranks of a model that answer at once: a number per token, or metrics of an update."""

    name: str
    mesh: Mesh
    clock: Clock
    noise: torch.Tensor  # at least as many numbers as a rank gets tokens
    members: Sequence[Member] = ()

    def start_sharded(self, method: str, shards: Sequence[Any], *_: Any) -> list[Any]:
        with self.clock.stopped():
            return [self.answer(method, shard) for shard in shards]

    def answer(self, method: str, shard: Any) -> Any:
        return {} if method == "update" else self.noise[: shard.num_tokens] * shard.mask

    def wait(self, refs: Sequence[Any], what: str) -> list[Any]:
        return list(refs)


@dataclass
class Clock:
    """Seconds and CPU seconds without those in which it was stopped."""

    skipped: np.ndarray = field(default_factory=lambda: np.zeros(2))

    def now(self) -> np.ndarray:
        return np.array([time.perf_counter(), time.process_time()]) - self.skipped

    @contextmanager
    def stopped(self) -> Iterator[None]:
        before = self.now()
        yield
        self.skipped += self.now() - before


class Parts:
    """Runs the parts of a step one after the other, and remembers what each took."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.rows: dict[str, dict[str, float]] = {}

    def run(self, name: str, part: Callable[[], Result]) -> Result:
        gc.collect()
        before, started = reset_peak(), self.clock.now()
        result = part()
        wall, cpu = self.clock.now() - started
        self.rows[name] = {"s": round(wall, 3), "cpu_s": round(cpu, 3), "peak_mb": round(peak() - before)}
        return result


def reset_peak() -> float:
    """Begin to measure the peak anew where the kernel allows it; return the memory in use, in MiB."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return status("VmRSS")


def peak() -> float:
    """The most memory of this process since `reset_peak`, in MiB."""
    return status("VmHWM")


def status(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def size_mb(batch: TokenBatch) -> float:
    return sum(each.nbytes for each in (batch.ids, *batch.columns("token").values())) / 2**20


def step(estimator: str, samples: ScoredTrajectories, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every part of a step in its order, and return what they took."""
    clock = Clock()
    parts = Parts(clock)
    tokens = sum(len(t.ids) for t in samples.trajectories)
    noise = torch.randn(2 * tokens // arguments.ranks + arguments.longest) / 10

    def ranks(name: str) -> InstantRanks:
        return InstantRanks(name, Mesh(data=arguments.ranks), clock, noise)

    algo = AlgoConfig.of(
        "ppo",
        advantage=AdvantageConfig(estimator=estimator, gamma=0.99, lambd=0.95, is_correction_level="token"),
        kl=KLConfig(init_coef=0.1),
    )
    policy, reference = PolicyGroup(ranks("actor")), ReferenceGroup(ranks("ref"))
    critic = CriticGroup(ranks("critic")) if algo.advantage.needs("values") else None
    counts = {"steps_per_rollout": arguments.steps, "critic_warm_up": 0, "mismatch_limit": math.inf}
    maker = ExperienceMaker(algo, 1.0, policy, reference, critic, **counts)
    train = TrainConfig.of("ppo", batch_size=-(-len(samples.trajectories) // arguments.steps))
    credit, updater = CreditAssigner(algo), Updater(train, ActorConfig.of("ppo"), policy, critic, **counts)

    shaper = Shaper(RewardConfig.of("ppo"), lambda prompt: arguments.longest)
    shaped = parts.run("shaping", lambda: shaper.shape(samples))
    parts.run("sample_metrics", lambda: sample_metrics(shaped))
    batch, _ = parts.run("experience", lambda: maker.make(shaped, VERSION))
    batch, _ = parts.run("credit", lambda: credit.assign(batch))
    parts.run("update", lambda: updater.update(batch, VERSION, credit.kl_coef))
    parts.run("staleness", lambda: staleness(batch, VERSION))
    with TemporaryDirectory(prefix="rlhf-suite-benchmark-") as folder:
        parts.run("rollout_file", lambda: write_rollouts(Path(folder), 1, shaped, batch))
    rows = parts.rows.values()
    return {
        "us_per_token": round(1e6 * sum(row["cpu_s"] for row in rows) / tokens, 3),
        "memory_over_batch": round(max(row["peak_mb"] for row in rows) / size_mb(batch), 2),
        "batch_mb": round(size_mb(batch), 1),
        "parts": parts.rows,
    }


def decoding(samples: ScoredTrajectories) -> float:
    """Return the CPU microseconds per token that the texts of the first 2,000 responses take."""
    tokenizer = load_tokenizer("builtin:small", DataConfig.of("sft"))
    made = samples.trajectories[:2000]
    whole = [each.ids % len(tokenizer) for each in made]
    answers = [each.response_ids % len(tokenizer) for each in made]
    before = time.process_time()
    query_texts(tokenizer, whole)
    tokenizer.batch_decode(answers, skip_special_tokens=True)
    return round(1e6 * (time.process_time() - before) / sum(map(len, whole)), 3)


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
    keep_freed_memory()
    samples = scored(ledgers(arguments.responses, arguments.longest, arguments.median))
    steps = {estimator: step(estimator, samples, arguments) for estimator in arguments.estimators}
    tokens = sum(len(t.ids) for t in samples.trajectories)
    result = {"responses": arguments.responses, "tokens": tokens, "texts_us_per_token": decoding(samples)}
    publish("driver", result | {"steps": steps}, arguments.save)


if __name__ == "__main__":
    main()
