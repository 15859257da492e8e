"""FLOPs per token, peak rates and peak memory."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from recipe.hardware.devices import peak_flops_per_second
from recipe.model.size import count_flops_per_token

GPT2 = {"n_layer": 3, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 500}
LLAMA = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 88, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (GPT2Config(**GPT2), 32),
        (GPT2Config(**GPT2, tie_word_embeddings=False), 32),
        (LlamaConfig(**LLAMA, tie_word_embeddings=False), 32),
        (Qwen3Config(**LLAMA, head_dim=16, tie_word_embeddings=True), 4 * 16),  # of the heads
    ],
)
def test_flops_per_token_are_those_of_the_matmuls(config, width):
    """Six for each weight that is not looked up, and attention's. A tied matrix counts as the output."""
    model = AutoModelForCausalLM.from_config(config)
    modules = [module for module in model.modules() if not isinstance(module, torch.nn.Embedding)]
    weights = sum(p.numel() for module in modules for p in module.parameters(recurse=False))
    attention = 6 * 3 * (2 * 8 * width)  # in each layer, each query multiplies 8 keys, and each weight 8 values
    assert count_flops_per_token(config, model.num_parameters(), block_size=8) == 6 * weights + attention


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835), ("NVIDIA GH200 480GB", 989), ("NVIDIA GB200", 2500),
     ("NVIDIA B200", 2250), ("NVIDIA B300 SXM6 AC", 2250), ("NVIDIA H800", 989), ("NVIDIA A800-SXM4-80GB", 312),
     ("NVIDIA L40", 181), ("NVIDIA RTX A6000", 155), ("NVIDIA RTX 6000 Ada Generation", 364),
     ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("Tesla T4", 65),
     ("NVIDIA H100 PCIe", 756), ("Unheard Of", None)],
)  # fmt: skip
def test_peak_rates_from_data_sheets(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops_per_second(torch.device("cuda")) == (tflops and tflops * 1e12)
    assert peak_flops_per_second(torch.device("cpu")) is None


# The peak at the start, after 0.5 GB that is freed at once, and after the same again.
PEAKS = """
import torch
from recipe.hardware.devices import peak_memory_bytes
for size in (1, 2**27, 2**27):
    torch.ones(size)
    print(peak_memory_bytes(torch.device("cpu")))
"""


def test_peak_memory_is_a_maximum():
    """It grows with allocations and stays when they are freed. Linux's ru_maxrss would include the parent's peak."""
    torch.ones(2**28)  # 1 GB, in this process
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    start, grown, again = map(int, done.stdout.split())
    assert start < 2**30 and 2**28 < grown - start < 2**30 and 0 <= again - grown < 2**28
