"""The check of this machine, and plans: the table of GPUs, and arithmetic by hand."""

import json
import subprocess
from unittest import mock

import pytest
from helpers import ROOT, load_program, run_script

from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.hardware.gpus import GPUS, find_gpu, load_gpu

SCRIPT = "scripts/plan_run.py"


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
    arguments = ["--gpu", "h100", "--num_gpus", "8", "--mfu", "0.5", "--price_per_hour", "3"]
    flops = 6 * (124_475_904 - 1024 * 768) + 12 * 12 * 768 * 1024
    hours = 19073 * 524_288 * flops / (0.5 * 8 * 989e12) / 3600
    assert run_script(SCRIPT, *arguments) == ""
    text = capsys.readouterr().out
    for expected in (
        f"{hours:,.1f} hours on 8 x h100",
        f"${8 * hours * 3:,.0f} for",
        "124,475,904 with the padded vocabulary",
        "64 rows x 1 per step",
        f"{hours * 3.6e6 / 19073:,.0f} ms",
        "20.0 GB per process and epoch",
    ):
        assert expected in text
    labels = [line.split()[-1] for line in text.splitlines()[:-1]]
    assert labels.count("estimated") == 6 and labels.count("exact") == 5
    assert max(map(len, text.splitlines())) <= 90
    assert run_script(SCRIPT, *arguments, "--json") == ""
    found = json.loads(capsys.readouterr().out)
    assert found["step_ms"] == pytest.approx(hours * 3.6e6 / 19073) and found["gpu_hours"] == pytest.approx(8 * hours)
    assert sum(found["parts"].values()) == pytest.approx(found["memory_bytes"], abs=9)
    assert found["data_bytes"] == 2 * 19073 * 524_288


@pytest.fixture
def program(monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return load_program(SCRIPT)


def test_typed_options_of_the_run_are_kept(program):
    run = program.load_run("gpt2_124m", ["--per_device_train_batch_size", "4", "--activation_checkpointing"])
    plan = program.plan_gpu(*run, "a100-80gb")
    assert (plan.micro_batch_size, plan.activation_checkpointing) == (4, True)


def test_a_gpu_without_bf16_is_planned_in_fp16(program):
    typed = ([], ["--mixed_precision", "fp16"], ["--mixed_precision", "no"])
    plans = [program.plan_gpu(*program.load_run("gpt2_124m", options), "t4") for options in typed]
    assert plans[0] == plans[1] != plans[2]


# ---------------------------------------------------------------- this machine


def test_ten_steps_take_minutes_on_a_cpu(program, monkeypatch):
    """GPT-2 124M with its half a million tokens per step would take days; two rows of 1,024 do not."""
    saved = mock.Mock(side_effect=UserError("saved"))
    monkeypatch.setattr(program, "write_config", saved)
    with pytest.raises(UserError, match="saved"):
        program.measure_steps(None, program.load_run("gpt2_124m", [])[0], "no")
    assert saved.call_args.args[0].global_batch_size == 2 and saved.call_args.args[0].max_steps == 10


def test_ten_real_steps_are_extrapolated_and_leave_nothing(dataset_dir, tmp_path, monkeypatch, capsys):
    """Every check passes. Accelerate's launcher and our config for a CPU start the steps; nothing is published."""
    (tmp_path / "data").symlink_to(dataset_dir)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    monkeypatch.setattr("huggingface_hub.whoami", lambda: {"name": "ada"})
    options = "--config_overrides n_layer=2,n_head=2,n_embd=32 --block_size 32 --global_batch_size 4 --max_steps 1000"
    options += " --config demo --dataset_dir data --push_to_hub --hub_model_id ada/x --report_to tensorboard"
    launcher = ["--config_file", ROOT / "accelerate_configs" / "cpu.yaml"]
    assert run_script(SCRIPT, "--measure", *launcher, *options.split()) == ""
    found = capsys.readouterr().out
    measured = found.splitlines()[-1]
    assert found.count("ok ") == 6 and "FAILED" not in found and "128,000 in 1,000 steps" in found
    speed = float(measured.split(" tokens/s")[0].split()[-1].replace(",", ""))
    assert f"{1000 * 4 * 32 / speed / 3600:,.2f} hours for 1,000 steps" in measured
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_failed_check_is_the_exit_status(program, monkeypatch, capsys):
    """The other checks still run, and the run is planned."""
    monkeypatch.setattr(program, "check_compiler", mock.Mock(side_effect=RuntimeError("g++ is broken")))
    monkeypatch.setattr("sys.argv", [SCRIPT])
    with pytest.raises(UserError, match="1"):
        program.main()
    found = capsys.readouterr().out
    assert "g++ is broken" in found and found.count("FAILED ") == 1 and found.count("ok ") == 5
    assert "124,475,904 with the padded vocabulary" in found


@pytest.mark.parametrize(
    ("function", "replaced", "value", "remedy"),
    [
        ("check_packages", "version", "0.1", "pip install -e"),
        ("check_compiler", "why_no_inductor", "no C++ compiler", "--dynamo_backend no"),
        ("check_hub", "get_token", None, "hf auth login"),
    ],
)
def test_a_check_that_fails_names_the_remedy(program, monkeypatch, function, replaced, value, remedy):
    monkeypatch.setattr(program, replaced, lambda *_: value)
    arguments = [mock.Mock(push_to_hub=True)] if function == "check_hub" else []
    with pytest.raises(UserError, match=remedy):
        getattr(program, function)(*arguments)
    assert program.check_hub(mock.Mock(push_to_hub=False))  # which needs no token


def test_a_run_that_fails_is_quoted_without_the_launchers_traceback(program, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "error: there is no dataset x\nTraceback\nCalledProcessError\n")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: failed)
    with pytest.raises(UserError, match="error: there is no dataset x$"):
        program.measure_steps(None, load_config([])[0], "no")
