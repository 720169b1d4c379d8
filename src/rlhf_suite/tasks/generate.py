"""task=generate: a model's answers to the prompts of a file, by vLLM engines, in order; resumable at any instant."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from rlhf_suite.config.generate import output_file, shard_of
from rlhf_suite.config.logger import LoggerConfig
from rlhf_suite.config.runs import GenerateRun
from rlhf_suite.data.part_file import PartFile
from rlhf_suite.data.row_range import chunks, row_range
from rlhf_suite.errors import UserError
from rlhf_suite.launch.environment import device_kind
from rlhf_suite.launch.placement import Plan, Pool, Role, reserve
from rlhf_suite.launch.ray_cluster import ray_cluster
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.rewards.sources import open_reward
from rlhf_suite.rl.answers import Answerer
from rlhf_suite.rl.collect import stop_token_ids
from rlhf_suite.rl.dispatch import Dispatcher
from rlhf_suite.rl.engines import start_generators
from rlhf_suite.rl.reward_sources import text_source
from rlhf_suite.rl.scoring import REWARD_LOG, Scorer
from rlhf_suite.tasks.warm_start import warm_started
from rlhf_suite.train.console import Progress
from rlhf_suite.train.journal import Journal
from rlhf_suite.train.run_folder import RunFolder


def run(config: GenerateRun, folder: Path) -> dict[str, float]:
    """Write the answers; returns how many there are, their mean score and the speed."""
    shard = shard_of(config.generate.shard)
    assert shard is not None
    rows = row_range(config.data, shard)
    output = output_file(config.generate.output_path, config.generate.shard, folder / "generations.jsonl")
    part = PartFile(output, folder / "progress.json", rows.start, config.ckpt.load_enable)
    left, speed = range(part.progress.next_row, rows.stop), 0.0
    journal = Journal(LoggerConfig(), RunFolder(folder), config.task)
    if left and not part.progress.done:
        with answerer(config, journal) as answers:
            speed = write(config, answers, part, rows, left)
            journal.say(answers.bad.summary())
    totals = part.progress.totals
    if rows and not totals.get("prompts"):
        raise UserError(f"none of {len(rows)} rows of data.prompt_dataset={config.data.prompt_dataset} can be used")
    part.finish()
    metrics = summary(totals) | ({"tokens_per_s": speed} if speed else {})
    journal.say(", ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
    journal.say(f"Output: {output}")
    return metrics


def write(config: GenerateRun, answers: Answerer, part: PartFile, rows: range, left: range) -> float:
    """Answer the rows that are left; returns new tokens per second."""
    samples = config.vllm.num_engines * config.vllm.max_num_seqs
    size = config.generate.chunk_size or max(1, samples // config.rollout.n_samples_per_prompt)
    progress = Progress(LoggerConfig(), "generate", len(rows), left.start - rows.start)
    began, tokens, speed = time.perf_counter(), 0.0, 0.0
    try:
        for done in answers.answer(chunks(config.data, left, size)):
            part.append(done.rows, done.stop, done.sums)
            tokens += done.sums["tokens"]
            speed = tokens / (time.perf_counter() - began)
            progress.update(done.stop - rows.start, summary(part.progress.totals) | {"tokens_per_s": speed})
    finally:
        progress.close()
    return speed


@contextmanager
def answerer(config: GenerateRun, journal: Journal) -> Iterator[Answerer]:
    """Engines that are up, and what turns rows into answers with them."""
    path = warm_started(config.actor.model_name_or_path)
    tokenizer = load_tokenizer(path, config.data)
    device, vllm = device_kind(config.launch), config.vllm
    plan = Plan(device, (Pool((Role("engine", vllm.num_engines, vllm.tensor_parallel_size),)),))
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(config.launch, journal.folder.path, plan.num_actors))
        slots = reserve(plan, config.launch.timeout_s)["engine"]
        engines = start_generators(config, path, slots, device, journal.folder.logs)
        scorer = None
        if config.reward.rule or config.reward.remote_url:
            reward = stack.enter_context(closing(open_reward(config.reward, journal.folder.logs / REWARD_LOG)))
            scorer = Scorer(config.reward, [], tokenizer, text_source(reward), journal)
        engines.ready()
        dispatcher = Dispatcher(engines, vllm.max_num_seqs)
        yield Answerer(config, tokenizer, stop_token_ids(path, tokenizer), dispatcher, scorer)


def summary(totals: dict[str, float]) -> dict[str, float]:
    """Counts, and means over samples of the sums."""
    result = {name: totals.get(name, 0.0) for name in ("prompts", "skipped", "samples", "tokens")}
    if totals.get("samples"):
        result["truncated_rate"] = totals["truncated"] / totals["samples"]
    if totals.get("scored"):
        result["score"] = totals["score"] / totals["scored"]
    return result
