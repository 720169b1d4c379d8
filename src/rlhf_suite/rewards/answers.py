"""Answers of mathematics as text: where a response has its answer, one spelling for what is written in many ways, and
numbers in exact form. What is more than that, `mathematics.py` gives to math-verify.
"""

# ruff: noqa: RUF001 - signs that look alike are what this is about

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARACTERS, MAX_DEPTH, MAX_DIGITS = 4000, 24, 4000  # of an answer; of brackets in one another; of a power
MAX_FACTORIAL = 1000
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
VULGAR_VALUES = "12 13 23 14 34 15 25 35 45 16 56 18 38 58 78"
VULGAR = dict(zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", VULGAR_VALUES.split(" "), strict=True))
# What stands for the same, in the order in which it is replaced.
SAME: tuple[tuple[str, str], ...] = (
    *((sign, rf"\\frac{{{parts[0]}}}{{{parts[1]}}}") for sign, parts in VULGAR.items()),
    (r"[\u2000-\u200a\u202f\u00a0\u3000]", " "),
    (r"[\u200b-\u200f\ufeff]", ""),
    ("[−–—‐‑]", "-"),
    ("[×✕]", r"\\times "),
    ("[·⋅∙]", r"\\cdot "),
    ("[÷⁄∕]", "/"),
    ("±", r"\\pm "),
    ("∞", r"\\infty "),
    ("π", r"\\pi "),
    ("θ", r"\\theta "),
    ("≤|⩽|\\\\leqslant|\\\\leq?(?![a-z])", r"\\le "),
    ("≥|⩾|\\\\geqslant|\\\\geq?(?![a-z])", r"\\ge "),
    ("≠", r"\\ne "),
    ("<=", r"\\le "),
    (">=", r"\\ge "),
    (r"\\lt(?![a-z])", "<"),
    (r"\\gt(?![a-z])", ">"),
    ("∪", r"\\cup "),
    ("∩", r"\\cap "),
    ("∈", r"\\in "),
    ("√\\s*\\(([^()]*)\\)", r"\\sqrt{\1}"),
    ("√\\s*([0-9]+|[a-zA-Z])", r"\\sqrt{\1}"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    ("¢", r"\\text{ cents}"),
    ("€|£|\\\\\\$|\\$", ""),
    (r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|limits)(?![a-zA-Z])", ""),
    (r"\\(?:dfrac|tfrac|cfrac)(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:mathrm|mbox|textbf|textit|textrm|mathbf|operatorname|mathit|hbox|textnormal)(?=\s*\{)", r"\\text"),
    (r"\\l(?:brace|cbrace)", r"\\{"),
    (r"\\r(?:brace|cbrace)", r"\\}"),
    (r"\\(?:quad|qquad|enspace|thinspace)(?![a-zA-Z])", " "),
    (r"(?<=\d)(?:(?<!\\)\\[,!;: ]|\{,\}|,\\!|~|\s|,)+(?=\d{3}(?:\D|$))", ","),
    (r"(?<!\\)\\[,!;:> ]|~", " "),
    (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|°|\\degree|\\circ(?![a-z])", r"\\text{ degrees}"),
    (r"\\(?:implies|Rightarrow|therefore)(?![a-z])", " "),
    (r"\\(?:approx|equiv|sim)(?![a-z])", "="),
)
SAME_RE = tuple((re.compile(pattern), new) for pattern, new in SAME)
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
PLAIN = rf"{DIGITS}(?:\.\d*)?|\.\d+"
POWER_OF_TEN = r"\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*\{?\s*([+-]?\d+)\s*\}?|[eE]([+-]?\d+)"
DECIMAL = re.compile(rf"({PLAIN})(?:{POWER_OF_TEN})?")
PART = rf"(\{{\s*-?{DIGITS}\s*\}}|\d)"
FRACTION = re.compile(rf"(?:({DIGITS})\s*(?:\+\s*)?)?\\frac\s*{PART}\s*{PART}")
QUOTIENT = re.compile(rf"(?:({DIGITS})\s+)?({PLAIN})\s*/\s*(-?(?:{PLAIN}))")
PERIODIC = re.compile(rf"({DIGITS})?\.(\d*)\\(?:overline|bar|dot)\s*(?:\{{(\d+)\}}|(\d))")
RAISED = r"(?:\{\s*(\d+)\s*\}|\(\s*(\d+)\s*\)|(\d+))(?!\d|\s*(?:\^|\*\*))"  # not raised itself: 9**9**9 is 9**(9**9)
POWER = re.compile(rf"(\d+|[({{]\s*\d+\s*[)}}])\s*(?:\^|\*\*)\s*{RAISED}")
FACTORIAL = re.compile(r"(\d+|[)}])\s*!")
UNIT = re.compile(r"(?:\\text\s*\{([^{}]*)\}|([a-zA-Z][a-zA-Z. ]{2,}))\s*(?:(?:\^|\*\*)\s*\{?\s*([23])\s*\}?)?$")
NOT_UNITS = re.compile(
    r"\b(?:or|and|any|not|if|unless|except|to|than|but|other|no|either|for|pi|sqrt|log|sin|cos|tan|cot|ln)\b"
)
NAMES = {
    "degree": "degrees", "deg": "degrees", "radian": "radians", "rad": "radians", "centimeter": "cm",
    "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "millimeter": "mm",
    "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "cent": "cents",
    "dollar": "dollars", "second": "s", "minute": "min", "hour": "h", "day": "days", "week": "weeks", "year": "years",
    "gram": "g", "kilogram": "kg", "pound": "lb", "percent": "percent",
}  # fmt: skip
KNOWN = frozenset(NAMES.values())


def find_last_box(text: str) -> str | None:
    """Return what stands in the last \\boxed{...} that is not empty and whose braces close; "" if all are empty, None
    if there is none. It takes one pass, however many are left open.
    """
    boxes = list[tuple[int, int, int]]()  # boxes as the start of the command, and start and end of the content
    opened = list[tuple[int, int, bool]]()
    for token in BOX.finditer(text):
        if token[0].endswith("{") and token[0] != "\\{":
            opened.append((token.start(), token.end(), len(token[0]) > 1))
        elif token[0] == "}" and opened:
            begin, start, is_box = opened.pop()
            if is_box:
                boxes.append((begin, start, token.start()))
    boxes.sort()
    full = [box for box in boxes if text[box[1] : box[2]].strip()]
    if not full:
        return "" if boxes else None
    begin, start, end = full[-1]
    if len(full) > 1 and full[-2][2] < begin:
        between = text[full[-2][2] + 1 : begin].strip(" $\n\\()").lower()
        if between in ("or", "and", ",", ", or", ", and"):  # one answer in two boxes
            return f"{text[full[-2][1] : full[-2][2]]},{text[start:end]}"
    return text[start:end]


STATED = re.compile(r"(?:answer|result|solution|total)\s*(?:is|are|equals|=|:)+(?:\s*:)?\s*", re.IGNORECASE)
DENIED = re.compile(r"(?:is|are|was)\s+(?:\w+\s+){0,2}?not\b|isn't|aren't|\bcannot be\b|\bnot equal\b", re.IGNORECASE)
NUMBERS_ONLY = re.compile(r"[\d\s,.;$-]+")


def find_unboxed(response: str) -> str:
    """Return the part of a response without a box that has its answer, "" if there is none: what follows `####`, or
    "the answer is" in its sentence, else the last line.
    """
    if "####" in response:
        return response.rsplit("####", 1)[1].strip().partition("\n")[0]
    stated = [*STATED.finditer(response)]
    text = response[stated[-1].start() :] if stated else response.rstrip()
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return ""
    goes_on = stated and len(lines) > 1 and not STATED.sub("", lines[0]).strip()  # in the next line
    line = lines[1] if goes_on else lines[0] if stated else lines[-1]
    sentences = [sentence for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", line) if sentence.strip()]
    sentence = sentences[0] if stated else sentences[-1]
    if DENIED.search(sentence):
        return ""
    if stated:
        return STATED.sub("", sentence, count=1).strip().strip("*").rstrip(".!").strip()
    if NUMBERS_ONLY.fullmatch(sentence) and len(sentence.split()) > 2:
        return ""  # a list of guesses
    return sentence


def clean(text: str) -> str:
    """Return an answer in one spelling: no dollar signs, sizes of brackets or spaces of LaTeX, one name for a sign."""
    text = text.strip()
    if text.startswith("\\(") and text.endswith("\\)"):
        text = text[2:-2]
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: f"^{{{match[0].translate(SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match[0].translate(SUBSCRIPTS)}}}", text)
    text = re.sub("[０-９]", lambda match: str(ord(match[0]) - ord("０")), text)
    for pattern, new in SAME_RE:
        text = pattern.sub(new, text)
    text = re.sub(r"^\s*\\text\s*\{[^{}]*(?:\bis|\bare|=|:)\s*\}", "", text)
    return re.sub(r"\s+", " ", text).strip().rstrip(".,;: ").strip()


def is_too_much(text: str) -> bool:
    """Return whether an answer is longer, or nested more deeply, or holds a larger power or factorial than answers do:
    such ones can keep sympy busy for ever."""
    if len(text) > MAX_CHARACTERS:
        return True
    depth = deepest = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return True
    for match in FACTORIAL.finditer(text):
        if not match[1].isdigit() or len(match[1]) > 4 or int(match[1]) > MAX_FACTORIAL:
            return True
    while power_of := POWER.search(text):
        base, power = int(power_of[1].strip("({ )}")), next(digits for digits in power_of.groups()[1:] if digits)
        if base > 1 and (len(power) > 6 or int(power) * len(str(base)) > MAX_DIGITS):
            return True
        text = text[: power_of.start()] + str(base ** int(power) if base > 1 else base) + text[power_of.end() :]
    return False


def number(text: str) -> Fraction | None:
    """Return the value of an answer that is a number (integer, decimal, fraction, mixed number), None if it is none."""
    text = text.strip()
    while len(text) > 2 and text[0] == "{" and text[-1] == "}":
        text = text[1:-1].strip()
    sign = 1
    while text[:1] in ("-", "+"):
        sign, text = (-sign if text[0] == "-" else sign), text[1:].strip()
    if len(text) > MAX_DIGITS:
        return None
    value = decimal(text) if DECIMAL.fullmatch(text) else ratio(text)
    return None if value is None else sign * value


def decimal(text: str) -> Fraction | None:
    """Return the value of digits with a point and a power of ten; None where that has too many digits."""
    match = DECIMAL.fullmatch(text)
    assert match is not None
    power = int(match[2] or match[3] or 0)
    return Fraction(plain(match[1])) * Fraction(10) ** power if abs(power) <= MAX_DIGITS else None


def ratio(text: str) -> Fraction | None:
    """Return the value of a fraction, a mixed number or a decimal with a period."""
    if match := FRACTION.fullmatch(text) or QUOTIENT.fullmatch(text):
        above, below = Fraction(plain(match[2])), Fraction(plain(match[3]))
        return above / below + Fraction(plain(match[1] or "0")) if below else None
    if match := PERIODIC.fullmatch(text):
        whole, first, period = plain(match[1] or "0"), match[2], match[3] or match[4]
        scale = 10 ** len(first)
        return Fraction(int(whole + first), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    return None


def plain(digits: str) -> str:
    return digits.strip("{ }").replace(",", "").removesuffix(".")


def without_unit(text: str) -> tuple[str, str]:
    """Return an answer without the words after it, and their unit in one spelling with its power ("" if unknown)."""
    match = UNIT.search(text)
    before = text[: match.start()].strip() if match else ""
    if not match or not before or not re.search(r"[\d})]$|\\pi$", before) or not re.search(r"\d", before):
        return text, ""
    words = (match[1] if match[1] is not None else match[2]).strip().lower().strip(". ")
    if NOT_UNITS.search(words) or re.search(r"\d", words) or before.endswith(("^", "_", "+", "-", "=", ",", "<", ">")):
        return text, ""
    power = match[3] or {"square": "2", "sq": "2", "cubic": "3"}.get(words.split()[0] if words else "", "")
    last = words.split()[-1] if words else ""
    name = NAMES.get(last.rstrip("s"), NAMES.get(last, last))
    return before, f"{name}{power}" if name in KNOWN else ""
