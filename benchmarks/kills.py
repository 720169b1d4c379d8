"""kill -9 at random instants, in every kind of run: each has to end in the bytes of a run that nothing disturbed.

    python benchmarks/kills.py                       # 50 kills over all modes; a JSON line for each mode
    python benchmarks/kills.py --kills 4 --modes sft dpo
    python benchmarks/kills.py --write               # and writes docs/kills.md

Of each mode there is one run without kills. Others are killed (the driver alone, with SIGKILL) at instants that are
drawn uniformly from the duration of that run, wherever they fall: in the imports, a step, a checkpoint, the export. In
modes whose start takes longest, a step is drawn instead, and an instant within the time of two steps after it.
After each kill the same command goes on. Runs of one process are forked from this one, so that the imports are paid
once; runs on Ray are processes of their own. What is compared: SHA-256 of every model, all metrics but the clock's, the
rows of rollouts and evaluations, the answers and the training rows of generate and the loops. A stream of groups is not
the same each time: of it each prompt's place in the books is checked, after each kill and at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import stream_books
from common import RESULTS, ROOT, scratch

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

import jobs  # noqa: E402 - it is found by the line above

from rlhf_suite.cli.app import main as main_of_the_suite  # noqa: E402
from rlhf_suite.disk import file_digest  # noqa: E402
from rlhf_suite.launch.environment import runtime_env  # noqa: E402
from rlhf_suite.models.builtin import create_tiny  # noqa: E402
from rlhf_suite.run_folders.run_folder import RunFolder  # noqa: E402
from rlhf_suite.tracking.metrics import read_rows  # noqa: E402

POLL_S = 0.02
DEADLINE_S = 3600.0  # of a run that is not killed
KILLS_OF_A_RUN = 8  # then it may end
# Some groups of answers get equal rewards, which dynamic filtering drops.
REWARD = (
    "def reward_func(queries, prompts, labels):\n    return [float(sum(map(ord, text)) % 3 == 0) for text in queries]\n"
)

EVERY = "launch.device=cpu launch.timeout_s=600 ckpt.load_enable=true"
QUIET = f"logger.progress=false {EVERY}"
SUPERVISED = (
    "demo={task} data.max_samples=40 train.batch_size=8 train.micro_batch_size=4 train.max_epochs=3 train.max_steps=8 "
    "eval.steps=4 eval.max_samples=8 ckpt.save_steps=1 ckpt.max_num=2 " + QUIET
)
SAMPLING = "data.max_samples=48 rollout.n_samples_per_prompt=4 reward.rule=null reward.remote_url={reward} " + EVERY
PPO = (
    "task=ppo demo=ppo rollout.batch_size=4 train.batch_size=8 train.micro_batch_size=4 rollout.micro_batch_size=4 "
    "eval.max_samples=8 eval.n_samples_per_prompt=1 eval.steps=2 train.max_steps=5 ckpt.save_steps=1 "
    "logger.progress=false " + SAMPLING
)
# There is a checkpoint after each second step; evaluations after the others go on while the next step trains.
AHEAD = (
    PPO.replace("ckpt.save_steps=1", "ckpt.save_steps=2")
    .replace("eval.steps=2", "eval.steps=1")
    .replace("train.max_steps=5", "train.max_steps=12")
    + " algo.advantage.estimator=rloo train.async_enable=true train.async_queue_size=2 correction=tis "
    "ckpt.best_metric_key=none"
)
STREAM = (
    PPO.replace("data.max_samples=48", f"data.max_samples={stream_books.ROWS}")
    .replace("train.max_steps=5", f"train.max_steps={stream_books.STEPS}")
    .replace("eval.steps=2", f"eval.steps={stream_books.STEPS}")
    .replace("ckpt.save_steps=1", "ckpt.save_steps=2")
    + " algo.advantage.estimator=rloo algo.dynamic_filtering_enable=true train.async_enable=true "
    "train.async_queue_size=3 train.async_run_ahead=2 train.partial_rollout_enable=true correction=tis"
)


@dataclass(frozen=True)
class Mode:
    """A kind of run, and how many of 100 kills it gets."""

    name: str
    share: int
    line: str
    on_ray: bool = True
    between_steps: bool = False  # whether kills fall between steps, not in the start
    is_stream: bool = False  # not the same each time: its books are checked instead

    def words(self, root: Path) -> list[str]:
        """The command line, with a model that has random weights."""
        task = next(word for word in self.line.split() if word.startswith("task=")).partition("=")[2]
        line = self.line.format(task=task, reward=root / "reward.py")
        return [*line.split(), f"actor.model_name_or_path={root / 'model'}"]


MODES = (
    Mode("sft", 16, f"task=sft {SUPERVISED}", on_ray=False),
    Mode("sft, LoRA with dropout", 14, f"task=sft {SUPERVISED} ds.lora.rank=8 ds.lora.dropout=0.2", on_ray=False),
    Mode("dpo", 14, f"task=dpo {SUPERVISED}", on_ray=False),
    Mode(
        "sft, 2 ranks, ZeRO-2",
        10,
        f"task=sft {SUPERVISED} actor.num_gpus_per_node=2 ds.zero_stage=2 train.micro_batch_size=2",
    ),
    Mode(
        "ppo, gae with a critic",
        14,
        f"{PPO} algo.advantage.estimator=gae critic.save_value_network=true train.enable_ema=true algo.kl.target=0.02",
    ),
    Mode(
        "ppo, group_norm with dynamic filtering",
        12,
        f"{PPO} algo.advantage.estimator=group_norm algo.dynamic_filtering_enable=true "
        "rollout.vllm_generate_batch_size=8",
    ),
    Mode(
        "ppo, rollouts made ahead",
        14,
        AHEAD,
        between_steps=True,
    ),
    Mode("ppo, stream", 14, STREAM, between_steps=True, is_stream=True),
    Mode("generate", 10, f"task=generate demo=generate generate.chunk_size=4 {SAMPLING}"),
    Mode(
        "rejection_sampling",
        10,
        "task=rejection_sampling demo=rejection_sampling loop.num_iterations=2 loop.min_score=null train.batch_size=8 "
        "train.micro_batch_size=8 train.max_steps=4 eval.dataset=null ckpt.save_steps=1 logger.progress=false "
        + SAMPLING,
    ),
)


@dataclass
class Result:
    """The kills of one mode: at which second after its start and after which step each attempt was killed."""

    mode: str
    seed: int
    whole_s: float
    kills: int = 0
    runs: int = 0
    killed_at_s: list[float] = field(default_factory=list)
    killed_after_step: list[int] = field(default_factory=list)
    compared: int = 0  # files or series, over all runs
    different: list[str] = field(default_factory=list)

    def add_books(self, folder: Path) -> None:
        """Check the books of a stream, as they are now."""
        self.compared += 1
        self.different += [f"{folder.name}: {fault}" for fault in stream_books.faults(folder)]


def outcome(folder: Path) -> dict[str, str]:
    """What a run has made, each thing with a digest; clocks are left out."""
    found = {str(path.relative_to(folder)): file_digest(path) for path in sorted(folder.rglob("model.safetensors"))}
    found = {name: digest for name, digest in found.items() if "checkpoints" not in name}
    for path in sorted(folder.rglob("metrics.jsonl")):
        found[str(path.relative_to(folder))] = digest_of(jobs.timeless(read_rows(path)))
    for path in sorted(folder.rglob("*.parquet")):
        found[str(path.relative_to(folder))] = digest_of(pq.read_table(path).to_pylist())
    for name in ("generations.jsonl", "rows.jsonl"):
        found |= {str(path.relative_to(folder)): file_digest(path) for path in sorted(folder.rglob(name))}
    return found


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class Forked:
    """A run of the same command line in a process forked from this one: the imports are paid once, not by each kill."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.began, self.log = time.monotonic(), folder.with_name(f"{folder.name}.log")
        self.pid = os.fork()
        if self.pid:
            return
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os._exit(main_of_the_suite([*words, f"run_dir={folder}"]))

    def poll(self) -> int | None:
        done, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if done else None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def text(self) -> str:
        return self.log.read_text()


class Process(Forked):
    """A run as users start it: `python run.py`."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.job = jobs.Job(folder, words)
        self.began = self.job.began

    def poll(self) -> int | None:
        return self.job.process.poll()

    def kill(self) -> None:
        self.job.kill()

    def text(self) -> str:
        return self.job.text()


def start(mode: Mode, folder: Path, words: list[str]) -> Forked:
    return Process(folder, words) if mode.on_ray else Forked(folder, words)


def killed_after(run: Forked, seconds: float, wait: Callable[[], bool] = lambda: True) -> bool:
    """Kill a run so many seconds after its start, or after the first moment at which `wait()` is true; False if it has
    come to its end before."""
    since = run.began if wait() else None
    while since is None or time.monotonic() - since < seconds:
        if since is None and wait():
            since = time.monotonic()
        if (code := run.poll()) is not None:
            assert code == 0, run.text()
            return False
        time.sleep(POLL_S)
    run.kill()
    return True


def tried(mode: Mode, kills: int, seed: int, root: Path) -> Result:
    """Kill runs of one mode `kills` times, and compare each at its end with one that was not killed."""
    chance, words = random.Random(f"{seed} {mode.name}"), mode.words(root)
    whole = start(mode, root / "whole", words)
    assert not killed_after(whole, DEADLINE_S), whole.text()
    whole_s = time.monotonic() - whole.began
    result, expected = Result(mode.name, seed, round(whole_s, 1)), outcome(root / "whole")
    while result.kills < kills:
        folder, here, is_over = root / f"killed_{result.runs}", 0, False
        result.runs += 1
        while not is_over and here < KILLS_OF_A_RUN and result.kills < kills:
            run = start(mode, folder, words)
            is_over = not killed_after(run, *instant(mode, chance, root, whole_s, RunFolder(folder)))
            if not is_over:
                here, result.kills = here + 1, result.kills + 1
                result.killed_at_s.append(round(time.monotonic() - run.began, 1))
                result.killed_after_step.append(RunFolder(folder).status()["last_step"])
                if mode.is_stream:
                    result.add_books(folder)
        if not is_over:
            assert not killed_after(start(mode, folder, words), DEADLINE_S), "it does not come to its end"
        if mode.is_stream:
            result.add_books(folder)
            continue
        made = outcome(folder)
        result.compared += len(expected)
        result.different += [
            f"{folder.name}/{name}" for name in {**expected, **made} if expected.get(name) != made.get(name)
        ]
    return result


def instant(
    mode: Mode, chance: random.Random, root: Path, whole_s: float, folder: RunFolder
) -> tuple[float, Callable[[], bool]]:
    """Draw when a run is killed: so many seconds after its start, or after a step that it has not yet done."""
    if not mode.between_steps:
        return chance.uniform(0, whole_s), lambda: True
    rows = jobs.train_rows(root / "whole")
    seconds = (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1)
    first = stream_books.last_saved(folder.path) + 1
    step = chance.randint(first, max(first, rows[-1]["step"] - 1))
    began = time.time()

    def is_there() -> bool:
        rows = jobs.train_rows(folder.path) if folder.metrics.exists() else []
        return any(row["step"] >= step and row["time"] >= began for row in rows)

    return chance.uniform(0, 2 * seconds), is_there


def results(modes: Sequence[Mode], kills: int, seed: int) -> Iterator[Result]:
    os.environ.update(runtime_env("cpu"))
    for name in ("deepspeed", "rlhf_suite.tasks.sft", "rlhf_suite.tasks.dpo"):
        importlib.import_module(name)  # for the forks
    total = sum(mode.share for mode in modes)
    ends = [round(kills * sum(mode.share for mode in modes[: i + 1]) / total) for i in range(len(modes))]
    for mode, end, start in zip(modes, ends, [0, *ends], strict=False):
        with scratch() as root:
            os.environ["XDG_CACHE_HOME"] = str(root / "cache")
            create_tiny(root / "model", seed=0)
            (root / "reward.py").write_text(REWARD)
            yield tried(mode, end - start, seed, root)


def page(found: Sequence[Result]) -> str:
    """Return docs/kills.md."""
    kills, compared = sum(each.kills for each in found), sum(each.compared for each in found)
    different = sum(len(each.different) for each in found)
    between = {mode.name for mode in MODES if mode.between_steps}
    later = ", ".join(each.mode for each in found if each.mode in between and min(each.killed_after_step) > 0)
    lines = [
        "<!-- Written by: python benchmarks/kills.py --write -->",
        "",
        "# Killed at random instants",
        "",
        f"The driver of a run was killed {kills} times by `kill -9`, at random instants that are uniform over the "
        "duration of an undisturbed run"
        + (f" (of `{later}`: within the time of two steps after a random step)" if later else "")
        + ". After each kill the same command with `ckpt.load_enable=true` continued. "
        f"At the end {compared} models, series of metrics and files of samples were compared with those of undisturbed "
        f"runs: {'all are equal' if not different else f'{different} DIFFER'}. Models are compared by SHA-256, metrics "
        "without times. The last step is the step in the record of the run when it was killed, or 0 if there was "
        "no record. Of a stream, which is not the same each time, the books were checked instead, after each kill and "
        "at the end: each group that began is trained on once, or rejected with a reason, or outstanding.",
        "",
        "| run | seconds undisturbed | runs | kills | killed after seconds | last step then | compared | different |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        instants = ", ".join(f"{second:g}" for second in each.killed_at_s)
        steps = ", ".join(map(str, each.killed_after_step))
        cells = (each.mode, f"{each.whole_s:g}", each.runs, each.kills, instants, steps, each.compared)
        lines.append(f"| {' | '.join(map(str, cells))} | {', '.join(each.different) or 'none'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="of all modes together")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--modes", nargs="+", default=[mode.name for mode in MODES], help="names of modes")
    parser.add_argument("--write", action="store_true", help="write docs/kills.md")
    given = parser.parse_args()
    found = []
    for result in results([mode for mode in MODES if mode.name in given.modes], given.kills, given.seed):
        print(json.dumps(asdict(result)), flush=True)
        found.append(result)
    if given.write:
        write(found)
    sys.exit(any(each.different for each in found))


def write(found: Sequence[Result]) -> None:
    """Put the results in the place of earlier ones of the same modes, and write the page of all of them."""
    path = RESULTS / "kills.jsonl"
    earlier = [Result(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    by_mode = {each.mode: each for each in (*earlier, *found)}
    ordered = [by_mode[mode.name] for mode in MODES if mode.name in by_mode]
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in ordered))
    (ROOT / "docs" / "kills.md").write_text(page(ordered))


if __name__ == "__main__":
    main()
