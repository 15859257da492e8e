"""Which variables of a launcher count, in which programs, and what is said about those that do not fit together."""

import os
from unittest import mock

import pytest
from conftest import run_script

from recipe.errors import run_main
from recipe.launcher import (
    asks_for_cpu,
    count_local_processes,
    count_processes,
    drop_unset,
    forget_launcher,
    is_main_process,
    why_alone,
    why_incomplete,
)

FOUR = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
FOUR |= {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
MPI = {"PMI_SIZE": "2", "PMI_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1"}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (FOUR, None),
        ({"RANK": "3"}, None),  # a pod's; nothing was launched in it
        ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "node0"}, None),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set, but RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not"),
        (without(FOUR, "RANK"), "RANK is not; unset LOCAL_RANK, or start with accelerate launch"),
        (without(FOUR, "MASTER_PORT") | {"ACCELERATE_USE_CPU": "true"}, None),  # Accelerate has a port for a CPU
        (FOUR | {"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four', which is not a number; unset it, or start with acc"),
        ({"WORLD_SIZE": "4", "ACCELERATE_USE_CPU": "true"}, "WORLD_SIZE is set, but RANK, MASTER_ADDR are"),
        ({"WORLD_SIZE": "4"}, None),  # Accelerate sees one: see below
        (without(FOUR, "LOCAL_RANK", "MASTER_PORT") | {"CUDA_VISIBLE_DEVICES": "-1"}, None),
        ({"ACCELERATE_USE_FSDP": "maybe"}, "ACCELERATE_USE_FSDP is 'maybe', which is neither true nor false"),
        ({"ACCELERATE_USE_FSDP": "False"}, None),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, None),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, "starts only one with this"),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "PMI_SIZE": "2"}, None),
    ],
)  # fmt: skip
def test_whether_a_process_knows_its_place(environment, expected):
    reason = why_incomplete(environment)
    assert reason is expected or expected in reason


@pytest.mark.parametrize(
    ("environment", "num_seen", "has_gpu", "expected"),
    [
        ({}, 1, False, None),
        (FOUR, 4, True, None),
        (
            {"WORLD_SIZE": "4"},
            1,
            True,
            "WORLD_SIZE is 4, but LOCAL_RANK is not set; unset WORLD_SIZE, or start with acc",
        ),
        (FOUR, 1, False, "started 4 processes but Accelerate sees 1 (no GPU was found); on a CPU, use accelerate_con"),
        (FOUR, 1, True, "started 4 processes but Accelerate sees 1; on a CPU, use accelerate_configs/multi_cpu.yaml"),
    ],
)
def test_why_accelerate_sees_too_few(environment, num_seen, has_gpu, expected):
    reason = why_alone(environment, num_seen, has_gpu)
    assert reason is expected or expected in reason


@pytest.mark.parametrize(
    ("environment", "processes", "local", "is_main"),
    [
        ({}, 1, 1, True),
        (FOUR, 4, 2, False),
        (FOUR | {"RANK": "0"}, 4, 2, True),
        ({"RANK": "1"}, 1, 1, True),  # it speaks for itself
        ({"RANK": "1", "WORLD_SIZE": "2"}, 2, 2, True),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "4"}, 4, 4, True),  # which is not known: it has to say so
        ({"LOCAL_RANK": "", "RANK": "", "WORLD_SIZE": "4"}, 4, 4, True),
        (FOUR | {"RANK": "two"}, 4, 2, True),
        (without(FOUR, "MASTER_ADDR"), 4, 2, True),
        (without(FOUR, "LOCAL_WORLD_SIZE"), 4, 4, False),
        ({"WORLD_SIZE": "", "LOCAL_WORLD_SIZE": "all"}, 1, 1, True),
    ],
)
def test_how_many_processes_there_are_and_which_one_speaks(environment, processes, local, is_main):
    found = count_processes(environment), count_local_processes(processes, environment), is_main_process(environment)
    assert found == (processes, local, is_main)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"ACCELERATE_USE_CPU": "true"}, True),
        ({"ACCELERATE_USE_CPU": "1"}, True),
        ({"ACCELERATE_USE_CPU": "False"}, False),
        ({"ACCELERATE_USE_CPU": ""}, False),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, True),
        ({"CUDA_VISIBLE_DEVICES": "-1,-1"}, True),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, False),  # torch sees none, so nothing has to be asked for
    ],
)
def test_whether_the_cpu_was_asked_for(environment, expected):
    assert asks_for_cpu(environment) == expected


def test_an_empty_variable_is_an_unset_one():
    """So is -1, as older programs write it. Variables of others stay as they are."""
    kept = {"RANK": "0", "CUDA_VISIBLE_DEVICES": "", "EDITOR": ""}
    environment = {"LOCAL_RANK": "-1", "WORLD_SIZE": "", "MASTER_PORT": "", "ACCELERATE_USE_CPU": "", "PMI_RANK": ""}
    environment |= kept
    drop_unset(environment)
    assert environment == kept


def test_a_program_that_is_one_process_forgets_the_launcher():
    """But not what Accelerate was asked for, which plan_run.py reads."""
    kept = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "1", "HOME": "/home/jo"}
    environment = FOUR | MPI | kept
    forget_launcher(environment)
    assert environment == kept


def test_only_a_program_that_is_one_process_forgets_its_place():
    """A notebook's launcher starts `run_main` in each of its processes."""
    found = []
    for is_alone in (False, True):
        with mock.patch.dict(os.environ, FOUR):
            run_main(lambda: found.append(dict(os.environ)), is_alone=is_alone)
    assert FOUR.items() <= found[0].items() and not FOUR.keys() & found[1].keys()


ALONE = ("prepare_data", "train_tokenizer", "generate_text", "export_model", "push_to_hub", "plan_run", "run_ladder")


@pytest.mark.parametrize("name", ALONE)
def test_a_mistake_is_named_whatever_the_rank(name):
    with mock.patch.dict(os.environ, FOUR | MPI):
        assert run_script(f"scripts/{name}.py", "--optoin").startswith("error: ")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WORLD_SIZE": "", "LOCAL_RANK": "", "ACCELERATE_USE_FSDP": "", "LOCAL_WORLD_SIZE": ""}, ""),
        ({"LOCAL_RANK": "-1"}, ""),
        ({"RANK": "3"}, ""),
        ({"LOCAL_RANK": "0", "ACCELERATE_USE_CPU": ""}, "error: LOCAL_RANK is set, but RANK, WORLD_SIZE"),
        ({"WORLD_SIZE": "4", "ACCELERATE_USE_CPU": ""}, "error: WORLD_SIZE is 4, but LOCAL_RANK is not set"),
    ],
)
def test_a_run_in_a_shell_with_variables_from_elsewhere(monkeypatch, dataset_dir, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = ["--dataset_dir", dataset_dir, "--output_dir", "gone/run"]
    message = run_script("recipe/train.py", *options, "--resume_from_checkpoint", "gone/checkpoint-1")
    assert message.startswith(expected or "error: there is no checkpoint in gone/checkpoint-1")
