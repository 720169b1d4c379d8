"""Small tasks that need no download: `builtin:<task>`, made by pure Python from a fixed seed.

Each text task has three sets over questions that are all different:

    builtin:<task>         2048 training rows (addition: 6144, since carries take more examples)
    builtin:<task>_noisy   the same questions; 60 % of the answers have one wrong digit. A model tuned on it knows the
                           skill but uses it too seldom: what reinforcement learning can sharpen within a minute
    builtin:<task>_eval    128 rows whose questions are in no other set

Each of these also comes as pairs, `builtin:<task>_pairs` and `builtin:<task>_pairs_eval`: `prompt`, `chosen` (the right
answer), `rejected` (the same with one wrong digit); and as `_labelled`: `input`, `output` (half of them with one wrong
digit), `label` (1 for a right answer, 0 for a wrong one); and as `_steps`: `input` (the digits of such an answer, a ;
after each), `label` (+ or - for each digit).

Each data set is declared by a function that makes a question and its answer of a number below 10,000, another question
for every number.

The rows of `builtin:digits` have an image too, in the column `image`.

A row has `input` (the prompt), `output` (the answer to learn) and `label` (the right answer). `builtin:chat` has
message lists of two turns in `input`, in the roles user and assistant.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from difflib import get_close_matches

from rlhf_suite.errors import UserError
from rlhf_suite.registry import dataset

PREFIX = "builtin:"
NUM_EVAL, NUM_CHATS = 128, 64
NUM_TRAIN, NUM_TRAIN_OTHERWISE = {"addition": 6144}, 2048  # carries take more examples
NOISE = 0.6
_SEED = 0  # fixed: the evaluation rows must be held out whatever train.seed is


@dataset()
def reverse(number: int) -> tuple[str, str]:
    """Four digits, reversed."""
    digits = f"{number:04d}"
    return f"reverse {digits} =", digits[::-1]


@dataset()
def sort(number: int) -> tuple[str, str]:
    """Four digits, sorted."""
    digits = f"{number:04d}"
    return f"sort {digits} =", "".join(sorted(digits))


@dataset()
def addition(number: int) -> tuple[str, str]:
    """A number of three digits plus one of one digit."""
    left, right = divmod(number, 10)
    return f"add {left:03d} {right} =", f"{left + right:04d}"


@dataset()
def digits(number: int) -> tuple[str, str, bytes]:
    """Two coloured digits in an image: which is the red one, and which the blue one?"""
    left, right, swapped = number % 10, number // 10 % 10, bool(number // 100 % 2)
    red, blue = (right, left) if swapped else (left, right)
    shift = number // 200 % 5, number // 1000  # pixels across, 0 to 4, and down, 0 to 9
    return "red blue =", f"{red}{blue}", picture((left, right), swapped, shift)


# The lit segments of each digit: top, upper left, upper right, middle, lower left, lower right, bottom.
SEGMENTS = (
    "1110111",
    "0010010",
    "1011101",
    "1011011",
    "0111010",
    "1101011",
    "1101111",
    "1010010",
    "1111111",
    "1111011",
)
# Each as a box (left, top, right, bottom) in pixels.
BOXES = (
    (0, 0, 18, 5),
    (0, 0, 5, 20),
    (13, 0, 18, 20),
    (0, 17, 18, 22),
    (0, 20, 5, 40),
    (13, 20, 18, 40),
    (0, 35, 18, 40),
)
RED, BLUE, WHITE = (220, 30, 30), (30, 60, 220), (255, 255, 255)
SIDE = 56  # pixels


def picture(shown: tuple[int, int], swapped: bool, shift: tuple[int, int]) -> bytes:
    """Return a PNG file with two digits, the left one red and the right one blue, or `swapped`, and moved by a few
    pixels."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), WHITE)
    brush = ImageDraw.Draw(image)
    colours = (BLUE, RED) if swapped else (RED, BLUE)
    for digit, colour, left in zip(shown, colours, (4, 30), strict=True):
        x, y = left + shift[0], 4 + shift[1]
        for lit, (x0, y0, x1, y1) in zip(SEGMENTS[digit], BOXES, strict=True):
            if lit == "1":  # the last pixels of a rectangle belong to it
                brush.rectangle((x + x0, y + y0, x + x1 - 1, y + y1 - 1), colour)
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def names() -> list[str]:
    """Return the names of all built-in sets, without the prefix."""
    plain = [task + kind for task in dataset.names() for kind in ("", "_noisy", "_eval")]
    return (
        plain + [task + form + kind for task in dataset.names() for form in FORMS for kind in ("", "_eval")] + ["chat"]
    )


def rows(source: str, flag: str) -> list[dict[str, object]]:
    """Return the rows of `builtin:<task>`; `flag` is named when there is no such task."""
    name = source.removeprefix(PREFIX)
    if name not in names():
        near = get_close_matches(name, names(), n=1)
        hint = f"; did you mean {PREFIX}{near[0]}?" if near else "."
        raise UserError(f"{flag}={source}: no such built-in task{hint} Tasks: {', '.join(names())}")
    if name == "chat":
        return _chats()
    task, _, kind = name.partition("_")
    size = NUM_TRAIN.get(task, NUM_TRAIN_OTHERWISE)
    numbers = random.Random(_SEED).sample(range(10_000), size + NUM_EVAL)
    chosen = numbers[size:] if kind.endswith("eval") else numbers[:size]
    make = dataset.load(task)
    made = [make(number) for number in chosen]
    pairs = [(sample[0], sample[1]) for sample in made]
    images: list[dict[str, object]] = [{"image": sample[2]} if len(sample) > 2 else {} for sample in made]
    wrong = set(random.Random(_SEED).sample(range(len(pairs)), round(NOISE * len(pairs)))) if kind == "noisy" else set()
    rng = random.Random(_SEED + 1)
    if form := FORMS.get(f"_{kind.removesuffix('_eval')}"):
        return [form(*pair, rng) | image for pair, image in zip(pairs, images, strict=True)]
    return [
        {"input": question, "output": _spoil(answer, rng) if index in wrong else answer, "label": answer} | image
        for index, ((question, answer), image) in enumerate(zip(pairs, images, strict=True))
    ]


def _spoil(answer: str, rng: random.Random) -> str:
    """Return the answer with one digit replaced by another."""
    place = rng.randrange(len(answer))
    digit = rng.choice([digit for digit in "0123456789" if digit != answer[place]])
    return answer[:place] + digit + answer[place + 1 :]


def _pair(question: str, answer: str, rng: random.Random) -> dict[str, object]:
    return {"prompt": question, "chosen": answer, "rejected": _spoil(answer, rng)}


def _make_row(question: str, answer: str, rng: random.Random) -> dict[str, object]:
    right = rng.random() < 0.5
    return {"input": question, "output": answer if right else _spoil(answer, rng), "label": int(right)}


def _steps(question: str, answer: str, rng: random.Random) -> dict[str, object]:
    given = answer if rng.random() < 0.5 else _spoil(answer, rng)
    labels = ["+" if mine == right else "-" for mine, right in zip(given, answer, strict=True)]
    return {"input": f"{question} {''.join(f'{digit};' for digit in given)}", "label": labels}


# What each question and its answer become, by the ending of the set's name.
FORMS: dict[str, Callable[[str, str, random.Random], dict[str, object]]] = {
    "_pairs": _pair,
    "_labelled": _make_row,
    "_steps": _steps,
}


def _chats() -> list[dict[str, object]]:
    numbers = random.Random(_SEED).sample(range(10_000), NUM_CHATS)
    return [{"input": [*_turn(*reverse(number)), *_turn(*sort(number))]} for number in numbers]


def _turn(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
