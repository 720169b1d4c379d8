"""Rules between the flags of the supervised and preference tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields

from rlhf_suite import registry
from rlhf_suite.config.data import AnswerDataConfig, RewardTextConfig, SFTDataConfig
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.reward_text import says_reward
from rlhf_suite.config.runs import DistillRun, DPORun, KTORun, PRMRun, RMRun, SFTRun, SupervisedRun
from rlhf_suite.config.sources import evaluation_problems, source_problems

OF_SINGLE_ANSWERS = ("data.input_key", "data.output_key", "data.label_key")  # flags of task=kto without pairs
SEQUENCES_PER_ROW = {"rm": 2, "dpo": 2, "kto": 2}


def columns(run: SupervisedRun) -> dict[str, str]:
    """The flags that name columns of this run's data, and those names."""
    if run.data.row_format is not None:
        return {}  # of rows as they become
    names = [field.name for field in fields(run.data) if field.name.endswith("_key")]
    keys = {f"data.{name}": getattr(run.data, name) for name in names}
    if isinstance(run, KTORun) and run.data.chosen_key is not None:
        keys = {flag: column for flag, column in keys.items() if flag not in OF_SINGLE_ANSWERS}
    if isinstance(run, SFTRun) and run.actor.pretrain_mode_enable:
        keys = {"data.input_key": run.data.input_key}
    return {flag: column for flag, column in keys.items() if column is not None}


def has_training_data(run: SupervisedRun) -> Iterator[Problem]:
    data, names = run.data, columns(run)
    yield from source_problems("data.dataset", data.dataset, names, "data.dataset_probs", data.dataset_probs)
    yield from evaluation_problems(run.eval, names)


def modes_agree(run: SupervisedRun) -> Iterator[Problem]:
    pretrain = isinstance(run, SFTRun) and run.actor.pretrain_mode_enable
    multiturn = isinstance(run.data, SFTDataConfig) and run.data.multiturn
    if multiturn and not (run.data.apply_chat_template or pretrain):
        yield Problem(
            "data.multiturn", "needs the chat template, which marks the turns", "add data.apply_chat_template=true"
        )
    if pretrain:
        for flag, is_on in (
            ("data.multiturn", multiturn),
            ("data.apply_chat_template", run.data.apply_chat_template),
        ):
            if is_on:
                what = "actor.pretrain_mode_enable trains on plain text, every token"
                yield Problem(flag, what, f"write {flag}=false, or actor.pretrain_mode_enable=false")


def turns_are_marked(run: SupervisedRun) -> Iterator[Problem]:
    markers = run.data.turn_markers if isinstance(run.data, AnswerDataConfig) else None
    if markers is not None and (len(set(markers)) != 2 or len(markers) != 2 or not all(map(str.strip, markers))):
        what = f"{markers}: what begins a user's turn and what begins an assistant's are two texts that differ"
        yield Problem("data.turn_markers", what, """write 'data.turn_markers=["Human:","Assistant:"]', or null""")


def reward_has_its_place(run: SupervisedRun) -> Iterator[Problem]:
    if not isinstance(run.data, SFTDataConfig) or run.data.reward_key is None:
        return
    if run.data.multiturn:
        what = "a reward is that of one answer, and data.multiturn=true trains on several"
        yield Problem("data.reward_key", what, "write data.multiturn=false")
    elif run.data.turn_markers is not None and not run.data.apply_chat_template:
        what = "a dialogue that is kept as it is written has no place for the reward"
        yield Problem("data.reward_key", what, "add data.apply_chat_template=true, or give prompt and answer columns")
    yield from reward_template_problems(run.data)


def reward_template_problems(data: RewardTextConfig) -> Iterator[Problem]:
    if not says_reward(data.reward_template):
        what = f"{data.reward_template!r} must have {{prompt}} once and a {{reward}}; other braces are doubled"
        fix = """write 'data.reward_template="{prompt} <rm_score>: {reward:.2f} "'"""
        yield Problem("data.reward_template", what, fix)


def full_rows_are_not_padded(run: SupervisedRun) -> Iterator[Problem]:
    if isinstance(run.data, SFTDataConfig) and run.data.pack_to_max_len and not run.ds.packing_samples:
        what = "the examples of a row would be padded to one another, each to the longest"
        yield Problem("data.pack_to_max_len", what, "add ds.packing_samples=true")


def margins_are_read(run: SupervisedRun) -> Iterator[Problem]:
    if (
        isinstance(run, RMRun)
        and run.data.margin_key is not None
        and not registry.reward_loss.needs(run.algo.loss, "margin")
    ):
        what = f"algo.loss={run.algo.loss} takes no margins"
        readers = " or ".join(registry.reward_loss.that_need("margin"))
        yield Problem("data.margin_key", what, f"write data.margin_key=null, or algo.loss={readers}")


def preference_loss_fits(run: SupervisedRun) -> Iterator[Problem]:
    if not isinstance(run, DPORun):
        return
    loss = run.algo.loss
    if run.algo.needs("chosen_loss") and run.algo.nll_loss_coef == 0:
        what = f"algo.loss={loss} is one of two terms; the other, the loss of the chosen answer, is off"
        yield Problem("algo.nll_loss_coef", what, "write algo.nll_loss_coef=1")
    if not run.algo.needs("reference"):
        for key in ("model_name_or_path", "cache_enable", "offload"):
            if getattr(run.ref, key):
                what = f"algo.loss={loss} has no reference"
                yield Problem(
                    f"ref.{key}",
                    what,
                    f"remove it, or write algo.loss={' or '.join(registry.preference_loss.that_need('reference'))}",
                )


def pairs_are_whole(run: SupervisedRun) -> Iterator[Problem]:
    if not isinstance(run, KTORun) or run.data.chosen_key is None:
        return
    data = run.data
    if data.rejected_key is None:
        yield Problem("data.rejected_key", "of pairs only the better answer is named", "add data.rejected_key=rejected")
    if data.prompt_key is None and data.turn_markers is None and not data.apply_chat_template:
        what = "the prompt of the pairs is not named, so it cannot be told from the answers"
        fix = "add data.prompt_key=<column>, data.turn_markers or data.apply_chat_template=true"
        yield Problem("data.prompt_key", what, fix)


def reward_tokens_differ(run: SupervisedRun) -> Iterator[Problem]:
    if isinstance(run, PRMRun) and run.algo.reward_tokens is not None:
        names = run.algo.reward_tokens
        if len(names) < 2 or len(set(names)) < len(names):
            what = f"{', '.join(names) or 'nothing'}: a reward is a choice between two or more tokens that differ"
            yield Problem("algo.reward_tokens", what, "write 'algo.reward_tokens=[+,-]', or null")


def teacher_is_named(run: SupervisedRun) -> Iterator[Problem]:
    if isinstance(run, DistillRun) and run.teacher.model_name_or_path is None:
        key = "teacher.model_name_or_path"
        yield Problem(key, "no teacher is named", f"add {key}=<HF folder or hub name>")


RULES: tuple[Callable[[SupervisedRun], Iterable[Problem]], ...] = (
    has_training_data,
    modes_agree,
    turns_are_marked,
    reward_has_its_place,
    full_rows_are_not_padded,
    margins_are_read,
    preference_loss_fits,
    pairs_are_whole,
    reward_tokens_differ,
    teacher_is_named,
)
