"""Rewards by rules: 1 for a right response, 0 for a wrong one.

A rule gets one row and returns its reward, a number or a dict of named parts, or raises `LabelError` when the row's
label makes no sense (a wrong label is not a wrong response). It reads what the model wrote: `row.response` is the last
turn, and `row.turns` has all turns where a tool or an environment wrote between them. A rule that imports much has a
module of its own, which is loaded for that rule only.
"""

from __future__ import annotations

import re

from rlhf_suite.config.declarations.reward import RuleConfig
from rlhf_suite.registry import reward_rule
from rlhf_suite.rewards.base import Choice, LabelError, Outcome, RewardFailure, Sample, Scored, ScoringFunction
from rlhf_suite.rewards.reply import row_outcome

WITHOUT_SPACES = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # Chinese, Japanese, Korean
STRETCH = 24  # characters: longer than what prose says again by chance
FINAL = "#### "  # before the number with which a solution of GSM8K ends
FINAL_NUMBER = re.compile(rf"{FINAL}(-?[\d.,]+)", re.ASCII)
NUMBER = re.compile(r"-?[$\d.,]{2,}|-?\d+", re.ASCII)
WORD = re.compile(rf"[{WITHOUT_SPACES}]|[^\W{WITHOUT_SPACES}]+|[^\w\s]")


@reward_rule(needs=("label",))
def exact_match(row: Sample, config: RuleConfig) -> float:
    """The response equals the label, apart from white space at both ends."""
    return float(row.response.strip() == row.label.strip())


@reward_rule(name="format", needs=("time_limit",), reads=("format_pattern",))
def match_format(row: Sample, config: RuleConfig) -> float:
    """The whole response matches reward.rules.format_pattern, apart from white space around it.

    A dot in the pattern matches the end of a line too.
    """
    return float(re.compile(config.format_pattern, re.DOTALL).fullmatch(row.response.strip()) is not None)


@reward_rule(reads=("length_limit",))
def length(row: Sample, config: RuleConfig) -> float:
    """1 up to reward.rules.length_limit characters, then falling by the share beyond it, to 0 at twice the limit."""
    return min(1.0, max(0.0, 2.0 - len(row.response) / config.length_limit))


@reward_rule(reads=("repetition_ngram", "repetition_tolerated"))
def repetition(row: Sample, config: RuleConfig) -> float:
    """0 to -1: minus the share of word n-grams that the model wrote before, beyond reward.rules.repetition_tolerated.

    n is reward.rules.repetition_ngram. All turns of the model count. In scripts without spaces a character is a word.
    Stretches of 24 characters that stand again count too, whatever numbers are in them, if letters are half of them.
    """
    text = " ".join(row.turns or [row.response])
    words = WORD.findall(text)
    n, tolerated = config.repetition_ngram, config.repetition_tolerated
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    share = 1 - len(set(grams)) / len(grams) if grams else 0.0
    share = max(share, measure_repeats(text))
    return -max(0.0, share - tolerated) / (1 - tolerated)


def measure_repeats(text: str) -> float:
    """Return the share of stretches of characters that stand before, with every number as the same one."""
    plain = re.sub(r"\d+", "0", " ".join(re.sub("[\u200b-\u200f]", "", text).lower().split()))
    count, letters = len(plain) - STRETCH + 1, 0
    before, repeated = set[str](), 0
    for start in range(max(count, 0)):
        if start == 0:
            letters = sum(map(str.isalpha, plain[:STRETCH]))
        else:
            letters += plain[start + STRETCH - 1].isalpha() - plain[start - 1].isalpha()
        stretch = plain[start : start + STRETCH]
        repeated += stretch in before and letters >= STRETCH // 2
        before.add(stretch)
    return repeated / count if count > 0 else 0.0


@reward_rule()
def answer_tags(row: Sample, config: RuleConfig) -> float:
    """A penalty for the form of an answer that should end with <answer>...\\boxed{...}...</answer>.

    -3 without the tags, -2 without a box between them, -1 if a tag stands twice, -0.5 if text follows, else 0.
    """
    before, opened, rest = row.response.rpartition("<answer>")
    inside, closed, after = rest.partition("</answer>")
    if not (opened and closed):
        return -3.0
    if "\\boxed{" not in inside:
        return -2.0
    if "<answer>" in before or "</answer>" in before + after:
        return -1.0
    return -0.5 if after.strip() else 0.0


@reward_rule(needs=("label",))
def gsm8k(row: Sample, config: RuleConfig) -> Scored:
    """The number after the first "#### " of the response is that of the label; `flexible` is 1 if its last number is.

    The label is a number, or a solution that ends with "#### " and the number. Numbers are compared as texts, without
    commas, dollar signs and a full stop at the end: 42.0 is not 42. So does lm-evaluation-harness in its task gsm8k.
    """
    wanted = bare(row.label.rpartition(FINAL)[2])
    if not NUMBER.fullmatch(wanted):
        raise LabelError(f"the label {row.label[-80:]!r} does not end with a number; give 42 or a text with #### 42")
    strict, numbers = FINAL_NUMBER.search(row.response), NUMBER.findall(row.response)
    is_strict = strict is not None and bare(strict[1]) == wanted
    is_flexible = bool(numbers) and bare(numbers[-1]) == wanted
    return Scored(float(is_strict), float(is_strict), {"flexible": float(is_flexible)})


def bare(number: str) -> str:
    """Return a number as it is compared: without commas, dollar signs, spaces around it, and one full stop at its
    end."""
    return number.replace(",", "").replace("$", "").strip().removesuffix(".")


def make_scorer(name: str, config: RuleConfig | None = None, choice: Choice | None = None) -> ScoringFunction:
    """Return the rule `name`, of the suite or of a user's file, as a function of many rows."""
    rule, settings, chosen = reward_rule.load(name), config or RuleConfig(), choice or Choice()

    def outcome(row: Sample) -> Outcome:
        try:
            result = rule(row, settings)
        except LabelError as error:
            return RewardFailure(str(error), "error")
        if isinstance(result, Scored):
            return row_outcome(name, result.reward, [result.score], result.extra, chosen)
        return row_outcome(name, result, [], {}, chosen)

    return lambda rows: [outcome(row) for row in rows]
