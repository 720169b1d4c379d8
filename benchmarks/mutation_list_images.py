"""Mistakes with images: in their places, their order, their tokens, and what engines keep of them."""

from __future__ import annotations

from mutation import Mutation

ROWS = ("tests/data/test_images.py",)
MODELS = ("tests/models/test_vision.py",)
ENGINES = ("tests/engines/test_engine_images.py",)
AGENTS = ("tests/agents/test_agent_images.py",)
RUNS = ("tests/tasks/test_images_in_runs.py",)

IMAGES = [
    Mutation(
        "the images of a batch stay where they are when its sequences move",
        "data/batch.py",
        "tuple(batch.images[row] for row in chosen.tolist())",
        "batch.images[: len(chosen)]",
        ROWS,
    ),
    Mutation(
        "an image is cut off",
        "data/text_encoders.py",
        "example.images[-1].start + example.images[-1].length > max_len",
        "example.images[-1].start > max_len",
        ROWS,
    ),
    Mutation(
        "a row may have any number of images",
        "data/images.py",
        "if len(values) > config.max_images_per_prompt:",
        "if not values:",
        ROWS,
    ),
    Mutation(
        "URLs are fetched without being asked for",
        "data/images.py",
        "if not with_urls:",
        "if not text:",
        ROWS,
    ),
    Mutation(
        "placeholders and images need not be equally many",
        "data/images.py",
        "if found != len(images):",
        "if found > len(images):",
        ROWS,
    ),
    Mutation(
        "the file of an image is not opened when its row is read",
        "data/images.py",
        "    open_image(data)\n    return data",
        "    return data",
        ROWS,
    ),
    Mutation(
        "more features than placeholders are not noticed",
        "models/vision.py",
        "assert found == expected,",
        "assert found,",
        MODELS,
    ),
    Mutation(
        "a batch without an image leaves the tower out",
        "models/vision.py",
        "        if any(batch.images):\n",
        "        if True:\n",
        MODELS,
    ),
    Mutation(
        "an image of zeros is taken for padding",
        "models/vision.py",
        'if not pixels["pixel_values"].flatten(1).any(1).all():',
        'if not pixels["pixel_values"].numel():',
        MODELS,
    ),
    Mutation(
        "a frozen tower is trained",
        "models/prepare.py",
        "config.freeze_visual_encoder:",
        "config.freeze_visual_encoder and config.freeze:",
        MODELS,
    ),
    Mutation(
        "the trainer gives the tokens of images a probability",
        "models/head.py",
        "self.never = penalty.index_fill_(0,",
        "self.never = penalty.index_fill(0, torch.tensor([], dtype=torch.int64), NEVER) + 0 * penalty.index_fill_(0,",
        MODELS,
    ),
    Mutation(
        "a saved model has no processor",
        "models/save.py",
        "        if self.processor is not None:",
        "        if self.processor is None:",
        MODELS,
    ),
    Mutation(
        "the engine gets tokens of images that are expanded already",
        "engines/actor.py",
        "prompt_token_ids=collapsed(job.prompt_ids, job.images, image_token),",
        "prompt_token_ids=list(job.prompt_ids),",
        ENGINES,
    ),
    Mutation(
        "the features of images survive a weight sync",
        "engines/actor.py",
        "            engine.reset_encoder_cache()\n",
        "",
        ENGINES,
    ),
    Mutation(
        "the tokens of images are sampled",
        "engines/actor.py",
        "logit_bias=dict.fromkeys(sampling.never, NEVER) or None,",
        "logit_bias=None,",
        ENGINES,
    ),
    Mutation(
        "an engine that reads other tokens than the trainer is not noticed",
        "engines/actor.py",
        "self._prompt_ids = request.prompt_ids if request.images else None",
        "self._prompt_ids = None",
        ENGINES,
    ),
    Mutation(
        "an image too many is appended to an episode",
        "agents/session.py",
        "self.is_full = ids is None or has_many or",
        "self.is_full = ids is None or",
        AGENTS,
    ),
    Mutation(
        "later requests of an episode have the images of the first one",
        "data/trajectory.py",
        "        self.images += images\n",
        "",
        AGENTS,
    ),
    Mutation(
        "reference log-probs on disk do not depend on the images",
        "train/annotations.py",
        "            digest.update(hashlib.sha256(image.data).digest())\n",
        "            pass\n",
        RUNS,
    ),
]
