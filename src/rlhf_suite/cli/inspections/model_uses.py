"""Which models a run reads, and what each of them has to be able to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlhf_suite.config.reward import reward_model
from rlhf_suite.config.runs import (
    ChatRun,
    DistillRun,
    DPORun,
    GenerateRun,
    KTORun,
    LoopRun,
    MergeLoRARun,
    PPORun,
    RMRun,
    Run,
    ScoreRun,
    ServeRMRun,
    SupervisedRun,
)

BUILTIN = "builtin:"


@dataclass(frozen=True)
class ModelUse:
    """A model that the flag `key` names. `head`: language, reward or any. `length` tokens are read at most, as the flag
    `length_key` says; "" where another flag or the model itself bounds them."""

    key: str
    path: str
    head: str = "language"
    is_trained: bool = False
    in_4bit: bool = False  # quantised when it is loaded
    has_tokenizer: bool = False
    needs_template: bool = False
    head_prefix: str = "score"
    length_key: str = ""
    length: int = 0


def model_uses(run: Run) -> Iterator[ModelUse]:
    """Every model of a run that is not built in."""
    for use in (*actors(run), *frozen_models(run), *reward_models(run)):
        if use.path and not use.path.startswith(BUILTIN):
            yield use


def actors(run: Run) -> Iterator[ModelUse]:
    """The model that a run trains or samples from."""
    if isinstance(run, MergeLoRARun):
        yield ModelUse("actor.model_name_or_path", run.actor.model_name_or_path or "", head="any", has_tokenizer=True)
    if not isinstance(run, SupervisedRun | PPORun | LoopRun | GenerateRun | ChatRun):
        return
    chats = isinstance(run, ChatRun)  # without a template a chat has data.input_template
    use = ModelUse(
        "actor.model_name_or_path",
        run.actor.model_name_or_path or "",
        head="any" if isinstance(run, RMRun) else "language",
        has_tokenizer=True,
        needs_template=run.data.apply_chat_template and run.data.tokenizer_chat_template is None and not chats,
        length_key="chat.max_len" if isinstance(run, ChatRun) else "data.max_len",
        length=run.chat.max_len if isinstance(run, ChatRun) else run.data.max_len,
    )
    if isinstance(run, GenerateRun | ChatRun):
        yield use
        return
    use = replace(use, is_trained=True, in_4bit=run.ds.load_in_4bit)
    yield use
    if isinstance(run, PPORun) and run.algo.advantage.needs("values"):
        path = run.critic.model_name_or_path or ""
        yield replace(use, key="critic.model_name_or_path", path=path, head="any", has_tokenizer=False)


def frozen_models(run: Run) -> Iterator[ModelUse]:
    """References, teachers and judges of steps."""
    key = "ref.model_name_or_path"
    if isinstance(run, DPORun | KTORun) or (isinstance(run, PPORun) and run.algo.kl.init_coef > 0):
        yield ModelUse(key, run.ref.model_name_or_path or "", length_key="data.max_len", length=run.data.max_len)
    if isinstance(run, DistillRun) or (isinstance(run, PPORun) and run.algo.distill.coef > 0):
        path = run.teacher.model_name_or_path or ""
        use = ModelUse("teacher.model_name_or_path", path, length_key="data.max_len", length=run.data.max_len)
        yield replace(use, has_tokenizer=True)
    if isinstance(run, PPORun | ScoreRun) and run.reward.process.enable:
        path = run.reward.process.model_name_or_path or ""
        yield ModelUse("reward.process.model_name_or_path", path, has_tokenizer=True)


def reward_models(run: Run) -> Iterator[ModelUse]:
    """The model that scores."""
    key = "reward.model_name_or_path"
    if isinstance(run, ServeRMRun):
        path, length_key, length = run.reward.model_name_or_path or "", "serve.max_len", run.serve.max_len
    elif isinstance(run, PPORun | ScoreRun | LoopRun):
        path, length_key, length = reward_model(run.reward) or "", "data.max_len", run.data.max_len
        entries = (name for name, one in run.reward.sources.items() if one.model_name_or_path)
        key = next((f"reward.sources.{name}.model_name_or_path" for name in entries), key)
    else:
        return
    yield ModelUse(
        key,
        path,
        head="reward",
        has_tokenizer=not isinstance(run, PPORun),  # there the policy's tokens are scored
        needs_template=isinstance(run, ScoreRun)
        and run.data.apply_chat_template
        and run.data.tokenizer_chat_template is None,
        head_prefix=run.ds.value_head_prefix,
        length_key=length_key,
        length=length,
    )
