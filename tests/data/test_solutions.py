"""A solution to be scored has the same tokens and placeholders as a row of training."""

from __future__ import annotations

import pytest

from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.row import Row
from rlhf_suite.data.steps import SolutionEncoder, StepEncoder, StepFormat

ALGO = AlgoConfig.of("prm", placeholder_token=";", reward_tokens=["+", "-"])
STEPS = ["add 1 2", "so 3", "answer = 3"]
QUESTION = "what is 1 2"


def encoders(tokenizer, step_separator=None, data_separator="\n", max_len=200, **flags):
    """Training's encoder and the one of a model that was trained so."""
    data = DataConfig.of("prm", max_len=max_len, step_separator=data_separator, **flags)
    form = StepFormat.of(data, ALGO)
    assert form is not None
    saved = StepFormat.read(form.to_json())
    assert saved == form
    return StepEncoder(tokenizer, data, ALGO), SolutionEncoder(tokenizer, saved, step_separator)


@pytest.mark.parametrize(
    "flags", [{}, {"input_template": "Q: {} A:"}, {"apply_chat_template": True}], ids=["plain", "template", "chat"]
)
@pytest.mark.parametrize("fixture", ["tokenizer", "bos_tokenizer"])
def test_listed_steps_are_laid_out_as_in_training(request, fixture, flags):
    trained, scored = encoders(request.getfixturevalue(fixture), steps_key="steps", **flags)
    example = trained.encode(Row({"input": QUESTION, "steps": STEPS, "label": ["+", "-", "+"]}, "f", 1))
    found = scored.encode(QUESTION, "\n".join(STEPS))
    assert (found.ids, found.mask, found.truncated) == (example.ids, example.mask, False)
    assert sum(found.mask) == 3


def test_marked_text_is_laid_out_as_in_training(tokenizer):
    trained, scored = encoders(tokenizer)
    text = f"{QUESTION} " + "\n".join(f"{step};" for step in STEPS)
    example = trained.encode(Row({"input": text, "label": ["+", "-", "+"]}, "f", 1))
    found = scored.encode(QUESTION, "\n".join(STEPS))
    assert (found.ids, found.mask) == (example.ids, example.mask)


def test_without_a_separator_every_character_is_a_step(tokenizer):
    trained, scored = encoders(tokenizer, data_separator="")
    example = trained.encode(Row({"input": "reverse 216 = 6;1;2;", "label": ["+"] * 3}, "f", 1))
    for response in ("612", " 61 2"):
        found = scored.encode("reverse 216 =", response)
        assert (found.ids, found.mask) == (example.ids, example.mask)


def test_a_rendered_prompt_is_not_rendered_again(tokenizer):
    _, scored = encoders(tokenizer, steps_key="steps", input_template="Q: {} A:")
    assert scored.encode(f"Q: {QUESTION} A:", "so 3", is_rendered=True).ids == scored.encode(QUESTION, "so 3").ids


def test_blank_steps_are_not_steps(tokenizer):
    _, scored = encoders(tokenizer, steps_key="steps")
    plain = scored.encode(QUESTION, "\n".join(STEPS))
    assert scored.encode(QUESTION, "\n\n" + " \n\n".join(STEPS) + "\n \n").ids == plain.ids
    for nothing in ("", "  \n \n"):
        empty = scored.encode(QUESTION, nothing)
        assert sum(empty.mask) == 0 and not empty.truncated and len(empty) > 0


def test_a_response_cannot_mark_steps_of_its_own(tokenizer):
    _, scored = encoders(tokenizer)
    cheat = scored.encode(QUESTION, "so; 3;")
    assert cheat.ids == scored.encode(QUESTION, "so 3").ids and sum(cheat.mask) == 1


@pytest.mark.notices(
    "a solution that lost its last steps is not called cut",
    "data/steps.py",
    "truncated=sum(mask) < len(places)",
    "truncated=False",
)
def test_a_cut_solution_says_so_exactly_when_a_step_lost_its_placeholder(tokenizer):
    whole = encoders(tokenizer, steps_key="steps")[1].encode(QUESTION, "\n".join(STEPS))
    places = [place for place, is_place in enumerate(whole.mask) if is_place]
    for max_len in range(2, len(whole) + 2):
        found = encoders(tokenizer, steps_key="steps", max_len=max_len)[1].encode(QUESTION, "\n".join(STEPS))
        assert found.ids == whole.ids[:max_len]
        assert sum(found.mask) == sum(place < max_len for place in places)
        assert found.truncated == (max_len <= places[-1])


def test_another_separator_splits_the_response_and_changes_no_layout(tokenizer):
    _, scored = encoders(tokenizer, " | ", steps_key="steps")
    _, plain = encoders(tokenizer, steps_key="steps")
    assert scored.encode(QUESTION, " | ".join(STEPS)).ids == plain.encode(QUESTION, "\n".join(STEPS)).ids


def test_a_model_of_the_whole_vocabulary_has_no_format():
    assert StepFormat.of(DataConfig.of("prm"), AlgoConfig.of("prm", reward_tokens=None)) is None
