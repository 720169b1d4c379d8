"""Flags that would do nothing: set on the command line, but read only when another flag has a certain value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_suite.config.formatting import spelled
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.resolve import flat
from rlhf_suite.config.reward import is_http
from rlhf_suite.config.runs import Run


@dataclass(frozen=True)
class Needs:
    """Flags that begin with one of `prefixes` are read only when `flag` has a value that `is_met` accepts, or `or_flag`
    is not off."""

    prefixes: tuple[str, ...]
    flag: str
    is_met: Callable[[Any], bool]
    fix: str
    or_flag: str = ""

    def concerns(self, key: str) -> bool:
        return any(key.startswith(prefix) if prefix.endswith(".") else key == prefix for prefix in self.prefixes)

    def holds(self, flags: dict[str, Any]) -> bool:
        """Whether the flags are read, by the values of all flags of the run."""
        others = values_of(self.or_flag, flags) if self.or_flag in flags else []
        return any(map(self.is_met, values_of(self.flag, flags))) or any(value not in OFF for value in others)


def values_of(flag: str, flags: dict[str, Any]) -> list[Any]:
    """The value of a flag, and those of the same name in a table beside it: reward.rule, reward.sources.<name>.rule."""
    section, _, name = flag.rpartition(".")
    named = [key for key in flags if key.startswith(f"{section}.sources.") and key.rpartition(".")[2] == name]
    return [flags[key] for key in (flag, *named)]


OFF = (None, False, -1)


def is_positive(value: float | None) -> bool:
    return value is not None and value > 0


def is_set(value: object) -> bool:
    return value is not None


def equals(wanted: str) -> Callable[[Any], bool]:
    return lambda value: bool(value == wanted)


def differs_from(refused: str) -> Callable[[Any], bool]:
    return lambda value: bool(value != refused)


NEEDS = (
    Needs(("critic.",), "algo.advantage.estimator", equals("gae"), "algo.advantage.estimator=gae"),
    Needs(("ref.",), "algo.kl.init_coef", is_positive, "algo.kl.init_coef=<number > 0>"),
    Needs(("teacher.",), "algo.distill.coef", is_positive, "algo.distill.coef=<number > 0>"),
    Needs(("algo.kl.estimator",), "algo.kl.init_coef", is_positive, "algo.kl.init_coef=<number > 0>"),
    Needs(("algo.kl.unbiased_gradient",), "algo.kl.use_loss", bool, "algo.kl.use_loss=true"),
    Needs(
        (
            "algo.advantage.is_correction_mode",
            "algo.advantage.is_correction_gating",
            "algo.advantage.is_correction_threshold",
        ),
        "algo.advantage.is_correction_level",
        differs_from("off"),
        "algo.advantage.is_correction_level=token",
    ),
    Needs(("algo.kl.horizon",), "algo.kl.target", is_set, "algo.kl.target=<number>"),
    Needs(
        ("algo.advantage.no_std_norm",),
        "algo.advantage.estimator",
        ("gae", "reinforce", "reinforce_baseline").__contains__,
        "algo.advantage.estimator=gae, reinforce or reinforce_baseline",
    ),
    Needs(
        ("reward.num_nodes", "reward.num_gpus_per_node", "reward.offload"),
        "reward.model_name_or_path",
        is_set,
        "reward.model_name_or_path=<reward model>",
    ),
    Needs(
        ("score.max_tokens_per_gpu",),
        "reward.model_name_or_path",
        is_set,
        "reward.model_name_or_path=<reward model>, or a process reward model by reward=prm",
        or_flag="reward.process.enable",
    ),
    Needs(
        ("reward.num_retries",), "reward.rule", is_set, "reward.rule or reward.remote_url", or_flag="reward.remote_url"
    ),
    Needs(("reward.process.",), "reward.process.enable", bool, "reward.process.enable=true"),
    Needs(("reward.rules.format_pattern",), "reward.rule", equals("format"), "reward.rule=format"),
    Needs(("reward.rules.length_limit",), "reward.rule", equals("length"), "reward.rule=length"),
    Needs(
        ("reward.rules.code_timeout_s", "reward.rules.code_memory_mb"),
        "reward.rule",
        equals("code"),
        "reward.rule=code",
    ),
    Needs(("data.reward_columns",), "reward.remote_url", is_set, "reward.remote_url=<.py file or URLs>"),
    Needs(("reward.http.",), "reward.remote_url", is_http, "reward.remote_url=http://<host>:<port>/<path>"),
    Needs(("reward.max_error_rate",), "reward.on_error", equals("drop"), "reward.on_error=drop"),
    Needs(
        ("reward.overlong_penalty_factor",), "reward.overlong_buffer_len", is_set, "reward.overlong_buffer_len=<tokens>"
    ),
    Needs(
        (
            "rollout.vllm_generate_batch_size",
            "algo.dynamic_filtering_range",
            "algo.dynamic_filtering_min_std",
            "algo.dynamic_filtering_max_rounds",
        ),
        "algo.dynamic_filtering_enable",
        bool,
        "algo.dynamic_filtering_enable=true",
    ),
    Needs(("train.ema_beta",), "train.enable_ema", bool, "train.enable_ema=true"),
    Needs(("actor.muon.",), "actor.optim", equals("muon"), "actor.optim=muon"),
    Needs(("critic.muon.",), "critic.optim", equals("muon"), "critic.optim=muon"),
    Needs(
        ("actor.min_lr_ratio",),
        "actor.lr_scheduler",
        equals("cosine_with_min_lr"),
        "actor.lr_scheduler=cosine_with_min_lr",
    ),
    Needs(
        ("critic.min_lr_ratio",),
        "critic.lr_scheduler",
        equals("cosine_with_min_lr"),
        "critic.lr_scheduler=cosine_with_min_lr",
    ),
    Needs(
        ("actor.lr_warmup_ratio",),
        "actor.lr_scheduler",
        differs_from("constant"),
        "actor.lr_scheduler=constant_with_warmup",
    ),
    Needs(
        ("critic.lr_warmup_ratio",),
        "critic.lr_scheduler",
        differs_from("constant"),
        "critic.lr_scheduler=constant_with_warmup",
    ),
    Needs(
        ("actor.gradient_checkpointing_reentrant",),
        "actor.gradient_checkpointing_enable",
        bool,
        "actor.gradient_checkpointing_enable=true",
    ),
    Needs(
        ("critic.gradient_checkpointing_reentrant",),
        "critic.gradient_checkpointing_enable",
        bool,
        "critic.gradient_checkpointing_enable=true",
    ),
    Needs(
        ("actor.eps_clip", "actor.eps_clip_low_high"),
        "actor.policy_loss_type",
        ("ppo", "gspo", "cispo").__contains__,
        "actor.policy_loss_type=ppo, gspo or cispo",
    ),
    Needs(
        ("actor.dual_clip",),
        "actor.policy_loss_type",
        ("ppo", "gspo").__contains__,
        "actor.policy_loss_type=ppo or gspo",
    ),
    Needs(
        ("actor.sapo_tau_pos", "actor.sapo_tau_neg"),
        "actor.policy_loss_type",
        equals("sapo"),
        "actor.policy_loss_type=sapo",
    ),
    Needs(("actor.eps_clip",), "actor.eps_clip_low_high", lambda value: value is None, "actor.eps_clip_low_high=null"),
    Needs(
        ("ds.lora.alpha", "ds.lora.dropout", "ds.lora.target_modules", "ckpt.save_adapter"),
        "ds.lora.rank",
        is_positive,
        "ds.lora.rank=<rank>",
    ),
    Needs(
        ("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"),
        "train.dynamic_batch_enable",
        bool,
        "train.dynamic_batch_enable=true",
    ),
    Needs(("data.cache_max_gb",), "data.cache_enable", bool, "data.cache_enable=true"),
    Needs(
        ("data.input_template",), "data.apply_chat_template", lambda value: not value, "data.apply_chat_template=false"
    ),
    Needs(
        ("data.tools_key", "data.chat_template_kwargs"),
        "data.apply_chat_template",
        bool,
        "data.apply_chat_template=true",
    ),
    Needs(("chat.top_p", "chat.top_k"), "chat.temperature", is_positive, "chat.temperature=1"),
    Needs(
        ("data.turn_markers",),
        "data.output_key",
        lambda value: value is None,
        "data.output_key=null",
        or_flag="data.chosen_key",
    ),
    Needs(
        ("data.input_key", "data.output_key", "data.label_key"),
        "data.chosen_key",
        lambda value: value is None,
        "data.chosen_key=null",
    ),
    Needs(("data.prompt_key", "data.rejected_key"), "data.chosen_key", is_set, "data.chosen_key=<column>"),
    Needs(("data.turn_markers",), "data.prompt_key", lambda value: value is None, "data.prompt_key=null"),
    Needs(
        ("data.output_key", "data.input_template", "data.turn_markers", "data.reward_key"),
        "actor.pretrain_mode_enable",
        lambda value: not value,
        "actor.pretrain_mode_enable=false",
    ),
    Needs(("data.reward_template",), "data.reward_key", is_set, "data.reward_key=<column>"),
    Needs(("data.reward_template",), "data.target_reward", is_set, "data.target_reward=<number>"),
    Needs(
        (
            *("eval.split", "eval.max_samples", "eval.on_start", "eval.n_samples_per_prompt", "eval.temperature"),
            *(
                f"eval.{name}_key"
                for name in ("input", "output", "label", "prompt", "chosen", "rejected", "margin", "steps")
            ),
        ),
        "eval.dataset",
        is_set,
        "eval.dataset=<source>",
    ),
    Needs(("algo.simpo_gamma",), "algo.loss", equals("simpo"), "algo.loss=simpo"),
    Needs(("ckpt.allow_changes",), "ckpt.load_enable", bool, "ckpt.load_enable=true"),
    Needs(("ckpt.max_num", "ckpt.max_mem"), "ckpt.save_steps", is_positive, "ckpt.save_steps=<steps>"),
    Needs(("logger.wandb.project", "logger.wandb.org"), "logger.wandb.enable", bool, "logger.wandb.enable=true"),
    Needs(
        ("logger.wandb.group", "logger.wandb.run_name"),
        "logger.wandb.enable",
        bool,
        "logger.wandb.enable=true or logger.tensorboard_dir=<folder>",
        "logger.tensorboard_dir",
    ),
)


def idle(run: Run, given: Iterable[str]) -> Iterator[Problem]:
    """The given flags that this run would not read. A flag that is set to null, false, 0 or -1 is off by itself."""
    flags = flat(asdict(run))
    for key in given:
        for needs in NEEDS:
            if key not in flags or needs.flag not in flags or not needs.concerns(key):
                continue
            if flags[key] in OFF or needs.holds(flags):
                continue
            what = f"has no effect with {needs.flag}={spelled(flags[needs.flag])}"
            yield Problem(key, what, f"leave it away, or add {needs.fix}")
