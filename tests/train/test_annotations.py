"""Which file has what the frozen models say of the sequences: nothing that changes their numbers may share a file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.data.batch import Example, Group
from rlhf_suite.data.images import Image
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.tasks.dpo import make_task
from rlhf_suite.train.annotations import cache_file


def example(ids: list[int], image: bytes | None = None) -> Example:
    images = None if image is None else (Image(start=0, length=1, data=image),)
    return Example(ids, [0, *[1] * (len(ids) - 1)], images=images)


ITEMS = [Group((example([1, 2, 3], b"a cat"), example([1, 2, 4], b"a cat"))), Group((example([5, 6]), example([5, 7])))]


@pytest.fixture
def named(tmp_path):
    """Return the file of some items, with the flags `flags` of `ds`."""
    (tmp_path / "config.json").write_text("{}")
    config = Run.of("dpo")
    config.actor.model_name_or_path = config.ref.model_name_or_path = str(tmp_path)
    task = make_task(config, load_tokenizer("builtin:tiny", config.data))

    def file(items=ITEMS, **flags):
        plan = ModelPlan("ref", str(tmp_path))
        return cache_file(task, replace(config, ds=replace(config.ds, **flags)), {"ref": plan}, items)

    return file


def changed(number: int, **fields) -> list[Group]:
    """Return the items with other fields in one of the four sequences."""
    sequences = [sequence for group in ITEMS for sequence in group.examples]
    sequences[number] = replace(sequences[number], **fields)
    return [Group((sequences[0], sequences[1])), Group((sequences[2], sequences[3]))]


@pytest.mark.notices(
    "reference log-probs on disk do not depend on the images",
    "train/annotations.py",
    "            digest.update(hashlib.sha256(image.data).digest())\n",
    "            pass\n",
    cases="image",
)
@pytest.mark.parametrize(
    "items",
    [
        pytest.param(changed(0, ids=[1, 2, 9]), id="token"),
        pytest.param(changed(0, mask=[0, 0, 1]), id="mask"),
        pytest.param(changed(1, images=(Image(0, 1, b"a dog"),)), id="image"),
        pytest.param(changed(2, ids=[5, 6, 5], mask=[0, 1, 1]), id="length"),
        pytest.param(ITEMS[::-1], id="order"),
        pytest.param(ITEMS[:1], id="number"),
    ],
)
def test_other_sequences_have_another_file(named, items):
    assert named(items) != named()


@pytest.mark.parametrize("flags", [{"param_dtype": "fp32"}, {"load_in_4bit": True}, {"attn_implementation": "eager"}])
def test_another_precision_or_attention_has_another_file(named, flags):
    assert named(**flags) != named()


def test_what_no_frozen_model_reads_shares_the_file(named):
    assert named(changed(0, where="rows.jsonl:7", numbers={"weight": 2.0}, truncated=True)) == named()
