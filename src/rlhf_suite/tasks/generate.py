"""task=generate: write the responses of a model to the prompts of a file, in order, by vLLM; it can be resumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.config.declarations.generate import shard_of
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.config.declarations.reward import has_source
from rlhf_suite.config.declarations.rollout import most_sequences
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.object_store import AHEAD
from rlhf_suite.config.plan.run_plan import ACTOR, ENGINE, WorkerPlan
from rlhf_suite.data.benchmarks import load_benchmarks
from rlhf_suite.data.row import BadRows, RowError
from rlhf_suite.data.row_range import RowOrError, RowSource, prompt_rows
from rlhf_suite.data.text_encoders import PromptEncoder
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.engines.start import start_generators
from rlhf_suite.errors import UserError
from rlhf_suite.launch.placement import reserve
from rlhf_suite.launch.ray_cluster import ray_cluster
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.offline.answers import Answerer
from rlhf_suite.offline.batch_job import BatchJob
from rlhf_suite.rewards.sources import Rewards, check_labels
from rlhf_suite.rl.benchmarks import BenchmarkEvaluator
from rlhf_suite.rl.rollout_file import SampleFiles
from rlhf_suite.rl.sampling import Sampler, stop_token_ids
from rlhf_suite.rl.scoring import REWARD_LOG, Scorer
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tasks.warm_start import with_warm_starts
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.train.notices import chat_template_notices, embedding_notices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run(config: Run, folder: Path, plan: WorkerPlan) -> dict[str, float]:
    """Write the responses. Return counts, the mean score and the speed; with generate.benchmark what it measures."""
    if config.generate.benchmark is not None:
        return measure(config, folder, plan)
    shard, samples = shard_of(config.generate.shard), config.rollout.n_samples_per_prompt
    assert shard is not None
    source = prompt_rows(config.data)
    rows = source.part(*shard)
    job = BatchJob(config.task, config.generate, folder / "generations.jsonl", rows, config.ckpt.load_enable)
    size = config.generate.chunk_size or max(
        1, config.vllm.num_engines * most_sequences(config.vllm, plan.device) // samples
    )
    if job.left:
        with answerer(config, plan, source, job) as answers:
            job.write(answers.answer(source.chunks(job.left, size)), "tokens")
            job.journal.info(answers.bad.summary())
    return job.finish()


def measure(config: Run, folder: Path, plan: WorkerPlan) -> dict[str, float]:
    """Measure the model on benchmarks, and return the metrics."""
    journal, path = Journal(LoggerConfig(), RunFolder(folder), config.task), model_path(config, plan)
    tokenizer = load_tokenizer(path, config.data)
    evaluation = EvalConfig.of("ppo", benchmark=config.generate.benchmark, max_samples=config.data.max_samples)
    benchmarks, metrics = load_benchmarks(evaluation, config.data, tokenizer), dict[str, float]()
    with ExitStack() as stack:
        engines = start_engines(config, plan, path, journal, stack)
        sampler = make_sampler(config, path, engines, tokenizer)
        files = stack.enter_context(closing(SampleFiles()))
        for questions in benchmarks:
            metrics |= BenchmarkEvaluator(evaluation, questions, sampler, tokenizer, journal, files).evaluate(0)
        files.finish()
    journal.info("\n".join(f"{name} {value:.6g}" for name, value in metrics.items()))
    return metrics


def model_path(config: Run, plan: WorkerPlan) -> str:
    """Return the folder of the model."""
    return with_warm_starts(plan, config.data.prompt_dataset).models[ACTOR].path


def start_engines(config: Run, plan: WorkerPlan, path: str, journal: Journal, stack: ExitStack) -> EnginePool:
    """Return engines with a model that are starting; `stack` ends them."""
    stack.enter_context(ray_cluster(config.launch, journal.folder.path, plan.placement.num_devices))
    slots = reserve(plan.placement, config.launch.timeout_s)[ENGINE]
    engines = start_generators(config, path, slots, plan.device, journal.folder.logs)
    stack.callback(engines.retire)
    return engines


def make_sampler(config: Run, path: str, engines: EnginePool, tokenizer: PreTrainedTokenizerBase) -> Sampler:
    """Return what samples from engines, once they are up."""
    engines.ready()
    stop_ids = stop_token_ids(path, tokenizer)
    return Sampler(config.rollout, engines, stop_ids, seed=config.rollout.seed, max_len=config.data.max_len)


@contextmanager
def answerer(config: Run, plan: WorkerPlan, source: RowSource, job: BatchJob) -> Iterator[Answerer]:
    """Start the engines and yield what generates responses with them; stop the engines after the block."""
    journal, path = job.journal, model_path(config, plan)
    tokenizer = load_tokenizer(path, config.data)
    if job.left == job.rows:
        encoder = PromptEncoder(tokenizer, config.data)
        check_usable(encoder, source.chunks(job.rows, 1), config.data.on_bad_row)
        if has_source(config.reward):
            check_labels(config.reward, labels(encoder, source.chunks(job.rows, 1)))
    name = str(config.actor.model_name_or_path)
    for notice in (*embedding_notices(tokenizer, name), *chat_template_notices(tokenizer, config.data, name)):
        journal.warn(notice)
    with ExitStack() as stack:
        engines = start_engines(config, plan, path, journal, stack)
        scorer = None
        if has_source(config.reward):
            rewards = stack.enter_context(
                closing(Rewards(config.reward, journal.folder.logs / REWARD_LOG, seed=config.rollout.seed))
            )
            scorer = Scorer(config.reward, tokenizer, rewards, journal)
        sampler = make_sampler(config, path, engines, tokenizer)
        samples = AHEAD * most_sequences(config.vllm, plan.device) * len(engines)
        yield Answerer(config, tokenizer, sampler, scorer, max(1, samples // config.rollout.n_samples_per_prompt))


def labels(encoder: PromptEncoder, chunks: Iterable[tuple[range, list[RowOrError]]]) -> Iterator[tuple[str, str, str]]:
    """Yield place, datasource and label of each usable row."""
    for row in chain.from_iterable(rows for _, rows in chunks):
        with suppress(RowError):
            if not isinstance(row, RowError):
                prompt = encoder.encode(row)
                yield row.where, prompt.datasource, prompt.label


def check_usable(encoder: PromptEncoder, chunks: Iterable[tuple[range, list[RowOrError]]], on_bad_row: str) -> None:
    """Raise UserError if no row is a usable prompt, before any engine starts. The search ends at the first
    usable row.
    """
    bad = BadRows(on_bad_row)
    for row in chain.from_iterable(rows for _, rows in chunks):
        try:
            if isinstance(row, RowError):
                raise row
            encoder.encode(row)
        except RowError as error:
            bad.add(error.where or row.where, error.reason)
        else:
            return
    raise UserError(f"data.prompt_dataset: none of the rows can be used as a prompt. {bad.summary()}")
