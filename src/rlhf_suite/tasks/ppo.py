"""task=ppo: reinforcement learning. Starts the actors and runs the story of `rl.pipeline`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_suite.config.reward import ProcessRewardConfig, has_source, reward_model
from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.data.steps import SolutionEncoder
from rlhf_suite.errors import UserError
from rlhf_suite.launch.environment import device_kind
from rlhf_suite.launch.placement import reserve
from rlhf_suite.launch.ray_cluster import known_gpus, ray_cluster
from rlhf_suite.launch.run_placement import plan, settled
from rlhf_suite.models.load import check_teacher, load_tokenizer
from rlhf_suite.models.process_reward_model import solution_encoder
from rlhf_suite.models.reward_model import score_constants
from rlhf_suite.rewards.sources import Rewards, check_routes
from rlhf_suite.rl.actors import start_actors
from rlhf_suite.rl.build import wired
from rlhf_suite.rl.pipeline import total_steps
from rlhf_suite.rl.prompts import load_prompts
from rlhf_suite.rl.reward_models import ProcessRewardSource, RewardModelSource
from rlhf_suite.rl.scoring import REWARD_LOG
from rlhf_suite.rl.update import steps_per_rollout, warm_up_steps
from rlhf_suite.tasks.warm_start import warm_started
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.run_folder import RunFolder
from rlhf_suite.train.notices import batch_notices, chat_template_notices


def run(config: PPORun, folder: Path) -> dict[str, float]:
    """Train and return the last metrics; the policy is in `<folder>/model`."""
    config = with_models(config)
    assert config.actor.model_name_or_path is not None
    tokenizer = load_tokenizer(config.actor.model_name_or_path, config.data)
    constants = score_constants(reward_model(config.reward), config.reward.normalize_enable)
    if config.algo.distill.coef > 0:
        check_teacher(tokenizer, config.teacher, config.data)
    judge = process_judge(config.reward.process)
    prompts = load_prompts(config.data, config.eval, config.train.seed, tokenizer)
    check_routes(config.reward, [(each.where, each.datasource) for each in (*prompts.train, *prompts.held_out)])
    order = BatchOrder(len(prompts.train), config.rollout.batch_size, config.train.seed)
    device, run_folder = device_kind(config.launch), RunFolder(folder)
    config = settled(config, device, known_gpus(config.launch))
    placement = plan(config, device)
    with ExitStack() as stack:
        journal = stack.enter_context(closing(Journal(config.logger, run_folder, config.task)))
        journal.info(prompts.notes)
        for notice in notices(config, tokenizer, len(prompts.train)):
            journal.warn(notice)
        journal.info("Starting " + "; ".join(placement.lines()))
        stack.enter_context(ray_cluster(config.launch, folder, placement.num_actors))
        slots = reserve(placement, config.launch.timeout_s)
        steps = checked_steps(config, order) * steps_per_rollout(config)
        actors = start_actors(config, device, slots, run_folder.logs, steps)
        rewards = None
        if has_source(config.reward):
            model = None if actors.reward is None else RewardModelSource(actors.reward, constants)
            process = None
            if actors.process is not None and judge is not None:
                process = ProcessRewardSource(actors.process, judge, config.reward.process.aggregate)
            opened = Rewards(config.reward, run_folder.logs / REWARD_LOG, model, process)
            rewards = stack.enter_context(closing(opened))
        actors.ready()
        return wired(config, run_folder, journal, (tokenizer, prompts, order), actors, rewards).run()


def notices(config: PPORun, tokenizer: PreTrainedTokenizerBase, prompts: int) -> Iterator[str]:
    """What the user should know before the actors start."""
    yield from chat_template_notices(tokenizer, config.data, str(config.actor.model_name_or_path))
    yield from batch_notices("rollout.batch_size", config.rollout.batch_size, prompts, "prompts")


def checked_steps(config: PPORun, order: BatchOrder) -> int:
    """RL steps of the run; some of them train the policy."""
    steps = total_steps(order, config.train)
    if warm_up_steps(config) >= steps:
        raise UserError(
            f"critic.freezing_steps={config.critic.freezing_steps} leaves none of the {steps} RL steps to the policy: "
            f"write critic.freezing_steps={max(0, steps // 10)}, or raise train.num_episodes"
        )
    return steps


def with_models(config: PPORun) -> PPORun:
    """The configuration with every model it needs named: built-in ones warmed up, the critic's default filled in."""
    prompts = config.data.prompt_dataset
    actor = replace(config.actor, model_name_or_path=warm_started(config.actor.model_name_or_path, prompts=prompts))
    teacher = config.teacher
    if config.algo.distill.coef > 0:
        teacher = replace(teacher, model_name_or_path=warm_started(teacher.model_name_or_path, "teacher", prompts))
    reward = config.reward
    if reward.process.enable:
        path = warm_started(reward.process.model_name_or_path, "prm", prompts)
        reward = replace(reward, process=replace(reward.process, model_name_or_path=path))
    start = config.critic.model_name_or_path or reward_model(config.reward) or actor.model_name_or_path
    critic = replace(config.critic, model_name_or_path=start)
    return replace(config, actor=actor, teacher=teacher, reward=reward, critic=critic)


def process_judge(config: ProcessRewardConfig) -> SolutionEncoder | None:
    """How the process reward model is asked; a model that does not say is refused before anything starts."""
    if not config.enable:
        return None
    assert config.model_name_or_path is not None
    return solution_encoder(config.model_name_or_path, "reward.process.model_name_or_path", config.step_separator)
