"""What the ladder runs, in which order, with which options, and what it keeps. The runs are stand-ins."""

import json
import sys
from unittest.mock import create_autospec

import pytest
from conftest import load_program

import recipe.benchmark.runner
from recipe.benchmark.ladder import build_rungs, options_of
from recipe.benchmark.machine import Machine
from recipe.benchmark.measure import Setting, measure
from recipe.benchmark.peers import Peer, measure_peer
from recipe.benchmark.runner import LadderRunner
from recipe.errors import UserError

run_ladder = load_program("scripts/run_ladder.py")
H200 = Machine("cuda", "NVIDIA H200", bf16=True, tf32=True, matmul_tflops={"fp32": 50.0, "bf16": 800.0},
               data_sheet_tflops=989.0, environment={"num_cpus": 1, "torch": "2", "transformers": "5"})  # fmt: skip
SETTING = Setting("a model", {}, {}, 500, 1024, flops_per_token=10**9, micro_batch=16, global_batch=64)


class Clock:
    """Moves only while something is measured."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(recipe.benchmark.runner, "time", clock)
    draw = lambda results, path: path.touch()  # noqa: E731 (drawing takes longer than the stand-ins)
    monkeypatch.setattr(recipe.benchmark.runner, "save_ladder_chart", draw)
    return clock


@pytest.fixture
def measured(monkeypatch, clock):
    """The options of each run. `give(options)` returns its milliseconds, or why it fails."""

    class Measured(list):
        def give(self, options):
            return 100.0

    runs = Measured()

    def stand_in(options, setting, num_steps, work, deadline):
        runs.append(options)
        clock.now += 40
        found = runs.give(options)
        if isinstance(found, str) or clock.now > deadline:
            return {"failed": found if isinstance(found, str) else "too late"}
        return {"seconds_to_first_step": 9.0, "step_ms": found, "step_ms_lowest": found, "step_ms_highest": found,
                "tokens_per_second": round(64 * 1024 / found * 1e3), "peak_memory_bytes": 10**9,
                "attention_kernel": "flash", "losses": {1: 5.0}}  # fmt: skip

    monkeypatch.setattr(recipe.benchmark.runner, "measure", create_autospec(measure, side_effect=stand_in))
    return runs


@pytest.fixture
def runner(tmp_path, measured):
    def build(machine=H200, **options) -> LadderRunner:
        return LadderRunner(machine, SETTING, 12, tmp_path, tmp_path / "out.json", **options)

    return build


def test_an_extra_that_pays_is_kept_for_the_next_ones(runner, measured):
    """A micro-batch of 32 pays and 64 does not, so tuning is tried with 32, and memory options with neither."""
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


def test_mfu_is_relative_to_measured_products_and_to_the_data_sheet(runner):
    """65,536 tokens in 0.1 s at 1 GFLOP per token are 655.36 TFLOP/s, of 800 and of 989."""
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
    """Ten minutes at 40 s per run: both ends first, then the peers, the extras, the rest, and the small card last.

    A run that had no time left is recorded.
    """
    order = []
    ladder = runner(seconds=600)
    record = ladder._record
    ladder._record = lambda section, entry: (order.append(entry["name"]), record(section, entry))
    give_peers(monkeypatch, lambda peer: order.append(peer.name) or {"tokens_per_second": 1000})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # the script changes it
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
    assert {"no time left"} < {entry["not_run"] for entry in not_run}
    assert "not run: no time left" in (ladder.output_file.with_suffix(".md")).read_text()


def test_an_ablation_without_a_base(runner, measured):
    """If both runs with everything on fail, the others have no speedup."""
    top = options_of(build_rungs(H200))
    measured.give = lambda options: "out of memory" if options == top else 100.0
    ladder = runner()
    ladder.run_ablation()
    ladder.finish()
    entries = {entry["name"]: entry for entry in ladder.results["ablation"]}
    assert entries["everything"]["not_run"] == "out of memory" and entries["padding"]["step_ms"] == 100
    markdown = ladder.output_file.with_suffix(".md").read_text()
    assert "| off: padded vocabulary | 100.0 | 100.0-100.0 | 655,360 |" in markdown


def test_the_top_is_not_measured_again_for_the_ablation(runner, measured):
    ladder = runner()
    ladder.run_ladder(ladder.wanted(["tied", ladder.top]))
    ladder.run_ablation()
    assert measured.count(options_of(build_rungs(H200))) == 2  # as the top of the ladder, and again at the end
    assert [ladder.results["ablation"][i]["name"] for i in (0, -1)] == ["everything", "again"]


def peer(name: str, ours: str = "ours") -> Peer:
    return Peer(name, name, [name], None, "", 1, "0" * 64, ours=ours)


def give_peers(monkeypatch, give) -> None:
    """Replace the run of a peer by `give(peer)`."""
    stand_in = create_autospec(measure_peer, side_effect=lambda peer, num_steps, deadline: give(peer))
    monkeypatch.setattr(recipe.benchmark.runner, "measure_peer", stand_in)


def test_peers_are_compared_round_by_round(runner, measured, monkeypatch):
    """Ours is divided by theirs within a round; a round that failed on either side does not count."""
    rates = iter([{"tokens_per_second": 327_680}, {"failed": "killed"}, {"tokens_per_second": 655_360}])
    give_peers(monkeypatch, lambda peer: next(rates))
    ladder = runner()
    ladder.run_peers([peer("nanogpt", "ours_auto")], 3)
    (entry,) = ladder.results["peers"]
    assert entry["times_of_each_round"] == [2.0, 1.0] and entry["times"] == 1.5 and entry["rounds"] == "2 of 3"
    assert {options.get("per_device_train_batch_size") for options in measured} == {None, "auto"}


def test_an_interrupted_round_is_kept(runner, monkeypatch):
    """The file has what was measured before Ctrl-C, including the ladder."""

    def interrupted_at_the_second(peer):
        if peer.name == "second":
            raise KeyboardInterrupt
        return {"tokens_per_second": 327_680}

    give_peers(monkeypatch, interrupted_at_the_second)
    ladder = runner()
    ladder.run_ladder({"tied"})
    with pytest.raises(KeyboardInterrupt):
        ladder.run_peers([peer("first"), peer("second")], 1)
    results = json.loads(ladder.output_file.read_text())
    assert [entry["name"] for entry in results["peers"]] == ["first"] and results["peers"][0]["times"] == 2
    assert [entry["name"] for entry in results["ladder"]] == ["tied"]


def test_a_full_disk_leaves_the_results_before(runner, monkeypatch):
    """The error is one sentence, and the file is unchanged."""
    ladder = runner()
    ladder.run_ladder({"tied"})
    before = ladder.output_file.read_bytes()
    monkeypatch.setattr(recipe.benchmark.runner, "to_markdown", lambda results: "x")

    def write_text(path, text):
        with open("/dev/full", "w") as file:
            file.write(text)

    monkeypatch.setattr(recipe.benchmark.runner.Path, "write_text", write_text)
    with pytest.raises(
        UserError, match=r"cannot write .*out.json: No space left on device; an existing file is unchanged"
    ):
        ladder.run_ladder({"compile"})
    assert ladder.output_file.read_bytes() == before and [p.name for p in ladder.work.glob(".*")] == []
