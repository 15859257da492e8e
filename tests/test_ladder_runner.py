"""What is run, in which order, with which options, and what is kept of it, with runs that take no time."""

import importlib.util
import json
import sys

import pytest
import torch
from conftest import ROOT

import recipe.benchmark.runner
from recipe.benchmark.ladder import build_rungs, options_of
from recipe.benchmark.machine import Machine
from recipe.benchmark.measure import Goal, Setting
from recipe.benchmark.peers import Peer
from recipe.benchmark.runner import LadderRunner
from recipe.errors import UserError

spec = importlib.util.spec_from_file_location("run_ladder", ROOT / "scripts" / "run_ladder.py")
run_ladder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_ladder)
H200 = Machine("cuda", "NVIDIA H200", bf16=True, tf32=True, matmul_tflops={"fp32": 50.0, "bf16": 800.0},
               data_sheet_tflops=989.0)  # fmt: skip
SETTING = Setting("a model", {}, {}, 500, 1024, flops_per_token=10**9, micro_batch=16, global_batch=64)


class Clock:
    """Stands still but while something is measured."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def __getattr__(self, name):
        import time

        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(recipe.benchmark.runner, "time", clock)
    monkeypatch.setattr(recipe.benchmark.runner, "describe_environment", lambda device: {
        "num_cpus": 1, "torch": torch.__version__, "transformers": "5"
    })  # fmt: skip
    return clock


@pytest.fixture
def measured(monkeypatch, clock):
    """The options of each run, and how to change what runs give: `give(options)` returns milliseconds or a reason."""

    class Measured(list):
        def give(self, options):
            return 100.0

    runs = Measured()

    def measure(options, setting, goal, work, deadline):
        runs.append(options)
        clock.now += 40
        found = runs.give(options)
        if isinstance(found, str) or clock.now > deadline:
            return {"failed": found if isinstance(found, str) else "too late"}
        return {"seconds_to_first_step": 9.0, "step_ms": found, "step_ms_lowest": found, "step_ms_highest": found,
                "num_laps": 3, "tokens_per_second": round(64 * 1024 / found * 1e3), "peak_memory_bytes": 10**9,
                "attention_kernel": "flash", "profile_ms": {}, "losses": {1: 5.0}}  # fmt: skip

    monkeypatch.setattr(recipe.benchmark.runner, "measure", measure)
    return runs


@pytest.fixture
def runner(tmp_path, measured):
    def build(machine=H200, **options) -> LadderRunner:
        return LadderRunner(machine, SETTING, Goal(12), tmp_path, tmp_path / "out.json", "command", **options)

    return build


def test_what_pays_is_kept_for_what_comes_after(runner, measured):
    """A micro-batch of 32 pays, 64 does not, and tuning is tried with 32; memory options without it."""
    times = {32: 80.0, 64: 79.9}
    measured.give = lambda options: times.get(options.get("per_device_train_batch_size"), 100.0)
    ladder = runner()
    ladder.run_ladder(ladder.wanted(None))
    kept = {entry["name"]: entry["kept"] for entry in ladder.results["extras"]}
    assert kept == {"micro_batch_32": True, "micro_batch_64": False, "tuned": False}
    options = {entry["name"]: entry["options"] for entry in ladder.results["extras"] + ladder.results["memory"]}
    assert options["tuned"]["per_device_train_batch_size"] == 32
    assert options["tuned"]["dynamo_mode"].startswith("max-autotune")
    top = options_of(build_rungs(H200))
    assert options["loss_chunks"] == {**top, "loss_chunks": 8}
    assert options["8gb"]["gpu_memory_limit_gb"] == 8 and options["8gb"]["activation_checkpointing"]


def test_mfu_is_of_what_was_measured_and_of_the_data_sheet(runner):
    """65,536 tokens in 0.1 s at 1 GFLOP a token are 655.36 TFLOP/s, of 800 and of 989."""
    ladder = runner()
    ladder.run_ladder({"tied"})
    (entry,) = ladder.results["ladder"]
    assert entry["mfu"] == pytest.approx(0.8192) and entry["mfu_data_sheet"] == pytest.approx(655.36 / 989)


def test_the_largest_micro_batch_is_found_by_doubling(runner, measured):
    measured.give = lambda options: "out of memory" if options.get("per_device_train_batch_size", 16) > 32 else 100.0
    ladder = runner(fit=True)
    ladder.run_ladder({"tied"})
    assert ladder.results["ladder"][0]["largest_micro_batch"] == 32
    assert all(options["global_batch_size"] == options["per_device_train_batch_size"] for options in measured[1:])


def test_with_little_time_what_matters_comes_first(runner, clock, monkeypatch, tmp_path):
    """Ten minutes at 40 s a run, as scripts/run_ladder.py orders them: both ends, the peers, what pays, the rest.

    The small card comes last, and what has no time left says so.
    """
    order = []
    ladder = runner(seconds=600)
    record, ladder._record = (
        ladder._record,
        lambda section, entry: (order.append(entry["name"]), record(section, entry)),
    )
    monkeypatch.setattr(recipe.benchmark.runner, "measure_peer", lambda peer, *_: order.append(peer.name) or {
        "tokens_per_second": 1000
    })  # fmt: skip
    monkeypatch.setattr(run_ladder, "LadderRunner", lambda *args, **kwargs: ladder)
    monkeypatch.setattr(run_ladder, "find_machine", lambda: H200)
    monkeypatch.setattr(run_ladder, "choose_setting", lambda *args: SETTING)
    monkeypatch.setattr(run_ladder, "build_peers", lambda *args: [peer("nanogpt")])
    monkeypatch.setattr(sys, "argv", ["run_ladder.py", "--all", "--minutes", "10"])
    run_ladder.main()
    top = build_rungs(H200)[-1].name
    assert order[:6] == ["bottom", "tied", top, "nanogpt", "micro_batch_32", "micro_batch_64"]
    assert order[-1] == "8gb" and clock.now <= 640
    assert [entry["name"] for entry in ladder.results["ladder"]] == [rung.name for rung in build_rungs(H200)]
    not_run = [entry for entry in ladder.results["ablation"] if "not_run" in entry]
    assert {"no time was left"} < {entry["not_run"] for entry in not_run}
    assert "not run: no time was left" in (ladder.output_file.with_suffix(".md")).read_text()


def test_an_ablation_with_nothing_to_compare_with(runner, measured):
    """Neither run with everything on was measured: the others are shown without a ratio."""
    top = options_of(build_rungs(H200))
    measured.give = lambda options: "out of memory" if options == top else 100.0
    ladder = runner()
    ladder.run_ablation()
    ladder.finish()
    entries = {entry["name"]: entry for entry in ladder.results["ablation"]}
    assert entries["everything"]["not_run"] == "out of memory" and entries["padding"]["step_ms"] == 100
    assert (
        "| off: padded vocabulary | 100.0 (100.0-100.0) |  | 655,360 |"
        in ladder.output_file.with_suffix(".md").read_text()
    )


def test_the_top_is_not_measured_again_for_the_ablation(runner, measured):
    ladder = runner()
    ladder.run_ladder(ladder.wanted(["tied", ladder.top]))
    ladder.run_ablation()
    assert measured.count(options_of(build_rungs(H200))) == 2  # as the top of the ladder, and again at the end
    assert [ladder.results["ablation"][i]["name"] for i in (0, -1)] == ["everything", "again"]


def peer(name: str, ours: str = "ours") -> Peer:
    return Peer(name, name, [name], None, "", 1, "0" * 64, ours=ours)


def test_peers_are_compared_round_by_round(runner, measured, monkeypatch):
    """Ours over theirs, of the same round; a round that failed on either side does not count."""
    rates = iter([{"tokens_per_second": 327_680}, {"failed": "killed"}, {"tokens_per_second": 655_360}])
    monkeypatch.setattr(recipe.benchmark.runner, "measure_peer", lambda *args: next(rates))
    ladder = runner()
    ladder.run_peers([peer("nanogpt", "ours_auto")], 3)
    (entry,) = ladder.results["peers"]
    assert entry["times_of_each_round"] == [2.0, 1.0] and entry["times"] == 1.5 and entry["rounds"] == "2 of 3"
    assert {options.get("per_device_train_batch_size") for options in measured} == {None, "auto"}


def test_an_interrupted_round_is_kept(runner, monkeypatch):
    """What was measured before Ctrl-C is in the file, and so is the ladder's."""
    rates = iter([{"tokens_per_second": 327_680}])

    def measure_peer(*args):
        for rate in rates:
            return rate
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe.benchmark.runner, "measure_peer", measure_peer)
    ladder = runner()
    ladder.run_ladder({"tied"})
    with pytest.raises(KeyboardInterrupt):
        ladder.run_peers([peer("first"), peer("second")], 1)
    results = json.loads(ladder.output_file.read_text())
    assert [entry["name"] for entry in results["peers"]] == ["first"] and results["peers"][0]["times"] == 2
    assert [entry["name"] for entry in results["ladder"]] == ["tied"]


def test_a_full_disk_leaves_the_results_before(runner, monkeypatch):
    """One sentence, and the file as it was."""
    ladder = runner()
    ladder.run_ladder({"tied"})
    before = ladder.output_file.read_bytes()
    monkeypatch.setattr(recipe.benchmark.runner, "to_markdown", lambda results: "x")

    def write_text(path, text):
        with open("/dev/full", "w") as file:
            file.write(text)

    monkeypatch.setattr(recipe.benchmark.runner.Path, "write_text", write_text)
    with pytest.raises(UserError, match=r"cannot write .*out.json: No space left on device; what was there before"):
        ladder.run_ladder({"compile"})
    assert ladder.output_file.read_bytes() == before and [p.name for p in ladder.work.glob(".*")] == []
