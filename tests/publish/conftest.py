"""A finished run that has published nothing, and uploads without pauses."""

import shutil
from pathlib import Path

import pytest

from recipe.publish import uploads


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Do not wait before another attempt."""
    monkeypatch.setattr(uploads, "PAUSE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def finished(four_steps) -> Path:
    return four_steps


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of it, which a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))
