"""Sources to items through the cache: the same items from memory, from disk, and at the next start."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from dataclasses import replace
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data import builtin, store
from rlhf_suite.data.batch import Example, Group
from rlhf_suite.data.files import num_rows
from rlhf_suite.data.load import Loader
from rlhf_suite.data.packing import token_counts
from rlhf_suite.data.preferences import LabelledEncoder, PairEncoder
from rlhf_suite.data.row import BadRows, DataError
from rlhf_suite.data.sources import DATASET, EVAL, Sources, locate
from rlhf_suite.data.steps import StepEncoder
from rlhf_suite.data.text_encoders import ConversationEncoder, DocumentEncoder, PromptEncoder
from rlhf_suite.errors import UserError

ROW = {"prompt": "hello", "chosen": "user", "rejected": "there", "margin": 0.1, "label": 1, "steps": ["a", "b"]}
SFT = DataConfig.of("sft", input_key="prompt", output_key="chosen")


class Counting:
    """An encoder that knows how often it was asked (all of them together: what an instance has is part of its name)."""

    calls: ClassVar[list[str]] = []

    def __init__(self, encoder):
        self.encoder = encoder
        self.calls.clear()

    def encode(self, row):
        self.calls.append(row.where)
        return self.encoder.encode(row)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlhf_suite" / "encoded"


def write(path, count=50, **changes):
    rows = [ROW | {"prompt": f"hello {n}", "labels": [0.1 * (n % 7), 1]} | changes for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "nonsense\n")
    return path


def load(encoder, path, config=SFT, bad=None, **sources):
    bad = bad or BadRows(config.on_bad_row)
    return Loader(encoder, config, 0, bad).load(Sources(str(path), "train", **sources))


def encoders(tokenizer):
    pairs = DataConfig.of("rm", input_template="User: {}\nAssistant: ", prompt_key="prompt")
    steps = DataConfig.of("prm", input_key="prompt", steps_key="steps", label_key="labels", max_len=99)
    return {
        "examples": ConversationEncoder(tokenizer, SFT),
        "pairs with margins": PairEncoder(tokenizer, pairs, "margin"),
        "labelled": LabelledEncoder(tokenizer, DataConfig.of("kto", input_key="prompt", output_key="chosen")),
        "steps": StepEncoder(tokenizer, steps, AlgoConfig.of("prm", placeholder_token=";", reward_tokens=["+", "-"])),
        "documents": DocumentEncoder(tokenizer, replace(SFT, max_len=3)),
        "prompts": PromptEncoder(
            tokenizer, DataConfig.of("ppo", input_key="prompt", label_key="steps", reward_columns=["margin", "steps"])
        ),
    }


@pytest.mark.notices(
    "as many bad rows as are allowed end the run", "data/row.py", "if bad > allowed:", "if bad >= allowed:"
)
@pytest.mark.notices(
    "an item at the border of two stored batches is another one", "data/store.py", 'side="right"', 'side="left"'
)
@pytest.mark.parametrize("kind", ["examples", "pairs with margins", "labelled", "steps", "documents", "prompts"])
def test_stored_items_equal_the_encoded_ones(tokenizer, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(store, "BATCH_TOKENS", 40)
    encoder, path = encoders(tokenizer)[kind], write(tmp_path / "a.jsonl")
    fresh = load(encoder, path, replace(SFT, cache_enable=False))
    written, kept = load(encoder, path), load(encoder, path)
    assert fresh[0] == written[0] and len({len(each) for each in (fresh, written, kept)}) == 1
    assert list(fresh) == list(written) == list(kept) == [kept[place] for place in range(len(kept))]
    assert len(kept.layout.ends) > 3 and kept[-1] == kept[len(kept) - 1] and kept[5:9] == list(kept)[5:9]
    assert list(pickle.loads(pickle.dumps(kept))) == list(pickle.loads(pickle.dumps(fresh))) == list(kept)


def test_the_next_start_does_not_encode_again_and_reports_the_same(tokenizer, tmp_path):
    encoder, path = Counting(ConversationEncoder(tokenizer, replace(SFT, max_len=12))), write(tmp_path / "a.jsonl")
    path.write_text(path.read_text() + json.dumps(ROW | {"chosen": "a " * 30}) + "\n")
    first, second = BadRows("skip"), BadRows("skip")
    load(encoder, path, bad=first)
    assert len(encoder.calls) == 51 and first.count == 1 and first.noted.total() == 1
    load(encoder, path, bad=second)
    assert len(encoder.calls) == 51 and second == first


def changes():
    def other_content(path, encoder):
        path.write_text(path.read_text().replace("hello 7", "hello 8"))
        return encoder

    def other_template(path, encoder):
        return ConversationEncoder(encoder.tokenizer, replace(encoder.config, input_template="Q: {} A:"))

    def other_length(path, encoder):
        return ConversationEncoder(encoder.tokenizer, replace(encoder.config, max_len=14))

    def other_tokenizer(path, encoder):
        tokenizer = pickle.loads(pickle.dumps(encoder.tokenizer))
        tokenizer.add_tokens(["hello"])
        return ConversationEncoder(tokenizer, encoder.config)

    return [other_content, other_template, other_length, other_tokenizer]


@pytest.mark.notices(
    "encoded rows are found again under another data.max_len",
    "data/cache.py",
    '"cache_enable", "cache_max_gb",',
    '"cache_enable", "cache_max_gb", "max_len",',
)
@pytest.mark.notices(
    "encoded rows are found again with another chat template",
    "data/cache.py",
    'f"{file.name} {file_digest(file)}"',
    'f"{file.name}"',
)
@pytest.mark.notices(
    "encoded rows are found again when their file has changed",
    "data/sources.py",
    "[*map(file_digest, self.files),",
    "[*map(str, self.files),",
)
@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_whatever_changes_an_item_is_encoded_again(tokenizer, tmp_path, cache, change):
    path = write(tmp_path / "a.jsonl", chosen="what is the capital of France?")
    encoder = ConversationEncoder(tokenizer, SFT)
    before = list(load(encoder, path))
    changed = change(path, encoder)
    after = list(load(changed, path))
    assert after == list(load(changed, path, replace(SFT, cache_enable=False))) != before
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"dataset": "x"},
        {"dataset_probs": [1.0]},
        {"pack_to_max_len": True},
        {"dataloader_num_workers": 1},
        {"max_skipped_share": 0.5},
    ],
)
def test_flags_for_the_use_of_rows_do_not_change_their_cache_entry(tokenizer, tmp_path, cache, changed):
    path = write(tmp_path / "a.jsonl")
    for config in (SFT, replace(SFT, **changed)):
        load(ConversationEncoder(tokenizer, config), path, config)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.notices(
    "encoded rows are found again when another share of bad rows was allowed to go",
    "data/load.py",
    "fingerprint(self.encoder, self.data.on_bad_row, taken)",
    "fingerprint(self.encoder, taken)",
)
def test_rows_that_one_run_skipped_end_a_later_run_that_stops_at_bad_rows(tokenizer, tmp_path):
    """What is in the cache was made by another policy."""
    encoder, path = ConversationEncoder(tokenizer, SFT), write(tmp_path / "a.jsonl")
    assert len(load(encoder, path)) == 50
    with pytest.raises(DataError, match=r"a\.jsonl:51: not JSON"):
        load(encoder, path, replace(SFT, on_bad_row="stop"))


@pytest.mark.notices(
    "both answers of a stored pair have the numbers of the first",
    "data/store.py",
    "own = {name: column[place]",
    "own = {name: column[0]",
)
def test_the_sequences_of_a_group_keep_the_numbers_of_their_own():
    pair = [Example([1, number], [0, 1], "a:1", numbers={"number": number / 2}) for number in (5, 7)]
    kept = store.in_memory([Group(tuple(pair)), Group(tuple(reversed(pair)))])
    assert [[each.numbers["number"] for each in group.examples] for group in kept] == [[2.5, 3.5], [3.5, 2.5]]


def test_variables_of_the_chat_template_are_part_of_the_fingerprint(tokenizer, tmp_path, cache):
    tokenizer.chat_template = "{{ x }}{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    path, config = write(tmp_path / "a.jsonl", tools=[{"name": "add"}]), replace(SFT, apply_chat_template=True)
    found = []
    for changed in ({}, {"chat_template_kwargs": ["x:1"]}, {"chat_template_kwargs": ["x:2"]}, {"tools_key": "tools"}):
        encoder = ConversationEncoder(tokenizer, replace(config, **changed))
        found.append([example.ids for example in load(encoder, path, config)])
        assert found[-1] not in found[:-1]
    assert len(list(cache.iterdir())) == 4


def test_another_number_of_rows_is_another_cache_entry(tokenizer, tmp_path):
    path, encoder = write(tmp_path / "a.jsonl"), ConversationEncoder(tokenizer, SFT)
    assert [len(load(encoder, path, max_samples=number)) for number in (None, 10, 20)] == [50, 10, 20]


@pytest.mark.parametrize("file", [store.ROWS, store.COUNTS, store.SUMMARY])
@pytest.mark.parametrize("left", [0, 0.5, None])
def test_a_broken_cache_entry_is_encoded_again(tokenizer, tmp_path, cache, file, left):
    encoder, path = Counting(ConversationEncoder(tokenizer, SFT)), write(tmp_path / "a.jsonl")
    whole = list(load(encoder, path))
    (folder,) = cache.iterdir()
    if left is None:
        (folder / file).unlink()
    else:
        os.truncate(folder / file, int(left * (folder / file).stat().st_size))
    assert list(load(encoder, path)) == whole and len(encoder.calls) == 100
    load(encoder, path)
    assert len(encoder.calls) == 100


def test_a_run_that_ends_while_encoding_leaves_nothing(tokenizer, tmp_path, cache):
    path, config = write(tmp_path / "a.jsonl"), replace(SFT, on_bad_row="stop")
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.jsonl:51: not JSON"):
            load(ConversationEncoder(tokenizer, config), path, config)
        assert list(cache.iterdir()) == []


def test_leftovers_of_a_killed_run_are_removed_once_they_are_old(tokenizer, tmp_path, cache):
    path, old, new = write(tmp_path / "a.jsonl"), cache / ".abc.new.1", cache / ".abc.new.2"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / store.ROWS).touch()
    for each in (old / store.ROWS, old):
        os.utime(each, (1, 1))
    load(ConversationEncoder(tokenizer, SFT), path)
    assert not old.exists() and new.exists()


@pytest.mark.notices(
    "the share of bad rows is of the good ones",
    "data/encode.py",
    "bad.rows += 1",
    "bad.rows += not isinstance(result, RowError)",
)
def test_no_usable_row_is_an_error_that_says_why(tokenizer, tmp_path, cache):
    path, encoder = write(tmp_path / "a.jsonl", count=2, chosen=""), ConversationEncoder(tokenizer, SFT)
    with pytest.raises(
        UserError, match=r"data\.dataset: no usable row in .*a\.jsonl'\. 3 of 3 rows skipped: 2 x column"
    ):
        load(encoder, path)
    path.write_text("")
    with pytest.raises(UserError, match=r"no usable row in .*a\.jsonl'\.$"):
        load(encoder, path)
    assert not cache.exists()


def spoilt(path, good, bad):
    """A file of so many usable rows, and so many without an answer."""
    rows = [ROW | {"prompt": f"hello {n}", "chosen": "user" if n >= bad else ""} for n in range(good + bad)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("good", "bad", "share", "is_refused"),
    [(1, 59, 0.01, True), (59, 1, 0.01, False), (1, 1, 0.01, False), (1, 1, 0.0, True), (198, 2, 0.01, False),
     (197, 3, 0.01, True), (1, 2, 0.6, True), (71, 29, 0.29, False), (1, 2, 1.0, False)],
)  # fmt: skip
def test_more_bad_rows_than_allowed_end_the_run(tokenizer, tmp_path, good, bad, share, is_refused):
    config, path = replace(SFT, max_skipped_share=share), spoilt(tmp_path / "a.jsonl", good, bad)
    encoder = ConversationEncoder(tokenizer, config)
    for _ in range(2):  # the second time the rows are in the cache
        if not is_refused:
            assert len(load(encoder, path, config)) == good
            continue
        with pytest.raises(DataError) as caught:
            load(encoder, path, config)
        wanted = (
            f"{bad} of {good + bad} rows of data.dataset={path} cannot be used, and data.max_skipped_share={share:g}"
        )
        assert str(caught.value).startswith(wanted) and f"{bad} x column 'chosen' is empty (first {path}:1)" in str(
            caught.value
        )


def test_bad_rows_are_counted_for_each_source_alone(tokenizer, tmp_path):
    sound, broken = spoilt(tmp_path / "a.jsonl", 500, 0), spoilt(tmp_path / "b.jsonl", 8, 2)
    with pytest.raises(DataError, match=rf"2 of 10 rows of eval\.dataset={broken} cannot be used.*allows 1:"):
        load(ConversationEncoder(tokenizer, SFT), f"{sound},{broken}", flags=EVAL)


def test_the_share_that_the_message_names_is_enough(tokenizer, tmp_path):
    path = spoilt(tmp_path / "a.jsonl", 20, 7)
    with pytest.raises(DataError) as caught:
        load(ConversationEncoder(tokenizer, SFT), path)
    config = replace(SFT, max_skipped_share=float(str(caught.value).rpartition("=")[2]))
    assert len(load(ConversationEncoder(tokenizer, config), path, config)) == 20


def test_rows_that_are_too_long_are_counted_apart_from_bad_ones(tokenizer, tmp_path):
    path, bad = write(tmp_path / "a.jsonl", count=10, prompt="hello " * 50), BadRows("skip")
    path.write_text(path.read_text() + json.dumps(ROW) + "\n")
    assert len(load(ConversationEncoder(tokenizer, replace(SFT, max_len=30)), path, bad=bad)) == 1
    assert bad.summary().startswith(
        f"1 of 12 rows skipped: 1 x not JSON: Expecting value (first {path}:11); 10 of 12 rows left out"
    )
    with pytest.raises(DataError, match="leaves no room"):
        load(
            ConversationEncoder(tokenizer, replace(SFT, max_len=30)),
            path,
            bad=BadRows("stop"),
            config=replace(SFT, on_bad_row="stop"),
        )


def test_a_cache_entry_that_another_node_does_not_see_is_an_error(tokenizer, tmp_path, cache):
    pickled = pickle.dumps(load(ConversationEncoder(tokenizer, SFT), write(tmp_path / "a.jsonl")))
    cache.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="Set XDG_CACHE_HOME to a folder that all nodes see"):
        pickle.loads(pickled)


def test_token_counts_are_known_without_reading_the_items(tokenizer, tmp_path):
    one, other = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", count=7, chosen="what is the capital?")
    encoder = ConversationEncoder(tokenizer, SFT)
    for spec, settings in ((f"{one}", {}), (f"{one},{other}", {}), (f"{one},{other}", {"probs": [0.5, 0.5]})):
        items = load(encoder, spec, **settings)
        assert token_counts(items).tolist() == [len(item) for item in items] == token_counts(list(items)).tolist()


def test_the_contents_digest_depends_on_the_contents_of_the_files(tmp_path, tokenizer):
    def contents_digest(path, cache=True):
        loader = Loader(ConversationEncoder(tokenizer, SFT), replace(SFT, cache_enable=cache), 0, BadRows("skip"))
        loader.load(Sources(str(path), "train"))
        return loader.contents_digest

    path = write(tmp_path / "a.jsonl")
    first = contents_digest(path)
    assert contents_digest(path, cache=False) == first
    assert contents_digest(path.rename(tmp_path / "b.jsonl")) == first
    (tmp_path / "b.jsonl").write_text((tmp_path / "b.jsonl").read_text().replace("a", "b", 1))
    assert contents_digest(tmp_path / "b.jsonl") != first


def test_max_samples_counts_rows_also_where_a_row_makes_several_items(tokenizer, tmp_path):
    config = DataConfig.of("kto", prompt_key="prompt", chosen_key="chosen", rejected_key="rejected")
    items = load(LabelledEncoder(tokenizer, config), write(tmp_path / "a.jsonl"), config, max_samples=10)
    assert [item.numbers["label"] for item in items] == [1.0, 0.0] * 10


def test_encoding_says_about_how_many_rows_there_are(tokenizer, tmp_path):
    """50 rows and a broken line; a line end in quotes counts; of a list, and of a damaged file, only reading tells."""
    write(tmp_path / "a.jsonl")
    (tmp_path / "b.json").write_text(json.dumps([ROW] * 4))
    (tmp_path / "c.csv").write_text('prompt,chosen\nhello,"there\nuser"\n')
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress((json.dumps(ROW) + "\n").encode() * 3))
    pq.write_table(pa.Table.from_pylist([ROW] * 5), tmp_path / "e.parquet")
    config, found, passed = replace(SFT, cache_enable=False), [], 0

    def shown(rows, total, unit):
        nonlocal passed
        found.append((unit.rpartition("/")[2], total))
        for row in rows:
            passed += 1
            yield row

    def read(source, **limits):
        loader = Loader(ConversationEncoder(tokenizer, config), config, 0, BadRows("skip"), shown)
        return loader.load(Sources(source, "train", **limits))

    for name in ("a.jsonl", "b.json", "c.csv", "d.jsonl.gz", "e.parquet"):
        assert len(read(str(tmp_path / name))) > 0
    assert passed == 51 + 4 + 1 + 3 + 5
    read(str(tmp_path / "e.parquet"), max_samples=2)
    assert [total for _, total in found] == [51, None, 3, 3, 5, 2]
    assert found[0][0] == "a.jsonl"
    (tmp_path / "f.parquet").write_text("no table")
    assert num_rows(tmp_path / "f.parquet") is None
    assert locate("builtin:reverse", "train", DATASET).num_rows() == len(builtin.rows("builtin:reverse", ""))
