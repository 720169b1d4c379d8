"""Build the parts of the story in `pipeline.py` from a configuration and a plan, and put them together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_suite.agents.build import make_episodes, watch_calls
from rlhf_suite.agents.episodes import EpisodeRunner
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR, CRITIC, REFERENCE, Plan, makes_rollouts_ahead, round_size
from rlhf_suite.data.batch import Example, TokenBatch, collate
from rlhf_suite.data.benchmarks import Questions
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.models.vision import VisionProcessor
from rlhf_suite.rewards.sources import Rewards
from rlhf_suite.rl.actors import Actors
from rlhf_suite.rl.benchmarks import All, BenchmarkEvaluator, Measure
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.engine_update import EngineUpdate
from rlhf_suite.rl.episode_workers import EpisodeWorkers
from rlhf_suite.rl.evaluation import Evaluator
from rlhf_suite.rl.experience import ExperienceMaker
from rlhf_suite.rl.filtering import Filters
from rlhf_suite.rl.mismatch import mismatch_limit
from rlhf_suite.rl.model_groups import PolicyGroup
from rlhf_suite.rl.pipeline import Pipeline, total_steps
from rlhf_suite.rl.prompts import Prompts
from rlhf_suite.rl.replay import NoEngines, Replay
from rlhf_suite.rl.rollout import RolloutBuilder
from rlhf_suite.rl.rollout_file import SampleFiles
from rlhf_suite.rl.rollout_tasks import Rollouts
from rlhf_suite.rl.sampling import Sampler, stop_token_ids
from rlhf_suite.rl.schedules import Ahead, Rest, Schedule, Stream, WithTheStep
from rlhf_suite.rl.scoring import Scorer
from rlhf_suite.rl.shaping import Shaper
from rlhf_suite.rl.slots import GroupOrder
from rlhf_suite.rl.teachers import make_teachers
from rlhf_suite.rl.update import Updater
from rlhf_suite.rl.weight_sync import PROBE_SEQUENCES, WeightSync
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.serving.chat_server import PROGRAMS, ChatServer
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.timeline import Activity
from rlhf_suite.train.callbacks import Callbacks
from rlhf_suite.train.saving import Saver, Stateful, TrainingRows
from rlhf_suite.train.trained_worker import TrainedGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RunData:
    """What a run samples from."""

    tokenizer: PreTrainedTokenizerBase
    prompts: Prompts
    order: BatchOrder  # which prompts each step takes
    vision: VisionProcessor | None = None  # None: the run has no images
    benchmarks: Sequence[Questions] = ()


@dataclass(frozen=True)
class Sampling:
    """Where the samples of a run come from, and who follows the weights that they teach."""

    rollouts: Rollouts | Replay
    engines: EngineUpdate | NoEngines
    evaluator: Measure | None
    steps: int  # of the run


def build_pipeline(  # noqa: PLR0913, PLR0917 - a run is all of this
    config: Run,
    plan: Plan,
    folder: RunFolder,
    journal: Journal,
    data: RunData,
    actors: Actors,
    rewards: Rewards | None,
) -> Pipeline:
    """Build the pipeline of a run whose actors are up, and connect the trainer with the engines."""
    credit, files = CreditAssigner(config.algo), SampleFiles()
    if actors.engines is None:
        limit, sampling = math.inf, build_replay(config, data)
    else:
        limit = mismatch_limit(config.algo.mismatch_max, config.ds.precision, plan.device)
        sampling = build_sampling(config, plan, folder, journal, data, actors, actors.engines, rewards, files, limit)
    counts = {"steps_per_rollout": plan.optimizer_steps_per_rollout, "critic_warm_up": plan.critic_warm_up}
    updater = Updater(config.train, config.actor, actors.policy, actors.critic, **counts, mismatch_limit=limit)
    callbacks = Callbacks(config.train.callbacks)
    controllers = list_controllers(credit, updater, callbacks)
    return Pipeline(
        train=config.train,
        evaluation=config.eval,
        saves_value_network=config.critic.save_value_network,
        total_steps=sampling.steps,
        rollouts=sampling.rollouts,
        experience=ExperienceMaker(
            config.algo,
            config.rollout.temperature,
            actors.policy,
            actors.frozen.get(REFERENCE),
            actors.critic,
            **counts,
            mismatch_limit=limit,
            token_entropy=config.rollout.token_entropy or updater.entropy is not None,
            chooses_tokens=config.actor.chooses_tokens,
            teachers=make_teachers(config, actors.policy, actors.frozen),
        ),
        credit=credit,
        updater=updater,
        engines=sampling.engines,
        loop=None if actors.engines is None else actors.engines.loop,
        evaluator=sampling.evaluator,
        overlaps_evaluation=plan.overlaps_evaluation,
        rewards=rewards,
        files=files,
        saver=make_saver(config, folder, actors, data.prompts, controllers, sampling.rollouts),
        callbacks=callbacks,
        journal=journal,
    )


def list_controllers(credit: CreditAssigner, updater: Updater, callbacks: Callbacks) -> dict[str, Stateful]:
    """Return what of the driver has a state that checkpoints keep, beside samples."""
    controllers: dict[str, Stateful] = {"kl_controller": credit.controller, "callbacks": callbacks}
    return controllers if updater.entropy is None else controllers | {"entropy_controller": updater.entropy}


def build_sampling(  # noqa: PLR0913, PLR0917 - all that a response passes through
    config: Run,
    plan: Plan,
    folder: RunFolder,
    journal: Journal,
    data: RunData,
    actors: Actors,
    engines: EnginePool,
    rewards: Rewards | None,
    files: SampleFiles,
    mismatch_limit: float,
) -> Sampling:
    """Return the parts of a run that samples from its engines."""
    tokenizer, prompts, order = data.tokenizer, data.prompts, data.order
    stop_ids = stop_token_ids(plan.models[ACTOR].path, tokenizer)
    episodes = make_watched_episodes(config, engines, actors.episodes, data, stop_ids, journal)
    sampler = make_sampler(config, data, engines, stop_ids, episodes)
    beside = rewards.beside() if plan.overlaps_evaluation and prompts.held_out and rewards is not None else rewards
    scorer, held_out_scorer = (
        Scorer(config.reward, tokenizer, sources, journal, config.agent) for sources in (rewards, beside)
    )
    shaper, steps = Shaper(config.reward, sampler.max_new_tokens), total_steps(order, config.train)
    filters = Filters(config.algo, prompts.train, config.train.seed)
    builder = RolloutBuilder(filters, scorer, shaper, journal)
    schedule, groups = make_schedule(config, plan, scorer), make_order(config, data, steps)
    loop, is_beside = engines.loop, plan.rollouts_ahead > 0
    rollouts = Rollouts(schedule, groups, builder, sampler, loop, journal, is_beside)
    first = prompts.train[:PROBE_SEQUENCES]
    weights = connect_weight_sync(config, plan, actors.policy, engines, first, mismatch_limit)
    return Sampling(
        rollouts,
        EngineUpdate(weights, rollouts, journal, loop if plan.overlaps_sync else None),
        make_evaluator(config, data, sampler, held_out_scorer, files),
        steps,
    )


def make_evaluator(config: Run, data: RunData, sampler: Sampler, scorer: Scorer, files: SampleFiles) -> Measure | None:
    """Return what measures held-out prompts and benchmarks; None if the run has neither."""
    held_out, journal = data.prompts.held_out, scorer.journal
    measures: list[Measure] = [
        BenchmarkEvaluator(config.eval, questions, sampler, data.tokenizer, journal, files)
        for questions in data.benchmarks
    ]
    if held_out:
        folder = journal.folder.evaluations
        measures.insert(0, Evaluator(config.eval, held_out, sampler, scorer, folder, files))
    return All(measures) if measures else None


def build_replay(config: Run, data: RunData) -> Sampling:
    """Return the parts of a run that trains on the rollouts of another one. Its schedules of learning rates are those
    of a whole run, also where fewer rollouts were recorded."""
    assert config.rollout.replay is not None
    rollouts = Replay(RunFolder(Path(config.rollout.replay)).rollouts, config.actor.routing_replay)
    return Sampling(rollouts, NoEngines(), None, min(rollouts.steps, total_steps(data.order, config.train)))


def make_watched_episodes(
    config: Run,
    engines: EnginePool,
    workers: EpisodeWorkers | None,
    data: RunData,
    stop_ids: Sequence[int],
    journal: Journal,
) -> EpisodeRunner | None:
    """Have the timeline of the journal record when engines and environments are busy, and return what runs the
    episodes, if the run has an agent: `workers`, or this process."""
    engines.busy = Activity(journal.timeline, "engines", "generation")
    episodes: EpisodeRunner | None = workers
    if workers is None:
        serve = partial(ChatServer, logs=journal.folder.logs / PROGRAMS)
        episodes = make_episodes(config, engines, data.tokenizer, stop_ids, serve, data.vision)
        if episodes is not None:
            watch_calls(engines.loop, config.agent)
    if episodes is not None:
        episodes.record_in(journal.timeline)
    return episodes


def make_schedule(config: Run, plan: Plan, scorer: Scorer) -> Schedule:
    """Return what says when rollouts are made: with their steps, ahead of them, or as a stream of groups."""
    train, rollout, max_rounds = config.train, config.rollout, config.algo.dynamic_filtering_max_rounds
    if plan.rollouts_ahead and train.partial_rollout_enable:
        rests = Rest.NEVER if train.async_enable else Rest.WHILE_TRAINING
        surplus = 0 if config.algo.filters else round_size(rollout) - rollout.batch_size
        return Stream(plan.rollouts_ahead, train.async_run_ahead, max_rounds * rollout.batch_size, surplus, rests)
    whole = not scorer.reads_text_alone  # a reward model of the run may share its devices with the engines
    if plan.rollouts_ahead:
        return Ahead(max_rounds, Rest.NEVER, whole, plan.rollouts_ahead)
    rests = Rest.AFTER_ROUNDS if config.vllm.enable_sleep else Rest.NEVER
    return WithTheStep(max_rounds, rests, whole)


def make_order(config: Run, data: RunData, steps: int) -> GroupOrder:
    """Return the order of groups, in batches and in rounds of candidates."""
    order, rows = data.order, data.prompts.contents_digest
    is_stream = config.train.partial_rollout_enable and makes_rollouts_ahead(config.train)
    is_filtered, rounds = config.algo.filters, replace(order, batch_size=round_size(config.rollout))
    by_round = is_filtered and not is_stream
    return GroupOrder(order, rounds, steps, is_filtered, stream_by_round=by_round, rows=rows)


def make_sampler(
    config: Run,
    data: RunData,
    engines: EnginePool,
    stop_ids: Sequence[int],
    episodes: EpisodeRunner | None,
) -> Sampler:
    """Return what samples responses to the prompts that the run trains on."""
    return Sampler(
        config.rollout,
        engines,
        stop_ids,
        seed=config.train.seed,
        max_len=config.data.max_len,
        adds_greedy=config.algo.advantage.needs("greedy"),
        sleeps=config.vllm.enable_sleep,
        episodes=episodes,
        never=() if data.vision is None else data.vision.never_sampled,
    )


def connect_weight_sync(
    config: Run,
    plan: Plan,
    policy: PolicyGroup,
    engines: EnginePool,
    prompts: Sequence[Prompt],
    mismatch_limit: float,
) -> WeightSync:
    """Connect the trainer with the engines. The first sync is probed with `prompts`."""
    examples = [Example(prompt.ids, [0] * len(prompt.ids), images=prompt.images) for prompt in prompts]
    probe = collate(examples, TokenBatch)
    result = WeightSync(
        config.vllm,
        policy,
        engines,
        plan.engines.sync_backend,
        probe,
        max_len=config.data.max_len,
        mismatch_limit=mismatch_limit,
        timeout_s=config.launch.timeout_s,
        is_async=config.train.async_enable,
    )
    result.connect()
    return result


def make_saver(
    config: Run,
    folder: RunFolder,
    actors: Actors,
    prompts: Prompts,
    controllers: Mapping[str, Stateful],
    rollouts: Rollouts | Replay,
) -> Saver:
    """Return what writes and reads the checkpoints of a run, and writes its models at the end."""
    trained: dict[str, TrainedGroup] = {ACTOR: actors.policy}
    if actors.critic is not None:
        trained[CRITIC] = actors.critic
    return Saver(
        config.ckpt,
        folder,
        trained,
        "eval/pass1",
        TrainingRows("data.prompt_dataset", prompts.contents_digest),
        controllers,
        {"samples": rollouts},
    )
