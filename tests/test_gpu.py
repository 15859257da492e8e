"""Claims that need a GPU. `pytest -m gpu` runs only these; without a CUDA device they are skipped."""

import gc
import gzip
import json
import math
import shutil

import pytest
import torch
from conftest import read_events
from safetensors.torch import load_file
from torch._dynamo.utils import counters

import recipe.train
from recipe.errors import ProcessError
from recipe.hardware import memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: GPU paths are not tested on this machine"
    ),
]
BF16 = ["--mixed_precision", "bf16"]
COMPILED = [*BF16, "--dynamo_backend", "inductor"]


@pytest.fixture(autouse=True)
def whole_gpu():
    """Each test has all of the memory and restores the switches of the process."""
    precision = torch.get_float32_matmul_precision()
    free_memory()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.set_sync_debug_mode("default")


def free_memory():
    """Release memory that PyTorch keeps from earlier runs, because a later run could use it beyond its cap."""
    gc.unfreeze()  # a run excludes what it has built from collection
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.fixture
def before_each_step(monkeypatch):
    """Call a function before each step, and at the end, with the number of steps that are done."""

    def install(function):
        decide_turn = recipe.train.decide_turn

        def decide_and_more(run, state, stop):
            function(state.step)
            return decide_turn(run, state, stop)

        monkeypatch.setattr(recipe.train, "decide_turn", decide_and_more)

    return install


def fast_attention(output_dir):
    """Return the fused attention operators in the trace of a run."""
    trace = json.loads(gzip.decompress((output_dir / "trace.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    return names & {f"aten::_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "cudnn")}


@pytest.mark.parametrize("switches", [BF16, COMPILED, [*COMPILED, "--activation_checkpointing"]])
def test_flash_or_cudnn_attention_really_runs(train, switches):
    """The operators of a trace show it, not the option."""
    assert fast_attention(train(*switches, "--max_steps", "8", "--profile", "3"))


def test_other_attention_is_recognized(train):
    """The test above can fail: with plain matmuls, neither runs."""
    switches = ["--max_steps", "8", "--profile", "3", "--attn_implementation", "eager"]
    assert not fast_attention(train(*COMPILED, *switches))


def test_no_graph_break_and_no_recompilation(train):
    """Training compiles one graph and evaluation another, for any number of steps and evaluations."""
    counters.clear()
    train(*COMPILED, "--max_steps", "12", "--eval_steps", "4", "--per_device_train_batch_size", "2")
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


@pytest.mark.parametrize("placement", ["mmap", "device"])
@pytest.mark.parametrize("switches", [BF16, COMPILED, [*COMPILED, "--optim", "muon"]])
def test_no_host_synchronization_between_log_lines(train, before_each_step, placement, switches):
    """CUDA raises if the host waits for the device, from the fourth step to the one before the last."""

    def watch(step):
        torch.cuda.set_sync_debug_mode("error" if 3 <= step < 11 else "default")

    before_each_step(watch)
    train(*switches, "--max_steps", "12", "--logging_steps", "1000", "--data_placement", placement)


def test_a_synchronization_raises(train, before_each_step):
    """The test above can fail."""

    def watch(step):
        torch.cuda.set_sync_debug_mode("error" if 3 <= step < 11 else "default")

    before_each_step(watch)
    with pytest.raises(RuntimeError, match="synchroniz"):
        train(*BF16, "--max_steps", "12", "--logging_steps", "1000", "--optim", "adamw_torch")


def test_fp16_with_its_scaler_trains_like_fp32(train, tmp_path):
    """Scaled gradients are unscaled before clipping; overflows skip updates and are counted."""
    options = ["--max_steps", "40", "--lr_scheduler_type", "constant_with_warmup"]
    fp32, fp16 = (
        read_events(train(*options, "--mixed_precision", precision, output_dir=tmp_path / precision), "train")
        for precision in ("no", "fp16")
    )
    assert all(math.isfinite(event["loss"]) for event in fp16)
    assert fp16[-1]["loss"] == pytest.approx(fp32[-1]["loss"], abs=0.1)
    assert fp16[-1]["grad_norm"] == pytest.approx(fp32[-1]["grad_norm"], rel=0.3)
    assert fp16[-1]["skipped_steps"] <= 5


@pytest.mark.parametrize("switches", [BF16, COMPILED])
def test_a_resumed_run_repeats_bit_for_bit_with_deterministic_algorithms(train, tmp_path, switches):
    """Losses after the checkpoint and final weights equal those of an uninterrupted run."""
    options = [*switches, "--deterministic", "--max_steps", "12", "--save_steps", "6"]
    options += ["--per_device_train_batch_size", "2"]
    try:
        whole = train(*options, output_dir=tmp_path / "whole")
        shutil.copytree(whole / "checkpoint-6", tmp_path / "resumed" / "checkpoint-6")
        resumed = train(*options, "--resume_from_checkpoint", "latest", output_dir=tmp_path / "resumed")
    finally:
        torch.use_deterministic_algorithms(False)
    losses = [[event["loss"] for event in read_events(run, "train")] for run in (whole, resumed)]
    assert len(losses[1]) == 6 and losses[0][6:] == losses[1]
    weights = [load_file(run / "model.safetensors") for run in (whole, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_bf16_residual_stream_changes_the_losses_by_rounding(train, tmp_path):
    switches = [], ["--bf16_residual"]
    runs = [train(*COMPILED, *options, output_dir=tmp_path / str(len(options))) for options in switches]
    losses = [[event["loss"] for event in read_events(run, "train")] for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


def test_tf32_is_a_switch(train, before_each_step, tmp_path):
    a, b = (torch.randn(1024, 1024, device="cuda") for _ in range(2))
    exact, found = a.double() @ b.double(), []

    def look(_):
        found.append((torch.get_float32_matmul_precision(), (a @ b - exact).abs().max().item()))

    before_each_step(look)
    for switch, expected in (("true", "high"), ("false", "highest")):
        train("--tf32", switch, "--max_steps", "1", output_dir=tmp_path / switch)
        precision, error = found[-1]
        assert precision == expected
        has_tf32 = torch.cuda.get_device_capability() >= (8, 0)  # sums of 1,024 products: 10 bits of mantissa, or 23
        assert (error > 2e-3) == (switch == "true" and has_tf32), error


def test_rows_on_the_device_are_the_same_rows(train, tmp_path):
    """Rows from the file, from memory and from the GPU lead to the same losses."""
    runs = [
        [
            e["loss"]
            for e in read_events(train("--data_placement", placement, output_dir=tmp_path / placement), "train")
        ]
        for placement in ("mmap", "ram", "device")
    ]
    assert runs[0] == runs[1] == runs[2]


@pytest.fixture
def limit_memory(monkeypatch):
    """Leave this process a part of the GPU's memory, in bytes, as on a smaller one; the CUDA context counts."""

    def limit(num_bytes):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((num_bytes - memory.PROCESS_BYTES) / total)
        monkeypatch.setattr(memory, "measure_usable_bytes", lambda *_: int(num_bytes))

    return limit


LARGE = ["--config_overrides", "n_layer=8,n_head=4,n_embd=256", "--global_batch_size", "512"]


def test_the_micro_batch_follows_the_memory(train, limit_memory, tmp_path):
    """With less memory `auto` chooses a smaller micro-batch, and the losses stay the same."""
    found = []
    for name in ("all", "less"):
        if name == "less":
            limit_memory(1.5e9)
        output_dir = train(*LARGE, output_dir=tmp_path / name)
        summary = json.loads((output_dir / "summary.json").read_text())
        found.append((summary["per_device_train_batch_size"], [e["loss"] for e in read_events(output_dir, "train")]))
        free_memory()
    assert found[0][0] == 512 > found[1][0]
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-3)


def test_out_of_memory_in_the_middle_of_a_run(train, before_each_step, tmp_path):
    """The same command starts again in smaller pieces; the losses equal those of a run with enough memory."""
    whole = read_events(train(*LARGE, output_dir=tmp_path / "whole"), "train")
    free_memory()

    taken = []

    def take_memory_away(step):
        if step == 2 and not taken:
            taken.append(step)
            total, peak = torch.cuda.get_device_properties(0).total_memory, torch.cuda.max_memory_allocated()
            free_memory()
            torch.cuda.set_per_process_memory_fraction(0.6 * peak / total)

    before_each_step(take_memory_away)
    output_dir = tmp_path / "less"
    with pytest.raises(ProcessError, match="out of memory; the same command"):
        train(*LARGE, output_dir=output_dir)
    free_memory()
    train(*LARGE, "--resume_from_checkpoint", "auto", output_dir=output_dir)
    assert json.loads((output_dir / "summary.json").read_text())["per_device_train_batch_size"] < 512
    losses = [e["loss"] for e in read_events(output_dir, "train")]
    assert losses == pytest.approx([e["loss"] for e in whole], abs=1e-3)


def test_124m_trains_on_8_gb(train, limit_memory, tmp_path, jsonl_file, tokenizer_dir):
    """The recipe trains 512 rows of 1,024 tokens per step, with GPT-2's number of logits."""
    limit_memory(8e9)
    text = ["--train_file", jsonl_file, "--tokenizer_name", tokenizer_dir, "--cache_dir", tmp_path / "data"]
    recipe = ["--config", "gpt2_124m", *text, "--pad_vocab_to_multiple_of", "50304", *COMPILED]
    fixed = ["--max_steps", "2", "--save_steps", "0", "--output_dir", tmp_path / "run"]
    summary = json.loads((train(*recipe, *fixed, alone=True) / "summary.json").read_text())
    assert summary["tokens_seen"] == 2 * 512 * 1024 and summary["per_device_train_batch_size"] < 512
    assert summary["peak_memory_bytes"] < 8e9
