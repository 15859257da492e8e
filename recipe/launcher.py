"""The launcher's variables in the environment: how many processes there are, which one this is, and its answers.

They matter in recipe/train.py and scripts/evaluate_model.py, which may run as several processes. All other programs
run as one process and remove them, because a shell or a container may have set them for something else. This module
imports nothing of the package.
"""

import os
from collections.abc import Mapping, MutableMapping

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # of torchrun, a number each
MEETING_POINT = ("MASTER_ADDR", "MASTER_PORT")
PREFIXES = ("PMI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "TORCHELASTIC_")  # of mpirun and torchrun
ANSWERS = ("ACCELERATE_", "FSDP_")  # prefixes of the answers to `accelerate config`
LAUNCHED = {"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"}  # every launched process has one of them
TRUE: tuple[str, ...] = ("1", "true", "yes", "on", "y", "t")
FALSE: tuple[str, ...] = ("0", "false", "no", "off", "n", "f")
NO_LAUNCHER = "or start with accelerate launch"


def forget_launcher(environment: MutableMapping[str, str]) -> None:
    """Remove the variables that would make this process one of several."""
    for name in filter(is_of_a_launch, [*environment]):
        del environment[name]


def drop_unset(environment: MutableMapping[str, str]) -> None:
    """Remove launcher variables that are empty (Accelerate cannot read them) or -1 (Accelerate takes it for unset)."""
    for name, value in [*environment.items()]:
        if value in ("", "-1") and (is_of_a_launch(name) or name.startswith(ANSWERS)):
            del environment[name]


def is_of_a_launch(name: str) -> bool:
    return name in (*PLACE, *MEETING_POINT) or name.startswith(PREFIXES)


def why_incomplete(environment: Mapping[str, str]) -> str | None:
    """Return why a process cannot find its place among the others, and what helps; None if it can."""
    for name in PLACE:
        text = environment.get(name, "0")
        if not text.isdigit():
            return f"{name} is '{text}', which is not a number; unset it, {NO_LAUNCHER}"
    for name, text in environment.items():
        if name.startswith("ACCELERATE_USE_") and text.lower() not in TRUE + FALSE:
            return f"{name} is '{text}', which is neither true nor false"
    on_cpu = asks_for_cpu(environment)
    port = () if on_cpu else ("MASTER_PORT",)  # Accelerate has a default for a CPU
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", *port) if name not in environment]
    several = on_cpu and count_processes(environment) > 1  # on a CPU, Accelerate needs no LOCAL_RANK for these
    if missing and ("LOCAL_RANK" in environment or several):
        present = "WORLD_SIZE" if several else "LOCAL_RANK"
        verb = "is" if len(missing) == 1 else "are"
        return f"{present} is set, but {', '.join(missing)} {verb} not; unset {present}, {NO_LAUNCHER}"
    if _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1 and count_processes(environment) == 1:
        remedy = "start one per machine, with accelerate launch (see scripts/slurm), or unset SLURM_STEP_NUM_TASKS"
        return f"srun has started several tasks, each of which would do the whole work by itself; {remedy}"
    return None


def why_alone(environment: Mapping[str, str], num_seen: int, has_gpu: bool) -> str | None:
    """Return why Accelerate (1.15) sees fewer processes than there are, and what helps; None if it sees all."""
    expected = count_processes(environment)
    if num_seen == expected:
        return None
    if "LOCAL_RANK" not in environment:
        return f"WORLD_SIZE is {expected}, but LOCAL_RANK is not set; unset WORLD_SIZE, {NO_LAUNCHER}"
    seen = f"{num_seen}" if has_gpu else f"{num_seen} (no GPU was found)"
    remedy = "on a CPU, use accelerate_configs/multi_cpu.yaml"
    return f"the launcher started {expected} processes but Accelerate sees {seen}; {remedy}"


def asks_for_cpu(environment: Mapping[str, str]) -> bool:
    """Return whether the launcher asks for the CPU: by `use_cpu`, or by hiding all GPUs from several processes.

    The launcher of several processes does not pass `use_cpu` on, but it does pass on gpu_ids -1 (accelerate 1.15).
    """
    hidden = set(environment.get("CUDA_VISIBLE_DEVICES", "all").split(",")) == {"-1"}
    return is_true(environment, "ACCELERATE_USE_CPU") or hidden


def count_processes(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many processes the launcher has started."""
    return _number(environment, "WORLD_SIZE", 1)


def count_local_processes(num_processes: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return how many of the run's processes are on this machine: what the launcher says, else all num_processes."""
    return _number(environment, "LOCAL_WORLD_SIZE", num_processes)


def is_main_process(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process prints for all of them. A process without a launcher always does."""
    is_launched = "LOCAL_RANK" in environment and count_processes(environment) > 1
    return not is_launched or environment.get("RANK") == "0" or why_incomplete(environment) is not None


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this process among those of its machine; 0 without a launcher."""
    return _number(environment, "LOCAL_RANK", 0) if count_processes(environment) > 1 else 0


def answer(name: str, default: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return what the launcher says to a question of `accelerate config`, in lower case."""
    return (environment.get(f"ACCELERATE_{name}") or default).lower()


def dynamo_mode() -> str:
    """Return the launcher's mode for torch.compile."""
    return answer("DYNAMO_MODE", "default")


def is_true(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in TRUE


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable as a number, or the default if it is none."""
    text = environment.get(name, "")
    return int(text) if text.isdigit() else default
