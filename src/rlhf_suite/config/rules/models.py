"""Rules about the models of a run: their names, precision, attention, optimisers and what is frozen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rlhf_suite.config.check.formatting import did_you_mean, number_of
from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.declarations.ds import ATTENTION, HUB_KERNELS, DeepSpeedConfig, is_flash
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.config.declarations.runs import TASKS, Run
from rlhf_suite.config.declarations.task_groups import RL, TRAINED
from rlhf_suite.config.plan.run_plan import Ranked, is_actor, model_sections, num_ranks

FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


@rule()
def model_is_named(run: Run) -> Iterator[Problem]:
    task = TASKS[run.task]
    if task.model.endswith("model_name_or_path") and all_values(run)[task.model] is None:
        demo = f", or demo={run.task} for a small built-in example" if task.has_demo else ""
        yield Problem(task.model, "no model is named", f"add {task.model}=<HF folder or hub name>{demo}")


@rule()
def model_folders_exist(run: Run) -> Iterator[Problem]:
    for key, path in all_values(run).items():
        if not key.endswith("model_name_or_path") or path is None or not path.startswith(("/", "./", "../", "~")):
            continue
        if not Path(path).is_dir():
            fix = "give a Hugging Face folder, a hub name or builtin:tiny"
            yield Problem(key, f"the folder {path} does not exist", fix)


@rule(tasks=("distill",))
def teacher_is_named(run: Run) -> Iterator[Problem]:
    if run.teacher.model_name_or_path is None:
        key = "teacher.model_name_or_path"
        yield Problem(key, "no teacher is named", f"add {key}=<HF folder or hub name>")


@rule(tasks=TRAINED)
def four_bits_fit(run: Run) -> Iterator[Problem]:
    key = "ds.load_in_4bit"
    if not run.ds.load_in_4bit:
        return
    if run.ds.lora.rank == 0:
        yield Problem(key, "4-bit weights cannot be trained themselves", "add ds.lora.rank=<rank>")
    elif run.ds.zero_stage == 3:
        problem = "ZeRO-3 cannot partition 4-bit weights (ds.zero_stage=3)"
        yield Problem(key, problem, "write ds.zero_stage=2, or ds.load_in_4bit=false")
    else:
        yield from without_bitsandbytes(key)


@rule(tasks=("serve_rm", "chat"))
def four_bits_can_be_loaded(run: Run) -> Iterator[Problem]:
    if run.ds.load_in_4bit:
        yield from without_bitsandbytes("ds.load_in_4bit")


def without_bitsandbytes(key: str) -> Iterator[Problem]:
    if find_spec("bitsandbytes") is None:
        yield Problem(key, "the package bitsandbytes is not installed", "run pip install 'rlhf-suite[qlora]'")


@rule(tasks=TRAINED)
def liger_fits(run: Run) -> Iterator[Problem]:
    key = "ds.use_liger_kernel"
    if run.ds.use_liger_kernel and run.launch.device == "cpu":
        yield Problem(key, "its kernels need a GPU (launch.device=cpu)", f"write {key}=false")
    elif run.ds.use_liger_kernel and run.ds.tensor_parallel_size > 1:
        problem = "its kernels have not been tried with layers that ds.tensor_parallel_size splits"
        yield Problem(key, problem, f"write {key}=false, or ds.tensor_parallel_size=1")
    elif run.ds.use_liger_kernel and find_spec("liger_kernel") is None:
        yield Problem(key, "the package liger-kernel is not installed", "run pip install 'rlhf-suite[gpu]'")


@rule(tasks=(*TRAINED, "serve_rm"))
def attention_fits(run: Run) -> Iterator[Problem]:
    key, name = "ds.attn_implementation", run.ds.attn_implementation
    if name is None:
        return  # the best that the model can do
    if run.ds.splits_tokens and is_flash(name):
        return  # `sequences_split` refuses it
    if is_flash(name):
        yield from flash_attention_fits(name, run.ds.param_dtype, run.launch.device)
    elif name not in ATTENTION:
        known = f"{', '.join(ATTENTION)} and {HUB_KERNELS}<name>"
        fix = did_you_mean(name, ATTENTION, f"{key}=") or f"write {key}=varlen"
        yield Problem(key, f"{name} is not known; there are {known}", fix)
    elif name != "varlen" and (demand := packing_demand(run)):
        problem = f"{name} would let packed sequences see each other ({demand})"
        yield Problem(key, problem, f"write {key}=varlen")


def packing_demand(run: Run) -> str | None:
    """Return the flag and value by which a run wants packed rows; None if its model may pad them."""
    ds = run.ds
    if ds.splits_tokens:
        return f"ds.ring_attn_size={ds.ring_attn_size}"
    if getattr(getattr(run, "data", None), "pack_to_max_len", False):
        return "data.pack_to_max_len=true"
    return "ds.packing_samples=true" if ds.packing_samples else None


def flash_attention_fits(name: str, dtype: str | None, device: str) -> Iterator[Problem]:
    """Yield why a flash kernel cannot run. Where its package is missing, transformers would fetch another kernel from
    the hub in its place, unasked."""
    key = "ds.attn_implementation"
    package = FLASH_PACKAGES.get(name, "kernels")
    if dtype == "fp32":
        yield Problem(key, "flash attention has no fp32 kernels", f"write {key}=varlen, or ds.param_dtype=bf16")
    elif device == "cpu":
        yield Problem(key, "flash attention needs a GPU (launch.device=cpu)", f"write {key}=varlen")
    elif find_spec(package) is None:
        problem = f"{name} needs the package {package}, which is not installed"
        yield Problem(key, problem, f"install it, or write {key}=varlen, which uses the kernels of torch")


@rule(tasks=RL)
def policy_is_not_drawn(run: Run) -> Iterator[Problem]:
    if run.ds.lora.rank > 0 and run.ds.lora.dropout > 0:
        problem = (
            f"{run.ds.lora.dropout} would train a different policy in every forward pass than the one that sampled"
        )
        yield Problem("ds.lora.dropout", problem, "write ds.lora.dropout=0.0")


@rule(tasks=TRAINED)
def models_can_be_trained(run: Run) -> Iterator[Problem]:
    sections = {"actor": run.actor} | ({"critic": run.critic} if run.task in RL else {})
    for name, section in sections.items():
        if len(section.adam.betas) != 2:
            problem = f"needs 2 values, not {len(section.adam.betas)}"
            yield Problem(f"{name}.adam.betas", problem, f"write '{name}.adam.betas=[0.9,0.95]'")
        yield from muon_fits(name, section, run.ds)
        yield from experts_keep_their_gradient(name, section)
        yield from frozen_names_fit(name, section, run.ds)


def muon_fits(name: str, section: TrainedModelConfig, ds: DeepSpeedConfig) -> Iterator[Problem]:
    """Yield what does not fit Muon: it takes whole matrices, and DeepSpeed clips its orthogonalised update."""
    if section.optim != "muon":
        return
    if ds.lora.rank > 0:
        problem = "muon orthogonalises whole weight matrices, and LoRA trains factors of them"
        yield Problem(f"{name}.optim", problem, f"write {name}.optim=adam, or ds.lora.rank=0")
    if section.max_norm > 0:
        problem = f"{section.max_norm:g} would clip the orthogonalised update of muon, not the gradient"
        yield Problem(f"{name}.max_norm", problem, f"add {name}.max_norm=0")


def frozen_names_fit(name: str, section: TrainedModelConfig, ds: DeepSpeedConfig) -> Iterator[Problem]:
    key = f"{name}.freeze"
    if section.freeze and ds.lora.rank > 0:
        problem = "LoRA trains only its adapters; everything else is frozen already"
        yield Problem(key, problem, "remove it, and choose with ds.lora.target_modules")
    if section.freeze_router and (ds.lora.rank > 0 or section.aux_loss_coef > 0):
        other = (
            "LoRA trains only its adapters" if ds.lora.rank > 0 else f"{name}.aux_loss_coef is a loss of the routers"
        )
        yield Problem(f"{name}.freeze_router", f"{other}, and here they are frozen", "remove one of the two")
    for pattern in section.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            problem = f"{pattern!r} is not a regular expression: {error}"
            yield Problem(key, problem, f"write '{key}=[model.embed_tokens]'")


def experts_keep_their_gradient(name: str, section: TrainedModelConfig) -> Iterator[Problem]:
    """Refuse re-entrant checkpointing with a loss of the router: its logits would have no gradient."""
    if section.aux_loss_coef > 0 and section.gradient_checkpointing_enable and section.gradient_checkpointing_reentrant:
        problem = f"{name}.aux_loss_coef would have no effect: re-entrant checkpointing keeps no gradient of the router"
        key = f"{name}.gradient_checkpointing_reentrant"
        yield Problem(key, problem, f"write {key}=false")


@rule(tasks=TRAINED)
def offloads_fit(run: Run) -> Iterator[Problem]:
    for name in ("ref", "teacher", "reward"):
        section = getattr(run, name, None)
        if section is None or not section.offload:
            continue
        key = f"{name}.offload"
        if run.launch.device == "cpu":
            problem = "there is no GPU to bring the weights to (launch.device=cpu)"
        elif is_actor(run, name, section):
            problem = "with LoRA this model is the actor without its adapters, and no copy is held"
        elif name == "ref" and run.ds.load_in_4bit:
            problem = "weights in 4 bits (ds.load_in_4bit=true) stay on the GPU"
        else:
            continue
        yield Problem(key, problem, f"write {key}=false")


@rule(tasks=RL)
def actor_has_its_ranks(run: Run) -> Iterator[Problem]:
    """Check that a frozen model that is the actor without its adapters is asked for no other ranks than the actor's."""
    for name, section in model_sections(run).items():
        if isinstance(section, Ranked) and is_actor(run, name, section):
            ranks, own = num_ranks(section), num_ranks(run.actor)
            if ranks not in (1, own):
                problem = (
                    f"with LoRA this model is the actor without its adapters, on the actor's {number_of(own, 'rank')}"
                )
                fix = f"remove {name}.num_nodes and {name}.num_gpus_per_node"
                yield Problem(f"{name}.num_gpus_per_node", f"{problem}, and asked for {ranks}", fix)
