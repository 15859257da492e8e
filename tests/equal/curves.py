"""What the tests of equality read of a run."""

import json
from pathlib import Path

import pytest
from helpers import read_events


def losses_of(run: Path, event: str = "train", after: int = -1) -> list[float]:
    """Return the losses that a run has logged after a step."""
    return [line["loss"] for line in read_events(run, event) if line["step"] > after]


def assert_equal_losses(run: Path, reference: Path, after: int = -1, tolerance: float = 1e-5) -> None:
    """Compare the training and validation losses after a step."""
    for event in ("train", "eval"):
        expected = losses_of(reference, event, after)
        assert expected, event
        assert losses_of(run, event, after) == pytest.approx(expected, abs=tolerance), event


def weights_of(run: Path) -> bytes:
    """Return the file of the weights, to compare bit for bit."""
    return (run / "model.safetensors").read_bytes()


def read_summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())
