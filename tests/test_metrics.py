"""FLOPs and what they are compared with."""

import pytest
import torch
from transformers import GPT2Config

from recipe.metrics import count_flops_per_token, peak_flops_per_second


def test_flops_per_token_of_gpt2_124m():
    """855 M at T = 1024, the PaLM and nanoGPT count."""
    assert count_flops_per_token(GPT2Config(vocab_size=50304), 124_475_904) == pytest.approx(855e6, rel=0.001)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H200", 989), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("Tesla T4", 65),
     ("NVIDIA H100 PCIe", 756), ("Unheard Of", None)],
)  # fmt: skip
def test_the_data_sheet_of_a_device(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops_per_second(torch.device("cuda")) == (tflops and tflops * 1e12)
    assert peak_flops_per_second(torch.device("cpu")) is None
