"""How long `rlhf-suite report` takes for a run of many samples, and how large its page is.

The run is made up: rollouts and an evaluation before and after, written by the suite's own writers. The command is a
process of its own, so its imports count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from common import ROOT, publish, scratch
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import CallRecord, Experience, Trajectory, TurnRecord
from rlhf_suite.report.html import choose_runs
from rlhf_suite.report.sample_files import Reader
from rlhf_suite.report.watch import Live
from rlhf_suite.rl.rollout_file import write_evaluation, write_rollouts
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.metrics import MetricLogger

VOCABULARY = 30_000
WORDS = (ROOT / "README.md").read_text().split()
PROMPT_TOKENS, ANSWER_TOKENS, GROUP = 40, 6, 8


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=200, help="of a response")
    parser.add_argument("--watch", action="store_true", help="measure the first and a later reading of a watched page")
    parser.add_argument("--save", action="store_true", help="add the line to results/report.jsonl")
    arguments = parser.parse_args()
    with scratch() as place:
        made_run(place / "run", arguments.steps, arguments.samples // (arguments.steps + 2), arguments.tokens)
        if arguments.watch:
            publish("report", {**time_readings(place / "run"), **vars(arguments)}, arguments.save)
            return
        began = time.perf_counter()
        command = [sys.executable, "-m", "rlhf_suite.cli", "report", str(place / "run")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        size = (place / "run" / "report.html").stat().st_size / 1e6
    result = {"seconds": round(seconds, 2), "megabytes": round(size, 2), **vars(arguments)}
    publish("report", result, arguments.save)


def time_readings(folder: Path) -> dict[str, float]:
    """Return the seconds that `rlhf-suite watch` takes to read a run first, again when it has a further step, and when
    nothing has changed."""
    live, version, seconds = Live(lambda: choose_runs([folder]), Reader(), ""), "", dict[str, float]()
    for name in ("first_s", "later_s", "unchanged_s"):
        if name == "later_s":
            further_step(RunFolder(folder))
        live.end_rest()
        began = time.perf_counter()
        changed = live.newer_than(version)
        seconds[name], version = round(time.perf_counter() - began, 4), live.version
        assert (changed is None) == (name == "unchanged_s")
    return seconds


def further_step(folder: RunFolder) -> None:
    """Write the metrics of the step after the last, as a run does."""
    step = folder.status()["last_step"] + 1
    with folder.metrics.open("a") as file:
        file.write(json.dumps({"step": step, "time": time.time(), "train/reward": 0.5}) + "\n")
    folder.record_step(step)


def made_run(path: Path, steps: int, samples: int, tokens: int, texts: Sequence[str] = (), turns: int = 1) -> RunFolder:
    """Write a run folder with `samples` of each of `steps` and of two evaluations. Responses have `tokens` tokens in
    each of their `turns`, between which a tool answers a call, and `texts` in turn, or random words. With several turns
    the last one of the second sample is a summary."""
    folder, random = RunFolder(path), np.random.default_rng(0)
    folder.start("made up")
    agent = "agent:\n  kind: tools\n" if turns > 1 else ""
    folder.config.write_text(f"task: ppo\nrollout:\n  batch_size: 8\n{agent}")
    logger = MetricLogger(LoggerConfig(), folder, 0)
    for place in (folder.rollouts, folder.evaluations):
        place.mkdir()
    for step in range(steps + 1):
        scored = sampled(random, samples, tokens, step, texts, turns)
        if step in (0, steps):
            write_evaluation(folder.evaluations, step, scored)
            logger.log(step, {"eval/pass1": float(scored.rewards.mean())})
        if step:
            write_rollouts(folder.rollouts, step, scored, experience_of(random, scored))
            times = {"timing/generation": 2.0, "timing/ppo_train": 1.0, "timing/step_total": 3.0}
            logger.log(step, {"train/reward": float(scored.rewards.mean()), **times})
            folder.record_step(step)
    logger.close()
    folder.mark_done({"eval/pass1": 0.5})
    return folder


def sampled(
    random: np.random.Generator, samples: int, tokens: int, step: int, texts: Sequence[str], turns: int
) -> ScoredTrajectories:
    """Return made up samples, GROUP of each prompt."""
    trajectories, texts_of_prompts = [], [written(random, PROMPT_TOKENS) for _ in range(-(-samples // GROUP))]
    for number in range(samples):
        group, ids = number // GROUP, random.integers(0, VOCABULARY, PROMPT_TOKENS).tolist()
        prompt = Prompt(ids, texts_of_prompts[group], "42", "default", "", index=group)
        trajectory = Trajectory.start(prompt, group, number % GROUP)
        for turn in range(turns):
            if turn:
                trajectory.append_environment(random.integers(0, VOCABULARY, ANSWER_TOKENS).tolist())
            log_probs = -random.exponential(0.5, tokens).astype(np.float32)
            trajectory.append_model(random.integers(0, VOCABULARY, tokens), log_probs, max(0, step - 1))
            if turns > 1:
                trajectory.turn_records.append(made_record(len(trajectory.ids), turn, turn < turns - 1))
        if turns > 1 and number == 1:
            trajectory.ending = Ending.COMPACTED
        trajectories.append(trajectory)
    responses = [texts[number % len(texts)] if texts else written(random, tokens) for number in range(samples)]
    rewards = random.random(samples, dtype=np.float32)
    queries = [each.prompt.text + response for each, response in zip(trajectories, responses, strict=True)]
    return ScoredTrajectories(trajectories, rewards, rewards, responses, queries)


def made_record(end: int, turn: int, calls: bool) -> TurnRecord:
    """Return how a made up turn went, with a call or none."""
    call = CallRecord("look_up", f'{{"page": {turn}, "of": "<b>"}}', None, f"{turn} pages of <i>it</i>")
    return TurnRecord(end, 0.5 + turn, 0.125, [call] if calls else [])


def written(random: np.random.Generator, tokens: int) -> str:
    """Return random words, three for four tokens."""
    return " ".join(random.choice(WORDS, 3 * tokens // 4))


def experience_of(random: np.random.Generator, scored: ScoredTrajectories) -> Experience:
    """Return made up numbers for the tokens of samples."""
    trajectories = scored.trajectories
    engine = torch.from_numpy(np.concatenate([each.engine_log_probs for each in trajectories]))
    mask = torch.from_numpy(np.concatenate([each.model_mask for each in trajectories])).float()

    def near(scale: float) -> torch.Tensor:
        return engine + torch.from_numpy(random.normal(0, scale, len(engine)).astype(np.float32)) * mask

    return Experience(
        torch.from_numpy(np.concatenate([each.ids for each in trajectories])),
        torch.tensor([len(each.ids) for each in trajectories]),
        owner=torch.from_numpy(np.concatenate([t.owner for t in scored.trajectories])),
        weight_version=torch.from_numpy(np.concatenate([t.version for t in scored.trajectories])),
        mask=mask,
        engine_log_probs=engine,
        old_log_probs=near(1e-3),
        ref_log_probs=near(0.1),
        values=near(1.0),
        advantages=near(1.0) * mask,
        returns=near(1.0),
    )


if __name__ == "__main__":
    main()
