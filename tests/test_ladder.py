"""The ladder: each rung changes what it claims, its numbers mean what they say, and the README shows them."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import BLOCK_SIZE, ROOT
from torch.nn import functional as F

import recipe.benchmark.measure
import recipe.hardware.accelerator
import recipe.train
from recipe.benchmark.ladder import (
    BOTTOM,
    RUN_OPTIONS,
    ablations,
    build_extras,
    build_memory_rungs,
    build_rungs,
    choose_micro_batch,
    climb,
    options_of,
)
from recipe.benchmark.machine import Machine
from recipe.benchmark.measure import (
    LAP,
    Goal,
    Setting,
    combine,
    loss_delta,
    measure,
    summarize_events,
    to_arguments,
    why_it_ended,
)
from recipe.benchmark.runner import pays
from recipe.benchmark.tables import peer_row, text_row, to_markdown, to_short_markdown
from recipe.command_line import load_config
from recipe.config import PROFILED_STEPS, TrainConfig
from recipe.data.packed import PackedSplit
from recipe.errors import UserError
from recipe.model.loss import LanguageModelingLoss

spec = importlib.util.spec_from_file_location("run_ladder", ROOT / "scripts" / "run_ladder.py")
run_ladder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_ladder)
CPU = Machine("cpu", "a CPU", bf16=True)
H200 = Machine("cuda", "NVIDIA H200", bf16=True, tf32=True, memory_bytes=150_000_000_000)
T4 = Machine("cuda", "Tesla T4", bf16=False, memory_bytes=15_000_000_000)


# ------------------------------------------------------------------ what each switch changes


def observe(train, monkeypatch, options: dict) -> dict:
    """Run 9 steps of the training program with these options, and see what it does."""
    seen = {"sdpa": set(), "rows_per_read": set(), "blocks": 0, "head_rows": set(), "keep": 0, "host_reads": 0}
    with monkeypatch.context() as patch:

        def build_model(*args):
            model = original_build_model(*args)
            seen["vocabulary"] = model.lm_head.weight.shape[0]
            seen["tied"] = model.lm_head.weight is model.transformer.wte.weight
            block = model.transformer.h[0]
            block.mlp.c_fc.register_forward_hook(lambda *_: seen.__setitem__("blocks", seen["blocks"] + 1))
            block.mlp.c_fc.register_forward_hook(lambda m, i, output: seen.__setitem__("matmul", output.dtype))
            block.mlp.register_forward_pre_hook(lambda m, i: seen.__setitem__("gelu", type(m.act).__name__))
            model.transformer.ln_f.register_forward_pre_hook(lambda m, i: seen.__setitem__("residual", i[0].dtype))
            model.lm_head.register_forward_hook(
                lambda m, i, output: seen["head_rows"].add(i[0].numel() // i[0].shape[-1])
            )
            return model

        def build_optimizer(config, module):
            optimizer = original_build_optimizer(config, module)
            seen["index_mask"] = module.index_mask
            seen["fused"] = bool(optimizer.defaults["fused"])
            return optimizer

        def sdpa(*args, **kwargs):
            seen["sdpa"].add((kwargs["is_causal"], kwargs.get("attn_mask") is None))
            return original_sdpa(*args, **kwargs)

        def read(split, indices):
            seen["rows_per_read"].add(len(indices))
            return original_read(split, indices)

        def counted(method):
            def read_by_the_host(tensor):
                seen["host_reads"] += 1
                return method(tensor)

            return read_by_the_host

        def compile_(module, **kwargs):
            seen["compiled"] = (type(module).__name__, kwargs["backend"], kwargs["mode"], kwargs["fullgraph"])

        original_build_model, original_build_optimizer = recipe.train.build_model, recipe.train.build_optimizer
        original_sdpa, original_read = F.scaled_dot_product_attention, PackedSplit.__getitem__
        patch.setattr(recipe.train, "build_model", build_model)
        patch.setattr(recipe.train, "build_optimizer", build_optimizer)
        evaluated = {"loss": 0, "perplexity": 1, "bits_per_byte": 0, "num_rows": 1, "seconds": 0.0}
        patch.setattr(recipe.train, "evaluate_model", lambda *args: evaluated)
        patch.setattr(recipe.train, "sample_from", lambda *args, **kwargs: "")
        patch.setattr(F, "scaled_dot_product_attention", sdpa)
        patch.setattr(PackedSplit, "__getitem__", read)
        for name in ("tolist", "item", "__bool__", "__float__", "__int__"):
            patch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
        patch.setattr(torch.nn.Module, "compile", compile_)  # that inductor computes the same is in test_runtime.py
        train(*to_arguments({**RUN_OPTIONS, **options, "max_steps": 9, "overwrite": True}))
    seen.setdefault("compiled", None)
    return seen


@pytest.fixture(scope="module")
def observed():
    """What was seen with which options: rungs share their neighbours."""
    return {}


IN_GRAPH, LOGITS = "LanguageModelingLoss", "GPT2LMHeadModel"
COMPILED = (IN_GRAPH, "inductor", "default", True)
CUDA_ONLY = [rung for rung in build_rungs(H200) if rung.name in ("sigmoid_gelu", "index_mask")]  # seen on a CPU too
ALL = [*build_rungs(CPU), *build_extras(CPU, 2, 4), *build_memory_rungs(CPU), *CUDA_ONLY]


@pytest.mark.parametrize(
    ("name", "key", "before", "after"),
    [
        ("tied", "tied", False, True),
        ("half", "matmul", torch.float32, torch.bfloat16),
        ("compile", "compiled", None, (LOGITS, "inductor", "default", True)),
        ("flash", "sdpa", set(), {(True, True)}),
        ("padding", "vocabulary", 500, 512),
        ("fused", "fused", False, True),
        ("packed", "rows_per_read", {1}, {2}),
        ("no_sync", "host_reads", 10, 5),  # at each of 9 steps; at 1, 4, 8, 9; and the seed of the DataLoader
        ("loss_in_graph", "compiled", (LOGITS, "inductor", "default", True), COMPILED),
        ("attention", "sdpa", {(True, True)}, set()),
        ("micro_batch_4", "rows_per_read", {2}, {4}),
        ("bf16_residual", "residual", torch.float32, torch.bfloat16),
        ("sigmoid_gelu", "gelu", "NewGELUActivation", "SigmoidGELU"),
        ("index_mask", "index_mask", False, True),
        ("tuned", "compiled", COMPILED, (IN_GRAPH, "inductor", "max-autotune-no-cudagraphs", True)),
        ("loss_chunks", "head_rows", {2 * BLOCK_SIZE}, {2 * BLOCK_SIZE // 8}),
        ("checkpointing", "blocks", 18, 36),
    ],
)  # fmt: skip
def test_a_rung_changes_what_it_claims(train, monkeypatch, observed, name, key, before, after):
    """Type, kernel, mask, optimizer, graph, batches: seen in the running program, with and without the switch."""
    rung = next(rung for rung in ALL if rung.name == name)
    rungs = build_rungs(CPU)
    below = options_of(rungs[: rungs.index(rung)]) if rung in rungs else options_of(rungs)
    batch = {"global_batch_size": 4, "per_device_train_batch_size": 2}
    found = []
    for options in ({**batch, **below}, {**batch, **combine(below, rung.on)}):
        if json.dumps(options) not in observed:
            observed[json.dumps(options)] = observe(train, monkeypatch, options)
        found.append(observed[json.dumps(options)][key])
    assert found == [before, after]


def test_every_rung_has_its_claim():
    """The test above covers all but those that only a GPU can run (test_gpu.py) and huge pages (test_memory.py)."""
    claims = {parameters[0] for parameters in test_a_rung_changes_what_it_claims.pytestmark[0].args[1]}
    assert {rung.name for rung in (*ALL, *build_rungs(H200))} - claims == {"bottom", "tf32", "8gb", "huge_pages"}


# ------------------------------------------------------------------ what is run


def test_the_top_of_the_ladder_is_the_recipe():
    """Its options are the defaults of recipe/train.py, or what their `auto` takes on the machine."""
    resolved = {"mixed_precision": "bf16", "dynamo_backend": "inductor", "attn_implementation": "sdpa"}
    for machine in (CPU, H200):
        resolved |= dict.fromkeys(("bf16_residual", "sigmoid_gelu", "index_mask"), machine is H200)
        rungs = build_rungs(machine)
        options = options_of(rungs)
        options.pop("logging_steps")
        assert options.pop("config_overrides") == "tie_word_embeddings=true"
        cannot = {key for rung in rungs if rung.why_not for key in rung.on}
        for key, value in options.items():
            default = TrainConfig.__dataclass_fields__[key].default
            assert value == default or (default == "auto" and value == resolved[key]) or key in cannot, key


def test_the_bottom_has_nothing_on():
    """Each switch of a rung is off, or other, at the bottom."""
    for rung in build_rungs(H200):
        assert all(BOTTOM[key] != value for key, value in rung.on.items()), rung.name


def test_each_rung_adds_one_switch():
    """A rung differs from the one below it in its own options only; one that cannot run changes nothing above it."""
    climbed = climb(build_rungs(CPU))
    for (below, options_below), (rung, options) in zip(climbed, climbed[1:], strict=False):
        if below.why_not is None:
            assert {key for key in options if options[key] != options_below.get(key)} == set(rung.on)
    assert climbed[-1][1]["tf32"] is False


def test_an_ablation_takes_one_switch_back():
    """All differ from the top in one option, which has its value from below the rung."""
    (_, top), *others, (_, again) = ablations(build_rungs(CPU))
    assert again == top
    taken_back = {}
    for rung, options in others:
        if rung.why_not is not None:
            continue
        (key,) = (key for key in top if options[key] != top[key])
        taken_back[rung.name] = (key, options[key])
    assert taken_back["half"] == ("mixed_precision", "no") and taken_back["attention"] == (
        "attn_implementation",
        "sdpa",
    )
    assert taken_back["tied"] == ("config_overrides", "tie_word_embeddings=false")
    assert "flash" not in taken_back  # the rung `attention` decides about the same option
    assert len(taken_back) == len(build_rungs(CPU)) - 3  # bottom, tf32, flash


def test_a_machine_without_bf16_takes_fp16():
    """And has a reason for what it cannot run."""
    rungs = {rung.name: rung for rung in build_rungs(T4)}
    assert rungs["half"].on == {"mixed_precision": "fp16"} and "scaler" in rungs["half"].what
    assert rungs["tf32"].why_not == "Tesla T4 has no TF32" and rungs["huge_pages"].why_not


def test_the_micro_batch_fits_the_memory():
    """At about 4 GB a row of the bottom rung of 124 M parameters."""
    assert [choose_micro_batch(machine, 124_000_000) for machine in (H200, T4, CPU)] == [16, 2, 4]
    assert choose_micro_batch(H200, 1_558_000_000) == 2 and choose_micro_batch(T4, 10**10) == 1


# ------------------------------------------------------------------ what is read


def setting_of(dataset_dir, block_size=BLOCK_SIZE) -> Setting:
    options = {**RUN_OPTIONS, "config": "demo", "dataset_dir": str(dataset_dir), "block_size": block_size}
    options["config_overrides"] = "n_layer=2,n_head=2,n_embd=32"
    return Setting("a model", options, {"n_layer": 2, "n_head": 2, "n_embd": 32}, 500, block_size, 1000, 2, 4)


def event(step, tokens_per_second, loss=1.0, **more):
    return {"event": "train", "step": step, "loss": loss, "tokens_per_second": tokens_per_second,
            "peak_memory_bytes": 5, **more}  # fmt: skip


def test_laps_with_compiling_or_profiling_do_not_count():
    """128 tokens a step, laps of 4: the first one and the profiled steps are left out, and single steps grouped."""
    profile = {"event": "profile", "step": 15, "attention_kernel": "flash", "matmul_ms": 2.0, "step_ms": 5.0}
    events = [event(1, 1), event(4, 10), event(8, 128), event(12, 64), event(16, 1), profile]
    found = summarize_events(events, setting_of("d"), profile_after=12)
    assert (found["step_ms"], found["step_ms_lowest"], found["step_ms_highest"]) == (1500, 1000, 2000)
    assert (found["num_laps"], found["tokens_per_second"], found["peak_memory_bytes"]) == (2, 85, 5)
    assert found["profile_ms"] == {"matmul": 2.0, "step": 5.0} and found["attention_kernel"] == "flash"
    single = [event(step, 128 if step % 4 else 32) for step in range(1, 13)]  # 1 s, and 4 s every fourth
    assert summarize_events([*single, profile], setting_of("d"), 12)["step_ms"] == 1750
    assert summarize_events([*single[:6], profile], setting_of("d"), 12) is None


def test_the_loss_is_compared_over_the_same_steps():
    """The last line whose steps the reference has all: a mean against a mean."""
    reference = {1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0}
    assert loss_delta({1: 5.0, 2: 4.0, 4: 2.75}, reference) == pytest.approx(0.25)
    assert loss_delta({1: 5.0, 4: 3.1, 8: 9.0}, reference) == pytest.approx(0.1)
    assert loss_delta({8: 1.0}, reference) is None
    assert loss_delta({1: 5.0, 2: None}, reference) is None  # not finite


def test_a_rung_that_diverges_is_marked():
    """It may be fast, and is neither kept nor shown without a mark."""
    entry = {"what": "x", "step_ms": 1.0, "step_ms_lowest": 1.0, "step_ms_highest": 1.0, "tokens_per_second": 9,
             "mfu": 1.0, "peak_memory_bytes": 9, "loss_delta": None, "loss_is_finite": False}  # fmt: skip
    assert text_row(entry, 9.0).endswith(" *")
    assert text_row({**entry, "step_ms_highest": 1.2}, 9.0).endswith("*~")  # and its laps differ
    assert not pays(entry, {"step_ms": 2.0, "step_ms_lowest": 2.0})
    assert pays({**entry, "loss_is_finite": True}, {"step_ms": 2.0, "step_ms_lowest": 2.0})
    assert not pays({**entry, "loss_is_finite": True}, {"step_ms": 2.0, "step_ms_lowest": 0.9})  # within the noise


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("a\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n", "out of memory"),
        ("train 1%\nerror: no such file\n\n", "error: no such file"),
        ("Traceback\nValueError: bad\ntrain 1%", "ValueError: bad"),
        ("", "no output"),
    ],
)
def test_why_a_run_ended(log, expected):
    assert why_it_ended(log) == expected


def test_a_run_that_fails_says_why(dataset_dir, tmp_path):
    """The message of the training program."""
    found = measure(
        {"per_device_train_batch_size": 3}, setting_of(dataset_dir), Goal(4), tmp_path, time.monotonic() + 99
    )
    assert found["failed"].startswith("error: per_device_train_batch_size 3 does not divide the 4 sequences")


def test_a_run_that_takes_too_long_is_ended(dataset_dir, tmp_path):
    found = measure({}, setting_of(dataset_dir), Goal(4), tmp_path, deadline=time.monotonic() + 1)
    assert found == {"failed": "not done in 1 s"}


def test_laps_done_by_the_deadline_count(monkeypatch, tmp_path):
    """Timed for longer than there is, a run is shown with what it has done: 8 steps of 128 tokens, at 2 s and 1 s."""
    profile = {"event": "profile", "step": 7, "attention_kernel": "flash", "matmul_ms": 2.0, "step_ms": 5.0}
    events = [event(4, 10), event(8, 10), profile, event(12, 64), event(16, 128)]
    lines = "".join(json.dumps(line) + "\n" for line in events)
    (tmp_path / "train.py").write_text(
        "import sys, time\nfrom pathlib import Path\nfolder = Path(sys.argv[sys.argv.index('--output_dir') + 1])\n"
        f"folder.mkdir()\n(folder / 'metrics.jsonl').write_text({lines!r})\n"
        "time.sleep(99)\n"
    )
    monkeypatch.setattr(recipe.benchmark.measure, "TRAIN", tmp_path / "train.py")
    started_at = time.monotonic()
    found = measure({}, setting_of("d"), Goal(4, seconds=600), tmp_path, deadline=started_at + 3)
    assert found["step_ms"] == 1500 and found["num_laps"] == 2 and 3 <= time.monotonic() - started_at < 20


# ------------------------------------------------------------------ the program and its tables


def test_the_program(dataset_dir, tmp_path):
    """Real rungs in real processes, to JSON, Markdown and a chart; the reference's loss is its own.

    FLOPs are those of the dataset's 500 tokens: 6 * (500 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 64) + 12 * 2 * 32 * 32.
    """
    recipe_file = tmp_path / "tiny.yaml"
    model = "config_overrides: {n_layer: 2, n_head: 2, n_embd: 32}"
    recipe_file.write_text(f"dataset_dir: {dataset_dir}\nblock_size: {BLOCK_SIZE}\n{model}\n")
    arguments = ["--config", "tiny.yaml", "--rungs", "half", "--steps", "8", "--output_file", "out/l.json"]
    script = [sys.executable, str(ROOT / "scripts" / "run_ladder.py")]
    done = subprocess.run(
        [*script, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines()[4:])) <= 80
    results = json.loads((tmp_path / "out" / "l.json").read_text())
    tied, half = results["ladder"]
    assert (tied["name"], tied["loss_delta"]) == ("tied", 0) and tied["num_laps"] >= 2
    assert results["flops_per_token"] == 6 * (500 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 64) + 12 * 2 * 32 * 32
    if "not_run" not in half:  # this CPU has bf16 units
        assert 0 < abs(half["loss_delta"]) < 0.05
    assert tied["tokens_per_second"] > 0 and tied["seconds_to_first_step"] > 0 and 0 < tied["mfu"] < 1
    assert tied["attention_kernel"] == "matmuls" and tied["profile_ms"]["matmul"] > 0
    assert (
        set(results["machine"]["matmul_tflops"]) >= {"fp32"} and results["environment"]["torch"] == torch.__version__
    )
    assert "tied weights" in (tmp_path / "out" / "l.md").read_text()
    assert (tmp_path / "out" / "l.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rungs", "tyed"], "there is no rung 'tyed'; the rungs are bottom, tied"),
        (["--output_file", "x.md"], "output_file must end in .json, got x.md"),
        (["--output_file", "/proc/x.json"], "cannot write /proc/x.json"),
        (["--rungs", "tied", "--ablate"], "--rungs chooses from the ladder"),
        (["--nanogpt", "d"], "are for --peers, or --all"),
        (["--all", "--nanogpt", "nowhere"], "nowhere holds no train.py; git clone"),
        (["--peers", "--run_clm", "nowhere"], "there is no nowhere; it is examples/pytorch"),
        (["--steps", "0"], "steps must be greater than 0"),
        (["--micro_batch", "3", "--global_batch", "4"], "global_batch 4 does not divide by micro_batch 3"),
        (["--config", "nowhere"], "no recipe 'nowhere'"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(arguments, message, dataset_dir, tmp_path, monkeypatch, capsys):
    """Before anything is run, and without an empty file of results."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_ladder, "find_machine", lambda: CPU)
    monkeypatch.setattr(sys, "argv", ["scripts/run_ladder.py", "--dataset_dir", str(dataset_dir), *arguments])
    with pytest.raises(UserError, match=re.escape(message)):
        run_ladder.main()
    assert not list(tmp_path.glob("runs/*.json"))


def test_rows_fit_80_columns():
    """The longest names, and numbers of the slowest and of the fastest machine."""
    for rung in [*ALL, *build_rungs(H200), *build_rungs(T4)]:
        entry = {"what": rung.what, "step_ms": 123_456.7, "step_ms_lowest": 1.0, "step_ms_highest": 123_456.7,
                 "tokens_per_second": 1_234_567, "mfu": 1, "peak_memory_bytes": 139e9, "loss_delta": 1.0}  # fmt: skip
        assert (
            len(text_row(entry, 100.0)) <= 80 and len(text_row({"what": rung.what, "not_run": "x" * 99}, None)) <= 80
        )
    peer = {"what": "x" * 60, "tokens_per_second": 1_234_567, "times": 12.345, "times_of_each_round": [12.3, 12.5]}
    assert len(peer_row(peer)) <= 80


def test_ended_by_a_scheduler_it_ends_the_run_it_measures(dataset_dir, tmp_path):
    """SIGTERM, as `timeout` sends it: no training process is left over."""
    arguments = ["--config", "demo", "--dataset_dir", str(dataset_dir), "--seconds", "300"]
    script = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "run_ladder.py"), *arguments],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    for _ in range(600):
        logs = list(tmp_path.glob("*/run/metrics.jsonl"))
        if logs:
            break
        time.sleep(0.1)
    script.send_signal(signal.SIGTERM)
    assert logs and script.wait(30) == 128 + signal.SIGTERM
    processes = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(b"train.py" in line and str(tmp_path).encode() in line for line in processes)


def results_of(name: str) -> dict:
    return json.loads((ROOT / "scripts" / "benchmarks" / f"{name}_cpu.json").read_text())


@pytest.mark.parametrize("name", ["ladder", "peers", "overhead", "ablation", "memory"])
def test_the_markdown_is_that_of_the_results(name):
    path = ROOT / "scripts" / "benchmarks" / f"{name}_cpu.md"
    assert path.read_text() == to_markdown(results_of(name)) + "\n"


def test_the_readme_shows_what_was_measured():
    """Its tables are made from the result files, and the numbers in its sentences are theirs."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    ladder = results_of("ladder")
    for results, section in ((ladder, "ladder"), (results_of("peers"), "peers")):
        assert " ".join(to_short_markdown(results, section).split()) in readme
    ran = [e for section in ("ladder", "extras", "memory") for e in ladder.get(section, []) if "step_ms" in e]
    num_steps = LAP + ladder["goal"]["steps"] + PROFILED_STEPS
    minutes = sum(e["seconds_to_first_step"] + num_steps * e["step_ms"] / 1e3 for e in ran) / 60
    assert f"one switch after another: {minutes:.0f} minutes on two CPU cores" in readme
    best = [entry for entry in ladder["extras"] if entry.get("kept")][-1]
    times = ladder["ladder"][0]["step_ms"] / best["step_ms"]
    assert f"{best['tokens_per_second']:,} tokens/s, {times:.2f} times the bottom and {best['mfu']:.0%} of" in readme
    entries = [*results_of("memory")["ladder"], *results_of("memory")["memory"]]
    memory = {e["name"]: f"{e['peak_memory_bytes'] / 1e9:.2f}" for e in entries if "step_ms" in e}
    assert f"leave the graph take {memory['no_sync']} GB, the loss in it {memory['loss_in_graph']};" in readme
    chunks = f"({memory['loss_chunks']} and {memory['checkpointing']} GB; {memory['attention']} without them;"
    assert chunks in readme
    peers = {e["name"]: e["times"] for e in results_of("peers")["peers"]}
    assert f"two CPU cores {peers['nanogpt']:.1f} times nanoGPT, {peers['bf16']:.1f} times nanoGPT given" in readme
    demo, shakespeare = (
        json.loads((ROOT / "scripts" / "benchmarks" / f"{name}_cpu.json").read_text())
        for name in ("demo", "shakespeare")
    )
    assert f"perplexity from {demo['untrained']['perplexity']:,.0f} to {demo['perplexity']:.0f} " in readme
    assert f"takes {demo['wall_seconds']:.0f} seconds once" in readme
    losses = f"from {shakespeare['untrained']['loss']:.2f} nats per token to {shakespeare['eval_loss']:.2f} "
    assert losses in readme and round(shakespeare["wall_seconds"] / 60) <= 3
    (bare,) = results_of("overhead")["peers"]
    rounds = bare["times_of_each_round"]
    spread = f"{min(rounds):.2f} to {max(rounds):.2f} in {len(rounds)} rounds"
    assert f"ran {bare['times']:.3f} times as fast ({spread};" in readme
    ablation = {e["name"]: e.get("step_ms") for e in results_of("ablation")["ablation"]}
    assert (
        f"differs by {ablation['everything'] / ablation['again'] - 1:.0%}, so that less means nothing there" in readme
    )


def test_what_is_not_a_rung_of_this_project_is_not_measured():
    """All options that the ladder passes exist, with values they take."""
    for machine in (CPU, H200, T4):
        rungs = [*climb(build_rungs(machine)), *ablations(build_rungs(machine))]
        top = options_of(build_rungs(machine))
        rungs += [(r, combine(top, r.on)) for r in (*build_extras(machine, 4, 16), *build_memory_rungs(machine))]
        for _, options in rungs:
            load_config(["--dataset_dir", "d", *to_arguments({**RUN_OPTIONS, **options})])


def test_logits_do_not_leave_the_graph_with_the_loss_in_it():
    """The module that is compiled returns one number; without it in the graph, logits of the whole vocabulary."""
    from test_model import captured_graphs, tiny

    rows = torch.randint(0, 500, (2, 33))
    model = tiny()[2]
    module = LanguageModelingLoss(model, 500)
    outputs = []
    for compiled, inputs in ((module, (rows[:, :-1], rows[:, 1:])), (model, (rows[:, :-1], None))):
        (graph,) = captured_graphs(compiled, *inputs)
        (node,) = (node for node in graph.graph.nodes if node.op == "output")
        outputs.append([tuple(o.meta["example_value"].shape) for o in node.args[0]])
    assert outputs[0] == [()] and (2, 32, 512) in outputs[1]
