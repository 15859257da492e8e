"""Which variables of a launcher count, in which programs, and which are named when they do not fit together."""

import os
from unittest import mock

import pytest

from recipe.errors import run_main
from recipe.launcher import (
    asks_for_cpu,
    count_local_processes,
    count_processes,
    drop_unset,
    is_main_process,
    why_alone,
    why_incomplete,
)

FOUR = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
FOUR |= {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
MPI = {"PMI_SIZE": "2", "PMI_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
CPU = {"ACCELERATE_USE_CPU": "true"}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, None),
        (FOUR, None),
        ({"RANK": "3"}, None),  # a pod's; nothing was launched in it
        ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}, None),
        ({"LOCAL_RANK": "0"}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT unset LOCAL_RANK"),
        (without(FOUR, "MASTER_PORT") | CPU, None),  # Accelerate has a port for a CPU
        (FOUR | {"WORLD_SIZE": "four"}, "WORLD_SIZE 'four'"),
        ({"WORLD_SIZE": "4"} | CPU, "RANK, MASTER_ADDR unset WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, None),  # Accelerate sees one: see below
        (without(FOUR, "LOCAL_RANK", "MASTER_PORT") | {"CUDA_VISIBLE_DEVICES": "-1"}, None),
        ({"ACCELERATE_USE_FSDP": "maybe"}, "ACCELERATE_USE_FSDP 'maybe'"),
        ({"ACCELERATE_USE_FSDP": "False"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun accelerate launch SLURM_STEP_NUM_TASKS"),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, None),  # in a batch script
        (FOUR | {"SLURM_STEP_NUM_TASKS": "2"}, None),
    ],
)
def test_a_process_that_does_not_know_its_place_names_the_variables_that_are_wrong(environment, names):
    check_reason(why_incomplete(environment), names)


@pytest.mark.parametrize(
    ("environment", "num_seen", "has_gpu", "names"),
    [
        ({}, 1, False, None),
        (FOUR, 4, True, None),
        ({"WORLD_SIZE": "4"}, 1, True, "4, LOCAL_RANK unset WORLD_SIZE"),
        (FOUR, 1, False, "4 1 GPU accelerate_configs/multi_cpu.yaml"),
        (FOUR, 1, True, "4 1; accelerate_configs/multi_cpu.yaml"),
    ],
)
def test_a_run_says_why_accelerate_sees_too_few_processes(environment, num_seen, has_gpu, names):
    check_reason(why_alone(environment, num_seen, has_gpu), names)


def check_reason(reason, names):
    """Assert that there is a reason if one is expected, and that each of the words is in it."""
    assert (reason is None) == (names is None)
    assert [name for name in (names or "").split() if name not in reason] == []


@pytest.mark.parametrize(
    ("environment", "processes", "local", "is_main"),
    [
        ({}, 1, 1, True),
        (FOUR, 4, 2, False),
        (FOUR | {"RANK": "0"}, 4, 2, True),
        ({"RANK": "1"}, 1, 1, True),  # it speaks for itself
        ({"RANK": "1", "WORLD_SIZE": "2"}, 2, 2, True),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "4"}, 4, 4, True),  # which is not known: it has to say so
        (without(FOUR, "MASTER_ADDR"), 4, 2, True),
        (without(FOUR, "LOCAL_WORLD_SIZE"), 4, 4, False),
        ({"WORLD_SIZE": "", "LOCAL_WORLD_SIZE": "all"}, 1, 1, True),
    ],
)
def test_the_variables_say_how_many_processes_there_are_and_which_one_speaks(environment, processes, local, is_main):
    found = count_processes(environment), count_local_processes(processes, environment), is_main_process(environment)
    assert found == (processes, local, is_main)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ACCELERATE_USE_CPU", "true", True),
        ("ACCELERATE_USE_CPU", "False", False),
        ("CUDA_VISIBLE_DEVICES", "-1,-1", True),
        ("CUDA_VISIBLE_DEVICES", "0,1", False),
        ("CUDA_VISIBLE_DEVICES", "", False),  # torch sees none, so nothing has to be asked for
    ],
)
def test_the_variables_say_whether_the_cpu_was_asked_for(name, value, expected):
    assert asks_for_cpu({name: value}) == expected


def test_an_empty_variable_of_a_launcher_is_an_unset_one():
    """Older programs write -1 for it. Variables of others stay as they are."""
    kept = {"RANK": "0", "CUDA_VISIBLE_DEVICES": "", "EDITOR": ""}
    environment = {"LOCAL_RANK": "-1", "WORLD_SIZE": "", "MASTER_PORT": "", "ACCELERATE_USE_CPU": "", "PMI_RANK": ""}
    environment |= kept
    drop_unset(environment)
    assert environment == kept


def test_only_a_program_that_is_one_process_forgets_the_launcher():
    """But not what Accelerate was asked for, which plan_run.py reads. A notebook's launcher starts `run_main` in each
    of its processes.
    """
    kept = CPU | {"CUDA_VISIBLE_DEVICES": "1", "HOME": "/home/jo"}
    found = []
    for is_alone in (False, True):
        with mock.patch.dict(os.environ, FOUR | MPI | kept, clear=True):
            run_main(lambda: found.append(dict(os.environ)), is_alone=is_alone)
    assert found == [FOUR | MPI | kept, kept]
