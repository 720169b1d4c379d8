"""`data`: where rows come from and how they become tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rlhf_suite import registry
from rlhf_suite.config.flags import FREE, flag, is_false, is_null, is_positive, is_set, is_true, needs
from rlhf_suite.config.formatting import literal

SOURCES = (
    "Comma list of sources: file, pattern (data/*.jsonl), folder, hub name (@data_dir behind it), builtin:<task>, "
    "reasoning_gym:<task>, .py file with rows()"
)
REWARD_COLUMNS = "Further columns that reward files, servers and agents get with each row, by name (docs/rewards.md)"
WITH_COLUMNS = is_set("reward.remote_url", "<.py file or URLs>") | needs("agent.kind", registry.agent, "columns")
INPUT_KEY = "Column of the prompt or conversation; the texts of a comma list of columns are joined by blank lines"


TEMPLATED, PLAIN = is_true(".apply_chat_template"), is_false(".apply_chat_template")
NOT_PRETRAINING = is_false("actor.pretrain_mode_enable")
WITH_IMAGES, WITHOUT_IMAGES = is_set(".image_key", "<column>"), is_null(".image_key")
WITH_DOCUMENTS = is_set(".pretrain_dataset", "<source>")
SINGLE, PAIRED = is_null(".chosen_key"), is_set(".chosen_key", "<column>")


@dataclass
class RenderConfig:
    """How conversations become text"""

    apply_chat_template: bool = flag(False, "Render conversations with the tokenizer's chat template")
    tokenizer_chat_template: str | None = flag(None, when=TEMPLATED, strict="no chat template is applied")
    """Chat template (Jinja text or a file) instead of the tokenizer's"""
    chat_template_kwargs: list[str] = flag([], when=TEMPLATED)
    """Variables that the chat template reads, each as name:value, e.g. [enable_thinking:false]"""


@dataclass
class TextConfig(RenderConfig):
    """How rows become text, and text tokens"""

    max_len: int = flag(2048, "Longest sequence in tokens", ge=2)
    tools_key: str | None = flag(None, when=TEMPLATED)
    """Column of the tools that the chat template is given: a list of descriptions, or that list as JSON text"""
    on_bad_row: str = flag("skip", choices=("skip", "stop"))
    """What happens to a row that cannot be used: it is counted, reported and skipped, or it ends the run"""


@dataclass
class DataConfig(TextConfig):
    """What the data of every task that trains has in common"""

    SEQUENCES_PER_ROW: ClassVar[int] = 1

    row_format: str | None = flag(None, algorithms=registry.row_format)
    """A function of your own, file.py:function, from a row to the columns that the task reads; null: rows have them"""
    max_samples: int | None = flag(None, "Rows taken from each source, and again from the mixture; null: all", ge=1)
    max_skipped_share: float = flag(0.01, ge=0, le=1)
    """End the run when a larger share of a source's rows cannot be used (one row may always, unless this is 0); rows
    that are too long do not count"""
    dataloader_num_workers: int = flag(0, "Number of processes that tokenise rows", ge=0, resume=FREE)
    cache_enable: bool = flag(True, resume=FREE, when=WITHOUT_IMAGES)
    """Keep encoded rows below XDG_CACHE_HOME (~/.cache), by their content, and read them from there: data may be larger
    than memory, and the next start does not tokenise again. false: encode at every start, into memory, as rows with
    images (data.image_key) always are, since nothing would notice another image under the same path"""
    cache_max_gb: float = flag(50.0, gt=0, resume=FREE, when=is_true(".cache_enable"))
    """Size of the cache in GiB; beyond it the rows that have not been used for the longest time are removed"""


@dataclass
class ImageDataConfig:
    """Images of rows"""

    image_key: str | None = flag(None, when=TEMPLATED, strict="only a chat template says where an image stands")
    """Column of the images of a row: a path (relative to the data file), bytes, base64, an image of the library
    datasets, or a list of these; null: text alone"""
    max_images_per_prompt: int = flag(1, ge=1, when=WITH_IMAGES)
    """Most images of a sequence, those of later turns included"""
    image_urls_enable: bool = flag(False, "Fetch images whose column has a URL", when=WITH_IMAGES)


@dataclass
class PromptTextConfig(TextConfig):
    """Where prompts come from"""

    input_key: str = flag("input", INPUT_KEY)
    prompt_dataset: str | None = flag(None, SOURCES)
    prompt_split: str = flag("train", "Split of sources that have several")
    input_template: str | None = flag(None, "Prompt template with one {}", when=PLAIN)
    label_key: str | None = flag(None, "Column that the reward gets as the label")
    reward_columns: list[str] = flag([], REWARD_COLUMNS, when=WITH_COLUMNS)


@dataclass
class RowRangeConfig(PromptTextConfig):
    """Prompts that are read as they are needed"""

    skip_samples: int = flag(0, "Rows to leave out at the start", ge=0)
    max_samples: int | None = flag(None, "Rows taken after those; null: all", ge=1)


@dataclass
class ScoredRowsConfig:
    """Rows that a reward is asked about"""

    dataset: str | None = flag(None, SOURCES)
    dataset_split: str = flag("train", "Split of sources that have several")
    input_key: str = flag("prompt", INPUT_KEY)
    label_key: str | None = flag(None, "Column that a rule or a file gets as the label")
    reward_columns: list[str] = flag([], REWARD_COLUMNS, when=WITH_COLUMNS)
    query_key: str | None = flag("reward_query")
    """Column of prompt and response with special tokens, as task=generate writes it: this is what rewards see. Rows
    without it: the prompt, the response and what ends it"""
    finish_key: str | None = flag("finish_reason")
    """Column that says whether the response is finished: length, max_tokens or false means cut off, so that no
    end-of-sequence token is scored with it. Rows without it are finished"""
    response_end: str = flag("")
    """Text behind a finished response for rewards that read text: the end-of-sequence token of the model that wrote it,
    such as <|im_end|>; rows with data.query_key have it already"""
    skip_samples: int = flag(0, "Rows to leave out at the start", ge=0)


@dataclass
class ScoreDataConfig(ScoredRowsConfig, TextConfig):
    """Prompts with responses"""

    output_key: str = flag("response", "Column of the response: text, or messages")
    input_template: str | None = flag(None, "Prompt template with one {} for a reward model", when=PLAIN)
    max_samples: int | None = flag(None, "Rows taken after those; null: all", ge=1)


@dataclass
class CheckedDataConfig(ScoredRowsConfig):
    """Prompts with responses, or with right answers"""

    output_key: str | None = flag(None, "Column of the response; null: the label is scored as its own answer")
    max_samples: int = flag(16, "Rows taken after those", ge=1)


@dataclass
class RewardTextConfig:
    """Prompts that say a reward"""

    reward_template: str = flag(
        "{prompt} <rm_score>: {reward:.2f} ",
        when=(is_set(".reward_key", "<column>"), is_set(".target_reward", "<number>")),
    )
    """How a prompt states its reward; input_template is applied to the result"""


@dataclass
class TargetRewardConfig(RewardTextConfig):
    """Prompts that ask for a reward"""

    target_reward: float | None = flag(None)
    """Reward that every prompt asks for, for a model of conditional SFT; null: prompts are not changed"""


@dataclass
class GenerateDataConfig(RowRangeConfig, TargetRewardConfig):
    """Prompts to answer, as they are or with a reward to aim at"""


@dataclass
class ConditionalDataConfig(RowRangeConfig, RewardTextConfig):
    """Prompts that are answered, and learned with the rewards of the answers in them"""


@dataclass
class SourceDataConfig(DataConfig):
    """Rows to learn from"""

    dataset: str | None = flag(None, SOURCES)
    dataset_probs: list[float] | None = flag(None, "Mixing probabilities; null: concatenate", ge=0)
    dataset_split: str = flag("train", "Split of sources that have several")
    input_template: str | None = flag("User: {}\nAssistant: ", when=(PLAIN, NOT_PRETRAINING))
    """Prompt template with one {}"""


@dataclass
class AnswerDataConfig(SourceDataConfig):
    """Answers to learn from, or to prefer"""

    turn_markers: list[str] | None = flag(
        None, when=(is_null(".output_key") | is_set(".chosen_key", "<column>"), is_null(".prompt_key"), NOT_PRETRAINING)
    )
    """The texts that begin a turn of the user and of the assistant, where a column holds a whole dialogue as text"""


@dataclass
class SFTDataConfig(AnswerDataConfig, RewardTextConfig, ImageDataConfig):
    """SFT data"""

    input_key: str = flag("input", INPUT_KEY)
    output_key: str | None = flag(None, when=NOT_PRETRAINING)
    """Column of the response; null: the last turn of input_key is the response"""
    reward_key: str | None = flag(None, when=NOT_PRETRAINING)
    """Column of a reward that is written into the prompt (conditional SFT); null: prompts are not changed"""
    pack_to_max_len: bool = flag(False)
    """Pack several examples into each row of max_len tokens; train.batch_size counts these rows"""
    multiturn: bool = flag(False, "Train on every turn of the assistant (needs apply_chat_template)")


@dataclass
class PromptDataConfig(DataConfig, PromptTextConfig, ImageDataConfig):
    """RL prompts"""

    prompt_probs: list[float] | None = flag(None, "Mixing probabilities; null: concatenate", ge=0)
    teacher_prompt_key: str | None = flag(None, when=is_positive("algo.distill.coef"))
    """Column that teachers read in place of the prompt, rendered as it is: the prompt with a solution or feedback in
    it, for self-distillation. Where a row has none they read the prompt; null: they always do"""
    pretrain_dataset: str | None = flag(
        None,
        "Documents: each optimiser step of the policy also has train.batch_size windows of them, whose next-token loss "
        "counts actor.ptx_coef (PPO-ptx, Ouyang et al. 2022). " + SOURCES,
    )
    pretrain_split: str = flag("train", "Split of document sources that have several", when=WITH_DOCUMENTS)
    pretrain_probs: list[float] | None = flag(None, ge=0, when=WITH_DOCUMENTS)
    """Mixing probabilities of the documents; null: concatenate"""
    pretrain_key: str = flag("text", "Column of the text of a document", when=WITH_DOCUMENTS)


@dataclass
class PairDataConfig(AnswerDataConfig):
    """Pairs of a better and a worse answer"""

    SEQUENCES_PER_ROW: ClassVar[int] = 2

    prompt_key: str | None = flag(None)
    """Column (or comma list) of the prompt; null: the beginning that both answers have in common"""
    chosen_key: str = flag("chosen", "Column of the better answer: text, messages, or a dialogue that ends with it")
    rejected_key: str = flag("rejected", "Column of the worse answer: text, messages, or a dialogue that ends with it")


@dataclass
class ImagePairDataConfig(PairDataConfig, ImageDataConfig):
    """Pairs of a better and a worse answer, perhaps about images"""


@dataclass
class RewardPairDataConfig(ImagePairDataConfig):
    """Pairs of a better and a worse answer, with how much better"""

    margin_key: str | None = flag(
        None, when=needs("algo.loss", registry.reward_loss, "margin"), strict="this loss takes no margins"
    )
    """Column of the margin by which the better answer must win; null: 0"""


@dataclass
class LabelledDataConfig(AnswerDataConfig):
    """Answers that are desirable or not"""

    SEQUENCES_PER_ROW: ClassVar[int] = 2

    input_key: str = flag("input", INPUT_KEY, when=SINGLE)
    output_key: str | None = flag("output", when=SINGLE)
    """Column of the answer; null: the last turn of input_key is the answer"""
    label_key: str = flag("label", when=SINGLE)
    """Column that is 1 (true, yes) for a desirable answer and 0 (false, no) for an undesirable one"""
    prompt_key: str | None = flag(None, when=PAIRED)
    """Column (or comma list) of the prompt of pairs; null: it is in both answers"""
    chosen_key: str | None = flag(None)
    """Learn from pairs, without labels: column of the desirable answer, as task=dpo reads it"""
    rejected_key: str | None = flag(None, "Column of the undesirable answer of pairs", when=PAIRED)


@dataclass
class StepDataConfig(SourceDataConfig):
    """Solutions with a label for every step"""

    input_template: str | None = flag(None, "Template of the text with one {}", when=PLAIN)
    input_key: str = flag("input")
    """Column of the text with a placeholder behind each step; with steps_key, the column of the prompt"""
    steps_key: str | None = flag(None)
    """Column with the list of steps; each is put on its own line with a placeholder behind it"""
    label_key: str = flag("label", "Column with a list of a reward token, or of P(first reward token), for every step")
    step_separator: str = flag("\n")
    """The text that ends a step in solutions that the trained model will score; empty: every character is a step"""


def variables_of(settings: Sequence[str]) -> dict[str, object]:
    """Return the variables by name."""
    return {name: literal(value) for name, _, value in (setting.partition(":") for setting in settings)}


def with_reward(template: str, prompt: str, reward: float) -> str:
    """Return the prompt with its reward."""
    return template.format(prompt=prompt, reward=reward)


def says_reward(template: str) -> bool:
    """Return whether the template has {prompt} once, and a {reward} that changes the text."""
    try:
        texts = [with_reward(template, "\0", reward) for reward in (-1.5, 2.5)]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False
    return texts[0] != texts[1] and all(text.count("\0") == 1 for text in texts)
