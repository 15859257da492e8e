"""The programs as `accelerate launch` starts them on two processes."""

import json

import pytest
from helpers import (
    CPU_ONLY,
    ROOT,
    TINY,
    default_arguments,
    launch,
    make_documents,
    read_events,
    reset_accelerate,
    run_script,
    write_task,
)

TWO_PROCESSES = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1")
TWO_PROCESSES += ("--dynamo_backend", "no", "--mixed_precision", "no")
SHORT = ["--max_steps", "6", "--eval_steps", "3", "--global_batch_size", "8", "--per_device_train_batch_size", "2"]


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory, dataset_dir):
    """The command line of an evaluation of which each process gets some windows, rows and examples."""
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "a.txt").write_text("".join(make_documents(30)), encoding="utf-8")
    data = f"--text_file {folder}/a.txt --dataset_dir {dataset_dir} --tasks {write_task(folder, 'lambada_openai')}"
    return f"{ROOT}/scripts/evaluate_model.py {data} --batch_size 1"


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, dataset_dir, evaluation):
    """Train with the backends that name the runs, and evaluate the first model. Returns the folder and the output."""
    folder = tmp_path_factory.mktemp("two")
    command = f"{evaluation} --model aot_eager --output_file two.json"
    arguments = ["aot_eager,aot_eager+", command, *default_arguments(dataset_dir, folder, TINY), *SHORT]
    program = ROOT / "tests/programs/train_and_evaluate_in_two.py"
    result = launch(arguments, folder, TWO_PROCESSES, program, **CPU_ONLY, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


@pytest.mark.parametrize("name", ["aot_eager", "aot_eager+"])
def test_gradients_reduced_in_several_buckets_are_those_of_one_process(train, two_processes, tmp_path, name):
    """Compiled, with recomputation (+) or without: the losses and gradient norms are the same but for rounding."""
    one = train(*SHORT, output_dir=tmp_path / "one")
    run = two_processes[0] / name
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["num_processes"], summary["dynamo_backend"]) == (2, "aot_eager")
    for event, key, count in (("train", "loss", 6), ("train", "grad_norm", 6), ("eval", "loss", 3)):
        found, expected = ([e[key] for e in read_events(path, event)] for path in (run, one))
        assert len(found) == count and found == pytest.approx(expected, abs=1e-5), key


def test_two_processes_divide_an_evaluation(two_processes, evaluation, tmp_path):
    """The scores and counts of texts, rows and tasks are those of one process, and the table is printed once."""
    folder, printed = two_processes
    program, *arguments = evaluation.split()
    arguments += ["--model", folder / "aot_eager", "--output_file", tmp_path / "one.json"]
    assert not run_script(program, *arguments)
    reset_accelerate()  # which a run that follows in this process may want with another precision
    one, two = (json.loads(path.read_text())[0] for path in (tmp_path / "one.json", folder / "two.json"))
    assert (one["num_processes"], two["num_processes"]) == (1, 2)
    scores_of_one, scores_of_two = ([*of["texts"], of["tasks"]["own_lambada"]] for of in (one, two))
    for expected, found in zip(scores_of_one, scores_of_two, strict=True):
        assert expected.keys() == found.keys()
        numbers = {key for key, value in expected.items() if isinstance(value, (int, float))} - {"seconds"}
        for key in numbers:
            assert found[key] == pytest.approx(expected[key], rel=1e-5), key
    tables = [line for line in printed.splitlines() if "bits/byte" in line and not line.startswith("step")]
    assert len(tables) == 1


def test_waiting_for_the_main_process_has_no_time_limit(two_processes):
    """Text preparation and slow saves may take longer than collectives allow, so the others wait on the host."""
    assert two_processes[1].count("waited: prepared") == 2


@pytest.mark.parametrize("late", ["0", "1"])
def test_the_launchers_report_ends_with_our_error(tmp_path, late):
    """torchrun prints 40 lines and ends with our sentence, whichever process failed first: it kills the other."""
    program = ROOT / "tests/programs/fail_late.py"
    result = launch([late], tmp_path, TWO_PROCESSES, program, ACCELERATE_USE_CPU="true")
    assert result.returncode != 0
    assert "the mistake" in [line for line in result.stderr.splitlines() if line.strip("=- ")][-1]
