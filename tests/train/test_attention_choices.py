"""Every task has the gradient of its formula under each attention, and with tied and untied embeddings."""

from __future__ import annotations

import pytest
import task_gradients
from plain_models import make_models, relative_error
from splits import Split

pytestmark = pytest.mark.stack

TASKS = ("sft", "rm sigmoid", "dpo sigmoid", "kto", "prm, whole vocabulary", "distill forward_kl")


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("untied"), "llama", tied=False)


@pytest.mark.parametrize("name", TASKS)
def test_transformers_own_attention_gives_the_gradient_of_the_formula(ranks, folder, untied, name):
    for path, attention in ((untied, "sdpa"), (folder, "eager")):
        split = Split(attention, packed=False, micro=3, attention=attention)
        found = ranks(1).call(task_gradients.gradient, path, name, split)[0]
        assert ("lm_head.weight" in found) == (path == untied and not name.startswith("rm"))
        assert relative_error(found, task_gradients.wanted(path, name, split)) <= 1e-5, attention
