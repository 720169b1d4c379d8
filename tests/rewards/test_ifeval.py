"""The rule `ifeval`: each kind of instruction, followed and not, and the loose reading."""

from __future__ import annotations

import json
import random
import re

import pytest

from rlhf_suite.config.declarations.reward import RewardConfig, RuleConfig
from rlhf_suite.rewards.base import LabelError, Sample, Scored
from rlhf_suite.rewards.ifeval import CHECKS, ifeval
from rlhf_suite.rewards.reward_process import IsolatedScorer

# For each kind: the arguments, a text that follows it, and one that does not.
CASES = {
    "keywords:existence": ({"keywords": ["sun", "moon"]}, "The Sun and the MOON.", "The sun."),
    "keywords:frequency": ({"keyword": "ab ", "frequency": 2, "relation": "at least"}, "ab, Ab", "ab"),
    "keywords:forbidden_words": ({"forbidden_words": ["he"]}, "she", "so He"),
    "keywords:letter_frequency": ({"letter": "A", "let_frequency": 3, "let_relation": "less than"}, "a A b", "aaA"),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "*** a\n***\nb", "a *** *** b"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "less than"}, "it's", "one two three"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Well"}, "a\n\n'well, b", "a\n\nso well",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[a] [b]", "[a]"),
    "detectable_content:postscript": ({"postscript_marker": "P.P.S"}, "x\n P.P. S done", "x P.S. y"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n** b"),
    "detectable_format:constrained_response": ({}, " My answer is no. ", "My answer is No."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* *b*", "*a* * *"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "PART ", "num_sections": 2}, "PART 1 a PART 2 b", "PART 1 a part 2",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{'a': 1}"),
    "detectable_format:title": ({}, "<<a>>", "<< >>"),
    "combination:two_responses": ({}, "a\n******\nb", "a ****** a"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say it."}, " say it. It", "It. Say it."),
    "startend:end_checker": ({"end_phrase": "The end."}, 'so "the END."', "The end. Or not"),
    "startend:quotation": ({}, ' "a" ', '"a'),
    "punctuation:no_comma": ({}, "a; b", "a, b"),
}  # fmt: skip
# By langdetect and nltk, which the extra `ifeval` has.
LANGUAGE = {
    "language:response_language": ({"language": "de"}, "Das ist ein Satz in deutscher Sprache.", "This is English, no doubt about it."),  # noqa: E501
    "change_case:english_capital": ({}, "THIS IS WRITTEN IN LARGE LETTERS.", "This is written in small letters."),
    "change_case:english_lowercase": ({}, "this is written in small letters.", "This is written in large letters."),
}  # fmt: skip
SENTENCES = {
    "length_constraints:number_sentences": ({"num_sentences": 2, "relation": "at least"}, "I am Dr. No. You are not.", "It costs $3.50, Mr. Day."),  # noqa: E501
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"}, "AB cd EF.", "AB cd",
    ),
}  # fmt: skip


def score(kinds, arguments, response):
    label = json.dumps({"instruction_id_list": kinds, "kwargs": arguments})
    return ifeval(Sample("", "", response, label, ""), RuleConfig())


def test_every_kind_is_tested():
    assert {*CHECKS} == {*CASES, *LANGUAGE, *SENTENCES} and len(CHECKS) == 25


@pytest.mark.parametrize("kind", CASES)
def test_a_text_follows_an_instruction_or_does_not(kind):
    arguments, right, wrong = CASES[kind]
    every = dict.fromkeys(["num_words", "language", "keyword"]) | arguments  # rows have all names, most of them null
    assert score([kind], [every], right).score == 1 and score([kind], [every], wrong).score == 0
    assert score([kind], [every], " \n").score == 0


@pytest.mark.parametrize("kind", LANGUAGE)
def test_a_language_is_told(kind):
    pytest.importorskip("langdetect", reason="pip install 'rlhf_suite[ifeval]'")
    arguments, right, wrong = LANGUAGE[kind]
    assert score([kind], [arguments], right).score == 1 and score([kind], [arguments], wrong).score == 0


@pytest.mark.parametrize("kind", SENTENCES)
def test_sentences_and_words_are_told(kind):
    nltk = pytest.importorskip("nltk", reason="pip install 'rlhf_suite[ifeval]'")
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        pytest.skip("python -m nltk.downloader punkt_tab")
    arguments, right, wrong = SENTENCES[kind]
    assert score([kind], [arguments], right).score == 1 and score([kind], [arguments], wrong).score == 0


def test_several_instructions_are_counted_strictly_and_loosely():
    """Without the first line and the asterisks the answer follows the third instruction too."""
    kinds = ["punctuation:no_comma", "detectable_format:title", "startend:quotation"]
    scored = score(kinds, [{}, {}, {}], 'Sure, here it is:\n*"no comma"*')
    assert (scored.reward, scored.score) == (0, 0)
    counts = {"instructions": 3, "followed": 0, "followed_loose": 2, "loose": 0}
    assert scored.extra == counts
    both = score(kinds[::2], [{}, {}], 'Sure, here it is:\n*"no comma"*')
    assert (both.score, both.extra["loose"]) == (0, 1)


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("yes", "is not JSON"),
        ('{"instruction_id_list": ["a:b"], "kwargs": [{}]}', "there is no kind of instruction 'a:b'"),
        ('{"instruction_id_list": [], "kwargs": []}', "0 instructions"),
        ('{"instruction_id_list": ["detectable_format:title"], "kwargs": []}', "1 instructions and 0 sets"),
        ('{"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": null}]}', "argument 'keywords'"),
        (
            '{"instruction_id_list": ["keywords:frequency"], '
            '"kwargs": [{"keyword": "a", "frequency": 3, "relation": "or"}]}',
            "the relation 'or' is neither",
        ),
        ('{"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["(a"]}]}', "cannot use its arg"),
        ('{"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": 5}]}', "cannot use its arguments"),
        ('{"instruction_id_list": ["keywords:frequency"], "kwargs": [{"keyword": 5}]}', "cannot use its arguments"),
    ],
)  # fmt: skip
def test_a_label_that_makes_no_sense_is_no_wrong_answer(label, reason):
    with pytest.raises(LabelError, match=reason):
        ifeval(Sample("", "", "x", label, ""), RuleConfig())


@pytest.mark.notices(
    "a response of brackets ends a run with the rule ifeval",
    "rewards/ifeval.py",
    "    except (ValueError, RecursionError):\n        return False",
    "    except ValueError:\n        return False",
)
def test_json_that_is_nested_deeply_is_not_json():
    assert score(["detectable_format:json_format"], [{}], "[" * 5000).score == 0


def test_a_response_at_which_a_check_hangs_is_wrong(tmp_path):
    label = json.dumps({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["(a|a)*b"]}]})
    scorer = IsolatedScorer(RewardConfig.of("ppo", rule="ifeval", timeout_s=30.0), tmp_path / "log")
    try:
        (outcome,) = scorer.score([Sample("", "", "a" * 50, label, "")])
    finally:
        scorer.close()
    assert isinstance(outcome, Scored) and outcome.score == 0 and outcome.extra["timed_out"] == 1


@pytest.mark.parametrize(
    ("marker", "text", "follows"),
    [
        ("P.S.", "a\n\n\n p. s. b", True),
        ("Note:", "a\n\n note: b\nc", True),
        ("Note:", "a\n\n note b\nc", False),
    ],
)
def test_a_postscript_is_found_after_empty_lines(marker, text, follows):
    assert score(["detectable_content:postscript"], [{"postscript_marker": marker}], text).score == follows


def published_bullets(text: str) -> int:
    """Return the number of bullets as IFEval counts them."""
    return len(re.findall(r"^\s*\*[^\*].*$", text, re.M)) + len(re.findall(r"^\s*-.*$", text, re.M))


def test_bullets_are_as_many_as_the_published_patterns_find():
    draw = random.Random(3)
    for _ in range(3000):
        text = "".join(draw.choices("*-a \n\t\r\v", k=draw.randrange(20)))
        arguments = {"num_bullets": published_bullets(text)}
        assert CHECKS["detectable_format:number_bullet_lists"](text, arguments), repr(text)
