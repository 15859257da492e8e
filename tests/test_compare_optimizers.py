"""compare_optimizers.py: what it runs, and what it concludes from the losses."""

import json
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from conftest import PLAIN, TINY, run_script, run_training
from safetensors.torch import load_file

from recipe.benchmark import optimizers
from recipe.benchmark.charts import save_optimizer_chart
from recipe.benchmark.optimizers import Comparison, build_sides, summarize, to_markdown, tokens_to_reach
from recipe.command_line import load_config

SCRIPT = "scripts/benchmarks/compare_optimizers.py"


def result(side, rate, loss, seed=1, steps=100, tokens=1000):
    found = {"side": side, "learning_rate": rate, "seed": seed, "max_steps": steps, "tokens": tokens, "loss": loss}
    curve = [[tokens // 2, loss + 1], [tokens, loss]]
    return found | {"eval_rows": 5, "num_parameters": 1e6, "curve": curve}


@pytest.fixture
def results():
    """Muon at 200 tokens is at 3.5 and at 400 tokens at 2.5; AdamW at 1,000 tokens is at 3.0 in the mean."""
    runs = [
        result("adamw", 0.1, 9.0),
        result("adamw_zero", 0.1, 3.1),
        result("adamw_zero", 0.2, 2.9),
        result("adamw_zero", 0.2, 3.1, seed=2),
        result("muon", 0.1, 2.0),
        {"side": "muon", "learning_rate": 0.2, "seed": 1, "max_steps": 100, "failed": "NaN"},
        result("muon", 0.1, 3.5, steps=20, tokens=200),
        result("muon", 0.1, 2.5, steps=40, tokens=400),
        result("adamw_zero", 0.1, 2.5, steps=200, tokens=2000),
        result("adamw_zero", 0.2, 2.6, steps=200, tokens=2000),
    ]
    names = {name: side.what for name, side in build_sides(0.5).items()}
    named = {str(number): run for number, run in enumerate(runs)}
    return {"sides": names, "runs": named, "max_steps": 100, "seed": 1, "tokens_per_second": {"muon": [10, 30, 20]}}


def test_the_summary(results):
    """The best rate of the first seed, the mean over the seeds, and the tokens that each side needs."""
    summary = summarize(results)
    rows = {row["side"]: row for row in summary["rows"]}
    assert rows.keys() == {"adamw", "adamw_zero", "muon"} and summary["best_adamw"] == "adamw_zero"
    assert rows["adamw_zero"]["learning_rate"] == 0.2 and rows["adamw_zero"]["loss"] == pytest.approx(3.0)
    assert rows["adamw_zero"]["spread"] == pytest.approx(0.2) and rows["muon"]["tokens_per_second"] == 20
    assert rows["muon"]["learning_rate"] == 0.1, "a run that failed has no loss"
    muon, adamw = summary["comparison"]
    assert muon["tokens"] == pytest.approx(200 * 2**0.6)  # 2.9 of the same seed, in the logarithm of the tokens
    assert adamw["points"] == [(1000, 2.9), (2000, 2.5)] and adamw["tokens"] is None
    assert "after 0.00 M tokens with 0.30 of them" in to_markdown(results)


@pytest.mark.parametrize(("loss", "tokens"), [(3.0, 100), (2.0, 400), (2.5, 200), (1.9, None), (3.1, None)])
def test_tokens_to_reach(loss, tokens):
    found = tokens_to_reach([(100, 3.0), (400, 2.0)], loss)
    assert found == (tokens and pytest.approx(tokens))


def test_charts_are_drawn(results, tmp_path):
    """Over tokens and over seconds, each a PNG file of its own size."""
    for row, speed in (("adamw", 5), ("adamw_zero", 5)):
        results["tokens_per_second"][row] = [speed]
    results["summary"] = summarize(results)
    for seconds in (False, True):
        save_optimizer_chart(results, tmp_path / f"{seconds}.png", seconds=seconds)
        assert (tmp_path / f"{seconds}.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def in_this_process(monkeypatch):
    """Let runs be calls of main(), in this thread, which may handle signals. Returns the arguments of each."""
    started = []

    class Pool(ThreadPoolExecutor):
        def submit(self, work, run):
            (finished := Future()).set_result(work(run))
            return finished

    def run(self, arguments, directory, cpus):
        started.append(arguments)
        run_training(arguments, directory)
        return ""

    monkeypatch.setattr(Comparison, "_run_training", run)
    monkeypatch.setattr(optimizers, "ThreadPoolExecutor", Pool)
    return started


def test_a_comparison_tunes_repeats_and_continues(in_this_process, dataset_dir, tmp_path, monkeypatch):
    """2 sides x 2 rates, another seed at the best rates, and a shorter run; the same command then runs nothing."""
    monkeypatch.chdir(tmp_path)
    options = ["--dataset_dir", dataset_dir, *TINY, *PLAIN, "--max_steps", 6, "--global_batch_size", 4]
    command = [SCRIPT, "--output_file", "found.json", "--sides", "adamw", "muon", "--adamw_rates", 1e-3, 1e-2]
    command += [
        "--muon_rates",
        1e-3,
        1e-2,
        "--seeds",
        1,
        2,
        "--repeated_rates",
        1,
        "--lengths",
        0.5,
        "--evaluations",
        2,
        *options,
    ]
    assert run_script(*command) == ""
    results = json.loads((tmp_path / "found.json").read_text())
    assert len(in_this_process) == 4 + 2 + 1 == len(results["runs"])
    configs = [load_config(list(map(str, arguments)))[0] for arguments in in_this_process]
    assert [config.optim for config in configs[:4]] == ["adamw_torch_fused"] * 2 + ["muon"] * 2
    assert [config.learning_rate for config in configs[:2]] == [1e-3, 1e-2]
    assert [config.muon_learning_rate for config in configs[2:4]] == [1e-3, 1e-2]
    assert [config.seed for config in configs] == [1] * 4 + [2] * 2 + [1]
    assert (configs[6].optim, configs[6].max_steps) == ("muon", 3)
    assert len({config.learning_rate for config in configs if config.optim == "muon"}) == 1
    for row in results["summary"]["rows"]:
        best = [run for run in results["runs"].values() if run["side"] == row["side"] and run["seed"] == 2]
        assert best[0]["learning_rate"] == row["learning_rate"] == float(min(row["grid"], key=row["grid"].get))
    assert "Muon, decay to zero" in (tmp_path / "found.md").read_text()
    in_this_process.clear()
    assert run_script(*command) == "" and in_this_process == []
    error = run_script(*command, "--warmup_steps", 1)
    assert "has other options" in error


def test_the_averaged_tail_is_the_mean_of_the_last_checkpoints(dataset_dir, tmp_path, monkeypatch):
    """Its weights are those of five checkpoints, added up in another order and divided by five."""
    folders = [tmp_path / "run" / f"checkpoint-{step}" for step in range(1, 6)]
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        optimizers.save_file({"w": torch.full((2, 2), 2.0**number)}, folder / "model.safetensors")
    means = []

    def run(self, arguments, directory, cpus):
        means.append(load_file(directory / "model.safetensors")["w"])
        return "runs/x, 5 rows: validation loss 1.2500, perplexity 3.49"

    monkeypatch.setattr(Comparison, "_run_training", run)
    comparison = Comparison([], dataset_dir, tmp_path, 1, {}, lambda: None)
    assert comparison._evaluate_average(tmp_path / "run", [0]) == 1.25
    assert torch.equal(means[0], torch.full((2, 2), 31 / 5))


def test_unequal_grids_are_refused(tmp_path):
    error = run_script(SCRIPT, "--output_file", tmp_path / "a.json", "--adamw_rates", 1, "--muon_rates", 1, 2)
    assert "equally many" in error
