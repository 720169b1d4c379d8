"""Flags of OpenRLHF that are not just called otherwise here: their value changes, they become several flags or none, or
they have no counterpart."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rlhf_suite.config.check.old_names import BECOMES, GONE, NOTHING
from rlhf_suite.config.declarations.runs import flags_of
from rlhf_suite.migrate.command import Migrated, Old, join_values, write_value
from rlhf_suite.migrate.shell_text import VARIABLE, is_open, variable, whole_number

Handler = Callable[[Migrated, Old, Sequence[str]], None]


def model(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """Batch inference with `--eval_task rm` names the reward model so."""
    new.add("reward.model_name_or_path" if old.task == "score" else "actor.model_name_or_path", values[0])


def dataset(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """What generates reads prompts."""
    new.add("data.prompt_dataset" if old.task == "generate" else "data.dataset", values[0])


def template(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """An empty template is none."""
    text = "".join(values)
    new.add("data.input_template", text.replace("\\n", "\n") if text else "null")


def zero_stage(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """Stages are for training; what only computes needs none."""
    if "ds.zero_stage" in flags_of(old.task):
        new.add("ds.zero_stage", values[0])
    else:
        new.remark(f"--zero_stage {values[0]}: task={old.task} trains nothing, so it has no stage")


def to(*pairs: tuple[str, str | None], remark: str | None = None) -> Handler:
    """Write flags: with a fixed value, or (None) with that of the old flag."""

    def handler(new: Migrated, old: Old, values: Sequence[str]) -> None:
        known = [(key, value) for key, value in pairs if key in flags_of(old.task)]
        for key, value in known:
            new.add(key, join_values(values, key, old.task) if value is None else value)
        if not known:
            new.lost.append(f"{' or '.join(key for key, _ in pairs)}: task={old.task} has no such flag")
        if remark is not None:
            new.remark(remark)

    return handler


def ignore(reason: str) -> Handler:
    """The flag needs nothing here, for a reason that is worth a remark."""
    return lambda new, old, values: new.remark(reason)


def drop_flag(flag: str, reason: str) -> tuple[str, Handler]:
    """The flag has no counterpart."""
    return flag, lambda new, old, values: new.lost.append(f"--{flag}: {reason}")


def attention(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """Flash attention is part of `varlen`, the default; other kernels need padded batches."""
    kernel = values[0] if values else "flash_attention_2"
    if kernel.startswith("flash_attention") or "flash" in kernel:
        new.remark("flash attention: ds.attn_implementation=varlen, the default, uses a flash kernel on GPUs in bf16")
    elif old.has("packing_samples", "ds.packing_samples"):
        new.remark(f"--attn_implementation {kernel}: with packed samples OpenRLHF used flash attention in its place")
    else:
        new.add("ds.attn_implementation", kernel)


def precision(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """fp16 is not trained here."""
    if values and values[0] == "fp16":
        new.lost.append("--param_dtype fp16: no counterpart; bf16 and fp32 can be trained")
    elif "ds.param_dtype" in flags_of(old.task):
        new.add("ds.param_dtype", values[0] if values else "bf16")


def prompt_length(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """The limit is on prompt and response together; a long prompt is left out and not cut."""
    answer = old.value("generate_max_len", "max_new_tokens") or "1024"
    lengths = [number for number in map(whole_number, (values[0], answer)) if number is not None]
    if len(lengths) == 2:
        new.add("data.max_len", str(sum(lengths)))
    else:
        new.add("data.max_len", variable(f"(({bare(values[0])} + {bare(answer)}))"))
    new.remark(
        "--prompt_max_len: data.max_len limits prompt and response together; longer prompts are left out, not cut"
    )


def bare(text: str) -> str:
    """Return a variable as it is written within arithmetic."""
    return VARIABLE.sub(lambda match: match[1].removeprefix("((").removesuffix("))"), text)


def wandb(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """Keys come from the environment."""
    new.add("logger.wandb.enable", "true")
    new.remark("the key of Weights & Biases is not a flag: export WANDB_API_KEY")


BAND = ["0.5", "5.0"]  # OpenRLHF's, for each kind of correction


def correction(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """The correction is a preset; that of OpenRLHF's `tis` has another band, which is written."""
    kind = old.value("vllm_is_correction_type", "algo.advantage.is_correction_type") or "tis"
    kind = "icepop" if old.has("use_icepop") else kind
    if not old.has("algo.advantage.is_correction_level"):
        new.put("correction", kind)
        if kind == "tis" and not old.has("vllm_is_truncated_threshold", "algo.advantage.is_correction_threshold"):
            threshold(new, old, BAND)


def threshold(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """The band of the correction; one value is the upper bound. A level without a mode masks, there and here."""
    new.add("algo.advantage.is_correction_threshold", f"[{','.join(values)}]")


def sync_backend(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """`auto` takes NCCL, CUDA IPC or shared memory by where the engines are."""
    if values and values[0] == "nccl":
        new.remark("--vllm_sync_backend nccl: vllm.sync_backend=auto, the default, takes NCCL, or CUDA IPC on one GPU")
    else:
        new.add("vllm.sync_backend", values[0] if values else "auto")


def reward_models(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """One model is a flag, several are sources."""
    if "," not in values[0]:
        new.add("reward.model_name_or_path", values[0])
        return
    names = values[0].split(",")
    sources = [f"m{place}:{{model_name_or_path:{written_in_table(name)}}}" for place, name in enumerate(names, start=1)]
    new.put("reward.sources", f"{{{','.join(sources)}}}")
    new.remark("several reward models are reward.sources, each with a weight; OpenRLHF added them up")


def written_in_table(name: str) -> str:
    return write_value("reward.model_name_or_path", name.strip(), "ppo")


def post_processor(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """What batch inference did with scores."""
    kind = values[0] if values else ""
    if kind == "rs":
        new.add("score.best_of_n" if old.task == "score" else "generate.best_of_n", "true")
    elif kind == "iter_dpo" and old.task == "score":
        new.add("score.pairs", "true")
    elif kind == "csft":
        new.remark(
            "--post_processor csft: task=sft data.reward_key=score trains on the scored rows; task=conditional_sft "
            "does all in one loop, with loop.standardize_enable=true for rewards that are standardised"
        )
    else:
        new.lost.append(f"--post_processor {kind}: no counterpart is known")


def conditional(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """OpenRLHF's prompt of conditional SFT asks for a reward of 5."""
    if not old.has("csft_prompt"):
        conditional_prompt(new, old, ["<rm_score>: 5.00"])


def conditional_prompt(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """The text after the prompt says a reward, which is a number here, in a template."""
    text = " ".join(values).strip()
    number = re.search(r"-?\d+(?:\.(\d+))?", text)
    if number is None or "data.target_reward" not in flags_of(old.task):
        new.lost.append(f"--csft_prompt {text}: write data.target_reward and data.reward_template")
        return
    digits = len(number[1] or "")
    new.add("data.target_reward", number[0])
    said = f"{text[: number.start()]}{{reward:.{digits}f}}{text[number.end() :]}"
    new.add("data.reward_template", f"{{prompt}} {said} ")


def convert_freezing(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """OpenRLHF freezes one step more; -1 is never."""
    steps = whole_number(values[0]) if values else -1
    if steps is None and not is_open(values[0]):
        new.lost.append(f"--freezing_actor_steps {values[0]}: not a whole number; write critic.freezing_steps=<steps>")
    elif steps is None or steps >= 0:
        new.add("critic.freezing_steps", variable(f"(({bare(values[0])} + 1))") if steps is None else str(steps + 1))
        new.remark("critic.freezing_steps=N trains only the critic in N steps; OpenRLHF did so in N + 1")


def normalization(new: Migrated, old: Old, values: Sequence[str]) -> None:
    """A run that only generates has no reward model, there and here."""
    key = "reward.normalize_enable"
    if key in flags_of(old.task):
        new.add(key, join_values(values, key, old.task))
    else:
        new.remark(f"--normalize_reward: task={old.task} has no reward model, whose scores it would normalise")


def margin(new: Migrated, old: Old, values: Sequence[str]) -> None:
    new.add("data.margin_key", "margin")


def ranking_loss(new: Migrated, old: Old, values: Sequence[str]) -> None:
    new.add("algo.loss", "sigmoid" if not values or values[0] == "sigmoid" else "logexp")


def offload_both(new: Migrated, old: Old, values: Sequence[str]) -> None:
    new.add("ref.offload", "true")
    if old.has("reward_pretrain"):
        new.add("reward.offload", "true")


# Flags that mean nothing without a value.
NEEDS_VALUE = (
    "pretrain", "dataset", "zero_stage", "prompt_max_len", "reward_pretrain", "reward.model_name_or_path",
    "vllm_is_truncated_threshold", "algo.advantage.is_correction_threshold",
)  # fmt: skip
HANDLERS: dict[str, Handler] = {
    **{name: to(*pairs) for name, pairs in BECOMES.items()},
    **{name: ignore(f"--{name}: {reason}") for name, reason in NOTHING.items()},
    **dict(drop_flag(name, reason) for name, reason in GONE.items()),
    # precision and kernels
    "bf16": precision,
    "param_dtype": precision,
    "ds.param_dtype": precision,
    "fp16": lambda new, old, values: precision(new, old, ["fp16"]),
    "flash_attn": attention,
    "attn_implementation": attention,
    "ds.attn_implementation": attention,
    "pretrain": model,
    "dataset": dataset,
    "data.input_template": template,
    "input_template": template,
    "zero_stage": zero_stage,
    # lengths
    "data.max_len": to(("serve.max_len", None), ("data.max_len", None)),
    "prompt_max_len": prompt_length,
    "normalize_reward": normalization,
    # logging
    "use_wandb": wandb,
    "logger.wandb.key": wandb,
    # corrections of engine and trainer
    **dict.fromkeys(
        (
            "enable_vllm_is_correction",
            "vllm_enable_is_correction",
            "algo.advantage.is_correction_enable",
            "algo.advantage.is_correction_type",
            "vllm_is_correction_type",
            "use_icepop",
        ),
        lambda new, old, values: correction(new, old, ()),
    ),
    **dict.fromkeys(("vllm_is_truncated_threshold", "algo.advantage.is_correction_threshold"), threshold),
    # RL
    "vllm_sync_backend": sync_backend,
    "vllm.sync_backend": sync_backend,
    "reward_pretrain": reward_models,
    "reward.model_name_or_path": reward_models,
    "ref_reward_offload": offload_both,
    "freezing_actor_steps": convert_freezing,
    "critic.freezing_steps": convert_freezing,
    # preferences and reward models
    "margin_loss": margin,
    "model.margin_loss_enable": margin,
    "loss": ranking_loss,
    "model.loss_type": ranking_loss,
    # tools
    "eval_task": lambda new, old, values: new.remark(f"--eval_task {' '.join(values)} is task={old.task} here"),
    "post_processor": post_processor,
    "enable_csft": conditional,
    "csft_prompt": conditional_prompt,
    "pretrain_data": to(
        ("data.pretrain_dataset", None), remark="data.pretrain_key=text: name the column of the text of a document"
    ),
}
