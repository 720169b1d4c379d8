"""Built-in tasks: right answers, held-out questions, the stated share of noise, the same rows every time."""

from __future__ import annotations

import pytest

from rlhf_suite.data import builtin
from rlhf_suite.data.images import open_image
from rlhf_suite.data.sources import DATASET, locate
from rlhf_suite.errors import UserError
from rlhf_suite.registry import dataset


def load(name):
    return [row.values for row in locate(name, "train", DATASET).rows()]


def answer(question):
    task, *numbers, _ = question.split()
    assert task != "red", "the answer is in the image; see below"
    if task == "add":
        return f"{int(numbers[0]) + int(numbers[1]):04d}"
    return numbers[0][::-1] if task == "reverse" else "".join(sorted(numbers[0]))


@pytest.mark.parametrize("task", [name for name in dataset.names() if name != "digits"])
def test_answers_are_right_and_evaluation_questions_held_out(task):
    train, held_out = load(f"builtin:{task}"), load(f"builtin:{task}_eval")
    size = 6144 if task == "addition" else 2048
    assert (len(train), len(held_out)) == (size, 128)
    for row in train + held_out:
        assert row["output"] == row["label"] == answer(row["input"])
    assert len({row["input"] for row in train + held_out}) == size + 128


@pytest.mark.parametrize("task", dataset.names())
def test_noisy_answers_have_one_wrong_digit_in_six_of_ten_rows(task):
    train, noisy = load(f"builtin:{task}"), load(f"builtin:{task}_noisy")
    assert [(row["input"], row["label"]) for row in noisy] == [(row["input"], row["label"]) for row in train]
    wrong = [row for row in noisy if row["output"] != row["label"]]
    assert len(wrong) == round(0.6 * len(train))
    for row in wrong:
        assert sum(a != b for a, b in zip(row["output"], row["label"], strict=True)) == 1


def read_digit(pixels, colour) -> str:
    """The digit of this colour: which of its segments are lit, found from its box."""
    places = [(x, y) for x in range(56) for y in range(56) if pixels[x, y] == colour]
    bottom, lefts = max(y for _, y in places), sorted({x for x, _ in places})
    left, top = (lefts[-1] - 17, bottom - 39)
    middles = [(9, 2), (2, 10), (15, 10), (9, 19), (2, 28), (15, 28), (9, 37)]
    lit = "".join(str(int((left + x, top + y) in places)) for x, y in middles)
    return str(builtin.SEGMENTS.index(lit))


@pytest.mark.stack
def test_digits_show_their_answers_and_no_image_is_held_out_twice():
    train, held_out = load("builtin:digits"), load("builtin:digits_eval")
    assert len({row["image"] for row in train + held_out}) == len(train) + len(held_out) == 2048 + 128
    for row in [*train[:100], *held_out]:
        pixels = open_image(row["image"]).load()
        assert row["output"] == row["label"] == read_digit(pixels, builtin.RED) + read_digit(pixels, builtin.BLUE)
    assert {row["label"] for row in load("builtin:digits")} == {f"{number:02d}" for number in range(100)}
    assert all(row["image"] for row in load("builtin:digits_pairs") + load("builtin:digits_noisy"))


def test_a_row_looks_as_documented():
    first = load("builtin:reverse")[0]
    assert set(first) == {"input", "output", "label"}
    assert first["input"].startswith("reverse ") and first["input"].endswith(" =")


@pytest.mark.stack
def test_rows_are_the_same_every_time():
    assert all(load(f"builtin:{name}") == load(f"builtin:{name}") for name in builtin.names())
    assert load("builtin:reverse")[0]["input"] == "reverse 6311 ="


def test_chats_have_two_turns():
    chats = load("builtin:chat")
    assert len(chats) == 64
    for chat in chats:
        assert [message["role"] for message in chat["input"]] == ["user", "assistant"] * 2
        assert all(chat["input"][k + 1]["content"] == answer(chat["input"][k]["content"]) for k in (0, 2))


def test_an_unknown_task_names_the_nearest_and_all():
    with pytest.raises(
        UserError, match=r"data\.dataset=builtin:revers: .*did you mean builtin:reverse\? Tasks: reverse"
    ):
        load("builtin:revers")
    with pytest.raises(UserError, match=r"no such built-in task\. Tasks: reverse, reverse_noisy, reverse_eval, sort"):
        load("builtin:xyzzy")
