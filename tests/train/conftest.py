"""The models and the batch that the tests of the step, its optimisers and its gradients share."""

from __future__ import annotations

import gradients
import plain_models
import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return plain_models.make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def batch(folder):
    return gradients.make_batch(folder)
