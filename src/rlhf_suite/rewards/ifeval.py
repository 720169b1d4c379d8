"""Rule `ifeval`: the 25 kinds of instructions of IFEval (Zhou et al. 2023, arXiv:2311.07911), checked as published.

The label is JSON: {"instruction_id_list": [...], "kwargs": [{...}, ...]}, as rows of google/IFEval have them; the
arguments of an instruction that are null or empty count as missing. Loose checks (section 2.2 there) also look at the
response without its first line, its last line, both, and without asterisks; it is enough that one of them passes.

Kinds that need a language are told by langdetect, and sentences and words by nltk with its data `punkt_tab`: the extra
`ifeval` of the suite has both packages, which are loaded only where a row needs them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_suite.config.declarations.reward import RuleConfig
from rlhf_suite.errors import UserError
from rlhf_suite.registry import reward_rule
from rlhf_suite.rewards.base import LabelError, Sample, Scored

Arguments = Mapping[str, Any]
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
FENCES = ("```json", "```Json", "```JSON", "```")
PUNCTUATION = ".,?!'\""


@reward_rule(needs=("label", "time_limit"))
def ifeval(row: Sample, config: RuleConfig) -> Scored:
    """The response follows all instructions of its label, as IFEval checks them (docs/benchmarks_of_models.md).

    `loose` is 1 if it does so by the loose checks; `instructions`, `followed` and `followed_loose` count instructions.
    """
    kinds, arguments = read_label(row.label)
    checks = [(CHECKS[kind], own) for kind, own in zip(kinds, arguments, strict=True)]
    variants = [*loose_variants(row.response)]
    strict = [follows(check, row.response, own) for check, own in checks]
    loose = [any(follows(check, text, own) for text in variants) for check, own in checks]
    counts = {"instructions": len(kinds), "followed": sum(strict), "followed_loose": sum(loose)}
    extra = {"loose": float(all(loose)), **{name: float(count) for name, count in counts.items()}}
    return Scored(float(all(strict)), float(all(strict)), extra)


def read_label(label: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the kinds of the instructions in a label, and their arguments without those that are missing."""
    try:
        content = json.loads(label)
        kinds, given = content["instruction_id_list"], content["kwargs"]
        arguments = [{name: value for name, value in own.items() if value} for own in given]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LabelError(f"the label is not JSON with instruction_id_list and kwargs: {error}") from None
    if not kinds or len(kinds) != len(arguments):
        raise LabelError(f"the label has {len(kinds)} instructions and {len(arguments)} sets of arguments")
    if unknown := [kind for kind in kinds if kind not in CHECKS]:
        raise LabelError(f"there is no kind of instruction {unknown[0]!r}; the kinds are {', '.join(CHECKS)}")
    return kinds, arguments


def follows(check: Callable[[str, Arguments], bool], text: str, arguments: Arguments) -> bool:
    """Return whether a text follows an instruction; an empty one follows none.

    Raises:
        LabelError: the arguments are not those of the instruction.
    """
    try:
        return bool(text.strip()) and check(text, arguments)
    except KeyError as error:
        raise LabelError(f"the instruction {check.__name__} lacks its argument {error}") from None
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise LabelError(f"the instruction {check.__name__} cannot use its arguments: {error}") from None


def loose_variants(response: str) -> Iterator[str]:
    """Yield the texts of which one has to pass a loose check."""
    lines = response.split("\n")
    for part in (response, "\n".join(lines[1:]).strip(), "\n".join(lines[:-1]).strip(), "\n".join(lines[1:-1]).strip()):
        yield part
        yield part.replace("*", "")


def is_as_many(count: int, wanted: float, relation: str) -> bool:
    """Return whether a count is "less than" a number, or "at least" as many."""
    if relation not in ("less than", "at least"):
        raise LabelError(f"the relation {relation!r} is neither 'less than' nor 'at least'")
    return count < wanted if relation == "less than" else count >= wanted


def has_keywords(text: str, own: Arguments) -> bool:
    return all(re.search(word, text, re.IGNORECASE) for word in own["keywords"])


def has_keyword_so_often(text: str, own: Arguments) -> bool:
    return is_as_many(len(re.findall(own["keyword"].strip(), text, re.IGNORECASE)), own["frequency"], own["relation"])


def has_no_forbidden_word(text: str, own: Arguments) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in own["forbidden_words"])


def has_letter_so_often(text: str, own: Arguments) -> bool:
    return is_as_many(text.lower().count(own["letter"].strip().lower()), own["let_frequency"], own["let_relation"])


def is_in_language(text: str, own: Arguments) -> bool:
    return detect_language(text) in (own["language"], None)


def has_so_many_sentences(text: str, own: Arguments) -> bool:
    return is_as_many(len(split_sentences(text)), own["num_sentences"], own["relation"])


def has_divided_paragraphs(text: str, own: Arguments) -> bool:
    """Paragraphs are divided by ***; the first and the last may be empty."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    empty = [place for place, part in enumerate(parts) if not part.strip()]
    at_ends = {0, len(parts) - 1}
    return {*empty} <= at_ends and len(parts) - len(empty) == own["num_paragraphs"]


def has_so_many_words(text: str, own: Arguments) -> bool:
    return is_as_many(len(re.findall(r"\w+", text)), own["num_words"], own["relation"])


def has_paragraph_with_first_word(text: str, own: Arguments) -> bool:
    """Paragraphs are divided by empty lines; the first word ends before its punctuation."""
    parts, number = text.split("\n\n"), int(own["nth_paragraph"])
    count = sum(bool(part.strip()) for part in parts)
    if number > count or not parts[number - 1].strip():
        return False
    word = parts[number - 1].split()[0].lstrip("'").lstrip('"')
    first = re.split(f"[{re.escape(PUNCTUATION)}]", word)[0].lower()
    return count == own["num_paragraphs"] and first == own["first_word"].lower()


def has_placeholders(text: str, own: Arguments) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= own["num_placeholders"]


def has_postscript(text: str, own: Arguments) -> bool:
    marker = own["postscript_marker"].strip()
    return re.search(POSTSCRIPTS.get(marker, marker.lower()), text.lower(), re.MULTILINE) is not None


def has_bullets(text: str, own: Arguments) -> bool:
    # As published, but without empty lines before a bullet, over which \s* would take quadratic time.
    stars = re.findall(r"^[^\S\n]*\*[^\*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == own["num_bullets"]


def has_one_of_the_answers(text: str, own: Arguments) -> bool:
    return any(answer in text.strip() for answer in ANSWERS)


def has_highlights(text: str, own: Arguments) -> bool:
    single = [part for part in re.findall(r"\*[^\n\*]*\*", text) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*[^\n\*]*\*\*", text) if part[2:-2].strip()]
    return len(single) + len(double) >= own["num_highlights"]


def has_sections(text: str, own: Arguments) -> bool:
    pattern = rf"\s?{own['section_spliter'].strip()}\s?\d+\s?"
    return len(re.split(pattern, text)) - 1 >= own["num_sections"]


def is_json(text: str, own: Arguments) -> bool:
    text = text.strip()
    for fence in FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str, own: Arguments) -> bool:
    return any(title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text))


def has_two_responses(text: str, own: Arguments) -> bool:
    """Two different responses are divided by ******; what stands before the first or after the last may be empty."""
    parts = [part.strip() for part in text.split("******")]
    empty = {place for place, part in enumerate(parts) if not part}
    whole = [part for part in parts if part]
    return empty <= {0, len(parts) - 1} and len(whole) == 2 and whole[0] != whole[1]


def repeats_prompt(text: str, own: Arguments) -> bool:
    return text.strip().lower().startswith(own["prompt_to_repeat"].strip().lower())


def ends_with_phrase(text: str, own: Arguments) -> bool:
    return text.strip().strip('"').lower().endswith(own["end_phrase"].strip().lower())


def has_capital_words(text: str, own: Arguments) -> bool:
    words = [word for word in split_words(text) if word.isupper()]
    return is_as_many(len(words), own["capital_frequency"], own["capital_relation"])


def is_english_in_capitals(text: str, own: Arguments) -> bool:
    return text.isupper() and detect_language(text) in ("en", None)


def is_english_in_lowercase(text: str, own: Arguments) -> bool:
    return text.islower() and detect_language(text) in ("en", None)


def has_no_comma(text: str, own: Arguments) -> bool:
    return "," not in text


def is_quoted(text: str, own: Arguments) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Callable[[str, Arguments], bool]] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": has_keyword_so_often,
    "keywords:forbidden_words": has_no_forbidden_word,
    "keywords:letter_frequency": has_letter_so_often,
    "language:response_language": is_in_language,
    "length_constraints:number_sentences": has_so_many_sentences,
    "length_constraints:number_paragraphs": has_divided_paragraphs,
    "length_constraints:number_words": has_so_many_words,
    "length_constraints:nth_paragraph_first_word": has_paragraph_with_first_word,
    "detectable_content:number_placeholders": has_placeholders,
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": has_bullets,
    "detectable_format:constrained_response": has_one_of_the_answers,
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:multiple_sections": has_sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "combination:two_responses": has_two_responses,
    "combination:repeat_prompt": repeats_prompt,
    "startend:end_checker": ends_with_phrase,
    "startend:quotation": is_quoted,
    "change_case:capital_word_frequency": has_capital_words,
    "change_case:english_capital": is_english_in_capitals,
    "change_case:english_lowercase": is_english_in_lowercase,
    "punctuation:no_comma": has_no_comma,
}
NEEDED = "eval.benchmark=ifeval, or a rule ifeval, needs {}: pip install 'rlhf_suite[ifeval]'"


def detect_language(text: str) -> str | None:
    """Return the language of a text (ISO 639-1), the same each time; None for a text without letters."""
    try:
        import langdetect
    except ModuleNotFoundError:
        raise UserError(NEEDED.format("langdetect")) from None
    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return None


def split_sentences(text: str) -> Sequence[str]:
    """Return the sentences of an English text, by nltk's Punkt."""
    sentences: Sequence[str] = nltk_with_data().sent_tokenize(text)
    return sentences


def split_words(text: str) -> Sequence[str]:
    """Return the words and signs of an English text."""
    words: Sequence[str] = nltk_with_data().word_tokenize(text)
    return words


def nltk_with_data() -> Any:
    """Return nltk, where its data for sentences are there."""
    try:
        import nltk
    except ModuleNotFoundError:
        raise UserError(NEEDED.format("nltk")) from None
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        problem = "the sentences and words of ifeval need the data punkt_tab of nltk"
        raise UserError(f"{problem}: python -m nltk.downloader punkt_tab, or set NLTK_DATA to where it is") from None
    return nltk
