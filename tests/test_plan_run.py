"""Plans for machines that are not there: arithmetic by hand, published runs, result files, and the printed text."""

import dataclasses
import json
import math

import pytest
import torch
from conftest import ROOT, run_script
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from recipe.benchmark.forecast import (
    Cluster,
    count_executed_flops,
    estimate_compute_seconds,
    estimate_muon_seconds,
    forecast,
    load_run,
    resolve_setting,
    ring_bytes,
    scaling,
)
from recipe.benchmark.ladder import choose_setting
from recipe.benchmark.machine import Machine
from recipe.benchmark.measured import read_measurements
from recipe.data.packed import open_packed_dataset
from recipe.errors import UserError
from recipe.hardware.gpus import GPUS, Gpu, find_gpu, load_gpu
from recipe.hardware.memory import MemoryPlan, Setting
from recipe.model.loss import LanguageModelingLoss
from recipe.model.size import count_parameters
from recipe.optim.muon import orthogonalize

ROUND = Gpu("round", "Round", 8, tflops=100, memory_gb_per_second=1000, link_gb_per_second=10, watts=500)
THE_COMMAND = [
    "--config",
    "gpt2_774m",
    "--gpu",
    "a100-80gb",
    "--num_gpus",
    "16",
    "--num_nodes",
    "2",
    "--price_per_hour",
    "1.5",
]
SCRIPT = "scripts/plan_run.py"


def small_plan(micro_batch: int = 2, checkpointing: bool = False, chunks: int = 1) -> MemoryPlan:
    return MemoryPlan(micro_batch, checkpointing, chunks, "adamw_torch_fused", {})


def plan_as_json(capsys, *arguments: object) -> dict:
    assert run_script(SCRIPT, *arguments, "--json") == ""
    return json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------ the table of GPUs


@pytest.mark.parametrize(
    ("device_name", "expected"),
    [("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
     ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L4", "l4"),
     ("Tesla V100-SXM2-32GB", "v100-32gb"), ("Tesla V100-SXM2-16GB", "v100"),
     ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 4090 Laptop GPU", None)],
)  # fmt: skip
def test_names_that_torch_reports(device_name, expected):
    """Variants of a card differ in memory and links, and a laptop's card is another one."""
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


# ------------------------------------------------------------------ communication


def test_bytes_of_a_ring():
    """They are those of a ring that is played through, chunk by chunk."""
    num_gpus, chunk = 4, 100
    sums, sent = [[float(gpu)] * num_gpus for gpu in range(num_gpus)], [0] * num_gpus
    for step in range(2 * (num_gpus - 1)):  # first every chunk is summed up around the ring, then copied around it
        before = [list(chunks) for chunks in sums]
        for gpu in range(num_gpus):
            index, after = (gpu - step) % num_gpus, (gpu + 1) % num_gpus
            adds = before[after][index] if step < num_gpus - 1 else 0.0
            sums[after][index] = before[gpu][index] + adds
            sent[gpu] += chunk
    assert sums == [[6.0] * num_gpus] * num_gpus  # 0 + 1 + 2 + 3
    assert [ring_bytes(num_gpus * chunk, num_gpus)] * num_gpus == sent
    assert ring_bytes(1e9, 1) == 0


def test_all_reduce_by_hand():
    """774,090,240 fp32 gradients on 16 A100s in two nodes: 2 x 15/16 x 4 bytes each, at 0.8 of 12.5 GB/s."""
    config, model_config = load_run("gpt2_774m", [])
    assert count_parameters(model_config) == 774_090_240
    run = forecast(config, model_config, Cluster(load_gpu("a100-80gb"), 16, 2))
    assert run.allreduce_bytes == 5_805_676_800
    assert run.allreduce_seconds == pytest.approx(0.58056768)
    in_a_node = forecast(config, model_config, Cluster(load_gpu("a100-80gb"), 8))  # NVLink: 0.8 of 300 GB/s
    assert in_a_node.allreduce_seconds == pytest.approx(2 * 7 / 8 * 4 * 774_090_240 / 240e9)
    compressed, _ = load_run("gpt2_774m", ["--ddp_comm_hook", "bf16"])
    assert (
        forecast(compressed, model_config, Cluster(load_gpu("a100-80gb"), 16, 2)).allreduce_bytes == 5_805_676_800 / 2
    )


def test_the_slowest_link_bounds_a_ring():
    """A network faster than the links within a node does not help."""
    assert Cluster(ROUND, 16, 2, node_bandwidth_gbps=8).ring_bytes_per_second == pytest.approx(0.8e9)
    assert Cluster(ROUND, 16, 2, node_bandwidth_gbps=800).ring_bytes_per_second == pytest.approx(8e9)
    assert Cluster(ROUND, 8, 1, node_bandwidth_gbps=8).ring_bytes_per_second == pytest.approx(8e9)


def test_backward_hides_communication_only_if_not_compiled():
    """A compiled backward returns all gradients at its end."""
    for backend, hides in (("auto", False), ("no", True)):
        config, model_config = load_run("gpt2_124m", ["--dynamo_backend", backend])
        run = forecast(config, model_config, Cluster(load_gpu("h100"), 8))
        assert (run.exposed_seconds < run.allreduce_seconds) == hides


# ------------------------------------------------------------------ computation


@pytest.mark.parametrize(("checkpointing", "chunks"), [(False, 1), (False, 8), (True, 1), (True, 8)])
def test_executed_flops_are_counted_by_torch(checkpointing, chunks):
    """torch's counter sees the matrix products of forward, recomputation and backward; biases are the difference."""
    model_config = GPT2Config(
        n_layer=3, n_head=2, n_embd=128, n_positions=64, vocab_size=512, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    model = GPT2LMHeadModel(model_config)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    module, rows = LanguageModelingLoss(model, 512, num_chunks=chunks).train(), torch.zeros(2, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        module(rows, rows).backward()
    expected = count_executed_flops(model_config, 64, small_plan(2, checkpointing, chunks))
    assert counter.get_total_flops() / rows.numel() == pytest.approx(expected, rel=0.01)


def test_time_of_a_step_by_hand():
    """122,304 parameters, 768 tokens in three micro-batches, bf16.

    Matrices: 782,976 FLOPs per token at 0.6 x 100 TFLOP/s. Memory at 0.8 x 1 TB/s: 5 passes over 2,048 + 2,000 bytes
    per token, and 3 x 20 + 40 bytes per parameter. Recomputation: 2 passes more, a third of the head's 384,000 FLOPs,
    and a third of the others without c_proj's 2 x 64 x 256.
    """
    model_config = GPT2Config(n_layer=1, n_head=1, n_embd=64, n_positions=128, vocab_size=1000)
    setting = Setting("cuda", "bf16", compiled=True, bf16_residual=True)

    def seconds(plan: MemoryPlan) -> float:
        return estimate_compute_seconds(model_config, 128, plan, setting, ROUND, num_micro_batches=3)

    plain = 768 * 782_976 / 60e12 + (768 * 5 * 4048 + 122_304 * 100) / 0.8e12
    assert seconds(small_plan()) == pytest.approx(plain)
    chunked = plain + 768 * 128_000 / 60e12 + 768 * 2 * 2000 / 0.8e12
    assert seconds(small_plan(chunks=8)) == pytest.approx(chunked)
    checkpointed = plain + 768 * (398_976 / 3 - 32_768) / 60e12 + 768 * 2 * 2048 / 0.8e12
    assert seconds(small_plan(checkpointing=True)) == pytest.approx(checkpointed)


def test_what_muon_adds_by_hand():
    """On two GPUs: torch's count of the products, halved; 124 bytes per value of a matrix; half of them exchanged.

    Matrices of three blocks: 12 of 128 x 128 and 6 of 128 x 512.
    """
    model_config = GPT2Config(n_layer=3, n_head=2, n_embd=128, n_positions=64, vocab_size=512)
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.ones(12, 128, 128))
        orthogonalize(torch.ones(6, 128, 512))
    values = 12 * 128 * 128 + 6 * 128 * 512
    expected = counter.get_total_flops() / 2 / 60e12 + values * 124 / 0.8e12 + values * 2 / 2 / 8e9
    assert estimate_muon_seconds(model_config, Cluster(ROUND, 2)) == pytest.approx(expected)
    plain, muon = (
        forecast(*load_run("gpt2_124m", ["--optim", optim]), Cluster(load_gpu("h100"), 8))
        for optim in ("adamw_torch_fused", "muon")
    )
    assert 1.01 < muon.step_seconds / plain.step_seconds < 1.05  # modded-nanogpt measured 1.025
    assert muon.plan.parts["optimizer"] == 8 * count_parameters(load_run("gpt2_124m", [])[1]) - 4 * 84_934_656


@pytest.mark.parametrize(
    ("recipe", "published"),
    [("gpt2_124m", 10e9 / (45 * 60) / 8), ("gpt2_1558m", 32_000 * 1_048_576 / (24 * 3600) / 8)],
)
def test_estimates_are_close_to_published_runs(recipe, published):
    """Tokens/s of each of eight H100s: llm.c's PyTorch trainer (modded-nanogpt's README); llm.c (discussion 677)."""
    run = forecast(*load_run(recipe, []), Cluster(load_gpu("h100"), 8))
    assert run.tokens_per_second / 8 == pytest.approx(published, rel=0.15)


# ------------------------------------------------------------------ the whole plan


def test_what_a_plan_adds_up_to(capsys):
    """The issue's example: every number follows from the time of a step."""
    content = plan_as_json(capsys, *THE_COMMAND)
    plan, seconds = content["plan"], content["plan"]["step_seconds"]
    assert plan["tokens_per_step"] == 524_288 and plan["num_steps"] == 30_000 and plan["source"] == "estimated"
    assert plan["plan"]["micro_batch_size"] * plan["num_micro_batches"] * 16 == 512
    assert plan["tokens_per_second"] == pytest.approx(524_288 / seconds)
    assert plan["gpu_hours"] == pytest.approx(30_000 * seconds * 16 / 3600)
    assert plan["days"] == pytest.approx(30_000 * seconds / 86_400)
    assert plan["energy_kwh"] == pytest.approx(plan["gpu_hours"] * 0.4)
    assert plan["cost"] == pytest.approx(plan["gpu_hours"] * 1.5)
    flops_per_token = 6 * (774_090_240 - 1024 * 1280) + 12 * 36 * 1280 * 1024
    assert plan["mfu"] == pytest.approx(plan["tokens_per_second"] * flops_per_token / (16 * 312e12))
    assert plan["memory_bytes"] < content["gpu"]["memory_gib"] * 2**30


def test_scaling_keeps_the_batch_or_the_share():
    """Strong: the same batch. Weak: the same rows per GPU and the same tokens. Nodes have eight GPUs."""
    config, model_config = load_run("gpt2_124m", [])
    cluster = Cluster(load_gpu("h100"), 16, 2)
    strong, weak = (scaling(config, model_config, cluster, is_weak) for is_weak in (False, True))
    assert list(strong) == list(weak) == [1, 2, 4, 8, 16, 32, 64]
    assert {run.num_rows for run in strong.values()} == {512} and strong[16] == weak[16]
    assert [run.num_rows for run in weak.values()] == [32 * n for n in weak]
    assert [run.num_nodes for run in strong.values()] == [1, 1, 1, 1, 2, 4, 8]
    tokens = [run.num_steps * run.tokens_per_step for run in weak.values()]
    assert max(tokens) / min(tokens) == pytest.approx(1, abs=1e-4)
    rates = [run.tokens_per_second for run in strong.values()]
    assert rates[:4] == sorted(rates[:4]) and rates[4] < 2 * rates[3]  # the network between nodes costs time
    odd = scaling(dataclasses.replace(config, global_batch_size=48), model_config, cluster, False)
    assert "not divisible by 32" in odd[32] and odd[16].num_rows == 48


def test_memory_options_are_those_of_the_run():
    """What is typed is kept, and a limit of memory applies."""
    config, model_config = load_run("gpt2_124m", ["--per_device_train_batch_size", "4", "--loss_chunks", "2"])
    plan = forecast(config, model_config, Cluster(load_gpu("h100"))).plan
    assert (plan.micro_batch_size, plan.loss_chunks) == (4, 2)
    config, model_config = load_run("gpt2_124m", ["--gpu_memory_limit_gb", "8"])
    assert forecast(config, model_config, Cluster(load_gpu("h100"))).plan.total_bytes < 8e9


def test_precision_is_that_of_the_gpu():
    config, _ = load_run("gpt2_124m", [])
    assert resolve_setting(config, load_gpu("t4"), 1) == Setting("cuda", "fp16", True, False, 1)
    assert resolve_setting(config, load_gpu("a100-80gb"), 4) == Setting("cuda", "bf16", True, True, 4)


def test_the_vocabulary_is_that_of_the_dataset(dataset_dir):
    """Without a dataset it is GPT-2's. The dataset also sets the length of an epoch."""
    assert load_run("gpt2_124m", [])[1].vocab_size == 50304
    assert load_run("gpt2_124m", ["--dataset_dir", str(dataset_dir)])[1].vocab_size == 512
    rows = len(open_packed_dataset(dataset_dir).splits["train"])
    config, _ = load_run("gpt2_124m", ["--dataset_dir", str(dataset_dir), "--num_train_epochs", "2"])
    assert config.max_steps == math.ceil(2 * rows / 512)


# ------------------------------------------------------------------ measurements


def test_a_broken_result_file_is_named(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match=r"broken\.json is not valid JSON"):
        read_measurements(tmp_path)


@pytest.mark.parametrize("program", ["run_ladder", "first_gpu"])
def test_a_result_file_replaces_the_estimate(program, dataset_dir, tmp_path, capsys):
    """On one GPU the plan has the measured rate and says so; on several it adds an estimate of the communication."""
    setting = choose_setting("demo", str(dataset_dir), Machine("cpu", "CPU", bf16=False), 4)
    numbers = {"tokens_per_second": 12_345, "peak_memory_bytes": 2e9}
    content = {"environment": {"device": "NVIDIA A100-SXM4-80GB"}}
    if program == "run_ladder":
        content |= {"setting": setting.says, "ladder": [{"tokens_per_second": 1}, numbers, {"not_run": "no"}]}
    else:
        content |= {"name": "ours", "result": {"setting": setting.says, **numbers}}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "found.json").write_text(json.dumps(content))
    (tmp_path / "results" / "other.json").write_text("[1]")
    assert [found.gpu for found in read_measurements(tmp_path)] == ["a100-80gb"]
    common = ["--config", "demo", "--optim", "adamw_torch_fused", "--dataset_dir", dataset_dir, "--results", tmp_path]
    found = plan_as_json(capsys, *common, "--gpu", "a100-80gb")
    assert found["plan"]["source"] == "measured"
    assert found["plan"]["tokens_per_second"] == pytest.approx(12_345)
    assert found["strong"][1]["source"] == "estimated"
    assert 1.5 * 12_345 < found["strong"][1]["tokens_per_second"] < 2 * 12_345
    for other in (["--gpu", "h100"], ["--gpu", "a100-80gb", "--config_overrides", "n_layer=9"],
                  ["--gpu", "a100-80gb", "--activation_checkpointing", "true"]):  # fmt: skip
        assert plan_as_json(capsys, *common, *other)["plan"]["source"] == "estimated"


# ------------------------------------------------------------------ what is printed


def test_the_text_fits_a_terminal_and_has_the_numbers(capsys):
    """At most 80 columns; each number of the plan is marked."""
    assert run_script(SCRIPT, *THE_COMMAND) == ""
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    plan = lines[3 : lines.index("", 3)]
    assert all(line.endswith(("exact", "estimated")) for line in plan)
    text = "\n".join(lines)
    assert "5.81 GB per step" in text and "581 ms at 10 GB/s" in text and "524,288" in text
    assert "--num_processes 16" in text and "recipe/train.py --config gpt2_774m --dataset_dir DIR" in text


def test_the_command_of_an_older_gpu(capsys):
    """It repeats the options that were typed, and asks for fp16."""
    assert run_script(SCRIPT, "--gpu", "t4", "--train-file", "a b.txt", "--tokenizer_vocab_size=300") == ""
    text = capsys.readouterr().out
    assert "--config_file accelerate_configs/single_gpu.yaml" in text and "--mixed_precision fp16" in text
    assert "recipe/train.py --config gpt2_124m --train_file 'a b.txt' --tokenizer_vocab_size=300" in text


def test_the_readme_shows_the_table_of_presets(capsys):
    """Every cell is what the program prints today."""
    assert run_script(SCRIPT, "--table", "--markdown") == ""
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert "\n".join(table) in (ROOT / "README.md").read_text()


def test_the_table_of_presets(capsys):
    """Four sizes on ten classes of memory, in text, Markdown and JSON; each plan fits its class."""
    assert run_script(SCRIPT, "--table") == ""
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert run_script(SCRIPT, "--table", "--markdown") == ""
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [len(row) for row in rows] == [5] * 12
    assert all(cell == "-" or cell.endswith(" estimated") for row in rows[2:] for cell in row[1:])
    presets = plan_as_json(capsys, "--table")
    for name, sizes in presets.items():
        limit = float(name.partition(" GB")[0].rpartition(" ")[2]) * 2**30
        assert all(preset is None or preset["memory_bytes"] < limit for preset in sizes.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("", "pass --gpu"), ("--gpu a101", "did you mean a10"), ("--gpu t4 --num_gpux 2", "did you mean --num_gpus?"),
     ("--gpu t4 --max_stepz 2", "did you mean --max_steps?"), ("--gpu t4 --num_gpus 0", "must be greater than 0"),
     ("--gpu h100 --num_gpus 3", "global_batch_size 512 is not divisible by 3"),
     ("--gpu h100 --num_gpus 8 --num_nodes 3", "num_gpus 8 is not divisible by num_nodes 3"),
     ("--gpu rtx3060 --config gpt2_1558m", "the model does not fit into 12.5 GB"),
     ("--gpu l4 --config gpt2_1558m --dynamo_backend inductor", "the model does not fit into 23.6 GB"),
     ("--gpu t4 --mixed_precision bf16", "t4 has no bf16"), ("--gpu h100 --mixed_precision no", "no fp32 rates"),
     ("--gpu h100 --config gpt2_finetune", "num_train_epochs needs the size of the dataset"),
     ("--gpu h100 --results nowhere", "there is no folder nowhere"), ("--gpu h100 --config x", "there is no recipe")],
)  # fmt: skip
def test_mistakes_are_one_sentence(arguments, message):
    error = run_script(SCRIPT, *arguments.split())
    assert error.startswith("error: ") and message in error and "\n" not in error
