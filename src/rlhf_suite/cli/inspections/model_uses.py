"""List the models that a run reads, and what each model must provide."""

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
    """A model that the flag `key` names, and what the run needs of it.

    `head` is language, reward or any. The model reads at most `length` tokens, the value of the flag `length_key`. This
    is "" if another flag or the model itself limits the length.
    """

    key: str
    path: str
    head: str = "language"
    is_trained: bool = False
    in_4bit: bool = False  # whether it is quantised when it is loaded
    has_tokenizer: bool = False
    needs_template: bool = False
    head_prefix: str = "score"
    length_key: str = ""
    length: int = 0


def model_uses(run: Run) -> Iterator[ModelUse]:
    """Yield every model of a run except built-in ones."""
    for use in (*actors(run), *frozen_models(run), *reward_models(run)):
        if use.path and not use.path.startswith(BUILTIN):
            yield use


def actors(run: Run) -> Iterator[ModelUse]:
    """Yield the models that a run trains or samples from, a critic included."""
    if isinstance(run, MergeLoRARun):
        yield ModelUse("actor.model_name_or_path", run.actor.model_name_or_path or "", head="any", has_tokenizer=True)
    if not isinstance(run, SupervisedRun | PPORun | LoopRun | GenerateRun | ChatRun):
        return
    chats = isinstance(run, ChatRun)  # a chat without a chat template uses data.input_template
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
    """Yield references, teachers and process reward models."""
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
    """Yield the reward model."""
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
        has_tokenizer=not isinstance(run, PPORun),  # in task=ppo it scores the tokens of the policy
        needs_template=isinstance(run, ScoreRun)
        and run.data.apply_chat_template
        and run.data.tokenizer_chat_template is None,
        head_prefix=run.ds.value_head_prefix,
        length_key=length_key,
        length=length,
    )
