"""Plans for GPUs that are not there: the table of GPUs, arithmetic by hand, and the README's table."""

import re

import pytest
from conftest import ROOT, load_program, run_script

from recipe.hardware.gpus import GPUS, find_gpu, load_gpu

SCRIPT = "scripts/plan_run.py"


@pytest.mark.parametrize(
    ("device_name", "expected"),
    [("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
     ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L4", "l4"),
     ("NVIDIA H200 NVL", "h200-nvl"), ("Tesla V100-SXM2-32GB", "v100-32gb"), ("Tesla V100-SXM2-16GB", "v100"),
     ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 4090 Laptop GPU", None)],
)  # fmt: skip
def test_names_that_torch_reports(device_name, expected):
    """Variants of a card differ in memory and speed, and a laptop's card is another one."""
    gpu = find_gpu(device_name)
    assert (gpu and gpu.name) == expected


def test_gpus_are_found_in_any_case_and_with_either_separator():
    assert load_gpu("A100_80GB") is load_gpu("a100-80gb")
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)


def test_time_and_cost_by_hand(capsys):
    """124M: 6 N + 12 L d T FLOPs per token, N without the 1,024 positions, at 50% of 8 x 989 TFLOP/s and $3."""
    arguments = ["--gpu", "h100", "--num_gpus", "8", "--mfu", "0.5", "--price_per_hour", "3"]
    assert run_script(SCRIPT, *arguments) == ""
    text = capsys.readouterr().out
    flops = 6 * (124_475_904 - 1024 * 768) + 12 * 12 * 768 * 1024
    hours = 19073 * 524_288 * flops / (0.5 * 8 * 989e12) / 3600
    assert f"{hours:,.1f} hours on 8 x h100" in text and f"${8 * hours * 3:,.0f} for" in text
    assert "124,475,904 with the padded vocabulary" in text and "64 rows x 1 per step" in text
    assert max(map(len, text.splitlines())) <= 90
    labels = [line.split()[-1] for line in text.splitlines()[:-2]]
    assert labels.count("estimated") == 5 and labels.count("exact") == 4


def test_typed_options_of_the_run_are_kept():
    program = load_program(SCRIPT)
    run = program.load_run("gpt2_124m", ["--per_device_train_batch_size", "4", "--activation_checkpointing"])
    plan = program.plan_gpu(*run, "a100-80gb")
    assert (plan.micro_batch_size, plan.activation_checkpointing) == (4, True)


def test_a_gpu_without_bf16_is_planned_in_fp16():
    program = load_program(SCRIPT)
    plans = [
        program.plan_gpu(*program.load_run("gpt2_124m", options), "t4")
        for options in ([], ["--mixed_precision", "fp16"], ["--mixed_precision", "no"])
    ]
    assert plans[0] == plans[1] != plans[2]


def test_the_readme_shows_the_table_of_memory_classes(capsys):
    """Every cell is what the program prints today, and each plan fits its class."""
    assert run_script(SCRIPT, "--table") == ""
    table = capsys.readouterr().out.strip()
    assert table in (ROOT / "README.md").read_text()
    for row in table.splitlines()[2:]:
        limit = float(re.search(r"(\d+) GB", row)[1]) * 2**30 / 1e9
        assert all(float(found) < limit for found in re.findall(r": ([\d.]+) GB", row))
