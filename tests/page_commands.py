"""The commands in the blocks of README.md and docs/, and local stand-ins for the models, files and servers in them."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

import pyarrow
from pyarrow import parquet

ROOT = Path(__file__).parents[1]
# Translations, such as first_run.zh.md, have the blocks of their pages (tests/config/test_translations.py).
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.suffixes == [".md"])]
BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PLACEHOLDER = re.compile(r"<([a-zA-Z][^<>\n]*)>")
SERVER = re.compile(r"\b(http|ws)://[^/\s\"'}]+")
FILE = re.compile(
    r"^```(?:python|yaml)\n# (\S+\.(?:py|yaml))\n(.*?)^```", re.MULTILINE | re.DOTALL
)  # shown with its name


@dataclass(frozen=True)
class Command:
    """A command of a page with its place. `first`: the first command of its block that is of the same task; `...` in
    those below it stands for its model, data and sampling."""

    place: str
    text: str
    first: str = ""

    def words(self, server: str) -> list[str]:
        """The words after `run.py` or `rlhf-suite`; `server` is the address of one that is there, and `...` gives way
        to flags of the first command, and to what every run of the task needs."""
        words = words_of(self.text)
        given = {word.partition("=")[0] for word in words}
        above = [word for word in words_of(self.first) if word.startswith(REPEATED)] if self.first else []
        for more in (above, rest(words, self.text)) if "..." in words else ():
            words += [word for word in more if word.partition("=")[0] not in given]
            given |= {word.partition("=")[0] for word in more}
        return [SERVER.sub(rf"\1://{server}", word) for word in words if word != "..."]


def words_of(text: str) -> list[str]:
    """The words of a command of the suite, with stand-ins for placeholders and without what follows in a pipe."""
    words = shlex.split(PLACEHOLDER.sub(stand_in, text), comments=True)
    begin = next(number for number, word in enumerate(words) if word in ("run.py", "rlhf-suite")) + 1
    end = next((at for at, word in enumerate(words) if at > begin and word in ("|", "||", ">")), len(words))
    return words[begin:end]


def rest(words: list[str], text: str) -> list[str]:
    """The flags that a reader of a command would add: a model, data, and what scores answers."""
    task = next((word.removeprefix("task=") for word in words if word.startswith("task=")), "ppo")
    supervised = {"sft": "chats", "dpo": "pairs", "kto": "rated"}
    more = [f"data.dataset={supervised[task]}.jsonl"] if task in supervised else ["data.prompt_dataset=prompts.jsonl"]
    more += {"dpo": ["data.prompt_key=prompt"], "sft": ["data.output_key=output"]}.get(task, [])
    if "reward.rule=null" not in words and task not in supervised:
        more += ["data.label_key=label"] if "reward.rule=" in text else []
        if not re.search(r"reward\.(rule|sources|remote_url|model_name_or_path)=|reward=|agent.kind=environment", text):
            more += ["reward.rule=math", "data.label_key=label"]
    return ["actor.model_name_or_path=model", *more]


def commands() -> list[Command]:
    """The commands of all pages, each in one line."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in BLOCK.finditer(text):
            line, firsts = text.count("\n", 0, block.start(1)) + 1, dict[str, str]()
            for command in re.split(r"(?<!\\)\n", block[1]):
                place = f"{page.relative_to(ROOT)}:{line}"
                line += command.count("\n") + 1
                joined = command.replace("\\\n", " ").strip()
                if joined and not joined.startswith("#"):
                    task = next(iter(re.findall(r"task=\w+", joined)), "")
                    found.append(Command(place, joined, firsts.get(LIKE.get(task, task), "")))
                    if "..." not in joined and task:
                        firsts.setdefault(task, joined)
    return found


def stand_in(placeholder: re.Match[str]) -> str:
    """The local file or name that stands for `<a placeholder>`."""
    return STANDS_FOR[placeholder[1]]


REPEATED = ("actor.model_name_or_path=", "data.", "rollout.", "eval.dataset=")
LIKE = dict.fromkeys(("task=iterative_dpo", "task=conditional_sft"), "task=rejection_sampling")
STANDS_FOR = {
    **dict.fromkeys(
        (
            "HF folder",
            "policy",
            "student",
            "teacher",
            "base",
            "model",
            "that model",
            "folder of the policy",
            "folder of a chat model",
        ),
        "model",
    ),
    **dict.fromkeys(("reward model", "HF folder of a reward model"), "judge"),
    **dict.fromkeys(("model of task=prm", "process reward model"), "prm"),
    "adapter": "adapter",
    "folder": "merged",
    "rows": "rows.jsonl",
    "time": "T",
    "secret": "s",
    "first node": "node1",
    "HF folder of a model that reads images": "builtin:vision",
    "mark": "<mark>",
    "rm_score": "<rm_score>",
}

CONFIG = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 131072}
QUESTIONS = ("my.jsonl", "gsm8k.jsonl", "largest_train.jsonl", "largest_test.jsonl")
ROWS = {
    "rows.jsonl": {"input": "1 + 1", "output": "2", "context_messages": [{"role": "user", "content": "1 + 1"}]},
    **{name: {"question": "1 + 1", "answer": "#### 2"} for name in QUESTIONS},
    "prompts.jsonl": {"input": "1 + 1", "answer": "2", "label": "2", "hinted": "1 + 1 = 2"},
    "questions.jsonl": {"question": "1 + 1", "answer": "2"},
    "held_out.jsonl": {
        "input": "1 + 1",
        "prompt": "1 + 1",
        "chosen": "2",
        "rejected": "3",
        "answer": "2",
        "label": "2",
    },
    "answers.jsonl": {"prompt": "1 + 1", "response": "2", "label": "2", "answer": "2"},
    "graded.jsonl": {"prompt": "1 + 1", "response": "2", "grade": "1"},
    "pairs.jsonl": {"prompt": "1 + 1", "chosen": "2", "rejected": "3"},
    "rated.jsonl": {"input": "1 + 1", "output": "2", "is_good": True},
    "steps.jsonl": {"input": "1 + 1 <mark> = 2 <mark>", "label": ["+", "-"]},
    "solutions.jsonl": {"prompt": "1 + 1", "response": "2"},
    "scored.jsonl": {"input": "1 + 1", "output": "2", "reward": 1.0},
    "chats.jsonl": {"input": "1 + 1", "output": "2"},
    "mixed.jsonl": {"input": "1 + 1", "answer": "2", "label": "2", "datasource": "gsm8k"},
    "texts/a.jsonl": {"text": "once"},
    "MATH-500/test.jsonl": {"problem": "1 + 1", "answer": "2"},
}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "tools": None}
REWARD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0] * len(queries)}\n"
TOOL = (
    'def add(a: int, b: int) -> int:\n    """Add two numbers.\n\n    Args:\n        a: one\n        b: other\n    """\n'
)


def write_weights(file: Path, shapes: dict[str, list[int]]) -> None:
    """Write a safetensors file of float32 zeros."""
    names, end = {}, 0
    for name, (rows, columns) in shapes.items():
        begin, end = end, end + 4 * rows * columns
        names[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [begin, end]}
    header = json.dumps(names).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * end)


def write_files(folder: Path) -> None:
    """Write everything that the commands of the pages read, below `folder`; the Python and YAML files that pages show
    are written as shown."""
    for name, row in ROWS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{json.dumps(row)}\n" * 4)
    (folder / "data").mkdir()
    with gzip.open(folder / "data" / "a.jsonl.gz", "wt") as file:
        file.write(f"{json.dumps(MESSAGES)}\n")
    for name in ("my_reward.py", "judge.py"):
        (folder / name).write_text(REWARD)
    (folder / "rubric.md").write_text("Grade this answer: {response}\n")
    for page in PAGES:
        for name, text in FILE.findall(page.read_text()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    shutil.copy(ROOT / "experiments" / "own_code" / "own.py", folder)
    (folder / "experiments").symlink_to(ROOT / "experiments")
    images = [{"input": [{"role": "user", "content": "what?"}], "images": [], "answer": "2"}]
    parquet.write_table(pyarrow.Table.from_pylist(images), folder / "my.parquet")
    (folder / "gsm8k").mkdir()
    questions = [{"question": "1 + 1", "answer": "2\n#### 2"}]
    parquet.write_table(pyarrow.Table.from_pylist(questions), folder / "gsm8k" / "test.parquet")
    for name in ("game.py", "games.py"):
        (folder / name).write_text((folder / "second_try.py").read_text())
    write_models(folder)


def write_models(folder: Path) -> None:
    """Write models of a few numbers."""
    template = (ROOT / "experiments" / "agents" / "tools.jinja").read_text()
    heads = {"model": {}, "judge": {"score.weight": [1, 4]}, "prm": {}, "my-model": {}, "Qwen/Qwen3-0.6B": {}}
    for name, head in heads.items():
        (folder / name).mkdir(parents=True)
        settings = CONFIG | ({"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1} if head else {})
        (folder / name / "config.json").write_text(json.dumps(settings))
        write_weights(folder / name / "model.safetensors", {"model.embed_tokens.weight": [8, 4], **head})
        (folder / name / "tokenizer.json").write_text("{}")
        (folder / name / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "model"}))
    write_weights(folder / "adapter" / "adapter_model.safetensors", {"lora_A.weight": [1, 4]})
