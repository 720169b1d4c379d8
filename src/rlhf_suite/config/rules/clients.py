"""Rules about what trains call by call: a client (`rs.Client`), and the server of task=serve_train."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.runs import Run

# Sections of task=ppo that what trains call by call does not read: the user's loop scores and evaluates by itself.
OF_THE_LOOP = ("agent", "critic", "eval", "reward", "teacher")


def is_of_the_loop(task: str, key: str) -> bool:
    """Return whether a flag has no effect because a task's clients do themselves what it is about."""
    return task == "serve_train" and key.partition(".")[0] in OF_THE_LOOP


def list_unserved(run: Run) -> Iterator[Problem]:
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


@rule(tasks=("serve_train",))
def only_what_calls_do_is_served(run: Run) -> Iterator[Problem]:
    yield from list_unserved(run)


@rule(tasks=("serve_train",))
def results_do_not_depend_on_others(run: Run) -> Iterator[Problem]:
    """Check that gradients draw no random numbers: those of one client would depend on when others call."""
    if run.ds.lora.dropout > 0:
        problem = "the gradients of a client would depend on what others ask for meanwhile"
        yield Problem("ds.lora.dropout", problem, "write ds.lora.dropout=0")
    if not run.actor.disable_dropout:
        problem = "the gradients of a client would depend on what others ask for meanwhile"
        yield Problem("actor.disable_dropout", problem, "write actor.disable_dropout=true")
    if run.actor.optim != "adam":
        problem = "clients send the settings of AdamW with every optimiser step"
        yield Problem("actor.optim", problem, "write actor.optim=adam")
    if run.train.enable_ema:
        yield Problem("train.enable_ema", "there is one average of weights, and several models", "remove it")
