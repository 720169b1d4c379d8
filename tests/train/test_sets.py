"""Which rows a supervised run trains on, and which it holds out."""

from __future__ import annotations

import json

import pytest

from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tasks.sft import make_task
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.train.supervised import encode


@pytest.fixture
def encoded(tmp_path):
    """A folder with nine rows to train on and seven to test on, whose answers say which they are."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for split, count in (("train", 9), ("test", 7)):
        rows = [{"input": f"{n} =", "output": f"{split} {n}"} for n in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**flags):
        config = Run.of("sft")
        config.actor.model_name_or_path = "builtin:tiny"
        config.data.dataset = config.eval.dataset = str(folder)
        config.data.dataset_split, config.eval.split = "train", "test"
        config.data.input_key, config.data.output_key, config.data.cache_enable = "input", "output", False
        config.data.max_samples, config.eval.max_samples = flags.get("train"), flags.get("test")
        tokenizer = load_tokenizer("builtin:tiny", config.data)
        task, journal = make_task(config, tokenizer), Journal(LoggerConfig(progress=False), RunFolder(tmp_path), "sft")
        data = encode(config, make_task, task, journal)
        texts = lambda items: [tokenizer.decode(item.ids) for item in items]  # noqa: E731 - two lines of it
        return texts(data.train), {name: texts(items) for name, items in data.held_out.items()}

    return make


@pytest.mark.notices(
    "held-out rows are of the training split",
    "train/supervised.py",
    "Sources(source, config.eval.split,",
    "Sources(source, config.data.dataset_split,",
)
def test_held_out_rows_are_of_the_split_of_evaluations(encoded):
    train, held_out = encoded()
    assert len(train) == 9 and all("train" in text for text in train)
    assert list(held_out) == ["rows"] and len(held_out["rows"]) == 7
    assert all("test" in text for text in held_out["rows"])


@pytest.mark.notices(
    "as many held-out rows as training rows are taken",
    "train/supervised.py",
    "config.eval.max_samples, flags=EVAL)",
    "config.data.max_samples, flags=EVAL)",
)
def test_each_set_has_a_limit_of_its_own(encoded):
    train, held_out = encoded(train=4)
    assert (len(train), len(held_out["rows"])) == (4, 7)
    train, held_out = encoded(test=2)
    assert (len(train), len(held_out["rows"])) == (9, 2)
