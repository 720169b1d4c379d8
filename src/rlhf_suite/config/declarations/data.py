"""`data`: where rows come from and how they become tokens."""

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
    "Comma list of sources: file, pattern (data/*.jsonl), folder, hub name (@data_dir after it), builtin:<task>, "
    "reasoning_gym:<task>, .py file with rows()"
)
REWARD_COLUMNS = "Further columns that reward files, servers and agents get with each row, by name (docs/rewards.md)"
REWARD_TEMPLATE = "{prompt} <rm_score>: {reward:.2f} "
WITH_COLUMNS = is_set("reward.remote_url", "<.py file or URLs>") | algorithm_needs(
    "agent.kind", registry.agent, "columns"
)

TEMPLATED, PLAIN = is_true(".apply_chat_template"), is_false(".apply_chat_template")
NOT_PRETRAINING = is_false("actor.pretrain_mode_enable")
ON_EVERY_TOKEN = "pre-training is on every token of plain text"
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
    """Where rows come from and how they become text, and text tokens"""

    apply_chat_template: bool = flag(
        False,
        needs=Need(NOT_PRETRAINING, ON_EVERY_TOKEN),
        tasks=RENDERED,
        defaults={"chat": True},
        of_tasks={"score": {"when": (BY_REWARD_MODEL,)}},
    )
    """Render conversations with the tokenizer's chat template, in task=chat if it has one"""
    tokenizer_chat_template: str | None = flag(
        None,
        needs=Need(TEMPLATED, "it is the chat template that is applied"),
        tasks=RENDERED,
        of_tasks={"score": {"when": (BY_REWARD_MODEL,)}},
    )
    """Chat template (Jinja text or a file) instead of the tokenizer's"""
    chat_template_kwargs: list[str] = flag([], when=TEMPLATED, tasks=RENDERED)
    """Variables that the chat template reads, each as name:value, e.g. [enable_thinking:false]"""
    max_len: int = flag(
        2048,
        "Longest sequence in tokens",
        ge=2,
        tasks=ENCODED,
        defaults={"rm": 512, "dpo": 512},
        of_tasks={"score": {"when": (BY_REWARD_MODEL,)}},
    )
    tools_key: str | None = flag(None, when=TEMPLATED, tasks=ENCODED)
    """Column of the tools that the chat template is given: a list of descriptions, or that list as JSON text"""
    on_bad_row: str = flag("skip", choices=("skip", "stop"), tasks=ENCODED)
    """What happens to a row that cannot be used: it is counted, reported and skipped, or it ends the run"""
    row_format: str | None = flag(None, algorithms=registry.row_format, tasks=TRAINED)
    """A function of your own, file.py:function, from a row to the columns that the task reads; null: rows have them"""
    max_samples: int | None = flag(
        None, ge=1, tasks=(*ENCODED, "check_reward"), defaults={"check_reward": 16}, never_null=("check_reward",)
    )
    """Rows taken from each source, and again from the mixture; with data.skip_samples, rows after those; null: all"""
    max_skipped_share: float = flag(0.01, ge=0, le=1, tasks=TRAINED)
    """End the run when a larger share of a source's rows cannot be used (one row may always, unless this is 0); rows
    that are too long do not count"""
    dataloader_num_workers: int = flag(0, "Number of processes that tokenise rows", ge=0, resume=FREE, tasks=TRAINED)
    cache_enable: bool = flag(True, resume=FREE, when=WITHOUT_IMAGES, tasks=TRAINED)
    """Keep encoded rows below XDG_CACHE_HOME (~/.cache), by their content, and read them from there: data may be larger
    than memory, and the next start does not tokenise again. false: encode at every start, into memory, as rows with
    images (data.image_key) always are, since nothing would notice another image under the same path"""
    cache_max_gb: float = flag(50.0, gt=0, resume=FREE, when=is_true(".cache_enable"), tasks=TRAINED)
    """Size of the cache in GiB; beyond it the rows that have not been used for the longest time are removed"""
    dataset: str | None = flag(None, SOURCES, tasks=(*SUPERVISED, *SCORED))
    dataset_probs: list[float] | None = flag(None, "Mixing probabilities; null: concatenate", ge=0, tasks=SUPERVISED)
    dataset_split: str = flag("train", "Split of sources that have several", tasks=(*SUPERVISED, *SCORED))
    prompt_dataset: str | None = flag(None, SOURCES, tasks=PROMPTED)
    prompt_probs: list[float] | None = flag(None, "Mixing probabilities; null: concatenate", ge=0, tasks=RL)
    prompt_split: str = flag("train", "Split of sources that have several", tasks=PROMPTED)
    skip_samples: int = flag(0, "Rows to leave out at the start", ge=0, tasks=("generate", *LOOPS, *SCORED))
    input_key: str = flag(
        "input",
        when=SINGLE,
        tasks=(*WITH_ANSWERS, "prm", *PROMPTED, *SCORED),
        defaults=dict.fromkeys(SCORED, "prompt"),
    )
    """Column of the prompt or conversation; the texts of a comma list of columns are joined by blank lines. In task=prm
    the column of the text with a placeholder after each step; with data.steps_key, that of the prompt"""
    input_template: str | None = flag(
        None,
        when=(PLAIN, NOT_PRETRAINING),
        tasks=RENDERED,
        defaults=dict.fromkeys((*WITH_ANSWERS, "chat"), "User: {}\nAssistant: "),
        of_tasks={"score": {"when": (PLAIN, BY_REWARD_MODEL)}},
    )
    """Template of a prompt with one {}, in task=prm of the whole text, in task=chat of a turn; in task=score for a
    reward model"""
    output_key: str | None = flag(
        None,
        when=(NOT_PRETRAINING, SINGLE),
        tasks=(*WITH_ANSWERS, *SCORED),
        defaults={"kto": "output", "score": "response"},
        never_null=("score",),
    )
    """Column of the response; null: the last turn of input_key is the response, in task=check_reward the label is
    scored as its own answer"""
    label_key: str | None = flag(
        None,
        when=SINGLE,
        tasks=("kto", "prm", *PROMPTED, *SCORED),
        defaults=dict.fromkeys(("kto", "prm"), "label"),
        never_null=("kto", "prm"),
        of_tasks={"score": {"when": (SINGLE, BY_TEXT)}},
    )
    """Column that the reward, where it is a rule or a file, gets as the label. In task=kto: 1 (true, yes) for a
    desirable answer and 0 (false, no) for an undesirable one. In task=prm: a list of a reward token, or of P(first
    reward token), for every step"""
    reward_columns: list[str] = flag([], REWARD_COLUMNS, when=WITH_COLUMNS, tasks=(*PROMPTED, *SCORED))
    query_key: str | None = flag("reward_query", tasks=SCORED)
    """Column of prompt and response with special tokens, as task=generate writes it: this is what rewards see. Rows
    without it: the prompt, the response and what ends it"""
    finish_key: str | None = flag(
        "finish_reason", tasks=SCORED, of_tasks={"score": {"when": (BY_TEXT | BY_REWARD_MODEL,)}}
    )
    """Column that says whether the response is finished: length, max_tokens or false means cut off, so that no
    end-of-sequence token is scored with it. Rows without it are finished"""
    response_end: str = flag("", tasks=SCORED, of_tasks={"score": {"when": (BY_TEXT,)}})
    """Text after a finished response for rewards that read text: the end-of-sequence token of the model that wrote it,
    such as <|im_end|>; rows with data.query_key have it already"""
    prompt_key: str | None = flag(None, when=PAIRED, tasks=WITH_PAIRS)
    """Column (or comma list) of the prompt of pairs; null: the beginning that both answers have in common"""
    chosen_key: str | None = flag(
        None,
        tasks=WITH_PAIRS,
        defaults=dict.fromkeys(("rm", "dpo"), "chosen"),
        never_null=("rm", "dpo"),
        of_tasks={"kto": {"needs": OF_PAIRS}},
    )
    """Column of the better answer: text, messages, or a dialogue that ends with it. In task=kto: learn from pairs,
    without labels; null: from single answers"""
    rejected_key: str | None = flag(
        None,
        when=PAIRED,
        tasks=WITH_PAIRS,
        defaults=dict.fromkeys(("rm", "dpo"), "rejected"),
        never_null=("rm", "dpo"),
    )
    """Column of the worse answer: text, messages, or a dialogue that ends with it"""
    margin_key: str | None = flag(
        None,
        needs=Need(algorithm_needs("algo.loss", registry.reward_loss, "margin"), "this loss takes no margins"),
        tasks=("rm",),
    )
    """Column of the margin by which the better answer must win; null: 0"""
    turn_markers: list[str] | None = flag(
        None,
        when=(is_null(".output_key") | is_set(".chosen_key", "<column>"), is_null(".prompt_key"), NOT_PRETRAINING),
        tasks=(*TEXTS, "rm", "dpo", "kto"),
    )
    """The texts that begin a turn of the user and of the assistant, where a column holds a whole dialogue as text"""
    reward_key: str | None = flag(
        None,
        when=NOT_PRETRAINING,
        needs=(
            Need(is_false(".multiturn"), "a reward belongs to one answer"),
            Need(
                TEMPLATED | is_null(".turn_markers"),
                "a dialogue that is used as it is written has no place for the reward",
            ),
        ),
        tasks=TEXTS,
    )
    """Column of a reward that is written into the prompt (conditional SFT); null: prompts are not changed"""
    target_reward: float | None = flag(None, tasks=("generate", "chat"))
    """Reward that every prompt asks for, for a model of conditional SFT; null: prompts are not changed"""
    reward_template: str = flag(
        REWARD_TEMPLATE,
        when=(is_set(".reward_key", "<column>"), is_set(".target_reward", "<number>")),
        tasks=(*TEXTS, "generate", "conditional_sft", "chat"),
    )
    """How a prompt states its reward; input_template is applied to the result"""
    pack_to_max_len: bool = flag(
        False,
        needs=(
            Need(is_one_of("ds.packing_samples", None, True, remedy="null"), "the examples of a row would be padded"),
            Need(is_false("ds.deepcompile"), "with it the examples of a row are padded"),
        ),
        tasks=TEXTS,
    )
    """Pack several examples into each row of max_len tokens; train.batch_size counts these rows"""
    multiturn: bool = flag(
        False,
        when=NOT_PRETRAINING,
        needs=(Need(NOT_PRETRAINING, ON_EVERY_TOKEN), Need(TEMPLATED, "the chat template marks the turns")),
        tasks=TEXTS,
    )
    """Train on every turn of the assistant"""
    steps_key: str | None = flag(None, tasks=("prm",))
    """Column with the list of steps; each is put on its own line with a placeholder after it"""
    step_separator: str = flag("\n", tasks=("prm",))
    """The text that ends a step in solutions that the trained model will score; empty: every character is a step"""
    image_key: str | None = flag(
        None,
        needs=(
            Need(TEMPLATED, "only a chat template says where an image stands"),
            Need(is_one_of("ds.ring_attn_size", 1), "the tokens of an image are not split over ranks"),
            Need(is_one_of("ds.tensor_parallel_size", 1), "the matrices of models that read images are not split"),
            Need(is_one_of("algo.distill.coef", 0), "a teacher that reads images has not been tested"),
            Need(is_false("reward.process.enable"), "a process reward model reads text alone"),
        ),
        tasks=SEEING,
    )
    """Column of the images of a row: a path (relative to the data file), bytes, base64, an image of the library
    datasets, or a list of these; null: text alone"""
    max_images_per_prompt: int = flag(1, ge=1, when=WITH_IMAGES, tasks=SEEING)
    """Most images of a sequence, those of later turns included"""
    image_urls_enable: bool = flag(False, when=WITH_IMAGES, tasks=SEEING)
    """Fetch images whose column has a URL"""
    teacher_prompt_key: str | None = flag(
        None,
        when=is_positive("algo.distill.coef"),
        needs=Need(is_null("rollout.replay", ""), "the rollouts of an earlier run have no prompts of teachers"),
        tasks=RL,
    )
    """Column that teachers read in place of the prompt, rendered as it is: the prompt with a solution or feedback in
    it, for self-distillation. Where a row has none they read the prompt; null: they always do"""
    pretrain_dataset: str | None = flag(
        None,
        "Documents: each optimiser step of the policy also has train.batch_size windows of them, whose next-token loss "
        "counts actor.ptx_coef (PPO-ptx, Ouyang et al. 2022). " + SOURCES,
        tasks=RL,
    )
    pretrain_split: str = flag("train", "Split of document sources that have several", when=WITH_DOCUMENTS, tasks=RL)
    pretrain_probs: list[float] | None = flag(None, ge=0, when=WITH_DOCUMENTS, tasks=RL)
    """Mixing probabilities of the documents; null: concatenate"""
    pretrain_key: str = flag("text", "Column of the text of a document", when=WITH_DOCUMENTS, tasks=RL)

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
