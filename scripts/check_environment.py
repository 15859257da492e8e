"""Check this machine before a run: packages, launcher, device, precision, compiler, disk space and the Hub.

python scripts/check_environment.py
python scripts/check_environment.py --measure --config gpt2_124m --dataset_dir runs/data/fineweb-edu

All other options are options of recipe/train.py. --measure trains ten steps. `accelerate env` prints what else a bug
report needs. Exits with 1 if a check fails.
"""

import argparse
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import requires, version
from pathlib import Path

import torch
from accelerate.commands import launch
from accelerate.utils import launch as environments
from huggingface_hub import get_token, whoami
from packaging.requirements import Requirement

from recipe.arguments import CommandLine, typed_names
from recipe.command_line import load_config, names_data
from recipe.config import STANDARD_LIBRARY, TrainConfig, save_config
from recipe.environment import count_cpus, describe_device
from recipe.errors import UserError, one_line, run_main, short_reason
from recipe.hardware.accelerator import choose_dynamo_backend, choose_mixed_precision
from recipe.hardware.devices import native_bf16, why_no_inductor
from recipe.hardware.processes import ONE_OF_SEVERAL, ONLY_DDP, started_one_of_several, wants_cpu
from recipe.model.build import build_model_config
from recipe.model.size import count_parameters, count_training_flops

TRAIN = str(Path(__file__).resolve().parents[1] / "recipe" / "train.py")
MEASURED_STEPS = 10
MOST_CPU_FLOPS = 2e13  # of these steps, which take two minutes on two cores; a large batch is reduced
GPT2_VOCAB_SIZE = 50257


def main() -> None:
    args, config = parse()
    checks: dict[str, Callable[[], str]] = {
        "packages": check_packages,
        "launcher": lambda: check_launch(args.config_file),
        "device": check_device,
        "precision": lambda: check_precision(config),
        "compiler": check_compiler,
        "disk": lambda: check_disk(config),
        "Hub": lambda: check_hub(config),
    }
    if args.measure:
        checks["measured"] = lambda: measure(args.config_file, config)
    failed = 0
    for name, check in checks.items():
        try:
            print(f"ok      {name:10} {check()}", flush=True)
        except Exception as error:  # a broken installation fails in any way; the other checks still help
            failed += 1
            print(f"FAILED  {name:10} {error if isinstance(error, UserError) else short_reason(error)}", flush=True)
    if failed:
        raise UserError(f"{failed} of {len(checks)} checks failed")


def check_packages() -> str:
    """Compare the versions of the required packages with the ranges in pyproject.toml."""
    found = [need for need in map(Requirement, requires("gpt2-recipe")) if need.marker is None]
    wrong = [f"{need.name} {version(need.name)} is not {need.specifier}" for need in found
             if not need.specifier.contains(version(need.name), prereleases=True)]  # fmt: skip
    if wrong:
        raise UserError(f"{'; '.join(wrong)}; run pip install -e . in the folder that holds pyproject.toml")
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "datasets"))


def check_launch(config_file: str | None) -> str:
    """Resolve an Accelerate config, or the default one, with Accelerate's own launcher (1.15), but start nothing.

    From here on, this process has the launcher's settings.
    """
    if config_file and not os.path.isfile(config_file):
        raise UserError(f"there is no file {config_file}; use one in accelerate_configs/")
    launch.logger.setLevel("ERROR")  # it warns about every default that it uses
    typed = ["--config_file", config_file] if config_file else []
    try:
        args = launch._validate_launch_command(launch.launch_command_parser().parse_args([*typed, "train.py"]))[0]
        is_multi = args.multi_gpu or args.use_fsdp or args.use_megatron_lm
        if is_multi:
            environment = environments.prepare_multi_gpu_env(args)
        else:
            environment = environments.prepare_simple_launcher_cmd_env(args)[1]
    except Exception as error:  # of several types, for unknown keys and values
        reason = f"accelerate launch refuses the config: {one_line(error)}"
        raise UserError(f"{reason}; run accelerate config again, or use a file in accelerate_configs/") from error
    used = {"DeepSpeed": args.use_deepspeed, "FSDP": args.use_fsdp, "Megatron-LM": args.use_megatron_lm}
    if refused := [name for name, is_used in (used | {"TPU": args.tpu}).items() if is_used]:
        raise UserError(f"{refused[0]} is not supported: {ONLY_DDP}")
    if not is_multi and started_one_of_several(environment):
        raise UserError(ONE_OF_SEVERAL)
    names = ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND", "CUDA_VISIBLE_DEVICES")
    os.environ.update({name: environment[name] for name in names if name in environment})
    num_gpus, num_local = torch.cuda.device_count(), (args.num_processes or 1) // (args.num_machines or 1)
    if num_local > max(1, num_gpus) and not wants_cpu():
        remedy = f"pass --num_processes {max(1, num_gpus)} to accelerate launch, or use multi_cpu.yaml"
        raise UserError(f"{num_local} processes on a machine with {num_gpus} GPUs; {remedy}")
    settings = f"precision {args.mixed_precision}, dynamo {environment['ACCELERATE_DYNAMO_BACKEND'].lower()}"
    return f"{config_file or 'default config'}: {args.num_processes or 1} processes, {settings}"


def find_device() -> torch.device:
    found = None if wants_cpu() else torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def check_device() -> str:
    """Name the device and run a kernel on it: a build of PyTorch may lack those for an old or a new GPU."""
    device = find_device()
    if device.type != "cuda":
        return f"{describe_device(device)}, {count_cpus()} cores"
    torch.ones(1, device=device)
    memory, cudnn = torch.cuda.get_device_properties(device).total_memory, torch.backends.cudnn.version()
    return f"{describe_device(device)}, {memory / 1e9:.0f} GB, CUDA {torch.version.cuda}, cuDNN {cudnn}"


def check_precision(config: TrainConfig) -> str:
    choice = choose_mixed_precision(config, find_device())
    is_emulated = choice.value == "bf16" and native_bf16(find_device()) is None
    return f"{choice.value}: {choice.reason}{'; emulated, so it is slow' * is_emulated}"


def check_compiler() -> str:
    """Compile one small function with inductor."""
    device = find_device()
    if reason := why_no_inductor(device):
        raise UserError(f"{reason} (Debian: apt-get install g++ python3-dev); or train with --dynamo_backend no")
    compiled = torch.compile(lambda x: (2 * x).sin() + 1)
    compiled(torch.ones(8, device=device))
    return f"inductor compiles for {device.type}"


def check_disk(config: TrainConfig) -> str:
    """Show the free space where the run writes; a folder that does not exist yet is on its parent's disk."""
    found = []
    for folder in dict.fromkeys([config.output_dir or "runs", config.cache_dir]):
        existing = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.is_dir())
        found.append(f"{shutil.disk_usage(existing).free / 1e9:,.0f} GB free for {folder}")
    return f"{', '.join(found)}; a checkpoint takes 12 bytes per parameter, a packed token 2"


def check_hub(config: TrainConfig) -> str:
    if get_token() is None:
        if config.push_to_hub:
            raise UserError("--push_to_hub needs a token; run hf auth login, or set HF_TOKEN")
        return "not logged in; only --push_to_hub and gated datasets need that"
    try:
        return f"logged in as {whoami()['name']}"
    except Exception as error:  # of the HTTP client, which huggingface_hub chooses
        if config.push_to_hub:
            raise
        return f"a token is stored, but the Hub did not accept it: {short_reason(error)}"


def measure(config_file: str | None, config: TrainConfig) -> str:
    """Train ten steps of the run with the launcher, and extrapolate to all of its steps. Nothing is published."""
    model_config = build_model_config(config, GPT2_VOCAB_SIZE, 0, config.model_name_or_path)
    num_parameters = count_parameters(model_config)
    flops = count_training_flops(config, model_config, num_parameters)
    short = {"max_steps": MEASURED_STEPS, "num_train_epochs": None, "max_minutes": None, "profile": None}
    short |= {"eval_steps": 0, "max_eval_samples": 1, "eval_tasks": None, "save_steps": 0, "logging_steps": 2}
    short |= {"push_to_hub": False, "report_to": None, "resume_from_checkpoint": None, "expected_loss": None}
    short["dynamo_backend"] = choose_dynamo_backend(config, find_device(), flops).value  # of the whole run
    short["warmup_steps"] = min(config.warmup_steps, 1)
    steps, most = dataclasses.replace(config, **short), MOST_CPU_FLOPS if find_device().type == "cpu" else math.inf
    while steps.global_batch_size % 2 == 0 and count_training_flops(steps, model_config, num_parameters) > most:
        steps = dataclasses.replace(steps, global_batch_size=steps.global_batch_size // 2)
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--config_file", config_file] if config_file else []
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.yaml")
        save_config(steps, recipe)
        command = [*launcher, TRAIN, "--config", str(recipe), "--output_dir", f"{folder}/run"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
            raise UserError(f"training failed: {(lines or result.stderr.splitlines())[-1]}")
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    speed, memory = summary["tokens_per_second"], summary["peak_memory_bytes"] / 1e9
    length = "the length of the run depends on its epochs or minutes"
    if config.max_steps:
        hours = config.max_steps * config.tokens_per_step / speed / 3600
        length = f"{hours:,.2f} hours for {config.max_steps:,} steps"
    rows = summary["per_device_train_batch_size"]
    return f"{memory:.1f} GB, {rows} rows per forward pass, {speed:,.0f} tokens/s: {length}"


def parse() -> tuple[argparse.Namespace, TrainConfig]:
    """Return the options of this script and the run's config, with the standard library's text if none was given."""
    parser = CommandLine(description="Check this machine. All other options are options of recipe/train.py.")
    parser.add_argument("--config", default="demo", help="recipe (default: demo)")
    parser.add_argument("--config_file", help="Accelerate config (default: what `accelerate config` wrote)")
    parser.add_argument("--measure", action="store_true", help="train ten steps: memory, speed, hours to finish")
    args, options = parser.parse_with_run_options()
    if not names_data(args.config, options):
        options += ["--dataset_name", STANDARD_LIBRARY]
        if "tokenizer_name" not in typed_names(options):
            options += ["--tokenizer_vocab_size", str(GPT2_VOCAB_SIZE)]
    return args, load_config(["--config", args.config, *options])[0]


if __name__ == "__main__":
    run_main(main)
