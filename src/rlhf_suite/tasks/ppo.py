"""task=ppo: reinforcement learning. Builds the parts of `rl.pipeline.Pipeline` and runs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.batch import Example, collate
from rlhf_suite.data.chat import Prompt, PromptEncoder
from rlhf_suite.data.encode import encode_rows
from rlhf_suite.data.rows import EVAL, PROMPTS, BadRows, load_rows
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.launch.environment import device_kind, runtime_env
from rlhf_suite.launch.placement import Slot, reserve
from rlhf_suite.launch.ray_cluster import ray_cluster
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.rewards.pool import Rewarder
from rlhf_suite.rl.collect import Collector, stop_token_ids
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.engines import start_engines
from rlhf_suite.rl.evaluation import Evaluator
from rlhf_suite.rl.experience import ExperienceMaker
from rlhf_suite.rl.pipeline import Pipeline, total_steps
from rlhf_suite.rl.placement import plan
from rlhf_suite.rl.publish import Publisher, sync_backend
from rlhf_suite.rl.roles import CriticRole, PolicyRole, ReferenceRole, RewardRole
from rlhf_suite.rl.scoring import Scorer
from rlhf_suite.rl.update import Updater, steps_per_rollout
from rlhf_suite.tasks.warm_start import warm_started
from rlhf_suite.train.group import Group
from rlhf_suite.train.journal import Journal
from rlhf_suite.train.run_folder import RunFolder
from rlhf_suite.train.saving import Saver
from rlhf_suite.train.workers import GroupOptions, WorkerGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run(config: PPORun, folder: Path) -> dict[str, float]:
    """Train and return the last metrics; the policy is in `<folder>/model`."""
    config = with_models(config)
    assert config.actor.model_name_or_path is not None
    run_folder, journal = RunFolder(folder), Journal(config.logger, RunFolder(folder), config.task)
    tokenizer = load_tokenizer(config.actor.model_name_or_path, config.data)
    prompts, held_out = load_prompts(config, tokenizer, journal)
    device = device_kind(config.launch)
    placement = plan(config, device)
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(config.launch, folder, placement.num_actors))
        stack.callback(journal.close)
        slots = reserve(placement, config.launch.timeout_s)
        pipeline = build(config, run_folder, journal, tokenizer, (prompts, held_out), slots, stack)
        return pipeline.run()


def with_models(config: PPORun) -> PPORun:
    """The configuration with every model it needs named: built-in ones warmed up, the critic's default filled in."""
    actor = replace(config.actor, model_name_or_path=warm_started(config.actor.model_name_or_path))
    start = config.critic.model_name_or_path or config.reward.model_name_or_path or actor.model_name_or_path
    return replace(config, actor=actor, critic=replace(config.critic, model_name_or_path=start))


def load_prompts(
    config: PPORun, tokenizer: PreTrainedTokenizerBase, journal: Journal
) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to train on, and held-out ones."""
    data, seed = config.data, config.train.seed
    assert data.prompt_dataset is not None
    bad, encoder = BadRows(data.on_bad_row), PromptEncoder(tokenizer, data)
    rows = load_rows(
        data.prompt_dataset,
        split=data.prompt_split,
        probs=data.prompt_probs,
        max_samples=data.max_samples,
        seed=seed,
        bad=bad,
        flags=PROMPTS,
    )
    prompts = encode_rows(encoder, rows, bad, data.dataloader_num_workers)
    held_out: list[Prompt] = []
    if config.eval.dataset is not None:
        limit = config.eval.max_samples
        rows = load_rows(
            config.eval.dataset, split=config.eval.split, probs=None, max_samples=limit, seed=seed, bad=bad, flags=EVAL
        )
        held_out = encode_rows(encoder, rows, bad, data.dataloader_num_workers)
    journal.say(bad.summary())
    return prompts, held_out


def build(
    config: PPORun,
    folder: RunFolder,
    journal: Journal,
    tokenizer: PreTrainedTokenizerBase,
    prompts: tuple[Sequence[Prompt], Sequence[Prompt]],
    slots: dict[str, list[Slot]],
    stack: ExitStack,
) -> Pipeline:
    """Start all actors at once, then wire the parts."""
    device, path = device_kind(config.launch), config.actor.model_name_or_path
    assert path is not None
    train_prompts, held_out = prompts
    order = BatchOrder(len(train_prompts), config.rollout.batch_size, config.train.seed)
    optimizer_steps = total_steps(order, config.train) * steps_per_rollout(config)
    options = GroupOptions(device, folder.logs, config.launch.timeout_s, runtime_env(device))
    engines = start_engines(config, slots["engine"], device, folder.logs)
    trained, frozen = (config, optimizer_steps), (config,)
    classes = {
        "actor": (PolicyRole, trained),
        "critic": (CriticRole, trained),
        "ref": (ReferenceRole, frozen),
        "reward": (RewardRole, frozen),
    }
    groups = {
        name: WorkerGroup(cls, name, slots[name], options, args)
        for name, (cls, args) in classes.items()
        if name in slots
    }
    rewarder = None if "reward" in groups else stack.enter_context(closing(Rewarder(config.reward)))
    journal.say("Starting " + ", ".join(f"{group.world_size} x {name}" for name, group in groups.items()) + " and vLLM")
    for group in groups.values():
        group.ready()
    engines.ready()
    policy, critic, reference = groups["actor"], groups.get("critic"), groups.get("ref")
    collector = Collector(config, train_prompts, engines, stop_token_ids(path, tokenizer))
    scorers = [Scorer(config.reward, p, tokenizer, rewarder, groups.get("reward")) for p in (train_prompts, held_out)]
    credit = CreditAssigner(config.algo)
    probe = collate([Example(prompt.ids, [0] * len(prompt.ids)) for prompt in train_prompts[:4]])
    publisher = Publisher(config, policy, engines, sync_backend(config, device), probe)
    publisher.connect()
    trained_groups: dict[str, Group] = {name: groups[name] for name in ("actor", "critic") if name in groups}
    return Pipeline(
        config=config,
        order=order,
        collector=collector,
        scorer=scorers[0],
        experience=ExperienceMaker(config, policy, reference, critic),
        credit=credit,
        updater=Updater(config, policy, critic),
        publisher=publisher,
        evaluator=Evaluator(config, held_out, collector, scorers[1], folder.evaluations),
        saver=Saver(config.ckpt, folder, trained_groups, "eval/pass1", {"kl_controller": credit.controller}),
        journal=journal,
    )

