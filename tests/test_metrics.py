"""FLOPs, throughput, the progress lines of a log file."""

import io
import time

import pytest
from transformers import GPT2Config

from recipe.metrics import Throughput, count_flops_per_token
from recipe.report import _LineStream


def test_flops_per_token_of_gpt2_124m():
    """855 M at T = 1024, the PaLM and nanoGPT count."""
    assert count_flops_per_token(GPT2Config(vocab_size=50304), 124_475_904) == pytest.approx(855e6, rel=0.001)


def test_throughput_stops_for_what_is_not_training():
    throughput = Throughput()
    time.sleep(0.02)
    assert throughput.lap(1000) == pytest.approx(1000 / throughput.seconds)
    time.sleep(0.2)
    throughput.resume()
    time.sleep(0.02)
    throughput.lap(1000)
    assert throughput.seconds < 0.15 and throughput.tokens_per_second == pytest.approx(2000 / throughput.seconds)


def test_a_log_file_gets_lines_instead_of_a_redrawn_bar():
    stream = io.StringIO()
    lines = _LineStream(stream)
    for text in ("\rtrain  10%", "\rtrain  20%", "\n"):
        lines.write(text)
    assert stream.getvalue() == "train  10%\ntrain  20%\n"
