"""Mistakes in rows, messages, tokenisation and images."""

from __future__ import annotations

from mutation import Mutation

TRAINED_PROMPTS = ("tests/config/test_trained_prompts.py",)
CONVERSATIONS = ("tests/data/test_text_encoders.py",)

ROWS: list[Mutation] = [
    Mutation(
        "the template that a model was trained with is forgotten",
        "config/prompt_format.py",
        'found["input_template"] = recorded.input_template',
        "pass",
        TRAINED_PROMPTS,
    ),
    Mutation(
        "a template that the user chooses gives way to that of the model",
        "config/prompt_format.py",
        "if not {*CHOICES} & {*chosen}:",
        "if True:",
        TRAINED_PROMPTS,
    ),
    Mutation(
        "other prompts than a model was trained on are not said",
        "preflight/trained_prompts.py",
        "if used is not None and used != trained:",
        "if False:",
        TRAINED_PROMPTS,
    ),
    Mutation(
        "a reward model gets the prompts of generated rows in its template once more",
        "preflight/trained_prompts.py",
        "found is None or run.data.query_key in found",
        "found is None",
        TRAINED_PROMPTS,
    ),
    Mutation(
        "calls of tools that no prompt names are not said",
        "data/messages.py",
        "return (UNNAMED,) if not tools and any(",
        "return (UNNAMED,) if tools and any(",
        CONVERSATIONS,
    ),
]
