"""The parts of the story in `pipeline.py`, made of a configuration and put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.batch import Example, TokenBatch, collate
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.launch.environment import device_kind
from rlhf_suite.launch.run_placement import sync_backend
from rlhf_suite.rewards.sources import Rewards
from rlhf_suite.rl.actors import Actors
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.evaluation import Evaluator
from rlhf_suite.rl.experience import ExperienceMaker
from rlhf_suite.rl.mismatch import mismatch_limit
from rlhf_suite.rl.pipeline import Pipeline, total_steps
from rlhf_suite.rl.prompts import Prompts
from rlhf_suite.rl.rollout import RolloutBuilder
from rlhf_suite.rl.sampling import Sampler, stop_token_ids
from rlhf_suite.rl.scoring import Scorer
from rlhf_suite.rl.shaping import Shaper
from rlhf_suite.rl.update import Updater, steps_per_rollout, warm_up_steps
from rlhf_suite.rl.weight_sync import PROBE_SEQUENCES, WeightSync
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.run_folder import RunFolder
from rlhf_suite.train.saving import Saver, TrainingRows
from rlhf_suite.train.trained_worker import TrainedGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def wired(
    config: PPORun,
    folder: RunFolder,
    journal: Journal,
    data: tuple[PreTrainedTokenizerBase, Prompts, BatchOrder],
    actors: Actors,
    rewards: Rewards | None,
) -> Pipeline:
    """Return the pipeline of a run whose actors are up; trainer and engines are introduced to each other."""
    tokenizer, prompts, order = data
    limit = mismatch_limit(config.algo.mismatch_max, config.ds.param_dtype, device_kind(config.launch))
    sampler = make_sampler(config, prompts.train, actors.engines, tokenizer)
    scorer, held_out_scorer = (
        Scorer(config.reward, part, tokenizer, rewards, journal) for part in (prompts.train, prompts.held_out)
    )
    shaper, credit = Shaper(config.reward, sampler.max_new_tokens), CreditAssigner(config.algo)
    sources = prompts.train_sources
    rollout = RolloutBuilder(config.algo, config.rollout, order, sampler, scorer, shaper, journal, sources)
    counts = {"steps_per_rollout": steps_per_rollout(config), "critic_warm_up": warm_up_steps(config)}
    return Pipeline(
        train=config.train,
        evaluation=config.eval,
        saves_value_network=config.critic.save_value_network,
        total_steps=total_steps(order, config.train),
        rollout=rollout,
        experience=ExperienceMaker(
            config.algo,
            config.rollout.temperature,
            actors.policy,
            actors.reference,
            actors.teacher,
            actors.critic,
            **counts,
            mismatch_limit=limit,
        ),
        credit=credit,
        updater=Updater(config.train, actors.policy, actors.critic, **counts, mismatch_limit=limit),
        weights=connected_weight_sync(config, actors, prompts.train[:PROBE_SEQUENCES], limit),
        evaluator=Evaluator(
            config.eval, prompts.held_out, sampler, held_out_scorer, folder.evaluations, prompts.held_out_sources
        ),
        saver=make_saver(config, folder, actors, prompts, credit, rollout),
        journal=journal,
    )


def make_sampler(
    config: PPORun, prompts: Sequence[Prompt], engines: EnginePool, tokenizer: PreTrainedTokenizerBase
) -> Sampler:
    """Return what samples responses to the prompts that the run trains on."""
    path = config.actor.model_name_or_path
    assert path is not None
    return Sampler(
        config.rollout,
        prompts,
        engines,
        stop_token_ids(path, tokenizer),
        seed=config.train.seed,
        max_len=config.data.max_len,
        adds_greedy=config.algo.advantage.needs("greedy"),
        sleeps=config.vllm.enable_sleep,
    )


def connected_weight_sync(
    config: PPORun, actors: Actors, prompts: Sequence[Prompt], mismatch_limit: float
) -> WeightSync:
    """Introduce trainer and engines to each other; `prompts` are what the first sync is probed with."""
    backend = sync_backend(config, device_kind(config.launch))
    probe = collate([Example(prompt.ids, [0] * len(prompt.ids)) for prompt in prompts], TokenBatch)
    result = WeightSync(
        config.vllm,
        actors.policy,
        actors.engines,
        backend,
        probe,
        max_len=config.data.max_len,
        mismatch_limit=mismatch_limit,
    )
    result.connect()
    return result


def make_saver(
    config: PPORun,
    folder: RunFolder,
    actors: Actors,
    prompts: Prompts,
    credit: CreditAssigner,
    rollout: RolloutBuilder,
) -> Saver:
    """Return what writes and reads the checkpoints of a run, and writes its models at the end."""
    trained: dict[str, TrainedGroup] = {"actor": actors.policy}
    if actors.critic is not None:
        trained["critic"] = actors.critic
    return Saver(
        config.ckpt,
        folder,
        trained,
        "eval/pass1",
        TrainingRows("data.prompt_dataset", prompts.contents_digest),
        {"kl_controller": credit.controller},
        {"samples": rollout},
    )
