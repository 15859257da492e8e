"""What is known of the time of a step: its FLOPs, the peak rate of a GPU, and a profile."""

import gzip
import json
import time

import pytest
import torch
import torch._inductor.config
from helpers import values_of
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from recipe.hardware.devices import peak_flops_per_second
from recipe.model.size import count_flops_per_token

GPT2 = {"n_layer": 3, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 500}
LLAMA = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 88, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 16}


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
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("Tesla T4", 65),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA RTX A4000", None),
        ("Unheard Of", None),
    ],
)
def test_peak_rates_are_those_of_the_data_sheets(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops_per_second(torch.device("cuda")) == (tflops and tflops * 1e12)
    assert peak_flops_per_second(torch.device("cpu")) is None


def test_a_profile_is_of_the_three_steps_after_the_named_one(train, tmp_path, monkeypatch, capsys):
    """The slowest operators are printed with the path of the trace, and the run trains as one without a profile, in a
    time that does not contain that of writing the trace, three seconds here.
    """
    export = torch.profiler.profile.export_chrome_trace

    def export_slowly(found, path):
        time.sleep(3)
        export(found, path)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export_slowly)
    options = ["--max_steps", "8", "--attn_implementation", "sdpa"]
    plain = train(*options, output_dir=tmp_path / "plain")
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": False}):  # the profiler sets it
        run = train(*options, "--profile", "3")
    trace = json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))
    names = [str(event.get("name")) for event in trace["traceEvents"]]
    steps = {name for name in names if name.startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{step}" for step in (3, 4, 5)}  # counted from 0: the steps 4, 5 and 6
    assert names.count("Optimizer.step#AdamW.step") == 3
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    printed = capsys.readouterr().out
    assert "aten::addmm" in printed and str(run / "trace.json.gz") in printed
    assert values_of(run, "loss") == values_of(plain, "loss")
    assert values_of(run, "train_seconds")[-1] < 3
