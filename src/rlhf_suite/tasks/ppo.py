"""task=ppo: reinforcement learning. Load data, start the actors, and run `rl.pipeline`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_suite import registry
from rlhf_suite.agents.build import make_conversations
from rlhf_suite.config.declarations.agent import AgentConfig
from rlhf_suite.config.declarations.benchmarks import named_benchmarks
from rlhf_suite.config.declarations.ckpt import NO_METRIC
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.config.declarations.reward import has_source, reward_models
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.teacher import list_teachers
from rlhf_suite.config.plan.run_plan import ACTOR, PROCESS, Plan, judge_paths, teacher_paths
from rlhf_suite.config.rules.algorithms import warm_up_problems
from rlhf_suite.data.benchmarks import load_benchmarks
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.data.steps import SolutionEncoder
from rlhf_suite.engines.start import describe_syncs, engine_adapter
from rlhf_suite.errors import UserError
from rlhf_suite.launch.placement import reserve
from rlhf_suite.launch.processes import keep_freed_memory
from rlhf_suite.launch.ray_cluster import ray_cluster
from rlhf_suite.models.judge import JUDGE_FLAG, judge_length, judge_path
from rlhf_suite.models.load import Tokenizer, check_teacher, load_tokenizer, vision_processor
from rlhf_suite.models.process_reward_model import solution_encoder
from rlhf_suite.models.reward_model import score_constants
from rlhf_suite.rewards.base import RewardSource
from rlhf_suite.rewards.sources import Rewards, check_labels, check_routes
from rlhf_suite.rl.actors import Actors, start_actors
from rlhf_suite.rl.build import RunData, build_pipeline
from rlhf_suite.rl.documents import load_documents
from rlhf_suite.rl.evaluation import CALLS
from rlhf_suite.rl.judge_engines import JudgeEngines
from rlhf_suite.rl.pipeline import total_steps
from rlhf_suite.rl.prompts import Prompts, load_prompts
from rlhf_suite.rl.reward_models import ProcessRewardSource, RewardModelSource
from rlhf_suite.rl.sample_metrics import PASS
from rlhf_suite.rl.sampling import stop_token_ids
from rlhf_suite.rl.scoring import REWARD_LOG
from rlhf_suite.rl.teacher_endpoint import Endpoint
from rlhf_suite.rl.teachers import check_teachers
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tasks.warm_start import with_warm_starts
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.timeline import Activity
from rlhf_suite.train.notices import (
    batch_notices,
    chat_template_notices,
    describe_matrices,
    describe_rows,
    embedding_notices,
    pass_notices,
)


def run(config: Run, folder: Path, plan: Plan) -> dict[str, float]:
    """Train and return the last metrics; the policy is in `<folder>/model`."""
    keep_freed_memory()
    plan = with_warm_starts(plan, config.data.prompt_dataset)
    judges = read_judges(config, plan)
    record = RunFolder(folder)
    with ExitStack() as stack:
        journal = stack.enter_context(closing(Journal(config.logger, record, config.task)))
        data = load_data(config, plan, journal)
        announce(journal, config, plan, data)
        stack.enter_context(ray_cluster(config.launch, folder, plan.placement.num_devices))
        slots = reserve(plan.placement, config.launch.timeout_s)
        image_token = None if data.vision is None else data.vision.placeholder
        adapter, why = engine_adapter(config, plan.models[ACTOR])
        steps = rollouts(config, plan, data.order)
        actors = start_actors(config, plan, slots, record.logs, steps, image_token, adapter)
        if actors.episodes is not None:
            stack.enter_context(closing(actors.episodes))
        rewards = None
        if has_source(config.reward) and not config.replays:
            sources = judges.sources(actors, config.reward.process.aggregate)
            judge = open_judge(config, actors, journal, stack)
            opened = Rewards(config.reward, record.logs / REWARD_LOG, *sources, judge=judge, seed=config.train.seed)
            rewards = stack.enter_context(closing(opened))
        actors.ready()
        if config.ds.lora.rank > 0 and actors.engines is not None:
            journal.info(describe_syncs(actors.engines, why))
        return build_pipeline(config, plan, record, journal, data, actors, rewards).run()


def load_data(config: Run, plan: Plan, journal: Journal) -> RunData:
    """Load tokenizer and prompts. Refuse prompts that no source of rewards scores, and a tokenizer with which the
    agent's conversations cannot go on."""
    tokenizer = load_tokenizer(plan.models[ACTOR].path, config.data)
    if config.agent.has_turns and not config.replays:
        make_conversations(config, tokenizer, stop_token_ids(plan.models[ACTOR].path, tokenizer))
    for name in teacher_paths(config):
        check_teacher(tokenizer, plan.models[name].path, config.data, plan.models[name].flag)
    vision, keeps_chat = (
        vision_processor(plan.models[ACTOR].path, config.data.image_key),
        config.agent.has_turns,
    )
    evaluation = EvalConfig.of(config.task) if config.replays else config.eval
    prompts = load_prompts(config.data, evaluation, config.train.seed, tokenizer, keeps_chat, vision, journal.track)
    if not config.replays:
        rows = [(prompt.where, prompt.datasource) for prompt in (*prompts.train, *prompts.held_out)]
        check_routes(config.reward, rows)
        if config.algo.distill.coef > 0:
            check_teachers(config.teacher, [(prompt.where, prompt.datasource) for prompt in prompts.train])
            check_endpoints(config, tokenizer, journal)
        for part in (prompts.train, prompts.held_out):
            check_labels(config.reward, ((prompt.where, prompt.datasource, prompt.label) for prompt in part))
        check_datasets(config.agent, {datasource for _, datasource in rows})
        check_metric(config, prompts)
    # The policy's ranks read them from the cache.
    documents = load_documents(config.data, tokenizer, config.train.seed, journal.track)
    if documents is not None:
        digest, notes = f"{prompts.contents_digest} {documents.contents_digest}", f"{prompts.notes} {documents.notes}"
        prompts = replace(prompts, contents_digest=digest, notes=notes.strip())
    order = BatchOrder(len(prompts.train), config.rollout.batch_size, config.train.seed)
    benchmarks = load_benchmarks(evaluation, config.data, tokenizer)
    return RunData(tokenizer, prompts, order, vision, benchmarks)


def check_endpoints(config: Run, tokenizer: Tokenizer, journal: Journal) -> None:
    """Ask the servers of teachers for their models, and refuse those whose tokens are not those of the student."""
    for key, source in list_teachers(config.teacher).items():
        if registry.teacher.needs(source.kind, "server"):
            endpoint = Endpoint(f"{key}.remote_url", source.remote_url or "", config.teacher.http)
            for notice in endpoint.check(tokenizer):
                journal.warn(notice)


def check_datasets(config: AgentConfig, known: set[str]) -> None:
    """Refuse a dataset of agent.sources of which there is no row: its agent would silently have fewer rows."""
    for name, source in config.sources.items():
        for missing in (dataset for dataset in source.datasets if dataset not in known):
            raise UserError(
                f"agent.sources.{name}.datasets: no row has {missing!r} in its column datasource. The rows have "
                f"{', '.join(sorted(known))}: correct the name, or remove it"
            )


def check_metric(config: Run, prompts: Prompts) -> None:
    """Refuse a ckpt.best_metric_key of a set that the evaluation does not have."""
    key = config.ckpt.best_metric_key or NO_METRIC
    prefix = key.rpartition("/")[0]
    kinds = ({prompt.datasource for prompt in prompts.held_out}, {prompt.source for prompt in prompts.held_out})
    known = [f"eval/{name}" for kind in kinds if len(kind) > 1 for name in sorted(kind)]
    known += [f"eval/{CALLS}{number}" for number in config.eval.max_calls or ()]
    known += [f"eval/{name}" for name, _ in named_benchmarks(config.eval.benchmark)]
    if prefix not in ("", "eval", *known):
        there = f"there are {', '.join(known)}" if known else "all of its prompts are one set"
        last = key.rpartition("/")[2]
        raise UserError(f"ckpt.best_metric_key={key}: the evaluation has no set {prefix}; {there}. Write eval/{last}")


@dataclass(frozen=True)
class Judges:
    """What the folders of reward models say of their scores; read before anything starts."""

    constants: Mapping[str, tuple[float, float] | None]  # of each: mean and deviation by which scores are standardised
    encoder: SolutionEncoder | None  # of the process reward model

    def sources(self, actors: Actors, aggregate: str) -> tuple[dict[str, RewardSource], RewardSource | None]:
        """Return the reward models by name, and the process reward model, as sources of rewards."""
        models: dict[str, RewardSource] = {
            name: RewardModelSource(group, self.constants[name]) for name, group in actors.rewards.items()
        }
        if actors.process is None or self.encoder is None:
            return models, None
        return models, ProcessRewardSource(actors.process, self.encoder, aggregate)


def read_judges(config: Run, plan: Plan) -> Judges:
    """Read how the reward models of a run are asked, and refuse those that do not say."""
    process = plan.models.get(PROCESS)
    constants = {name: score_constants(plan.models[name].path, config.reward) for name in judge_paths(config)}
    encoder = None
    if process is not None:
        encoder = solution_encoder(process.path, process.flag, config.reward.process.step_separator)
    return Judges(constants, encoder)


def open_judge(config: Run, actors: Actors, journal: Journal, stack: ExitStack) -> JudgeEngines | None:
    """Return the chat model that judges on engines of the run; None if there is none. They end with the stack."""
    if actors.judge is None:
        return None
    stack.callback(actors.judge.retire)
    actors.judge.busy = Activity(journal.timeline, "judge", "judging")
    path = judge_path(config)
    tokenizer = load_tokenizer(path, DataConfig.of("ppo"), JUDGE_FLAG)
    stop_ids = tuple(stop_token_ids(path, tokenizer))
    settings = {"max_len": judge_length(config), "seed": config.train.seed}
    return JudgeEngines(actors.judge, tokenizer, config.reward.judge, stop_ids, **settings)


def announce(journal: Journal, config: Run, plan: Plan, data: RunData) -> None:
    """Tell the user what is worth knowing before the actors start."""
    journal.info(data.prompts.notes)
    notices = chat_template_notices(data.tokenizer, config.data, plan.models[ACTOR].path)
    sizes = batch_notices("rollout.batch_size", config.rollout.batch_size, len(data.prompts.train), "prompts")
    passes = pass_notices({} if config.replays else reward_models(config.reward), PASS)
    tokens = embedding_notices(data.tokenizer, plan.models[ACTOR].path)
    for notice in (*tokens, *notices, *sizes, *passes):
        journal.warn(notice)
    workers = [f"episode workers x {config.agent.num_workers}"] if config.agent.has_workers else []
    for line in (*describe_rows(config, plan), *describe_matrices(config, plan)):
        journal.info(line)
    if config.data.image_key is not None and config.vllm.sync_check == "full" and not config.replays:
        journal.info("Weight syncs: with images every tensor is compared, and no probe; rollouts are (mismatch/mean)")
    journal.info("Starting " + "; ".join([*plan.placement.lines(), *workers]))


def rollouts(config: Run, plan: Plan, order: BatchOrder) -> int:
    """Return the RL steps of the run, some of which train the policy. Their number follows from that of the prompts."""
    steps = total_steps(order, config.train)
    limit = f"the {steps} steps that the prompts make"
    for problem in warm_up_problems(plan.critic_warm_up, steps, limit, "train.num_episodes"):
        raise UserError(f"{problem.key}={problem.what}: {problem.fix}")
    return steps
