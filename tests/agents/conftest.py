"""One tokenizer for the tests of agents."""

from __future__ import annotations

import pytest
from scripted import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer(special=["<tool>", "</tool>"])
