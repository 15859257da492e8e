"""The numbers of training stay what they were, unless a change means to change them."""

import json

import pytest
from helpers import ROOT
from losses import FILE, describe_here, measure


def test_losses_and_weights_are_those_of_the_file():
    """Losses to 1e-5 (other vector units change them by up to 1e-6), and all bits where they can be equal."""
    expected = json.loads(FILE.read_text())
    runs = expected.pop("runs")
    found = measure(ROOT)
    for name, run in runs.items():
        assert found[name]["losses"] == pytest.approx(run["losses"], abs=1e-5), name
        if expected == describe_here():
            assert found[name]["weights"] == run["weights"], name
