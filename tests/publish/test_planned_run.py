"""The check of this machine, and plans: the table of GPUs, and arithmetic by hand."""

import json
import re
import subprocess
from unittest import mock

import pytest
import torch
from helpers import ROOT, load_program, run_script
from transformers import Qwen3Config

from recipe.errors import UserError
from recipe.hardware.gpus import GPUS, find_gpu, load_gpu

SCRIPT = "scripts/plan_run.py"
MEASURED = {"num_processes": 1, "mixed_precision": "no", "dynamo_backend": "no", "peak_memory_bytes": 0}
MEASURED |= {"per_device_train_batch_size": 1}


@pytest.mark.parametrize(
    ("device_name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_a_card_is_found_by_the_name_that_torch_reports(device_name, expected):
    """Variants of a card differ in memory and speed, and a laptop's card is another one."""
    gpu = find_gpu(device_name)
    assert (gpu and gpu.name) == expected


def test_gpus_are_found_in_any_case_and_with_either_separator():
    assert load_gpu("A100_80GB") is load_gpu("a100-80gb")
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)


def test_time_and_cost_are_those_computed_by_hand(capsys):
    """124M: 6 N + 12 L d T FLOPs per token, N without the 1,024 positions, at 50% of 8 x 989 TFLOP/s and $3."""
    arguments = ["--config", "gpt2_124m", "--gpu", "h100", "--num_gpus", "8", "--mfu", "0.5", "--price_per_hour", "3"]
    flops = 6 * (124_475_904 - 1024 * 768) + 12 * 12 * 768 * 1024
    hours = 19073 * 524_288 * flops / (0.5 * 8 * 989e12) / 3600
    assert run_script(SCRIPT, *arguments) == ""
    text = capsys.readouterr().out
    for expected in (
        f"{hours:,.1f} hours on 8 x h100",
        f"${8 * hours * 3:,.0f} for",
        "124,475,904, vocabulary of 50,304",
        "64 rows x 1 per step",
        f"{hours * 3.6e6 / 19073:,.0f} ms",
        "20.0 GB of token ids",
    ):
        assert expected in text
    labels = [line.split()[-1] for line in text.splitlines()[:-1]]
    assert [labels.count(word) for word in ("estimated", "exact", "assumed")] == [6, 2, 3]
    assert max(map(len, text.splitlines())) <= 90
    assert run_script(SCRIPT, *arguments, "--json") == ""
    found = json.loads(capsys.readouterr().out)
    assert found["step_ms"] == pytest.approx(hours * 3.6e6 / 19073) and found["gpu_hours"] == pytest.approx(8 * hours)
    assert sum(found["parts"].values()) == pytest.approx(found["memory_bytes"], abs=9)
    assert found["data_bytes"] == 2 * 19073 * 524_288


@pytest.fixture
def plan(capsys):
    """Return the plan that the options of a command line make, for an H100."""

    def run(options: str) -> dict:
        assert run_script(SCRIPT, "--gpu", "h100", "--json", *options.split()) == ""
        return json.loads(capsys.readouterr().out)

    return run


def test_the_vocabulary_is_the_models_or_the_datasets(plan, dataset_dir, tmp_path):
    """Qwen3 0.6B has 596,049,920 parameters; the dataset's 500 tokens are padded to 512 rows of 768 values."""
    shape = {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "head_dim": 128}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}
    Qwen3Config(vocab_size=151_936, **shape).save_pretrained(tmp_path)
    assert plan(f"--model_name_or_path {tmp_path}")["parameters"] == 596_049_920
    assert plan(f"--config gpt2_124m --dataset_dir {dataset_dir}")["parameters"] == 124_475_904 - (50304 - 512) * 768


def test_a_plan_is_of_the_run_that_the_options_name(plan):
    """The default recipe is that of training: the demo, with a million parameters, as long as the machine allows."""
    assert plan("")["parameters"] == 1_088_256 and plan("")["tokens"] is None
    typed = plan("--config gpt2_124m --per_device_train_batch_size 4 --activation_checkpointing")
    assert (typed["micro_batch"], typed["options"]) == (4, ["--activation_checkpointing"])


def test_rates_and_memory_are_those_of_the_precision(plan):
    """Data sheets name no rate for fp32, and a GPU without bf16 trains in fp16."""
    known, unknown = (plan(f"--config gpt2_124m --mixed_precision {name}") for name in ("bf16", "no"))
    assert known["step_ms"] and known["gpu_hours"] and unknown["step_ms"] is unknown["gpu_hours"] is None
    parts = [plan(f"--gpu t4 {options}")["parts"] for options in ("", "--fp16", "--mixed_precision no")]
    assert parts[0] == parts[1] != parts[2]


@pytest.fixture
def program():
    return load_program(SCRIPT)


# ---------------------------------------------------------------- this machine


def test_ten_steps_take_minutes_on_a_cpu(program, monkeypatch):
    """GPT-2 124M with its half a million tokens per step would take days; two rows of 1,024 do not."""
    saved = mock.Mock(side_effect=UserError("saved"))
    monkeypatch.setattr(program, "write_config", saved)
    planned = program.load_run("gpt2_124m", ["--config", "gpt2_124m"])
    with pytest.raises(UserError, match="saved"):
        program.measure_steps([], planned)
    assert saved.call_args.args[0].global_batch_size == 2 and saved.call_args.args[0].max_steps == 10
    text = program.describe_measured(planned.config, MEASURED | {"tokens_per_second": 1, "num_rows": 2})
    assert {"2", "512"} <= {*text.split()}


@pytest.mark.parametrize(("options", "expected"), [("", 4), ("--num_gpus 2", 2), ("--gpu t4", 1)])
def test_the_plan_is_for_all_gpus_of_the_machine(program, monkeypatch, options, expected):
    monkeypatch.setattr(program, "find_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr("sys.argv", [SCRIPT, *options.split()])
    assert program.parse()[0].num_gpus == expected


def test_ten_real_steps_are_extrapolated_and_leave_nothing(dataset_dir, tmp_path, monkeypatch, capsys):
    """Every check passes. Accelerate's launcher and our config for a CPU start the steps; nothing is published."""
    (tmp_path / "data").symlink_to(dataset_dir)
    monkeypatch.chdir(tmp_path)
    options = "--config_overrides n_layer=2,n_head=2,n_embd=32 --block_size 32 --global_batch_size 4 --max_steps 1000"
    options += " --config demo --dataset_dir data --push_to_hub --hub_model_id ada/x --report_to tensorboard"
    launcher = ["--config_file", ROOT / "accelerate_configs" / "cpu.yaml"]
    assert run_script(SCRIPT, "--measure", *launcher, *options.split()) == ""
    found = capsys.readouterr().out
    measured = found.splitlines()[-1]
    assert found.count("ok ") == 5 and "FAILED" not in found and "128,000 in 1,000 steps" in found
    speed = float(measured.split(" tokens/s")[0].split()[-1].replace(",", ""))
    assert f"{1000 * 4 * 32 / speed / 3600:,.2f} hours for 1,000 steps" in measured
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_failed_checks_name_the_remedy_and_are_the_exit_status(program, monkeypatch, capsys):
    """The other checks still run, and the run is planned."""
    monkeypatch.setattr(program, "why_no_inductor", lambda _: "no C++ compiler")
    monkeypatch.setattr(program, "check_device", mock.Mock(side_effect=RuntimeError("no kernel image")))
    monkeypatch.setattr("sys.argv", [SCRIPT, "--config", "gpt2_124m"])
    with pytest.raises(UserError, match="2"):
        program.main()
    found = capsys.readouterr().out
    assert found.count("FAILED ") == 2 and found.count("ok ") == 3
    assert "no kernel image" in found
    assert re.search(r"FAILED .*no C\+\+ compiler.*--dynamo_backend no", found)
    assert "124,475,904, vocabulary of 50,304" in found


def test_a_run_that_fails_is_quoted_without_the_launchers_traceback(program, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "error: there is no dataset x\nTraceback\nCalledProcessError\n")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: failed)
    with pytest.raises(UserError, match="error: there is no dataset x$"):
        program.measure_steps([], program.load_run(None, []))
