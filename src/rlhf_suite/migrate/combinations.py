"""What follows from several flags of a command of OpenRLHF, and from its defaults."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable

from rlhf_suite.migrate.command import Migrated, Old
from rlhf_suite.migrate.fork import SWITCHES

WITH_GAMMA = ("gae", "reinforce", SWITCHES["use_positive_gamma"])
GPUS_OF_A_NODE = "8"  # OpenRLHF's default for each model of its RL command


def gpus_by_default(new: Migrated, old: Old) -> None:
    """OpenRLHF gives each model eight GPUs where nothing is said; a model that a run does not have gets none here."""
    if new.task != "ppo":
        return
    roles = {
        "actor": True,
        "ref": number(new, "algo.kl.init_coef", 0.01) > 0,
        "critic": estimator(new) == "gae",
        "reward": has(new, "reward.model_name_or_path", "reward.sources"),
    }
    for role, exists in roles.items():
        sizes = [key for key in new.flags if key.startswith(f"{role}.num_")]
        if exists and old.entry == "train_ppo_ray":
            new.flags.setdefault(f"{role}.num_gpus_per_node", GPUS_OF_A_NODE)
        elif sizes and not exists:
            new.leave_out(sizes, f"this run has no model `{role}`")


def other_defaults(new: Migrated, old: Old) -> None:
    """Defaults that change what is computed are written, since the suite's own differ."""
    for key, value in DEFAULTS.get(old.entry, ()):
        new.flags.setdefault(key, value)


def evaluations(new: Migrated, old: Old) -> None:
    """An interval of -1 is never in OpenRLHF's RL, but twice here."""
    if new.task == "ppo" and "eval.dataset" in new.flags and new.flags.get("eval.steps", "-1") == "-1":
        new.remark(
            "eval.steps=-1: OpenRLHF evaluates never then, and here it is before the first and after the last step"
        )


def checkpoints_apart(new: Migrated, old: Old) -> None:
    """A script may keep checkpoints in the folder of the final model itself; here that is a folder inside it."""
    output, path = (posixpath.normpath(new.flags.get(key, "").strip('"')) for key in ("ckpt.output_dir", "ckpt.path"))
    if output == "." or path != output:
        return
    new.add("ckpt.path", f"{output}/checkpoints")
    new.remark(f"ckpt.path={path} is ckpt.output_dir too: here checkpoints are in a folder inside that of the model")


def without_effect(new: Migrated, old: Old) -> None:
    """OpenRLHF ignores flags that have no effect; here they would be refused."""
    for reason, keys, applies in IDLE:
        chosen = [key for key in new.flags if key.startswith(keys) and key != "algo.kl.init_coef"]
        if chosen and applies(new):
            new.leave_out(chosen, reason)


def critic_as_actor(new: Migrated, old: Old) -> None:
    """OpenRLHF's checkpointing of activations is for actor and critic."""
    is_checkpointed = new.flags.get("actor.gradient_checkpointing_enable") == "true"
    if new.task == "ppo" and estimator(new) == "gae" and is_checkpointed:
        new.add("critic.gradient_checkpointing_enable", "true")


def add_implied_switches(new: Migrated, old: Old) -> None:
    """What OpenRLHF switches on by itself is written here."""
    if "train.dynamic_batch_enable" in new.flags and "train.max_tokens_per_gpu" not in new.flags:
        new.add("train.max_tokens_per_gpu", "16192")
    if new.flags.get("actor.policy_loss_type") == "gspo":
        new.flags.setdefault("actor.loss_agg_mode", "seq-mean-token-mean")
    if "train.agent_func_path" in new.flags:
        new.add("agent.kind", "environment")
        new.remark("agent.kind=environment: the file of --agent_func_path is used unchanged (docs/agents.md)")


def asynchronous(new: Migrated, old: Old) -> None:
    """Old rollouts need a correction here, and engines have devices of their own."""
    flags = new.flags
    if all(flags.get(key) != "true" for key in ("train.async_enable", "train.partial_rollout_enable")):
        return
    if not has_correction(new):
        flags["correction"] = "tis"
        new.remark("correction=tis: rollouts of old weights are corrected for; OpenRLHF trains on them as they are")
    if flags.pop("train.colocate_all", None) == "true":
        flags["train.colocate_actor_ref"] = "true"
        if estimator(new) == "gae" and has(new, "reward.model_name_or_path", "reward.sources"):
            flags["train.colocate_critic_reward"] = "true"
        new.remark(
            "--colocate_all_models of an asynchronous run shares GPUs among trained models, not with the engines"
        )


def cut_sampling(new: Migrated, old: Old) -> None:
    """Nucleus sampling makes the engine's log-probs differ from the trainer's, by at most -log(top_p)."""
    share = number(new, "rollout.top_p", 1.0)
    if new.task != "ppo" or not 0 < share < 1:
        return
    if not has_correction(new):
        new.flags["correction"] = "tis"
        new.remark("correction=tis: rollout.top_p changes the sampled distribution; OpenRLHF does not correct for it")
    new.flags["algo.mismatch_max"] = f"{0.1 - math.log(share):.2f}"


DEFAULTS = {
    "train_kto": (("algo.beta", "0.01"),),
    "train_kd": (("data.output_key", "output"),),
    "serve_rm": (("serve.max_len", "2048"),),
    "interactive_chat": (
        ("chat.temperature", "0.2"),
        ("chat.top_p", "0.9"),
        ("chat.max_len", "4096"),
        ("chat.repetition_penalty", "1.2"),
    ),
}
# Why flags are left out, the flags (or how their names begin), and when.
IDLE: tuple[tuple[str, tuple[str, ...], Callable[[Migrated], bool]], ...] = (
    ("the estimator trains no critic", ("critic.",), lambda new: new.task == "ppo" and estimator(new) != "gae"),
    (
        "OpenRLHF ignores it with this estimator",
        ("algo.advantage.gamma", "algo.advantage.lambd"),
        lambda new: new.task == "ppo" and estimator(new) not in WITH_GAMMA,
    ),
    (
        "it has no effect with this estimator",
        ("algo.advantage.clip_range",),
        lambda new: new.task == "ppo" and estimator(new) == "gae",
    ),
    (
        "the KL coefficient is 0",
        ("ref.", "algo.kl."),
        lambda new: new.task == "ppo" and number(new, "algo.kl.init_coef", 0.01) <= 0,
    ),
    (
        "no reward model is named",
        ("reward.normalize_", "reward.offload"),
        lambda new: new.task in ("ppo", "score") and not has(new, "reward.model_name_or_path", "reward.sources"),
    ),
    (
        "no correction is on, so there and here it does nothing",
        ("algo.advantage.is_correction_",),
        lambda new: new.task == "ppo" and not has_correction(new),
    ),
    (
        "with ds.adam_offload they are always in host memory",
        ("ds.enable_sleep",),
        lambda new: new.flags.get("ds.adam_offload") == "true",
    ),
    (
        "it needs train.colocate_all",
        ("vllm.enable_sleep", "ds.enable_sleep"),
        lambda new: new.flags.get("train.colocate_all") != "true",
    ),
    (
        "DeepSpeed moves the states of the optimiser only with ds.zero_stage=2 or 3, so they stay on the GPU",
        ("ds.enable_sleep",),
        lambda new: new.flags.get("ds.zero_stage", "2") not in ("2", "3"),
    ),
    (
        "with a chat template there is none",
        ("data.input_template",),
        lambda new: new.flags.get("data.apply_chat_template") == "true",
    ),
    (
        "nothing to evaluate on is named (eval.dataset)",
        ("eval.steps",),
        lambda new: not has(new, "eval.dataset") and new.flags["eval.steps"] != "-1",
    ),
    (
        "Weights & Biases is off",
        ("logger.wandb.",),
        lambda new: new.flags.get("logger.wandb.enable") != "true" and not has(new, "logger.tensorboard_dir"),
    ),
)
COMBINATIONS: tuple[Callable[[Migrated, Old], None], ...] = (
    add_implied_switches,
    asynchronous,
    cut_sampling,
    gpus_by_default,
    other_defaults,
    critic_as_actor,
    evaluations,
    checkpoints_apart,
    without_effect,
)


def estimator(new: Migrated) -> str:
    return new.flags.get("algo.advantage.estimator", "gae")


def has(new: Migrated, *keys: str) -> bool:
    return any(key in new.flags for key in keys)


def has_correction(new: Migrated) -> bool:
    level = new.flags.get("algo.advantage.is_correction_level", "off")
    return "correction" in new.flags or level != "off"


def number(new: Migrated, key: str, default: float) -> float:
    """The value of a flag as a number; the default if it is a variable of the shell."""
    try:
        return float(new.flags.get(key, default))
    except ValueError:
        return default
