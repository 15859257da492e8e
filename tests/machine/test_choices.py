"""What every `auto` becomes: tables of facts, the probe that measures, and a resumed run that keeps the answers."""

import dataclasses

import pytest
import torch
from helpers import read_weights

from recipe.command_line import load_config
from recipe.hardware import accelerator, probe
from recipe.hardware.choices import Machine, choose, combine, settle, to_measure
from recipe.hardware.probe import Measured, measure_rates
from recipe.model.build import build_model_config

EPYC = Measured({"no": 3e11, "bf16": 6e11}, {"eager": 0.001, "sdpa": 0.002}, 4)  # bf16 pays, and plain attention
XEON = Measured({"no": 3.2e11, "bf16": 1.65e11}, {"eager": 0.003, "sdpa": 0.002}, 2)  # with AMX hidden from the guest
CLOSE = Measured({"no": 3e11, "bf16": 3.2e11}, {}, 4)
CPU = torch.device("cpu")
BF16_ON_CUDA = {"device_type": "cuda", "mixed_precision": "bf16"}  # in the checkpoint of a run on another GPU


def config_of(*argv):
    return load_config(["--dataset_dir", "d", "--max_steps", "9", *argv])[0]


def small_model(**shape):
    options = ",".join(f"{key}={value}" for key, value in {"n_layer": 2, "n_head": 2, "n_embd": 64, **shape}.items())
    return build_model_config(config_of("--config_overrides", options), 512, 0)


# ------------------------------------------------------------------ the choices


@pytest.mark.parametrize(
    ("argv", "machine", "measured", "label", "expected"),
    [
        # a CPU: what multiplies faster, and fp32 if there is no difference to speak of
        ("", {}, EPYC, "precision", "bf16"),
        ("", {}, XEON, "precision", "no"),
        ("", {}, CLOSE, "precision", "no"),
        ("", {"launcher_precision": "bf16"}, XEON, "precision", "bf16"),
        ("--mixed_precision no", {"launcher_precision": "bf16"}, EPYC, "precision", "no"),
        ("--bf16_residual", {}, EPYC, "residual", "bf16"),
        # other devices without data sheets are measured, too
        ("", {"device_type": "mps"}, EPYC, "precision", "bf16"),
        ("", {"device_type": "mps"}, EPYC, "dynamo", "no"),
        # CUDA: nothing is measured
        ("", {"device_type": "cuda"}, None, "precision", "bf16"),
        ("", {"device_type": "cuda", "has_bf16": False}, None, "precision", "fp16"),
        ("", {"device_type": "cuda"}, None, "dynamo", "inductor"),
        ("", {"device_type": "cuda", "why_no_inductor": "no Triton"}, None, "dynamo", "no"),
        ("", {"device_type": "cuda"}, None, "attention", "sdpa"),
        ("", {"device_type": "cuda", "has_bf16": False, "kept": BF16_ON_CUDA}, None, "precision", "fp16"),
        # compiling pays after 70 s of products at the measured rate: 4.2e13 FLOPs in bf16, 2.2e13 in fp32
        ("", {"total_flops": 4e13}, EPYC, "dynamo", "no"),
        ("", {"total_flops": 4e13}, XEON, "dynamo", "inductor_regional"),
        ("", {"total_flops": 5e13}, EPYC, "dynamo", "inductor_regional"),
        ("--max_minutes 2.75", {}, EPYC, "dynamo", "no"),
        ("--max_minutes 60", {}, EPYC, "dynamo", "inductor_regional"),
        ("", {"launcher_backend": "inductor", "total_flops": 1.0}, EPYC, "dynamo", "inductor"),
        ("--dynamo_backend aot_eager", {"launcher_backend": "inductor"}, EPYC, "dynamo", "aot_eager"),
        # the launcher's mode is shown where inductor compiles
        ("--dynamo_backend inductor", {"launcher_mode": "lite"}, EPYC, "mode", "lite"),
        # attention: plain where it is faster, never where it was too long to be measured
        ("", {}, EPYC, "attention", "eager"),
        ("", {}, XEON, "attention", "sdpa"),
        ("", {}, CLOSE, "attention", "sdpa"),
        ("--attn_implementation sdpa", {}, EPYC, "attention", "sdpa"),
        # threads: of the two numbers that make sense the fastest, unless the user has set one
        ("", {"thread_counts": (2, 4)}, EPYC, "threads", "4"),
        ("", {"thread_counts": (2, 4)}, XEON, "threads", "2"),
        ("", {"thread_counts": (2, 4), "typed_threads": 3}, EPYC, "threads", "3"),
    ],
)
def test_what_auto_becomes(argv, machine, measured, label, expected):
    choice = choose(config_of(*argv.split()), Machine(**{"device_type": "cpu"} | machine), measured)[label]
    assert choice.value == expected
    assert choice.reason


def test_what_all_processes_have_decides():
    """Two machines: what only one of them can do is not used, and the fewest threads count."""
    able = Machine("cpu", 2, has_bf16=True, typed_threads=4, thread_counts=(4, 8))
    unable = dataclasses.replace(able, has_bf16=False, why_no_inductor="no g++", typed_threads=2, thread_counts=(2,))
    assert combine([able, unable]) == combine([unable, able]) == unable


IN_THE_CHECKPOINT = {"device_type": "cpu", "mixed_precision": "no", "dynamo_backend": "no"}
IN_THE_CHECKPOINT |= {"attn_implementation": "sdpa", "num_threads": 1}


@pytest.mark.parametrize(
    ("argv", "kept", "machine", "expected"),
    [
        ("", {"device_type": "cuda"}, {}, ["bf16", "inductor_regional", "eager", "2"]),
        ("--mixed_precision bf16 --attn_implementation eager", {}, {}, ["bf16", "no", "eager", "1"]),
        ("", {}, {"thread_counts": (2, 3)}, ["no", "no", "sdpa", "3"]),  # another machine
        ("", {"dynamo_backend": "inductor"}, {"why_no_inductor": "no g++"}, ["no", "no", "sdpa", "1"]),
        ("", {"mixed_precision": "bf16"}, {}, ["bf16", "no", "sdpa", "1"]),
    ],
)
def test_a_resumed_run_keeps_what_was_measured(argv, kept, machine, expected):
    """Whatever is measured now, unless it is typed, impossible here, or the run moves to another type of device."""
    machine = Machine("cpu", **{"thread_counts": (1, 2), "kept": IN_THE_CHECKPOINT | kept, **machine})
    measured = dataclasses.replace(EPYC, num_threads=machine.thread_counts[-1])
    choices = choose(config_of(*argv.split()), machine, measured)
    assert [choices[label].value for label in ("precision", "dynamo", "attention", "threads")] == expected


def test_a_precision_that_is_kept_though_it_is_slow_here_says_so():
    """On another CPU, bf16 may take many times as long. The reason names the option."""
    kept = IN_THE_CHECKPOINT | {"mixed_precision": "bf16"}
    slow = Measured({"no": 3e10, "bf16": 1e9}, {}, 1)
    choice = choose(config_of(), Machine("cpu", kept=kept), slow)["precision"]
    assert choice.value == "bf16" and "30.0 times" in choice.reason and "--mixed_precision no" in choice.reason
    assert choose(config_of(), Machine("cpu", kept=kept), EPYC)["precision"].reason == "as in the checkpoint"


def test_a_killed_run_keeps_its_answers(train, tmp_path, monkeypatch):
    """A run resumed with the probe's answer inverted ends with the weights of an uninterrupted one."""
    auto = ["--mixed_precision", "auto", "--dynamo_backend", "no", "--attn_implementation", "auto"]

    def run(name, measured, *argv):
        monkeypatch.setattr(accelerator, "measure_rates", lambda *_: measured)
        folder = train(*auto, *argv, output_dir=tmp_path / name)
        return read_weights(folder)

    whole = run("whole", EPYC)
    run("killed", EPYC, "--max_steps", "3", "--save_steps", "2")
    again = ["--resume_from_checkpoint", str(tmp_path / "killed" / "checkpoint-2")]
    assert run("resumed", XEON, *again) == whole
    assert run("other", XEON) != whole


# ------------------------------------------------------------------ the probe


TYPED_PRECISION = ["--mixed_precision", "no"]
TYPED = [*TYPED_PRECISION, "--dynamo_backend", "no", "--attn_implementation", "sdpa"]


@pytest.mark.parametrize(
    ("argv", "machine", "expected"),
    [
        ([], Machine("cpu"), ["no", "bf16"]),
        (TYPED_PRECISION, Machine("cpu"), ["no"]),
        (TYPED, Machine("cpu"), []),
        (TYPED, Machine("cpu", thread_counts=(1, 2)), ["no"]),
        ([], Machine("cuda"), []),
    ],
)
def test_only_what_is_open_is_measured(argv, machine, expected):
    assert to_measure(settle(config_of(*argv), machine), machine) == expected


@pytest.mark.parametrize("factor", [0.5, 40.0])  # 40: a processor that only emulates bf16
def test_the_rates_are_those_computed_by_hand(monkeypatch, factor):
    """Each product counts as often as the model has it.

    Of a machine on which a product takes 1 ms, `factor` times as long in bf16, and a fifth of all calls five times.
    """
    calls = iter(range(10**9))

    def pretend(rounds, device, function):
        slow = 5.0 if next(calls) % 5 == 0 and rounds == 1 else 1.0
        return slow * (factor if function().dtype == torch.bfloat16 else 1.0) * 1e-3

    monkeypatch.setattr(probe, "SIDE_SECONDS", 0.0)  # 64 rows and columns
    monkeypatch.setattr(probe, "best_of", pretend)
    monkeypatch.setattr(probe, "time_attention", lambda *_: {})
    found = measure_rates(CPU, small_model(), 32).flops_per_second
    width = 64
    vocab = 512
    # a product has 64 x k x 64 multiply-adds of the k x columns that a token needs
    blocks = 2 * (2 * width * 4 * width) / (2 * 64 * 64 * 64) + 2 * 4 * width * width / (2 * 64 * 4 * 64 * 64)
    seconds = (blocks + width * vocab / (2 * 64 * 64 * 64)) * 1e-3
    by_hand = 2 * (2 * 12 * width * width + width * vocab) / 2 / seconds
    assert found == pytest.approx({"no": by_hand, "bf16": by_hand / factor}, rel=1e-9)


def test_a_probe_of_a_large_model_takes_less_than_two_seconds_and_leaves_no_trace():
    """Random state and number of threads stay as they were."""
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    large = small_model(n_layer=48, n_head=25, n_embd=1600)  # 1.5 B parameters
    measured = []
    for _ in range(3):  # another program may take the core
        seconds = probe.best_of(1, CPU, lambda: measured.append(measure_rates(CPU, large, 1024)))
        if seconds < 2:
            break
    assert seconds < 2
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    assert measured[-1].flops_per_second["no"] > 1e8
    assert set(measured[-1].attention_seconds) == {"eager", "sdpa"}


def test_plain_attention_of_long_rows_is_not_measured():
    assert measure_rates(CPU, small_model(), 4096, ["no"]).attention_seconds == {}


def test_a_product_of_an_accelerator_is_over_when_the_device_says_so(monkeypatch):
    waits = []
    module = type("Module", (), {"synchronize": staticmethod(lambda: waits.append(1))})
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    measure_rates(torch.device("meta"), small_model(), 32)
    assert len(waits) > 20
