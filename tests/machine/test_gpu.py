"""Claims that need a GPU. `pytest -m gpu` runs only these; without a CUDA device they are skipped."""

import contextlib
import gc
import gzip
import json
import math
import shutil

import pytest
import torch
from helpers import ONE_STEP, read_events, read_summary, values_of
from safetensors.torch import load_file

import recipe.train
from recipe.errors import UserError
from recipe.hardware.devices import rounds_products
from recipe.hardware.memory import PROCESS_BYTES

pytestmark = pytest.mark.gpu
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


@pytest.mark.parametrize(
    ("switches", "is_fast"),
    [
        (BF16, True),
        (COMPILED, True),
        ([*COMPILED, "--activation_checkpointing"], True),
        ([*COMPILED, "--attn_implementation", "eager"], False),  # which shows that the others can fail
    ],
)
def test_flash_or_cudnn_attention_really_runs(train, switches, is_fast):
    """The operators of a trace show it, not the option."""
    output_dir = train(*switches, "--max_steps", "8", "--profile", "3")
    trace = json.loads(gzip.decompress((output_dir / "trace.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    fast = {f"aten::_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "cudnn")}
    assert bool(names & fast) == is_fast


@pytest.mark.parametrize(
    ("switches", "waits"),
    [
        (BF16, False),
        (COMPILED, False),
        ([*COMPILED, "--optim", "muon"], False),
        ([*BF16, "--optim", "adamw_torch"], True),  # not fused; which shows that the others can fail
    ],
)
def test_the_host_does_not_wait_for_the_gpu_between_log_lines(train, before_each_step, switches, waits):
    """CUDA raises if it does, from the fourth step to the one before the last of twelve."""
    before_each_step(lambda step: torch.cuda.set_sync_debug_mode("error" if 3 <= step < 11 else "default"))
    with pytest.raises(RuntimeError, match="synchroniz") if waits else contextlib.nullcontext():
        train(*switches, "--max_steps", "12", "--logging_steps", "1000")


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
        resumed = train(*options, "--resume_from_checkpoint", "auto", output_dir=tmp_path / "resumed")
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(values_of(resumed, "loss")) == 6
    assert values_of(resumed, "loss") == values_of(whole, "loss")[6:]
    weights = [load_file(run / "model.safetensors") for run in (whole, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_tf32_is_a_switch(train, before_each_step, tmp_path):
    a, b = (torch.randn(1024, 1024, device="cuda") for _ in range(2))
    exact = a.double() @ b.double()
    found = []

    def look(_):
        rounds = rounds_products(torch.device("cuda"))
        found.append((torch.get_float32_matmul_precision(), (a @ b - exact).abs().max().item(), rounds))

    before_each_step(look)
    for switch, expected in (("true", "high"), ("false", "highest")):
        train("--tf32", switch, *ONE_STEP, output_dir=tmp_path / switch)
        precision, error, rounds = found[-1]
        assert precision == expected
        has_tf32 = torch.cuda.get_device_capability() >= (8, 0)  # sums of 1,024 products: 10 bits of mantissa, or 23
        assert (error > 2e-3) == rounds == (switch == "true" and has_tf32), error


LARGE = ["--config_overrides", "n_layer=8,n_head=4,n_embd=256", "--global_batch_size", "512"]


def test_after_a_lack_of_memory_the_same_command_goes_on_in_smaller_pieces(train, before_each_step, tmp_path):
    """The losses equal those of a run with enough memory."""
    whole = train(*LARGE, output_dir=tmp_path / "whole")
    assert read_summary(whole)["per_device_train_batch_size"] == 512
    free_memory()
    taken = []

    def take_memory_away(step):
        if step == 2 and not taken:
            taken.append(step)
            total = torch.cuda.get_device_properties(0).total_memory
            peak = torch.cuda.max_memory_allocated()
            free_memory()
            torch.cuda.set_per_process_memory_fraction(0.6 * peak / total)

    before_each_step(take_memory_away)
    with pytest.raises(UserError, match="out of memory"):
        train(*LARGE)
    free_memory()
    less = train(*LARGE, "--resume_from_checkpoint", "auto")
    assert read_summary(less)["per_device_train_batch_size"] < 512
    assert values_of(less, "loss") == pytest.approx(values_of(whole, "loss"), abs=1e-3)


def test_124m_trains_on_8_gb(train, monkeypatch, tmp_path, jsonl_file, tokenizer_dir):
    """The recipe trains 512 rows of 1,024 tokens per step, with GPT-2's number of logits, as on a smaller GPU."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((8e9 - PROCESS_BYTES) / total)  # the CUDA context counts
    monkeypatch.setattr("recipe.run.start.measure_usable_bytes", lambda *_: int(8e9))
    text = ["--train_file", jsonl_file, "--tokenizer_name", tokenizer_dir, "--cache_dir", tmp_path / "data"]
    recipe = ["--config", "gpt2_124m", *text, "--pad_vocab_to_multiple_of", "50304", *COMPILED]
    fixed = ["--max_steps", "2", "--save_steps", "0", "--output_dir", tmp_path / "run"]
    summary = read_summary(train(*recipe, *fixed, alone=True))
    assert summary["tokens_seen"] == 2 * 512 * 1024
    assert summary["per_device_train_batch_size"] < 512
    assert summary["peak_memory_bytes"] < 8e9
