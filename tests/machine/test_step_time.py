"""What is known of the time of a step: its FLOPs, the peak rate of a GPU, and a profile."""

import contextlib
import gzip
import io
import json
import time
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config
from helpers import values_of
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
def test_peak_rates_are_those_of_the_data_sheets(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops_per_second(torch.device("cuda")) == (tflops and tflops * 1e12)
    assert peak_flops_per_second(torch.device("cpu")) is None


# ------------------------------------------------------------------ --profile 3


@pytest.fixture(scope="module")
def profiled(train_shared) -> SimpleNamespace:
    """A run of eight steps that profiles after the third; writing the trace takes three seconds. And a plain run."""
    export = torch.profiler.profile.export_chrome_trace

    def export_slowly(found, path):
        time.sleep(3)
        export(found, path)

    options = ["--max_steps", "8", "--attn_implementation", "sdpa"]
    restored = torch._inductor.config.patch({"cpp.enable_kernel_profile": False})  # the profiler sets it
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, restored, contextlib.redirect_stdout(printed):
        patch.setattr(torch.profiler.profile, "export_chrome_trace", export_slowly)
        run = train_shared(*options, "--profile", "3")
    trace = json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))
    names = [str(event.get("name")) for event in trace["traceEvents"]]
    return SimpleNamespace(names=names, run=run, printed=printed.getvalue(), plain=train_shared(*options))


def test_a_profile_is_of_the_three_steps_after_the_named_one(profiled):
    """The slowest operators are printed with the path of the trace."""
    steps = {name for name in profiled.names if name.startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{step}" for step in (3, 4, 5)}  # counted from 0: the steps 4, 5 and 6
    assert profiled.names.count("Optimizer.step#AdamW.step") == 3
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in profiled.names
    assert "aten::addmm" in profiled.printed and str(profiled.run / "trace.json.gz") in profiled.printed


def test_a_profiled_run_trains_as_one_without(profiled):
    """In a time that does not contain that of writing the trace."""
    assert values_of(profiled.run, "loss") == values_of(profiled.plain, "loss")
    assert values_of(profiled.run, "train_seconds")[-1] < 3
    assert not (profiled.plain / "trace.json.gz").exists()
