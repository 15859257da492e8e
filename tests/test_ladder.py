"""The ladder: each rung changes what it claims, and tables and README show what was measured."""

import json
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from conftest import BLOCK_SIZE, ROOT, load_program, sigterm_when
from torch.nn import functional as F

import recipe.benchmark.measure
import recipe.hardware.accelerator
import recipe.run.reference
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
    Setting,
    combine,
    loss_delta,
    measure,
    summarize_events,
    to_arguments,
    why_it_ended,
)
from recipe.benchmark.runner import pays
from recipe.benchmark.tables import screen_header, screen_row, to_markdown
from recipe.command_line import load_config
from recipe.config import TrainConfig
from recipe.data.packed import PackedSplit
from recipe.errors import UserError
from recipe.model.loss import LanguageModelingLoss

run_ladder = load_program("scripts/run_ladder.py")
CPU = Machine("cpu", "a CPU", bf16=True)
H200 = Machine("cuda", "NVIDIA H200", bf16=True, tf32=True, memory_bytes=150_000_000_000)
T4 = Machine("cuda", "Tesla T4", bf16=False, memory_bytes=15_000_000_000)


# ------------------------------------------------------------------ what a switch changes


def observe(train, monkeypatch, options: dict) -> dict:
    """Run the training program with these options and record what it does."""
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

        def build_optimizer(config, module, *precision):
            optimizer = original_build_optimizer(config, module, *precision)
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

        original_build_model = recipe.hardware.accelerator.build_model
        original_build_optimizer = recipe.train.build_optimizer
        original_sdpa, original_read = F.scaled_dot_product_attention, PackedSplit.__getitem__
        patch.setattr(recipe.hardware.accelerator, "build_model", build_model)
        patch.setattr(recipe.run.reference, "compute_unigram_loss", lambda dataset: 1.0)  # reads rows, too
        patch.setattr(recipe.train, "build_optimizer", build_optimizer)
        evaluated = {"loss": 0, "perplexity": 1, "bits_per_byte": 0, "num_rows": 1, "seconds": 0.0, "sample": None}
        patch.setattr(recipe.train.Validation, "run", lambda self, final=False: evaluated)
        patch.setattr(F, "scaled_dot_product_attention", sdpa)
        patch.setattr(PackedSplit, "__getitem__", read)
        for name in ("tolist", "item", "__bool__", "__float__", "__int__"):
            patch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
        patch.setattr(torch.nn.Module, "compile", compile_)  # test_runtime.py tests inductor itself
        train(*to_arguments({**RUN_OPTIONS, **options, "overwrite": True}))
    seen.setdefault("compiled", None)
    return seen


@pytest.fixture(scope="module")
def observed():
    """Observations by options, because neighboring rungs share runs."""
    return {}


IN_GRAPH, LOGITS = "LanguageModelingLoss", "GPT2LMHeadModel"
COMPILED = (IN_GRAPH, "inductor", "default", True)
CUDA_ONLY = [
    rung for rung in build_rungs(H200) if rung.name in ("sigmoid_gelu", "index_mask")
]  # a CPU can run them, too
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
        ("no_sync", "host_reads", 10, 5),  # at each of 9 steps; at steps 1, 4, 8, 9; and the DataLoader's seed
        ("loss_in_graph", "compiled", (LOGITS, "inductor", "default", True), COMPILED),
        ("attention", "sdpa", {(True, True)}, set()),
        ("micro_batch_4", "rows_per_read", {2}, {4}),
        ("bf16_residual", "residual", torch.float32, torch.bfloat16),
        ("sigmoid_gelu", "gelu", "NewGELUActivation", "SigmoidGELU"),
        ("index_mask", "index_mask", False, True),
        ("tuned", "compiled", COMPILED, (IN_GRAPH, "inductor", "max-autotune-no-cudagraphs", True)),
        ("loss_chunks", "head_rows", {2 * BLOCK_SIZE}, {2 * BLOCK_SIZE // 8}),
        ("checkpointing", "blocks", 2, 4),
    ],
)  # fmt: skip
def test_a_rung_changes_what_it_claims(train, monkeypatch, observed, name, key, before, after):
    """The running program shows the change in types, kernels, masks, optimizer, graph or batches."""
    rung = next(rung for rung in ALL if rung.name == name)
    rungs = build_rungs(CPU)
    below = options_of(rungs[: rungs.index(rung)]) if rung in rungs else options_of(rungs)
    batch = {"global_batch_size": 4, "per_device_train_batch_size": 2, "max_steps": 9 if name == "no_sync" else 1}
    found = []
    for options in ({**batch, **below}, {**batch, **combine(below, rung.on)}):
        if json.dumps(options) not in observed:
            observed[json.dumps(options)] = observe(train, monkeypatch, options)
        found.append(observed[json.dumps(options)][key])
    assert found == [before, after]


def test_every_rung_has_a_claim():
    """The test above covers all rungs but huge pages (test_memory.py) and those that need a GPU (test_gpu.py)."""
    claims = {parameters[0] for parameters in test_a_rung_changes_what_it_claims.pytestmark[0].args[1]}
    assert {rung.name for rung in (*ALL, *build_rungs(H200))} - claims == {"bottom", "tf32", "8gb", "huge_pages"}


# ------------------------------------------------------------------ which options run


def test_the_top_of_the_ladder_is_the_recipe():
    """Its options are the defaults of recipe/train.py or what their `auto` chooses on the machine."""
    resolved = {"mixed_precision": "bf16", "dynamo_backend": "inductor", "attn_implementation": "sdpa"}
    resolved["optim"] = "adamw_torch_fused"
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


def test_the_bottom_has_no_switch_on():
    """Each option that a rung changes has another value at the bottom."""
    for rung in build_rungs(H200):
        assert all(BOTTOM[key] != value for key, value in rung.on.items()), rung.name


def test_each_rung_adds_one_switch():
    """A rung differs from the one below only in its own options; one that cannot run changes nothing above it."""
    climbed = climb(build_rungs(CPU))
    for (below, options_below), (rung, options) in zip(climbed, climbed[1:], strict=False):
        if below.why_not is None:
            assert {key for key in options if options[key] != options_below.get(key)} == set(rung.on)
    assert climbed[-1][1]["tf32"] is False


def test_an_ablation_turns_one_switch_off():
    """Each run differs from the top in one option, which has its value from below the rung."""
    (_, top), *others, (_, again) = ablations(build_rungs(CPU))
    assert again == top
    taken_back = {}
    for rung, options in others:
        if rung.why_not is not None:
            continue
        (key,) = (key for key in top if options[key] != top[key])
        taken_back[rung.name] = (key, options[key])
    assert taken_back["half"] == ("mixed_precision", "no")
    assert taken_back["attention"] == ("attn_implementation", "sdpa")
    assert taken_back["tied"] == ("config_overrides", "tie_word_embeddings=false")
    assert "flash" not in taken_back  # the rung `attention` changes the same option
    assert len(taken_back) == len(build_rungs(CPU)) - 3  # bottom, tf32, flash


def test_a_machine_without_bf16_uses_fp16():
    """What it cannot run has a reason."""
    rungs = {rung.name: rung for rung in build_rungs(T4)}
    assert rungs["half"].on == {"mixed_precision": "fp16"} and "scaler" in rungs["half"].what
    assert rungs["tf32"].why_not == "Tesla T4 has no TF32" and rungs["huge_pages"].why_not


def test_the_micro_batch_fits_the_memory():
    """The bottom rung of 124 M parameters takes about 4 GB per row."""
    assert [choose_micro_batch(machine, 124_000_000) for machine in (H200, T4, CPU)] == [16, 2, 4]
    assert choose_micro_batch(H200, 1_558_000_000) == 2 and choose_micro_batch(T4, 10**10) == 1


# ------------------------------------------------------------------ reading a run's log


def setting_of(dataset_dir, block_size=BLOCK_SIZE) -> Setting:
    options = {**RUN_OPTIONS, "config": "demo", "dataset_dir": str(dataset_dir), "block_size": block_size}
    options["config_overrides"] = "n_layer=2,n_head=2,n_embd=32"
    return Setting("a model", options, {"n_layer": 2, "n_head": 2, "n_embd": 32}, 500, block_size, 1000, 2, 4)


def event(step, tokens_per_second, loss=1.0, **more):
    return {"event": "train", "step": step, "loss": loss, "tokens_per_second": tokens_per_second,
            "peak_memory_bytes": 5, **more}  # fmt: skip


def test_laps_with_compiling_or_profiling_do_not_count():
    """Laps are 4 steps of 128 tokens; the first lap and profiled steps are skipped, single steps are grouped."""
    profile = {"event": "profile", "step": 15, "attention_kernel": "flash", "matmul_ms": 2.0, "step_ms": 5.0}
    events = [event(1, 1), event(4, 10), event(8, 128), event(12, 64), event(16, 1), profile]
    found = summarize_events(events, setting_of("d"), last_step=12)
    assert (found["step_ms"], found["step_ms_lowest"], found["step_ms_highest"]) == (1500, 1000, 2000)
    assert (found["tokens_per_second"], found["peak_memory_bytes"]) == (85, 5)
    assert found["profile_ms"] == {"matmul": 2.0, "step": 5.0} and found["attention_kernel"] == "flash"
    single = [event(step, 128 if step % 4 else 32) for step in range(1, 13)]  # 1 s, and 4 s every fourth
    assert summarize_events([*single, profile], setting_of("d"), 12)["step_ms"] == 1750


def test_the_loss_is_compared_over_the_same_steps():
    """The last line counts whose steps are all in the reference, mean against mean."""
    reference = {1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0}
    assert loss_delta({1: 5.0, 2: 4.0, 4: 2.75}, reference) == pytest.approx(0.25)
    assert loss_delta({1: 5.0, 4: 3.1, 8: 9.0}, reference) == pytest.approx(0.1)
    assert loss_delta({8: 1.0}, reference) is None
    assert loss_delta({1: 5.0, 2: None}, reference) is None  # not finite


def test_a_rung_that_diverges_is_marked():
    """However fast it is, it is marked and not kept."""
    entry = {"what": "x", "step_ms": 1.0, "step_ms_lowest": 1.0, "step_ms_highest": 1.0, "tokens_per_second": 9,
             "mfu": 1.0, "peak_memory_bytes": 9, "loss_delta": None, "loss_is_finite": False}  # fmt: skip
    assert screen_row(entry, "ladder").endswith(" inf/nan*") and "~" not in screen_row(entry, "ladder")
    assert " 1.0~ " in screen_row({**entry, "step_ms_highest": 1.2}, "ladder")  # its laps differ
    assert screen_row({**entry, "loss_is_finite": True, "loss_delta": 0.051}, "ladder").endswith(" +0.0510*")
    assert screen_row({**entry, "loss_is_finite": True, "loss_delta": -0.049}, "ladder").endswith(" -0.0490")
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
def test_the_log_says_why_a_run_ended(log, expected):
    assert why_it_ended(log) == expected


def test_a_run_that_fails_says_why(dataset_dir, tmp_path):
    """The reason is the message of the training program."""
    options, deadline = {"per_device_train_batch_size": 3}, time.monotonic() + 99
    found = measure(options, setting_of(dataset_dir), 4, tmp_path, deadline)
    assert found["failed"].startswith("error: per_device_train_batch_size 3")


def test_a_run_that_takes_too_long_is_ended(dataset_dir, tmp_path):
    found = measure({}, setting_of(dataset_dir), 4, tmp_path, deadline=time.monotonic() + 1)
    assert found == {"failed": "not finished after 1 s"}


# ------------------------------------------------------------------ the script and its tables


@pytest.fixture
def run_here(dataset_dir, tmp_path, monkeypatch):
    """Run the script in this process, which is faster. The measured runs are processes of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # the script changes it
    monkeypatch.setenv("COLUMNS", "80")
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments):
        argv = ["scripts/run_ladder.py", "--dataset_dir", dataset_dir, *arguments]
        monkeypatch.setattr(sys, "argv", [*map(str, argv)])
        run_ladder.main()

    yield run
    signal.signal(signal.SIGTERM, handler)


def test_the_script(run_here, tmp_path, monkeypatch, capsys):
    """A real rung runs in a real process and leaves JSON, Markdown and a chart.

    FLOPs are those of 500 tokens, unpadded: 6 * (500 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 64) + 12 * 2 * 32 * 32.
    """
    monkeypatch.setattr(run_ladder, "find_machine", recipe.benchmark.machine._find_machine)
    (tmp_path / "tiny.yaml").write_text(
        f"block_size: {BLOCK_SIZE}\nconfig_overrides: {{n_layer: 2, n_head: 2, n_embd: 32}}\n"
    )
    run_here("--config", "tiny.yaml", "--rungs", "bottom,tied", "--steps", "4", "--output_file", "out/l.json")
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 + len(str(tmp_path))
    assert "tied weights" in out and "loss diff:" in out
    results = json.loads((tmp_path / "out" / "l.json").read_text())
    bottom, tied = results["ladder"]
    assert (tied["name"], tied["loss_delta"]) == ("tied", 0) and bottom["loss_delta"] != 0
    assert results["flops_per_token"] == 6 * (500 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 64) + 12 * 2 * 32 * 32
    assert tied["tokens_per_second"] > 0 and tied["seconds_to_first_step"] > 0 and 0 < tied["mfu"] < 1
    assert tied["attention_kernel"] == "matmuls" and tied["profile_ms"]["matmul"] > 0
    assert "fp32" in results["machine"]["matmul_tflops"] and results["environment"]["torch"] == torch.__version__
    assert "tied weights" in (tmp_path / "out" / "l.md").read_text()
    assert (tmp_path / "out" / "l.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rungs", "tyed"], "there is no rung 'tyed'; the rungs are bottom, tied"),
        (["--output_file", "x.md"], "output_file must end in .json, got x.md"),
        (["--output_file", "/proc/x.json"], "cannot write /proc/x.json"),
        (["--rungs", "tied", "--ablate"], "--rungs selects rungs of the ladder"),
        (["--nanogpt", "d"], "require --peers or --all"),
        (["--all", "--nanogpt", "nowhere"], "nowhere has no train.py; run git clone"),
        (["--peers", "--run_clm", "nowhere"], "nowhere does not exist; expected examples/pytorch"),
        (["--steps", "0"], "steps must be greater than 0"),
        (["--micro_batch", "3", "--global_batch", "4"], "global_batch 4 is not a multiple of micro_batch 3"),
        (["--config", "nowhere"], "no recipe 'nowhere'"),
    ],
)
def test_a_mistake_is_found_before_anything_runs(arguments, message, run_here, tmp_path, monkeypatch):
    """It is one sentence and leaves no empty file of results."""
    monkeypatch.setattr(run_ladder, "find_machine", lambda: CPU)
    with pytest.raises(UserError, match=re.escape(message)):
        run_here(*arguments)
    assert not list(tmp_path.glob("runs/*.json"))


def test_rows_fit_80_columns():
    """Even the longest names, with the numbers of the slowest and of the fastest machine, stay apart."""
    numbers = {"step_ms": 123_456.7, "step_ms_lowest": 1.0, "step_ms_highest": 123_456.7, "mfu": 0.654}
    numbers |= {"speedup": 100.25, "tokens_per_second": 1_234_567, "peak_memory_bytes": 139e9, "loss_delta": 1.0}
    cells = ["123,456.7~", "100.25", "1,234,567", "65.4%", "139.00", "+1.0000*"]
    rungs = [*build_rungs(CPU), *build_rungs(H200), *build_rungs(T4)]
    shown = [rung for machine_rungs in (build_rungs(T4), build_rungs(H200)) for rung, _ in ablations(machine_rungs)]
    for rung in [*rungs, *shown, *build_extras(CPU, 2, 256), *build_memory_rungs(H200)]:
        row = screen_row({"what": rung.what, **numbers}, "ladder")
        assert len(row) <= 80 and row.split() == [*rung.what.split(), *cells]
        assert len(screen_row({"what": rung.what, "not_run": "x" * 99}, "ladder")) == 80
    peer = {"what": "nanoGPT at its default micro-batch, 12", "tokens_per_second": 1_234_567, "times": 12.345}
    peer |= {"our_tokens_per_second": 1_234_567, "times_of_each_round": [12.3, 12.5]}
    assert len(screen_row(peer, "peers")) <= 80 and screen_row(peer, "peers").split()[-1] == "12.30-12.50"
    assert max(len(line) for section in ("ladder", "peers") for line in screen_header(section).splitlines()) <= 80


def test_sigterm_ends_the_measured_run(run_here, tmp_path, monkeypatch):
    """A scheduler's or timeout's SIGTERM leaves no training process behind."""
    monkeypatch.setattr(run_ladder, "find_machine", lambda: CPU)
    started = sigterm_when(lambda: list(tmp_path.glob("*/run/metrics.jsonl")))
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)), started:
        run_here("--config", "demo", "--steps", "40000")
    processes = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(b"train.py" in line and str(tmp_path).encode() in line for line in processes)


def results_of(name: str) -> dict:
    return json.loads((ROOT / "scripts" / "benchmarks" / f"{name}_cpu.json").read_text())


@pytest.mark.parametrize("name", ["ladder", "peers", "overhead", "ablation", "memory"])
def test_the_markdown_comes_from_the_results(name):
    path = ROOT / "scripts" / "benchmarks" / f"{name}_cpu.md"
    assert path.read_text() == to_markdown(results_of(name)) + "\n"


def test_all_options_of_the_ladder_exist():
    """The training program accepts every option and value that the ladder passes."""
    for machine in (CPU, H200, T4):
        rungs = [*climb(build_rungs(machine)), *ablations(build_rungs(machine))]
        top = options_of(build_rungs(machine))
        rungs += [(r, combine(top, r.on)) for r in (*build_extras(machine, 4, 16), *build_memory_rungs(machine))]
        for _, options in rungs:
            load_config(["--dataset_dir", "d", *to_arguments({**RUN_OPTIONS, **options})])


def test_logits_do_not_leave_the_graph_with_the_loss_in_it():
    """The compiled module returns one number; without the loss, it returns logits of the whole vocabulary."""
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
