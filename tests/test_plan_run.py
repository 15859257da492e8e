"""Plans for GPUs that are not there: the table of GPUs, arithmetic by hand, and the README's table."""

import re

import pytest
from conftest import ROOT, load_program, run_script

from recipe.errors import UserError
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


def test_gpus_are_found_as_typed():
    """In any case and with either separator; a name that is not in the table gets a suggestion."""
    assert load_gpu("A100_80GB") is load_gpu("a100-80gb")
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    with pytest.raises(UserError, match="use a100-80gb.* or a100-40gb"):
        load_gpu("a100")
    with pytest.raises(UserError, match="did you mean rtx4090?"):
        load_gpu("rtx4900")


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


def test_options_of_the_run_and_precision_of_the_gpu():
    program = load_program(SCRIPT)
    run = program.load_run("gpt2_124m", ["--per_device_train_batch_size", "4", "--activation_checkpointing"])
    plan = program.plan_gpu(*run, "a100-80gb")
    assert (plan.micro_batch_size, plan.activation_checkpointing) == (4, True)
    run = program.load_run("gpt2_124m", [])
    assert program.plan_gpu(*run, "t4") == program.plan_gpu(*program.load_run("gpt2_124m", ["--mixed_precision", "fp16"]), "t4")  # fmt: skip # noqa: E501


def test_the_readme_shows_the_table_of_memory_classes(capsys):
    """Every cell is what the program prints today, and each plan fits its class."""
    assert run_script(SCRIPT, "--table") == ""
    table = capsys.readouterr().out.strip()
    assert table in (ROOT / "README.md").read_text()
    for row in table.splitlines()[2:]:
        limit = float(re.search(r"(\d+) GB", row)[1]) * 2**30 / 1e9
        assert all(float(found) < limit for found in re.findall(r": ([\d.]+) GB", row))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("", "pass --gpu"), ("--gpu a101", "did you mean a10"), ("--gpu t4 --num_gpux 2", "did you mean --num_gpus?"),
     ("--gpu t4 --max_stepz 2", "did you mean --max_steps?"), ("--gpu t4 --mfu 0", "must be greater than 0"),
     ("--gpu h100 --num_gpus 3", "global_batch_size 512 is not divisible by 3"),
     ("--gpu rtx3060 --config gpt2_1558m", "the model does not fit into 12.5 GB"),
     ("--gpu h100 --config gpt2_finetune", "depends on the dataset"),
     ("--gpu h100 --max_minutes 5", "pass --max_steps"), ("--gpu h100 --config x", "there is no recipe")],
)  # fmt: skip
def test_mistakes_are_one_sentence(arguments, message):
    error = run_script(SCRIPT, *arguments.split())
    assert error.startswith("error: ") and message in error and "\n" not in error
