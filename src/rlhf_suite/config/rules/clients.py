"""Rules about what trains call by call: a client (`rs.Client`), and the server of task=serve_train."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.runs import Run


def list_unserved(run: Run) -> Iterator[Problem]:
    """Yield a problem for each flag of task=ppo that asks for what a client (`rs.Client`) does not do."""
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
            yield Problem(key, "a client cannot do this, because its calls are the steps of your own loop", "remove it")
    if run.algo.advantage.needs("values"):
        fix = "choose another one, such as algo.advantage.estimator=group_norm"
        yield Problem("algo.advantage.estimator", f"{run.algo.advantage.estimator} needs a critic, which a client does not have", fix)  # fmt: skip  # noqa: E501


def knows_last_pass(ds: DeepSpeedConfig) -> bool:
    """Return whether the last backward pass before an update must be known as such, which a client cannot say."""
    return ds.deepcompile or (ds.zero_stage == 1 and ds.overlap_comm is True)


@rule(tasks=("serve_train",))
def results_do_not_depend_on_others(run: Run) -> Iterator[Problem]:
    """Check that gradients draw no random numbers: those of one client would depend on when others call."""
    if run.ds.lora.dropout > 0:
        problem = "the gradients of one client would depend on the requests of other clients"
        yield Problem("ds.lora.dropout", problem, "write ds.lora.dropout=0")


@rule(tasks=("serve_train",))
def no_pass_is_the_last(run: Run) -> Iterator[Problem]:
    if knows_last_pass(run.ds):
        problem = "it must know the last backward pass before an update, but no call of a client says so"
        yield Problem("ds.overlap_comm", problem, "remove it")
