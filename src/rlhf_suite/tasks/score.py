"""task=score: score the responses of a file by a rule, a file, servers or a (process) reward model; can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rlhf_suite.config.declarations.generate import shard_of
from rlhf_suite.config.declarations.reward import is_http
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.micro_batches import MicroBatches
from rlhf_suite.config.plan.run_plan import PROCESS, WorkerPlan, judge_paths
from rlhf_suite.distributed.ranks import start_ranks
from rlhf_suite.errors import UserError
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.models.process_reward_model import solution_encoder
from rlhf_suite.models.reward_model import score_constants
from rlhf_suite.offline.batch_job import BatchJob
from rlhf_suite.offline.scores import Reader, ScoredChunks, SolutionReader, TextReader, TokenReader, row_source
from rlhf_suite.rewards.sources import Rewards, list_sources
from rlhf_suite.rl.judge import Judge, alone
from rlhf_suite.rl.model_groups import ProcessRewardGroup, RewardGroup
from rlhf_suite.rl.reward_models import ProcessRewardSource, RewardModelSource
from rlhf_suite.rl.scoring import REWARD_LOG, SampleScorer
from rlhf_suite.tasks.warm_start import with_warm_starts


def run(config: Run, folder: Path, plan: WorkerPlan) -> dict[str, float]:
    """Write the scored rows. Return counts and the mean score."""
    shard, source = shard_of(config.score.shard), row_source(config)
    assert shard is not None
    rows = source.part(*shard)
    job = BatchJob(config.task, config.score, folder / "scores.jsonl", rows, config.ckpt.load_enable)
    if job.left:
        with open_rewards(config, with_warm_starts(plan, config.data.dataset), job) as (reader, rewards):
            scored = ScoredChunks(config, source, reader, SampleScorer(config.reward, rewards, job.journal))
            job.write(scored.score(source.chunks(job.left, config.score.chunk_size)), "rows")
            job.journal.info(scored.bad.summary())
    return job.finish()


@contextmanager
def open_rewards(config: Run, plan: WorkerPlan, job: BatchJob) -> Iterator[tuple[Reader, Rewards]]:
    """Start the source of the scores and yield what reads the rows and what scores them; stop it after the block.

    Raises:
        UserError: a process reward model needs more tokens for one solution than `score.max_tokens_per_gpu` allows.
    """
    reward, folder = config.reward, job.journal.folder
    log, judges = folder.logs / REWARD_LOG, judge_paths(config)
    if PROCESS in plan.models:
        model, process = plan.models[PROCESS], reward.process
        encoder = solution_encoder(model.path, model.flag, process.step_separator)
        least, budget = encoder.form.max_len, config.score.max_tokens_per_gpu
        if least > budget:
            raise UserError(
                f"score.max_tokens_per_gpu={budget} is too small for a whole solution; write {least} or more"
            )
        settings = (model, alone(model, config.ds), MicroBatches(tokens=budget))
        with start_ranks(Judge, plan.placement, config.launch, folder, settings) as group:
            source = ProcessRewardSource(ProcessRewardGroup(group), encoder, process.aggregate)
            yield SolutionReader(config.data, encoder), Rewards(reward, log, process=source)
    elif not judges:
        asks_servers = any(is_http(source.remote_url) for source in list_sources(reward).values())
        with closing(Rewards(reward, log)) as rewards:
            yield TextReader(config.data, asks_servers), rewards
    else:
        (name,) = judges
        model = plan.models[name]
        constants = score_constants(model.path, reward)
        tokenizer = load_tokenizer(model.path, config.data, model.flag)
        settings = (model, alone(model, config.ds), MicroBatches(tokens=config.score.max_tokens_per_gpu))
        with start_ranks(Judge, plan.placement, config.launch, folder, settings) as group:
            reward_model = RewardModelSource(RewardGroup(group), constants)
            yield TokenReader(config.data, tokenizer), Rewards(reward, log, {name: reward_model})
