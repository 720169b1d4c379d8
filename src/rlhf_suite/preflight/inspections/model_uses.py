"""List the models that a run reads, and what each model must provide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlhf_suite.config.check.sources import BUILTIN
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.runs import (
    Run,
)
from rlhf_suite.config.declarations.task_groups import PROMPTED, RESUMABLE, RL, TRAINED, TRAINING
from rlhf_suite.config.plan.run_plan import (
    ACTOR,
    CRITIC,
    PROCESS,
    REWARD,
    TEACHER,
    has_judge,
    model_paths,
    model_sections,
)


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
    reads_images: bool = False
    length_key: str = ""
    length: int = 0
    is_trusted: bool = False  # whether code in its folder is run
    split: tuple[int, str] = (1, "")  # over how many ranks its tokens are split, and how its attention reaches them
    attention: str | None = None  # ds.attn_implementation
    packed: bool | None = None  # ds.packing_samples
    shares_prefixes: bool | None = None  # ds.share_prefixes
    fills_rows: bool = False  # data.pack_to_max_len, for the model that is trained on these rows
    tensor: int = 1  # over how many ranks the matrices of its layers are split
    is_sampled: bool = False  # whether engines of vLLM load it
    dtype: str | None = None  # ds.param_dtype of a model that engines load


def model_uses(run: Run) -> Iterator[ModelUse]:
    """Yield every model of a run except built-in ones."""
    for name, section in model_sections(run).items():
        for key, path in model_paths(run, name, section).items():
            if path is not None and not path.startswith(BUILTIN):
                use = ModelUse(f"{key}.model_name_or_path", path, is_trusted=run.launch.trust_remote_code)
                if run.task in TRAINED:
                    split = (run.ds.ring_attn_size, run.ds.ring_attn_mode)
                    use = replace(use, split=split, tensor=run.ds.tensor_parallel_size)
                if run.task in (*TRAINING, "serve_rm"):
                    use = replace(use, attention=run.ds.attn_implementation, packed=run.ds.packing_samples)
                    use = replace(use, shares_prefixes=run.ds.share_prefixes)
                use = as_reward(run, use) if name == REWARD else as_language_model(run, name, use)
                yield with_length(run, name, use)
    path = run.reward.judge.model if has_judge(run) else None
    if path is not None and not path.startswith(BUILTIN):
        longest = run.reward.judge.max_len or 0
        yield ModelUse(
            "reward.judge.model",
            path,
            has_tokenizer=True,
            needs_template=True,
            length_key="reward.judge.max_len" if longest else "",
            length=longest,
            is_trusted=run.launch.trust_remote_code,
            is_sampled=True,
        )


def as_language_model(run: Run, name: str, use: ModelUse) -> ModelUse:
    """Add what a run needs of a model that it trains, samples from or compares with."""
    use = replace(use, reads_images=getattr(getattr(run, "data", None), "image_key", None) is not None)
    if name not in (ACTOR, CRITIC):
        return replace(use, has_tokenizer=name in (TEACHER, PROCESS))
    if name == ACTOR:
        use = replace(use, fills_rows=bool(getattr(getattr(run, "data", None), "pack_to_max_len", False)))
    head = "any" if name == CRITIC or run.task in ("rm", "merge_lora") else "language"
    use = replace(use, head=head, has_tokenizer=name == ACTOR)
    if run.task in TRAINING:
        use = replace(use, is_trained=True, in_4bit=run.ds.load_in_4bit)
    if run.task in (*TRAINING, "generate"):  # a chat without a template uses data.input_template
        use = replace(use, needs_template=renders(run.data))
    if name == ACTOR and run.task in PROMPTED:
        use = replace(use, is_sampled=True, dtype=run.ds.param_dtype)
    return use


def as_reward(run: Run, use: ModelUse) -> ModelUse:
    """Add what a run needs of its reward model."""
    use = replace(use, head="reward", head_prefix=run.ds.value_head_prefix)
    if run.task == "serve_rm":
        return replace(use, has_tokenizer=True)
    if run.task in RL:  # it scores the tokens of the policy
        return replace(use, reads_images=run.data.image_key is not None)
    return replace(use, has_tokenizer=True, needs_template=run.has("score") and renders(run.data))


def with_length(run: Run, name: str, use: ModelUse) -> ModelUse:
    """Add the longest sequence that the model reads, unless the model itself limits it."""
    if run.has("chat"):
        if run.chat.max_len is None:  # a message has a token at least
            return replace(use, length_key="chat.max_new_tokens", length=run.chat.max_new_tokens + 1)
        return replace(use, length_key="chat.max_len", length=run.chat.max_len)
    if run.task == "serve_rm" and run.serve.max_len is not None:
        return replace(use, length_key="serve.max_len", length=run.serve.max_len)
    if run.task in RL and run.data.teacher_prompt_key is not None and name in (ACTOR, TEACHER):
        response = run.rollout.max_new_tokens or run.data.max_len
        return replace(use, length_key="data.max_len", length=run.data.max_len + response)
    if name != PROCESS and run.task in RESUMABLE:
        return replace(use, length_key="data.max_len", length=run.data.max_len)
    return use


def renders(data: DataConfig) -> bool:
    """Return whether the chat template of the tokenizer is applied."""
    return data.apply_chat_template and data.tokenizer_chat_template is None
