"""What kills cost: the arithmetic on a log written and solved by hand, and the programs that are measured."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, load_program

from recipe.benchmark.faults import (
    Life,
    compare_losses,
    count_examples,
    describe_kills,
    differing_bits,
    draw_kills,
    kept_share,
    progress_at,
    save_stalls,
    surviving_steps,
    undisturbed_step_seconds,
)
from recipe.benchmark.interrupted import InterruptedRun, NanoGPT, Ours, RunClm
from recipe.errors import UserError


def steps_of(first_step: int, *times: float) -> list[tuple[float, int]]:
    return [(at, first_step + i) for i, at in enumerate(times)]


@pytest.fixture
def lives() -> list[Life]:
    """A run that saves every 4 steps, killed at 10 s after step 6, at 13 s before a step, and at 20 s after step 7."""
    return [
        Life(0.0, steps_of(1, 4, 5, 6, 7, 8, 9), dict.fromkeys(range(1, 7), "a"), ended_at=10.0),
        Life(10.0, ended_at=13.0),
        Life(13.0, ended_at=15.0, failed="damaged"),
        Life(15.0, steps_of(5, 17, 18, 19), {5: "a", 6: "b", 7: "c"}, {"loaded": 16.0}, ended_at=20.0),
        Life(20.0, steps_of(5, 24, 25, 26, 27, 28), dict.fromkeys(range(5, 10), "d")),
    ]


def test_progress_falls_back_to_the_checkpoint(lives):
    """While a process starts, the run has only the steps that it can resume from."""
    found = [progress_at(lives, at) for at in (0, 4, 9.9, 10, 14, 16, 17, 19.5, 21, 24, 30)]
    assert found == [0, 1, 6, 4, 4, 4, 5, 7, 4, 5, 9]


def test_kept_share(lives):
    """From 4 s to 28 s the run went from step 1 to step 9: 8 steps of 1 s in 24 s."""
    assert kept_share(lives, 4, 28, 1.0) == pytest.approx(8 / 24)


def test_what_each_kill_cost(lives):
    """Lost steps are those after the checkpoint; a new step is one that no earlier process had done."""
    first, before_a_step, last = describe_kills(lives)
    assert (first["killed_at_step"], first["steps_lost"], first["failed_starts"]) == (6, 2, [])
    assert "seconds_to" not in first  # the next process was killed before its first step
    assert before_a_step["killed_at_step"] is None and "steps_lost" not in before_a_step
    assert before_a_step["failed_starts"] == ["damaged"]
    assert before_a_step["seconds_to"] == {"loaded": 3.0, "first_step": 4.0, "new_step": 6.0}
    assert (last["killed_at_step"], last["steps_lost"]) == (7, 3)
    assert last["seconds_to"] == {"first_step": 4.0, "new_step": 7.0}


def test_surviving_steps(lives):
    """A process's steps survive up to the checkpoint from which a later one resumed."""
    assert surviving_steps(lives) == [[1, 2, 3, 4], [], [], [], [5, 6, 7, 8, 9]]


def test_losses_of_surviving_steps_are_compared(lives):
    """Steps that were done again count with their last loss."""
    assert compare_losses(lives, Life(0, losses=dict.fromkeys(range(1, 8), "a"))) == (3, 7)


def test_undisturbed_steps_and_the_delay_of_a_save():
    """Steps take 1 s, except the first, 3 s, and two of the ten after the save at step 20, 2 s."""
    durations = [3.0] + [1.0] * 19 + [2.0, 2.0] + [1.0] * 28
    times = [sum(durations[: i + 1]) for i in range(len(durations))]
    run = [Life(0.0, steps_of(1, *times))]
    assert undisturbed_step_seconds(run, 20) == pytest.approx(1.0)
    assert save_stalls(run, 20, 1.0) == pytest.approx([2.0, 0.0])  # after steps 20 and 40
    assert undisturbed_step_seconds([Life(0.0, steps_of(1, 1, 2, 3))], 20) is None


@pytest.mark.parametrize(
    ("steps", "expected"), [([1, 2, 3], (0, 0)), ([1, 2, 2, 2, 3], (16, 0)), ([1, 4], (0, 16)), ([2, 2], (8, 8))]
)
def test_repeated_and_skipped_examples(steps, expected):
    """A step takes 8 examples."""
    assert count_examples(steps, 8) == expected


def test_differing_bits():
    """1.0 and -1.0 differ in the sign; a missing tensor differs in every bit."""
    one = {"a": torch.ones(3), "b": [torch.zeros(2, dtype=torch.int64), "text"]}
    assert differing_bits(one, {"a": torch.tensor([1.0, -1.0, 1.0]), "b": [torch.tensor([0, 3]), "text"]}) == (3, 224)
    assert differing_bits(one, {"a": torch.ones(3)}) == (128, 224)


def test_kills_are_the_same_for_everyone():
    """One in the first half of each interval; the seed decides where."""
    kills = draw_kills(30, 4, seed=0)
    assert kills == draw_kills(30, 4, seed=0) != draw_kills(30, 4, seed=1)
    assert all(30 * i <= at <= 30 * i + 15 for i, at in enumerate(kills))


def test_our_metrics_are_read_without_those_of_earlier_processes(tmp_path):
    """A resumed run replaces the file by the lines up to its checkpoint, and then adds its own."""
    program = Ours.__new__(Ours)
    run = InterruptedRun(program, tmp_path / "run", 2, 1)
    run.output.mkdir()

    def event(kind: str, step: int, loss: float) -> str:
        return json.dumps({"event": kind, "step": step, "loss": loss}) + "\n"

    metrics, replaced = run.output / "metrics.jsonl", run.output / "metrics.new"
    kept = event("start", 0, 0.0) + event("train", 1, 5.0) + event("start", 1, 0.0)
    metrics.write_text(kept + event("train", 2, 4.0))
    program.directory, program.resume = tmp_path, lambda *_: [sys.executable, "-c", "pass"]
    run.start()
    run.poll()
    assert run.life.steps == []  # the process has not replaced the file yet
    replaced.write_text(kept)
    replaced.replace(metrics)
    run.poll()
    assert run.life.steps == []
    with open(metrics, "a") as file:  # the same start event as before, a step, and a line that is not complete
        file.write(event("start", 1, 0.0) + event("train", 2, 4.5) + '{"event": "tr')
    run.poll()
    assert [step for _, step in run.life.steps] == [2] and run.life.losses == {2: "4.5"}
    run.kill()


def test_the_steps_of_other_programs_are_read():
    """nanoGPT logs the number of steps before the one it did; Trainer logs no number, but where it resumes."""
    life = Life(0.0)
    NanoGPT.read(
        None, life, ["iter 0: loss 7.7, time 100.00ms, mfu -100.00%", "step 8: train loss 3, val loss 3"], 2.5
    )
    assert life.steps == [(2.5, 1)] and life.losses == {1: "7.7"}
    life, lines = Life(0.0), ["{'loss': '7.706', 'grad_norm': '3.1'}", "{'loss': 7.5, 'epoch': '0.1'}"]
    resumed = "  Resuming training from checkpoint with epoch 0 and global step 40"
    RunClm.read(None, life, [resumed, *lines], 2.5)
    assert life.steps == [(2.5, 41), (2.5, 42)] and life.losses == {41: "7.706", 42: "7.5"}
    life = Life(0.0)
    RunClm.read(None, life, lines, 2.5)
    assert life.steps == [(2.5, 1), (2.5, 2)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--rates", "0"], "must be above 0"),
        (["--threads", "0"], "--threads must be between 1 and"),
        (["--output_file", "missing/faults.json"], "the folder of --output_file missing/faults.json does not exist"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(options, reason, monkeypatch, tmp_path):
    """In one sentence."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["faults.py", *options])
    with pytest.raises(UserError, match=reason):
        load_program("scripts/benchmarks/faults.py").main()


@pytest.mark.slow
def test_a_short_measurement(tmp_path, monkeypatch):
    """Two kills: no example is repeated or skipped, and no bit differs."""
    command = [sys.executable, ROOT / "scripts" / "benchmarks" / "faults.py", "--rates", "40", "--minutes", "1.3"]
    short = ["--undisturbed_seconds", "5", "--save_seconds", "3", "--signals", "1", "--output_file", "faults.json"]
    subprocess.run([*command, *short], cwd=tmp_path, check=True, timeout=1800)
    found = json.loads((tmp_path / "faults.json").read_text())["programs"]["ours"]
    assert len(found["kills"]) == 2 and 0 < found["kept"]["40"]["share"] < 1
    assert (found["examples"], found["steps_with_another_loss"], found["differing_bits"]) == ("0, 0", 0, 0)
    assert found["sigterm"][0]["exit_status"] == 75 and found["sigterm"][0]["saved"]
    assert "| differing bits | 0 of" in (tmp_path / "faults.md").read_text()
