"""The start of a client: its configuration is composed and checked as that of task=ppo, and the same actors come up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf_suite.api.settings import ask, find_place, refuse
from rlhf_suite.config.ds import DeepSpeedConfig
from rlhf_suite.config.eval import EvalConfig
from rlhf_suite.config.plan import ACTOR, CRITIC, Plan
from rlhf_suite.config.problems import ConfigurationError, Problem
from rlhf_suite.config.record import fingerprint, save
from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.engines.start import engine_adapter
from rlhf_suite.errors import UserError
from rlhf_suite.launch.environment import limit_rights, pass_on_trust
from rlhf_suite.launch.placement import reserve
from rlhf_suite.launch.ray_cluster import ray_cluster
from rlhf_suite.launch.slurm import allocation
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.preflight.devices import fit_to_gpus, launch_of, plan_workers
from rlhf_suite.preflight.folders import for_run, lock_folders
from rlhf_suite.rl.actors import Actors, start_actors
from rlhf_suite.rl.build import connect_weight_sync
from rlhf_suite.rl.mismatch import mismatch_limit
from rlhf_suite.rl.pipeline import CLOSING_S
from rlhf_suite.rl.primitives import SteppedPolicyGroup, SteppedPolicyRole
from rlhf_suite.rl.prompts import load_prompts
from rlhf_suite.rl.weight_sync import WeightSync
from rlhf_suite.tasks.warm_start import with_warm_starts
from rlhf_suite.tracking.console import show_line
from rlhf_suite.tracking.run_folder import RunFolder
from rlhf_suite.train.saving import Saver, Stateful, TrainingRows
from rlhf_suite.waits import allow_silence

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

# What task=ppo cannot do without, and a client does not need. Each stands in unless the call names the flag, something
# that begins with one of the words, or a preset that may set it.
FILES = ("demo", "config", "config_dir")
STAND_INS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("data.prompt_dataset", "builtin:reverse", FILES),
    ("reward.rule", "length", ("reward", *FILES)),
    ("algo.advantage.estimator", "reinforce", ("algo/advantage", "estimator", "experiment", *FILES)),
    ("algo.kl.init_coef", 0, ("algo.kl", "experiment", *FILES)),
)
# What the loop that calls a client does itself, as settings of task=ppo say it.
OF_THE_LOOP = ("agent", "callbacks", "critic", "eval", "logger", "on_step", "reward", "teacher")
MODEL = ("model", "actor.model_name_or_path")  # without it the command line takes the demo
PROBE = "The engines have the weights of the policy."


@dataclass(frozen=True)
class Started:
    """The parts of a client that is up."""

    run: PPORun
    plan: Plan
    record: RunFolder
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt] | None  # of data.prompt_dataset; None: the call names none
    policy: SteppedPolicyGroup
    actors: Actors
    engines: EnginePool
    weights: WeightSync

    def saver(self, folder: Path, client: Stateful) -> Saver:
        """Return what writes the state of the policy and of a client to `folder`, and reads it."""
        config = replace(self.run.ckpt, path=str(folder), load_enable=True)
        rows = TrainingRows("data.prompt_dataset", "")
        return Saver(config, self.record, {ACTOR: self.policy}, "eval/pass1", rows, {"client": client})


def compose(settings: Mapping[str, Any]) -> tuple[PPORun, RunFolder, bool]:
    """Return the configuration of a client, its folder, and whether it has prompts of its own.

    Raises:
        ConfigurationError: there are mistakes in it; all of them are in its `problems`.
        UserError: a value has no form that a flag can take.
    """
    stand_ins = choose_stand_ins({name for name, _ in flatten(settings)})
    _, checked = ask("ppo", {**stand_ins, **settings})
    if checked.is_sweep or checked.is_submitted:
        raise ConfigurationError([Problem("hydra", "a client is one process of this machine", "remove it")])
    if allocation() is not None:
        raise ConfigurationError([Problem("hydra", "a client is on one node of a Slurm job", "start it on one node")])
    (run,) = checked.runs
    assert isinstance(run, PPORun)
    refuse([*list_unserved(run)])
    for remark in remark_on_unread(settings):
        show_line(remark, to_stderr=True)
    place = find_place(checked, for_run)
    return run, RunFolder(place.folder.resolve()), "data.prompt_dataset" not in stand_ins


def flatten(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings with their names with dots, those within tables too."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def remark_on_unread(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence about settings that a client accepts, so that those of task=ppo can be given as they are, but
    does not read. A setting that is None asks for nothing."""
    values = {name: value for name, value in flatten(settings) if value is not None}
    if unread := sorted(name for name in values if name.partition(".")[0] in OF_THE_LOOP):
        yield f"Warning: a client does not read {', '.join(unread)}: your loop scores, evaluates and logs by itself"


def choose_stand_ins(names: set[str]) -> dict[str, Any]:
    """Return the flags that stand in for what a call, with settings of these `names`, says nothing about."""
    if not names & {*MODEL}:
        return {}
    given = names | ({"data.prompt_dataset"} if "data" in names else set())
    return {
        key: value
        for key, value, others in STAND_INS
        if not any(name == key or name.startswith(others) for name in given)
    }


def list_unserved(run: PPORun) -> Iterator[Problem]:
    """Yield a problem for each flag of task=ppo that asks for what a client does not do."""
    asked = {
        "rollout.replay": run.replays,
        "agent.kind": run.agent.has_turns,
        "data.image_key": run.data.image_key is not None,
        "data.pretrain_dataset": run.data.pretrain_dataset is not None,
        "train.async_enable": run.train.async_enable,
        "train.partial_rollout_enable": run.train.partial_rollout_enable,
        "vllm.enable_sleep": run.vllm.enable_sleep,
        "algo.distill.coef": run.algo.distill.coef > 0,
        "algo.kl.target": run.algo.kl.target is not None,
        "algo.advantage.is_correction_level": run.algo.advantage.is_correction_level != "off",
        "actor.entropy_target": run.actor.entropy_coef is not None and run.actor.entropy_target is not None,
        "actor.policy_loss_type": run.actor.chooses_tokens,
        "actor.routing_replay": run.actor.routing_replay,
        "reward.model_name_or_path": run.reward.model_name_or_path is not None or run.reward.process.enable,
        "ds.enable_sleep": run.ds.enable_sleep,
        "ds.overlap_comm": knows_last_pass(run.ds),
    }
    for key, is_asked in asked.items():
        if is_asked:
            yield Problem(key, "a client does not do this: its calls are steps of your own loop", "remove it")
    if run.algo.advantage.needs("values"):
        fix = "choose another one, such as algo.advantage.estimator=group_norm"
        yield Problem("algo.advantage.estimator", f"{run.algo.advantage.estimator} needs a critic, and a client has none", fix)  # fmt: skip  # noqa: E501


def knows_last_pass(ds: DeepSpeedConfig) -> bool:
    """Return whether the last backward pass before an update must be known as such, which a client cannot say."""
    return ds.deepcompile or (ds.zero_stage == 1 and ds.overlap_comm is True)


def start(run: PPORun, record: RunFolder, has_prompts: bool, stack: ExitStack) -> Started:
    """Bring up the actors of a client, with the first weights in the engines; `stack` ends them.

    Raises:
        RunError: a process did not come up.
    """
    stack.enter_context(limit_rights(run.launch))
    stack.enter_context(lock_folders(record.path, run))
    plan = plan_workers(run)
    assert isinstance(plan, Plan) and CRITIC not in plan.models
    record.start(fingerprint(run))
    stack.push(lambda kind, error, trace: mark_end(record, error))
    save(run, record.config, plan)
    allow_silence(run.launch.timeout_s)
    pass_on_trust(run.launch)
    fitting, remarks = fit_to_gpus(replace(run, launch=launch_of(run, plan)))
    assert isinstance(fitting, PPORun)
    run = fitting
    for remark in remarks:
        show_line(remark, to_stderr=True)
    plan = with_warm_starts(plan, run.data.prompt_dataset)
    tokenizer = load_tokenizer(plan.models[ACTOR].path, run.data)
    prompts = load_prompts(run.data, EvalConfig.of(run.task), run.train.seed, tokenizer).train if has_prompts else None
    stack.enter_context(ray_cluster(run.launch, record.path, plan.placement.num_devices))
    slots = reserve(plan.placement, run.launch.timeout_s)
    adapter, _ = engine_adapter(run, plan.models[ACTOR])
    kind = SteppedPolicyGroup, SteppedPolicyRole
    actors = start_actors(run, plan, slots, record.logs, run.train.max_steps or 1, None, adapter, kind)
    actors.ready()
    assert isinstance(actors.policy, SteppedPolicyGroup) and actors.engines is not None
    engines = actors.engines
    stack.callback(engines.loop.join_threads, CLOSING_S)
    limit = mismatch_limit(run.algo.mismatch_max, run.ds.precision, plan.device)
    probe = as_prompt(tokenizer(PROBE, add_special_tokens=False)["input_ids"], 0)
    weights = connect_weight_sync(run, plan, actors.policy, engines, [probe], limit)
    stack.callback(weights.close)
    return Started(run, plan, record, tokenizer, prompts, actors.policy, actors, engines, weights)


def mark_end(record: RunFolder, error: BaseException | None) -> None:
    """Write into the folder of a client how it ended."""
    if error is None:
        record.mark_done({})
    elif isinstance(error, KeyboardInterrupt | SystemExit):
        record.mark_stopped("interrupted")
    else:
        record.mark_failed(error)


def as_prompt(ids: Sequence[int], index: int) -> Prompt:
    """Return tokens as the prompt with number `index`."""
    if not len(ids):
        raise UserError(f"prompt {index} has no tokens. Give at least one")
    return Prompt([int(token) for token in ids], "", "", "", f"prompt {index}", index=index)
