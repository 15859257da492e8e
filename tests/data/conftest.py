"""Fixtures of the tests that turn text into batches."""

import pytest

from recipe.data.tokenizer import read_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return read_tokenizer(str(tokenizer_dir))
