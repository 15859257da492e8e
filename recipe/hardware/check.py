"""Check the software of this machine: Python, packages, the Accelerate config, the Hub.

A check returns a `Finding`: what was found, whether a run works with it, and the remedy. This module imports only the
standard library, because anything else may be missing.
"""

import importlib
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Literal, NamedTuple

from recipe.errors import UserError, one_line, short_reason

if TYPE_CHECKING:
    from recipe.config import TrainConfig

FIRST_PYTHON = (3, 10)  # requires-python in pyproject.toml
SHOWN_PACKAGES = ("torch", "transformers", "accelerate")
HUB_SECONDS = 5.0  # to wait for the Hub's answer


class Finding(NamedTuple):
    """The result of a check. An error means that the run cannot work, a warning that something is slow or missing."""

    status: Literal["ok", "warning", "error"]
    found: str
    remedy: str = ""


class Launch(NamedTuple):
    """What `accelerate launch` would start. environment: what it would pass on to recipe/train.py."""

    config_file: str | None
    num_processes: int
    num_machines: int
    environment: dict[str, str]


def attempt(check: Callable[..., Finding], *arguments: object) -> Finding:
    """Run a check. A `UserError` would end the run, too. After any other exception, nothing is known: a warning."""
    try:
        return check(*arguments)
    except UserError as error:
        return refused(error)
    except Exception as error:
        return Finding("warning", f"not checked: {short_reason(error)}")


def refused(error: UserError) -> Finding:
    """Split the recipe's own message, `what was found; what fixes it`."""
    found, _, remedy = str(error).partition("; ")
    return Finding("error", found, remedy)


def check_python() -> Finding:
    """Compare the version of Python with the oldest that the recipe supports."""
    found = f"{sys.version.split()[0]} ({sys.executable})"
    if sys.version_info < FIRST_PYTHON:
        return Finding("error", found, f"install Python {'.'.join(map(str, FIRST_PYTHON))} or newer")
    return Finding("ok", found)


def check_packages() -> Finding:
    """Compare the versions of the required packages with the ranges in pyproject.toml."""
    if wrong := [problem for extra, _, problem in _requirements() if not extra and problem]:
        return Finding("error", "; ".join(wrong), "run pip install -e . in the folder that holds pyproject.toml")
    return Finding("ok", ", ".join(f"{name} {version(name)}" for name in SHOWN_PACKAGES))


def check_imports() -> Finding:
    """Import everything that a run imports, which finds packages that are installed but broken."""
    try:
        importlib.import_module("recipe.train")
    except Exception as error:
        remedy = "reinstall the package that fails: pip install --force-reinstall NAME"
        return Finding("error", f"recipe/train.py does not start: {short_reason(error)}", remedy)
    return Finding("ok", "recipe/train.py starts")


def check_optional_packages(config: "TrainConfig") -> Finding:
    """List the optional packages, and find those that the run's options need."""
    problems = {name: (extra, problem) for extra, name, problem in _requirements() if extra not in ("", "test")}
    installed = [f"{name} {version(name)}" for name, (_, problem) in problems.items() if not problem]
    missing = [name for name, (_, problem) in problems.items() if problem.endswith("not installed")]
    found = "; not installed: ".join(", ".join(names) for names in (installed or ["none"], missing) if names)
    needed = config.report_to or []
    for name, (extra, problem) in problems.items():
        if problem and name in needed:
            return Finding("error", f"--report_to {name}: {problem}", f"run pip install -e .[{extra}]")
        if problem and name not in missing:
            return Finding("warning", problem, f"run pip install -e .[{extra}]")
    return Finding("ok", found)


def _requirements() -> list[tuple[str, str, str]]:
    """Return (extra, package, problem) of all requirements: "" without an extra, and "" without a problem."""
    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, requires("gpt2-recipe")):
        extra = str(requirement.marker).partition("extra == ")[2].strip("'\"") if requirement.marker else ""
        name, problem = requirement.name, ""
        try:
            if not requirement.specifier.contains(version(name), prereleases=True):
                problem = f"{name} {version(name)} is not {requirement.specifier}"
        except PackageNotFoundError:
            problem = f"{name} is not installed"
        found.append((extra, name, problem))
    return found


def find_launch(config_file: str | None) -> Launch:
    """Resolve an Accelerate config, or the default one, with Accelerate's own launcher (1.15), but start nothing.

    Raises `UserError` if `accelerate launch` would refuse it.
    """
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import default_config_file
    from accelerate.utils import launch as environments

    from recipe.hardware.launcher import check_launcher

    if config_file and not os.path.isfile(config_file):
        raise UserError(f"there is no file {config_file}; use one in accelerate_configs/")
    launch.logger.setLevel("ERROR")  # it warns about every default that it uses
    chosen = config_file or (default_config_file if os.path.isfile(default_config_file) else None)
    typed = ["--config_file", config_file] if config_file else []
    try:
        args = launch._validate_launch_command(launch.launch_command_parser().parse_args([*typed, "train.py"]))[0]
        if args.use_deepspeed:
            check_launcher({"ACCELERATE_USE_DEEPSPEED": "true"})
        if args.tpu:
            raise UserError("TPUs are not supported; use accelerate_configs/single_gpu.yaml or cpu.yaml")
        if args.mixed_precision == "fp8":
            raise UserError("fp8 is not supported, as its converters skip GPT-2's Conv1D layers; choose bf16 instead")
        if args.multi_gpu or args.use_fsdp or args.use_megatron_lm:
            environment = environments.prepare_multi_gpu_env(args)
        else:
            environment = environments.prepare_simple_launcher_cmd_env(args)[1]
    except UserError:
        raise
    except Exception as error:  # of several types, for unknown keys and values
        reason = f"accelerate launch refuses {chosen}: {one_line(error)}"
        raise UserError(f"{reason}; run accelerate config again, or use a file in accelerate_configs/") from error
    return Launch(chosen, args.num_processes or 1, args.num_machines or 1, environment)


def check_launch(launch: Launch) -> Finding:
    """Say what the Accelerate config resolves to. Raises `UserError` for what the recipe refuses."""
    import torch

    from recipe.hardware.launcher import check_launcher, wants_cpu

    environment, num_local = launch.environment, launch.num_processes // launch.num_machines
    check_launcher(environment)
    parts = [f"{launch.num_processes} process{'es' * (launch.num_processes > 1)}"]
    parts += [f"{launch.num_machines} machines"] * (launch.num_machines > 1)
    parts += ["CPU"] * wants_cpu(environment)
    parts += [f"precision {environment['ACCELERATE_MIXED_PRECISION']}"]
    parts += [f"dynamo {environment['ACCELERATE_DYNAMO_BACKEND'].lower()}"]
    found = f"{os.path.relpath(launch.config_file) if launch.config_file else 'no config'}: {', '.join(parts)}"
    if num_local > max(1, torch.cuda.device_count()) and not wants_cpu(environment):
        remedy = f"pass --num_processes {max(1, torch.cuda.device_count())} to accelerate launch, or use "
        remedy += "accelerate_configs/multi_cpu.yaml for processes on the CPU"
        return Finding("error", f"{found}; this machine has {torch.cuda.device_count()} GPUs", remedy)
    return Finding("ok", found)


def check_hub(config: "TrainConfig") -> Finding:
    """Find out whether a token of the Hub is stored, and whether the Hub accepts it."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import build_hf_headers, get_session

    if constants.is_offline_mode():
        return Finding("warning", "offline mode is on", "unset HF_HUB_OFFLINE to load from the Hub or upload to it")
    if get_token() is None:
        if config.push_to_hub:
            return Finding("error", "--push_to_hub, but no token is stored", "run hf auth login, or set HF_TOKEN")
        return Finding("ok", "no token; only --push_to_hub and gated datasets need one")
    try:
        url = f"{constants.ENDPOINT}/api/whoami-v2"
        answer = get_session().get(url, headers=build_hf_headers(), timeout=HUB_SECONDS)
    except Exception as error:  # of the HTTP client, which huggingface_hub chooses
        return Finding("warning", f"a token is stored, but the Hub cannot be reached: {type(error).__name__}")
    if answer.status_code != 200:
        status = "error" if config.push_to_hub else "warning"
        return Finding(status, f"the Hub refuses the stored token ({answer.status_code})", "run hf auth login again")
    return Finding("ok", f"logged in as {answer.json()['name']}")
