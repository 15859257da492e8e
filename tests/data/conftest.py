"""Fixtures of the tests that turn text into batches."""

import pytest

from recipe.data.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return load_tokenizer(str(tokenizer_dir))
