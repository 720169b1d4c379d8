"""Rules that hold between flags: one small function per rule, listed by task. All of a run's problems come at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from rlhf_suite.config.checks import generate, loops, reward, rl, score, supervised
from rlhf_suite.config.checks.frozen import offloads_fit
from rlhf_suite.config.checks.optim import experts_keep_their_gradient, frozen_names_fit, muon_fits
from rlhf_suite.config.checks.resume import allowed_changes_are_flags
from rlhf_suite.config.checks.tools import CHAT, MERGE
from rlhf_suite.config.eval import EVALUATED
from rlhf_suite.config.names import did_you_mean
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.resolve import flat
from rlhf_suite.config.runs import (
    ChatRun,
    CheckRewardRun,
    GenerateRun,
    LoopRun,
    MergeLoRARun,
    PPORun,
    Run,
    ScoreRun,
    ServeRMRun,
    SupervisedRun,
)
from rlhf_suite.config.template_variables import variable_problems
from rlhf_suite.config.unused_flags import unused

AnyRun = SupervisedRun | PPORun
TextRun = AnyRun | GenerateRun | ScoreRun | ChatRun
R = TypeVar("R", bound=Run)
# A backslash and an n where a new line was meant; LaTeX commands such as \nabla go on in lower case.
UNTURNED_NEWLINE = re.compile(r"\\n(?![a-z])")


def check(run: Run, given: Collection[str]) -> list[Problem]:
    """Every problem of a run whose single values are fine. `given`: the keys set on the command line."""
    problems = [*unused(run, given), *broken(run, MODELS), *allowed_changes_are_flags(run)]
    if isinstance(run, SupervisedRun):
        problems += broken(run, (*COMMON, *supervised.RULES))
    elif isinstance(run, PPORun):
        problems += broken(run, (*COMMON, *rl.RULES, *reward.RULES))
    elif isinstance(run, GenerateRun):
        problems += broken(run, (*TEXT, *generate.RULES))
    elif isinstance(run, ScoreRun):
        problems += broken(run, (*TEXT, *score.RULES))
    elif isinstance(run, LoopRun):
        problems += broken(run, loops.RULES)
        told = {problem.key for problem in problems}
        found = loops.stage_problems(run, lambda stage: check(stage, ()), set(flat(asdict(run))))
        problems += [problem for problem in found if problem.key not in told]
    else:
        problems += tool_problems(run)
    return problems


def tool_problems(run: Run) -> Iterator[Problem]:
    """Of the tasks that train nothing and write no rows."""
    if isinstance(run, MergeLoRARun):
        yield from broken(run, MERGE)
    elif isinstance(run, ServeRMRun):
        yield from attention_fits(run)
    elif isinstance(run, CheckRewardRun):
        yield from broken(run, score.CHECK_REWARD)
    elif isinstance(run, ChatRun):
        yield from broken(run, (*TEXT, *CHAT))


def broken(run: R, rules: Iterable[Callable[[R], Iterable[Problem]]]) -> Iterator[Problem]:
    for rule in rules:
        yield from rule(run)


def model_is_named(run: Run) -> Iterator[Problem]:
    if run.MODEL.endswith("model_name_or_path") and flat(asdict(run))[run.MODEL] is None:
        demo = f", or demo={run.task} for a small built-in example" if run.HAS_DEMO else ""
        fix = f"add {run.MODEL}=<HF folder or hub name>{demo}"
        yield Problem(run.MODEL, "no model is named", fix)


def model_folders_exist(run: Run) -> Iterator[Problem]:
    for key, path in flat(asdict(run)).items():
        if not key.endswith("model_name_or_path") or path is None or not path.startswith(("/", "./", "../", "~")):
            continue
        if not Path(path).is_dir():
            yield Problem(key, f"there is no folder {path}", "give a Hugging Face folder, a hub name or builtin:tiny")


def batches_divide(run: AnyRun) -> Iterator[Problem]:
    """train.batch_size = ranks x micro_batch_size x a whole number of micro-batches."""
    ranks = run.actor.num_nodes * run.actor.num_gpus_per_node
    size, micro = run.train.batch_size, run.train.micro_batch_size
    if run.train.dynamic_batch_enable:
        if size % ranks:
            fix = f"write train.batch_size={next_multiple(size, ranks)}"
            yield Problem("train.batch_size", f"{size} is no multiple of the actor's {ranks} ranks", fix)
    elif size % (ranks * micro):
        what = f"{size} is no multiple of train.micro_batch_size x ranks = {micro} x {ranks}"
        yield Problem("train.batch_size", what, f"write train.batch_size={next_multiple(size, ranks * micro)}")


def next_multiple(number: int, factor: int) -> int:
    return -(-number // factor) * factor


def token_budget_holds_a_sequence(run: AnyRun) -> Iterator[Problem]:
    if run.train.dynamic_batch_enable and not run.ds.packing_samples:
        what = "a token budget counts no padding, so it needs packed sequences"
        yield Problem("train.dynamic_batch_enable", what, "add ds.packing_samples=true")
    count = supervised.SEQUENCES_PER_ROW.get(run.task, 1)
    least = count * run.data.max_len
    if run.train.dynamic_batch_enable and run.train.max_tokens_per_gpu < least:
        row = "one sequence" if count == 1 else f"the {count} sequences of a row, each"
        what = f"{run.train.max_tokens_per_gpu} tokens do not hold {row} of data.max_len={run.data.max_len}"
        yield Problem("train.max_tokens_per_gpu", what, f"write train.max_tokens_per_gpu={least} or more")


def steps_count(run: AnyRun) -> Iterator[Problem]:
    for key, steps in (("ckpt.save_steps", run.ckpt.save_steps), ("eval.steps", run.eval.steps)):
        if steps == 0:
            yield Problem(key, "0 is no interval", f"write {key}=-1 (see --help) or a number of steps")


def betas_are_two(run: AnyRun) -> Iterator[Problem]:
    betas = run.actor.adam.betas
    if len(betas) != 2:
        yield Problem("actor.adam.betas", f"{len(betas)} values, not 2", "write 'actor.adam.betas=[0.9,0.95]'")


def optimiser_fits(run: AnyRun) -> Iterator[Problem]:
    yield from muon_fits("actor", run.actor, run.ds)
    yield from experts_keep_their_gradient("actor", run.actor)
    yield from frozen_names_fit("actor", run.actor, run.ds)


def zero_stage_fits(run: AnyRun) -> Iterator[Problem]:
    stage = run.ds.zero_stage
    for name, is_on, least in (
        ("adam_offload", run.ds.adam_offload, 1),
        ("zpg", run.ds.zpg > 1, 3),
    ):
        if is_on and stage < least:
            yield Problem(
                f"ds.{name}", f"needs ds.zero_stage of {least} or more, it is {stage}", f"write ds.zero_stage={least}"
            )
    if run.ds.overlap_comm and stage != 2:
        what = f"works with ds.zero_stage=2, it is {stage}"
        yield Problem("ds.overlap_comm", what, "write ds.zero_stage=2, or ds.overlap_comm=false")
    if stage == 0 and run.ds.param_dtype == "bf16":
        what = "keeps no fp32 master weights, and a bf16 weight does not move by a small update"
        yield Problem("ds.zero_stage", f"0 with bf16 {what}", "write ds.zero_stage=1, or ds.param_dtype=fp32")
    if run.ds.grad_accum_dtype == "bf16" and run.ds.param_dtype == "fp32":
        what = "bf16 would round the gradients of fp32 parameters"
        yield Problem("ds.grad_accum_dtype", what, "write ds.grad_accum_dtype=fp32, or ds.param_dtype=bf16")


def four_bits_fit(run: AnyRun) -> Iterator[Problem]:
    key = "ds.load_in_4bit"
    if not run.ds.load_in_4bit:
        return
    if run.ds.lora.rank == 0:
        yield Problem(key, "4-bit weights cannot be trained themselves", "add ds.lora.rank=<rank>")
    elif run.ds.zero_stage == 3:
        what = "ZeRO-3 cannot partition 4-bit weights (ds.zero_stage=3)"
        yield Problem(key, what, "write ds.zero_stage=2, or ds.load_in_4bit=false")
    elif find_spec("bitsandbytes") is None:
        yield Problem(key, "the package bitsandbytes is not installed", "run pip install 'rlhf-suite[qlora]'")


def liger_fits(run: AnyRun) -> Iterator[Problem]:
    key = "ds.use_liger_kernel"
    if run.ds.use_liger_kernel and run.launch.device == "cpu":
        yield Problem(key, "its kernels need a GPU (launch.device=cpu)", f"write {key}=false")
    elif run.ds.use_liger_kernel and find_spec("liger_kernel") is None:
        yield Problem(key, "the package liger-kernel is not installed", "run pip install 'rlhf-suite[liger]'")


def attention_fits(run: AnyRun | ServeRMRun) -> Iterator[Problem]:
    key, name = "ds.attn_implementation", run.ds.attn_implementation
    if name in ("sdpa", "eager") and run.ds.packing_samples:
        what = f"{name} would let packed sequences see each other (ds.packing_samples=true)"
        yield Problem(key, what, f"write {key}=varlen")
    if name == "flash_attention_2" and run.ds.param_dtype == "fp32":
        yield Problem(key, "flash attention has no fp32 kernels", f"write {key}=varlen, or ds.param_dtype=bf16")
    if name == "flash_attention_2" and run.launch.device == "cpu":
        yield Problem(key, "flash attention needs a GPU (launch.device=cpu)", f"write {key}=varlen")


def template_has_one_place(run: TextRun) -> Iterator[Problem]:
    key, template = "data.input_template", run.data.input_template
    if template is None or run.data.apply_chat_template:
        return
    try:
        places = template.format("\0").count("\0")
    except (IndexError, KeyError, ValueError):
        places = 0
    if places != 1:
        fix = f"write {key}=null for no template, or one {{}}; other braces are doubled"
        yield Problem(key, f"{template!r} must have one {{}}, where the prompt goes", fix)
    if UNTURNED_NEWLINE.search(template):
        fix = f"""in bash write $'{key}="..."' with the dollar sign, or put the template in a preset"""
        yield Problem(key, f"{template!r} holds a backslash and an n where a new line is meant", fix)


def chat_template_fits(run: TextRun) -> Iterator[Problem]:
    if run.data.tokenizer_chat_template is not None and not run.data.apply_chat_template:
        yield Problem("data.tokenizer_chat_template", "is not used", "add data.apply_chat_template=true")
    yield from variable_problems(run.data.chat_template_kwargs)


def evaluation_has_data(run: AnyRun) -> Iterator[Problem]:
    if run.eval.dataset is not None:
        return
    if run.eval.steps > 0:
        yield Problem("eval.dataset", "eval.steps is set, but nothing to evaluate on", "add eval.dataset=<source>")
    elif run.ckpt.best_metric_key not in (None, "none"):
        yield Problem("eval.dataset", "ckpt.best_metric_key needs an evaluation", "add eval.dataset=<source>")
    elif run.train.early_stopping_patience is not None:
        yield Problem("eval.dataset", "train.early_stopping_patience needs an evaluation", "add eval.dataset=<source>")


def stopping_has_a_metric(run: AnyRun) -> Iterator[Problem]:
    if run.train.early_stopping_patience is not None and run.ckpt.best_metric_key == "none":
        what = "none leaves no metric for train.early_stopping_patience"
        yield Problem("ckpt.best_metric_key", what, "write ckpt.best_metric_key=null, or the name of a metric")


def best_metric_is_measured(run: AnyRun) -> Iterator[Problem]:
    """pass@k is measured for every power of two below eval.n_samples_per_prompt, and for that number."""
    key, name = "ckpt.best_metric_key", run.ckpt.best_metric_key
    if name in (None, "none") or run.eval.dataset is None:
        return
    known = [f"eval/{each}" for each in EVALUATED[run.task]]
    if isinstance(run, PPORun):
        samples = run.eval.n_samples_per_prompt
        known += [f"eval/pass{k}" for k in range(2, samples + 1) if k == samples or k & (k - 1) == 0]
    prefix, _, last = name.rpartition("/")
    if not prefix.startswith("eval") or f"eval/{last}" not in known:
        close = did_you_mean(name, known) or f"write {key}={known[0]}, or none"
        fix = close.replace("did you mean ", f"did you mean {key}=")
        yield Problem(key, f"no evaluation of task={run.task} measures {name}; it has {', '.join(known)}", fix)


MODELS: tuple[Callable[[Run], Iterable[Problem]], ...] = (model_is_named, model_folders_exist)
TEXT: tuple[Callable[[TextRun], Iterable[Problem]], ...] = (template_has_one_place, chat_template_fits)
COMMON: tuple[Callable[[AnyRun], Iterable[Problem]], ...] = (
    batches_divide,
    token_budget_holds_a_sequence,
    steps_count,
    betas_are_two,
    optimiser_fits,
    zero_stage_fits,
    four_bits_fit,
    offloads_fit,
    liger_fits,
    attention_fits,
    *TEXT,
    evaluation_has_data,
    best_metric_is_measured,
    stopping_has_a_metric,
)
