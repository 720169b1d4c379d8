"""Mistakes in rows, messages, tokenisation and images."""

from __future__ import annotations

from mutation import Mutation

TRAINED_PROMPTS = ("tests/config/test_trained_prompts.py",)
CONVERSATIONS = ("tests/data/test_text_encoders.py",)

FIRST_ROWS = ("tests/config/test_rows_of_files.py",)
EMBEDDINGS = ("tests/models/test_tokens_without_embeddings.py",)

IMAGES = ("tests/data/test_images.py",)

OWN_FILES = ("tests/test_own_files.py",)

MESSAGES = ("tests/data/test_templates.py", "tests/data/test_dialogue.py", "tests/data/test_text_encoders.py")

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
    Mutation(
        "a token without an embedding reaches the model",
        "data/render.py",
        "if rows is not None and ids and max(ids) >= rows:",
        "if rows is not None and ids and max(ids) > rows:",
        EMBEDDINGS,
    ),
    Mutation(
        "a model that lacks the embeddings of common words is loaded",
        "models/load.py",
        "if tokenizer.vocab_size > rows or",
        "if False or",
        EMBEDDINGS,
    ),
    Mutation(
        "a token that was added to a tokenizer stops every run",
        "preflight/inspections/model_files.py",
        "for token, number in self.vocabulary.items() if token not in added",
        "for token, number in self.vocabulary.items()",
        EMBEDDINGS,
    ),
    Mutation(
        "an answer that no flag names is found early in sft alone",
        "preflight/inspections/rows.py",
        "if not isinstance(run, SFTRun | DistillRun | KTORun) or",
        "if not isinstance(run, SFTRun) or",
        FIRST_ROWS,
    ),
    Mutation(
        "messages without a chat template are found when rows are encoded",
        "preflight/inspections/rows.py",
        "isinstance(value, list) and bool(value) and isinstance(value[0], dict)",
        "isinstance(value, dict)",
        FIRST_ROWS,
    ),
    Mutation(
        "a best metric may be that of any set",
        "config/rules/training.py",
        'prefix not in ("eval", *sets):',
        'not prefix.startswith("eval"):',
        FIRST_ROWS,
    ),
    Mutation(
        "a picture lies on its side",
        "data/images.py",
        "image = ImageOps.exif_transpose(image)",
        "pass",
        IMAGES,
    ),
    Mutation(
        "what is transparent has the colour that nobody sees",
        "data/images.py",
        'if not has_alpha or image.mode == "RGB":',
        "if True:",
        IMAGES,
    ),
    Mutation(
        "transparent pixels of palettes have the colour that nobody sees",
        "data/images.py",
        ' or "transparency" in image.info',
        "",
        IMAGES,
    ),
    Mutation(
        "an image may be in any format that Pillow knows",
        "data/images.py",
        ", formats=[each for each in FORMATS if each in Pillow.OPEN]",
        "",
        IMAGES,
    ),
    Mutation(
        "a server that sends a byte now and then is waited for",
        "data/images.py",
        "asyncio.timeout(URL_TIMEOUT_S),",
        "asyncio.timeout(None),",
        IMAGES,
    ),
    Mutation(
        "a server may send as much as it likes",
        "data/images.py",
        "if len(data) > MOST_BYTES:",
        "if False:",
        IMAGES,
    ),
    Mutation(
        "what a user's file imports is not a part of its digest",
        "registry.py",
        "return [digest(each) for each in (path, *others)]",
        "return [digest(path)]",
        OWN_FILES,
    ),
    Mutation(
        "relative imports of a user's package are not followed",
        "python_source.py",
        "[str(file.parents[level - 1])] if level else folders",
        "folders",
        OWN_FILES,
    ),
    Mutation(
        "a thread sees a user's file half imported",
        "python_source.py",
        "    with lock:",
        "    if True:",
        OWN_FILES,
    ),
    Mutation(
        "reference log-probs outlive a change of the model's code",
        "models/load.py",
        '("*.safetensors", "*.bin", "*.py")',
        '("*.safetensors", "*.bin")',
        OWN_FILES,
    ),
    Mutation(
        "a reference without the embeddings of the actor's words is loaded",
        "preflight/inspections/models.py",
        "for name in (REFERENCE, TEACHER, CRITIC) if",
        "for name in (TEACHER, CRITIC) if",
        EMBEDDINGS,
    ),
    Mutation(
        "an answer of a ShareGPT conversation is one of the user",
        "data/messages.py",
        '"gpt": "assistant",',
        '"gpt": "user",',
        MESSAGES,
    ),
    Mutation(
        "keys without a value reach the chat template",
        "data/messages.py",
        "message = {name: each for name, each in value.items() if each is not None}",
        "message = dict(value)",
        MESSAGES,
    ),
    Mutation(
        "arguments of tool calls that are JSON text stay text",
        "data/messages.py",
        "    if not isinstance(arguments, str):",
        "    if True:",
        MESSAGES,
    ),
    Mutation(
        "tools that are JSON text are one tool",
        "data/messages.py",
        "            value = json.loads(value)",
        "            value = [value]",
        MESSAGES,
    ),
    Mutation(
        "an empty answer is trained on",
        "data/messages.py",
        '    if not message.get("tool_calls") and (',
        "    if False and (",
        MESSAGES,
    ),
    Mutation(
        "a dialogue that ends with the user has an answer",
        "data/messages.py",
        "    if last[1] != markers[1]:",
        "    if False:",
        MESSAGES,
    ),
    Mutation(
        "the marker of the answer is no part of its prompt",
        "data/messages.py",
        "text[: last.end()], text[last.end() :].rstrip()",
        "text[: last.start()], text[last.end() :].rstrip()",
        MESSAGES,
    ),
    Mutation(
        "a dialogue may begin anywhere in a text",
        "data/messages.py",
        "    if not found or found[0].start() > 0:",
        "    if not found:",
        MESSAGES,
    ),
    Mutation(
        "a user's file gets the neighbour of another one",
        "python_source.py",
        "    check_neighbours(path)\n",
        "",
        OWN_FILES,
    ),
]
