"""`data`: the sources of rows, and how rows become tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_suite import registry
from rlhf_suite.config.declarations.conditions import (
    BY_REWARD_MODEL,
    BY_TEXT,
    Need,
    algorithm_needs,
    is_false,
    is_null,
    is_one_of,
    is_positive,
    is_set,
    is_true,
)
from rlhf_suite.config.declarations.flag_types import literal
from rlhf_suite.config.declarations.flags import FREE, flag
from rlhf_suite.config.declarations.sections import Section
from rlhf_suite.config.declarations.task_groups import (
    ENCODED,
    LOOPS,
    PROMPTED,
    RENDERED,
    RL,
    SCORED,
    SEEING,
    SUPERVISED,
    TEXTS,
    TRAINED,
    WITH_ANSWERS,
    WITH_PAIRS,
)

SOURCES = (
    "Sources of rows, separated by commas. A source is a file, a pattern (data/*.jsonl), a folder, a name on the "
    "Hugging Face hub (name or name@data_dir), builtin:<task>, reasoning_gym:<task>, or a .py file with rows()"
)
REWARD_COLUMNS = "Names of further columns that reward files, reward servers and agents get (docs/rewards.md)"
REWARD_TEMPLATE = "{prompt} <rm_score>: {reward:.2f} "
WITH_COLUMNS = is_set("reward.remote_url", "<.py file or URLs>") | algorithm_needs(
    "agent.kind", registry.agent, "columns"
)

TEMPLATED, PLAIN = is_true(".apply_chat_template"), is_false(".apply_chat_template")
NOT_PRETRAINING = is_false("actor.pretrain_mode_enable")
ON_EVERY_TOKEN = "pre-training learns every token of plain text"
WITH_IMAGES, WITHOUT_IMAGES = is_set(".image_key", "<column>"), is_null(".image_key")
WITH_DOCUMENTS = is_set(".pretrain_dataset", "<source>")
OF_PAIRS = (
    Need(is_set(".rejected_key", "rejected"), "only the better answer of each pair is named"),
    Need(
        is_set(".prompt_key", "<column>") | is_set(".turn_markers", "[<user>,<assistant>]") | TEMPLATED,
        "the prompt of the pairs is not named, so it cannot be separated from the answers",
    ),
)
SINGLE, PAIRED = is_null(".chosen_key"), is_set(".chosen_key", "<column>")


@dataclass
class DataConfig(Section):
    """The sources of rows, and how rows become text and tokens"""

    apply_chat_template: bool = flag(
        False,
        needs=Need(NOT_PRETRAINING, ON_EVERY_TOKEN),
        tasks=RENDERED,
        defaults={"chat": True},
        of_tasks={"score": {"when": (BY_REWARD_MODEL,)}},
    )
    """Format conversations with the chat template of the tokenizer. In task=chat this happens only if the tokenizer has
    a template"""
    tokenizer_chat_template: str | None = flag(
        None,
        needs=Need(TEMPLATED, "without it no chat template is applied"),
        tasks=RENDERED,
        of_tasks={"score": {"when": (BY_REWARD_MODEL,)}},
    )
    """Chat template to use instead of the tokenizer's: Jinja text, or the path of a file"""
    chat_template_kwargs: list[str] = flag([], when=TEMPLATED, tasks=RENDERED)
    """Variables for the chat template, each as name:value, for example [enable_thinking:false]"""
    max_len: int = flag(
        2048,
        "Longest sequence in tokens",
        ge=2,
        tasks=ENCODED,
        defaults={"rm": 512, "dpo": 512},
        of_tasks={"score": {"when": (BY_REWARD_MODEL,)}},
    )
    tools_key: str | None = flag(None, when=TEMPLATED, tasks=ENCODED)
    """Column with the tools that are passed to the chat template: a list of tool descriptions, or this list as JSON
    text"""
    on_bad_row: str = flag("skip", choices=("skip", "stop"), tasks=ENCODED)
    """What to do with a row that cannot be used. skip: count, report and skip it; stop: end the run"""
    row_format: str | None = flag(None, algorithms=registry.row_format, tasks=TRAINED)
    """Your own function, file.py:function, that converts a row to the columns that the task reads; null: rows have
    these columns already"""
    max_samples: int | None = flag(
        None, ge=1, tasks=(*ENCODED, "check_reward"), defaults={"check_reward": 16}, never_null=("check_reward",)
    )
    """Largest number of rows from each source, and also from the mixture of all sources. With data.skip_samples, rows
    are counted after the skipped ones. null: all rows"""
    max_skipped_share: float = flag(0.01, ge=0, le=1, tasks=TRAINED)
    """End the run when a larger share of a source's rows cannot be used. One unusable row is always allowed, unless
    this flag is 0. Rows that are too long do not count"""
    dataloader_num_workers: int = flag(0, ge=0, resume=FREE, tasks=TRAINED)
    """Number of processes that tokenise rows; 0: the run's own process does it"""
    cache_enable: bool = flag(True, resume=FREE, when=WITHOUT_IMAGES, tasks=TRAINED)
    """Store encoded rows on disk below XDG_CACHE_HOME (default ~/.cache) and read them from there. The data may then be
    larger than memory, and the next start does not tokenise the same rows again. false: encode all rows at every start
    and keep them in memory. Rows with images (data.image_key) are never cached, because a changed image under the same
    path would not be noticed"""
    cache_max_gb: float = flag(50.0, gt=0, resume=FREE, when=is_true(".cache_enable"), tasks=TRAINED)
    """Size limit of the cache in GiB. Beyond it, the least recently used rows are deleted"""
    dataset: str | None = flag(None, SOURCES, tasks=(*SUPERVISED, *SCORED))
    dataset_probs: list[float] | None = flag(None, ge=0, tasks=SUPERVISED)
    """Mixing probability of each source; null: concatenate the sources"""
    dataset_split: str = flag("train", tasks=(*SUPERVISED, *SCORED))
    """Name of the split to read from sources with several splits"""
    prompt_dataset: str | None = flag(None, SOURCES, tasks=PROMPTED)
    prompt_probs: list[float] | None = flag(None, ge=0, tasks=RL)
    """Mixing probability of each source; null: concatenate the sources"""
    prompt_split: str = flag("train", "Name of the split to read from sources with several splits", tasks=PROMPTED)
    skip_samples: int = flag(0, "Number of rows to skip at the start", ge=0, tasks=("generate", *LOOPS, *SCORED))
    input_key: str = flag(
        "input",
        when=SINGLE,
        tasks=(*WITH_ANSWERS, "prm", *PROMPTED, *SCORED),
        defaults=dict.fromkeys(SCORED, "prompt"),
    )
    """Column of the prompt or conversation. For several columns, separated by commas, their texts are joined with blank
    lines. In task=prm: column of the text with a placeholder after each step, or with data.steps_key the column of the
    prompt"""
    input_template: str | None = flag(
        None,
        when=(PLAIN, NOT_PRETRAINING),
        tasks=RENDERED,
        defaults=dict.fromkeys((*WITH_ANSWERS, "chat"), "User: {}\nAssistant: "),
        of_tasks={"score": {"when": (PLAIN, BY_REWARD_MODEL)}},
    )
    """Template of a prompt, with one {} for the prompt. In task=prm it is the template of the whole text, in task=chat
    that of one turn, and in task=score that of prompts for a reward model. null: no template"""
    output_key: str | None = flag(
        None,
        when=(NOT_PRETRAINING, SINGLE),
        tasks=(*WITH_ANSWERS, *SCORED),
        defaults={"kto": "output", "score": "response"},
        never_null=("score",),
    )
    """Column of the response. null: the last turn in the column input_key is the response; in task=check_reward the
    label is scored as the response"""
    label_key: str | None = flag(
        None,
        when=SINGLE,
        tasks=("kto", "prm", *PROMPTED, *SCORED),
        defaults=dict.fromkeys(("kto", "prm"), "label"),
        never_null=("kto", "prm"),
        of_tasks={"score": {"when": (SINGLE, BY_TEXT)}},
    )
    """Column of the label. A reward rule or a reward file gets it. In task=kto: 1 (true, yes) for a desirable answer, 0
    (false, no) for an undesirable one. In task=prm: a list with one entry per step, either a reward token or P(first
    reward token)"""
    reward_columns: list[str] = flag([], REWARD_COLUMNS, when=WITH_COLUMNS, tasks=(*PROMPTED, *SCORED))
    query_key: str | None = flag("reward_query", tasks=SCORED)
    """Column with prompt and response, including special tokens, as task=generate writes it. Rewards read this text.
    For rows without it, the text is put together from the prompt, the response and the end of the response"""
    finish_key: str | None = flag(
        "finish_reason", tasks=SCORED, of_tasks={"score": {"when": (BY_TEXT | BY_REWARD_MODEL,)}}
    )
    """Column that says whether the response is complete. The values length, max_tokens and false mean that it was cut
    off; no end-of-sequence token is scored with such a response. Rows without a value count as complete"""
    response_end: str = flag("", tasks=SCORED, of_tasks={"score": {"when": (BY_TEXT,)}})
    """Text to add after a complete response, for rewards that read text: the end-of-sequence token of the model that
    wrote it, such as <|im_end|>. Rows with data.query_key contain it already"""
    prompt_key: str | None = flag(None, when=PAIRED, tasks=WITH_PAIRS)
    """Column of the prompt of pairs, or several columns separated by commas; null: the prompt is the common beginning
    of both answers"""
    chosen_key: str | None = flag(
        None,
        tasks=WITH_PAIRS,
        defaults=dict.fromkeys(("rm", "dpo"), "chosen"),
        never_null=("rm", "dpo"),
        of_tasks={"kto": {"needs": OF_PAIRS}},
    )
    """Column of the better answer: text, messages, or a dialogue that ends with this answer. In task=kto: if it is set,
    learn from pairs without labels; null: learn from single answers"""
    rejected_key: str | None = flag(
        None,
        when=PAIRED,
        tasks=WITH_PAIRS,
        defaults=dict.fromkeys(("rm", "dpo"), "rejected"),
        never_null=("rm", "dpo"),
    )
    """Column of the worse answer: text, messages, or a dialogue that ends with this answer"""
    margin_key: str | None = flag(
        None,
        needs=Need(algorithm_needs("algo.loss", registry.reward_loss, "margin"), "this loss uses no margins"),
        tasks=("rm",),
    )
    """Column of the margin by which the reward of the better answer must exceed that of the worse one; null: 0"""
    turn_markers: list[str] | None = flag(
        None,
        when=(is_null(".output_key") | is_set(".chosen_key", "<column>"), is_null(".prompt_key"), NOT_PRETRAINING),
        tasks=(*TEXTS, "rm", "dpo", "kto"),
    )
    """The two texts that begin a turn of the user and a turn of the assistant, for columns that hold a whole dialogue
    as text"""
    reward_key: str | None = flag(
        None,
        when=NOT_PRETRAINING,
        needs=(
            Need(is_false(".multiturn"), "a reward belongs to one answer"),
            Need(
                TEMPLATED | is_null(".turn_markers"),
                "a dialogue in one text has no place for the reward",
            ),
        ),
        tasks=TEXTS,
    )
    """Column of a reward that is written into the prompt (conditional SFT); null: prompts are not changed"""
    target_reward: float | None = flag(None, tasks=("generate", "chat"))
    """Reward to request in every prompt, for a model that was trained by conditional SFT; null: prompts are not
    changed"""
    reward_template: str = flag(
        REWARD_TEMPLATE,
        when=(is_set(".reward_key", "<column>"), is_set(".target_reward", "<number>")),
        tasks=(*TEXTS, "generate", "conditional_sft", "chat"),
    )
    """Template that writes the reward into a prompt. data.input_template is applied to its result"""
    pack_to_max_len: bool = flag(
        False,
        needs=(
            Need(
                is_one_of("ds.packing_samples", None, True, remedy="null"), "padded rows cannot hold several examples"
            ),
            Need(is_false("ds.deepcompile"), "it works with padded rows, which cannot hold several examples"),
        ),
        tasks=TEXTS,
    )
    """Pack several examples into each row of data.max_len tokens. train.batch_size then counts these rows"""
    multiturn: bool = flag(
        False,
        when=NOT_PRETRAINING,
        needs=(Need(NOT_PRETRAINING, ON_EVERY_TOKEN), Need(TEMPLATED, "the chat template marks the turns")),
        tasks=TEXTS,
    )
    """Train on all turns of the assistant; false: only on the last response"""
    steps_key: str | None = flag(None, tasks=("prm",))
    """Column with the list of steps. Each step is put on its own line, with a placeholder after it; null: the text in
    the column input_key has the placeholders already"""
    step_separator: str = flag("\n", tasks=("prm",))
    """Text that ends a step. The trained model will use it to split solutions into steps when it scores them; empty:
    every character is a step"""
    image_key: str | None = flag(
        None,
        needs=(
            Need(TEMPLATED, "only a chat template has places for images"),
            Need(is_one_of("ds.ring_attn_size", 1), "sequences with images cannot be split over ranks"),
            Need(
                is_one_of("ds.tensor_parallel_size", 1), "tensor parallelism does not support models that read images"
            ),
            Need(is_one_of("algo.distill.coef", 0), "a teacher that reads images has not been tested"),
            Need(is_false("reward.process.enable"), "a process reward model reads only text"),
        ),
        tasks=SEEING,
    )
    """Column with the images of a row: a path (relative to the data file), bytes, base64, an image of the datasets
    library, or a list of these; null: rows have only text"""
    max_images_per_prompt: int = flag(1, ge=1, when=WITH_IMAGES, tasks=SEEING)
    """Largest number of images in a sequence, including the images of later turns"""
    image_urls_enable: bool = flag(False, when=WITH_IMAGES, tasks=SEEING)
    """Allow URLs in the image column, and download these images"""
    teacher_prompt_key: str | None = flag(
        None,
        when=is_positive("algo.distill.coef"),
        needs=Need(
            is_null("rollout.replay", ""), "the rollouts of an earlier run do not store the prompts of teachers"
        ),
        tasks=RL,
    )
    """Column of the text that teachers read instead of the prompt. It must be formatted already. For self-distillation
    it is the prompt together with a solution or feedback. Teachers read the normal prompt for rows without a value;
    null: for all rows"""
    pretrain_dataset: str | None = flag(
        None,
        "Documents for pre-training beside RL (PPO-ptx, Ouyang et al. 2022). Each optimiser step of the policy also "
        "trains on train.batch_size windows of them; actor.ptx_coef is the weight of their loss. " + SOURCES,
        tasks=RL,
    )
    pretrain_split: str = flag("train", when=WITH_DOCUMENTS, tasks=RL)
    """Name of the split to read from document sources with several splits"""
    pretrain_probs: list[float] | None = flag(None, ge=0, when=WITH_DOCUMENTS, tasks=RL)
    """Mixing probability of each document source; null: concatenate the sources"""
    pretrain_key: str = flag("text", "Column with the text of a document", when=WITH_DOCUMENTS, tasks=RL)

    @property
    def sequences_per_row(self) -> int:
        """The sequences that training reads of a row."""
        return 2 if self.TASK in WITH_PAIRS else 1

    def column(self, flag: str) -> str:
        """Return the column that a flag names which is never null in this task."""
        column: str | None = getattr(self, flag)
        assert column is not None, f"task={self.TASK} declares that data.{flag} may be null"
        return column

    @property
    def is_paired(self) -> bool:
        """Whether rows are pairs of a better and a worse answer."""
        return self.has("chosen_key") and self.chosen_key is not None


def variables_of(settings: Sequence[str]) -> dict[str, object]:
    """Return the variables by name."""
    return {name: literal(value) for name, _, value in (setting.partition(":") for setting in settings)}


def with_reward(template: str, prompt: str, reward: float) -> str:
    """Return the prompt with its reward."""
    return template.format(prompt=prompt, reward=reward)


def has_one_place(template: str) -> bool:
    """Return whether the template of a prompt has one {}, where the prompt goes."""
    try:
        return template.format("\0").count("\0") == 1
    except (IndexError, KeyError, ValueError):  # another {field}, or an unmatched brace
        return False


def says_reward(template: str) -> bool:
    """Return whether the template has {prompt} once, and a {reward} that changes the text."""
    try:
        texts = [with_reward(template, "\0", reward) for reward in (-1.5, 2.5)]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False
    return texts[0] != texts[1] and all(text.count("\0") == 1 for text in texts)
