"""The environment checker: on this machine, and under conditions that this machine does not have."""

import contextlib
import dataclasses
import json
import shlex
import subprocess
import sys
import sysconfig
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import BLOCK_SIZE, ROOT, TINY, default_arguments, load_program, run_script
from torch.nn.attention import SDPBackend, sdpa_kernel

from recipe.benchmark import expect
from recipe.benchmark.expect import Expectation, estimate_run, measure_run
from recipe.benchmark.preflight import Preflight
from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.hardware import check, check_device, check_machine, memory
from recipe.hardware.check import Finding, Launch, attempt, check_hub, check_launch, check_packages, find_launch
from recipe.hardware.check_device import check_attention, check_compiler, check_gpu_kernels, check_torch_build
from recipe.hardware.check_machine import check_cpu, check_disk, check_read_rate, checkpoint_bytes
from recipe.hardware.memory import MemoryPlan
from recipe.model.build import build_model_config

SCRIPT = "scripts/check_environment.py"
CPU = torch.device("cpu")
LONG = 1e20  # FLOPs of a run that compiles


@pytest.fixture
def config(dataset_dir):
    return load_config(["--dataset_dir", str(dataset_dir), "--config_overrides", "n_layer=2,n_head=2,n_embd=32"])[0]


@pytest.fixture
def model_config(config):
    return build_model_config(config, 512, 0)


@pytest.fixture
def quick(monkeypatch):
    """Without the compilation, which one test pays for."""
    monkeypatch.setattr(check_device, "check_compiler", lambda *_: Finding("ok", "not tried"))


@pytest.fixture
def here(dataset_dir, tmp_path, monkeypatch):
    """A working directory with the dataset in it, whose name is short."""
    (tmp_path / "data").symlink_to(dataset_dir)
    monkeypatch.chdir(tmp_path)


def test_this_machine(here, capsys):
    """Every check prints a line of at most 80 columns, then the command and what the run takes; it exits with 0."""
    assert run_script(SCRIPT, "--dataset-dir", "data", "--max_steps", "9") == ""
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    checks, command, run = output.split("\n\n")
    names = [line[9:20].strip() for line in checks.splitlines() if line[:1].strip()]
    assert set(names) >= {"Python", "PyTorch", "GPU", "Precision", "Attention", "Compiler", "Cores", "Read rate"}
    assert "compiled a tiny graph" in checks
    assert (
        command.replace(" \\\n   ", "")
        == "accelerate launch recipe/train.py --config demo --dataset_dir data --max_steps 9"
    )
    assert [line.split("  ")[0] for line in run.splitlines()] == [
        "micro-batch",
        "options",
        "memory",
        "throughput",
        "time",
    ]
    assert run.count("(estimated)") == 3


@pytest.mark.usefixtures("quick", "here")
def test_a_recipe_needs_no_dataset_to_be_checked(capsys):
    """The missing dataset is a warning with its remedy, and has a place in the command."""
    run_script(SCRIPT, "--config", "gpt2_124m", "--config_overrides", "n_layer=1", "--save_total_limit=1", "--json")
    found = json.loads(capsys.readouterr().out)
    checks = {line["name"]: line for line in found["checks"]}
    assert checks["Data"]["status"] == "warning" and "scripts/prepare_data.py" in checks["Data"]["remedy"]
    assert found["command"].endswith("--dataset_dir DIR")
    assert "dataset: 20.0 GB" in checks["Data disk"]["found"]  # 19,073 steps of 524,288 tokens of 2 bytes


@pytest.mark.usefixtures("quick", "here")
def test_an_error_is_the_exit_status(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nuse_cpu: true\nnum_machines: 1\n"
        "num_processes: 2\nmachine_rank: 0\nmixed_precision: 'no'\n"
    )
    error = run_script(SCRIPT, "--dataset_dir", "data", "--config_file", "mine.yaml", "--json")
    assert error == "error: this run cannot start: 1 error"
    found = json.loads(capsys.readouterr().out)
    assert not found["can_run"]
    (wrong,) = [line for line in found["checks"] if line["status"] == "error"]
    assert wrong["name"] == "Accelerate" and "multi_cpu.yaml" in wrong["remedy"]


def test_json_has_what_the_text_has(capsys):
    """Names, findings and remedies, and the same numbers of the run."""
    report = load_program(SCRIPT).report
    findings = {"Python": Finding("ok", "3.12.1"), "GPU": Finding("error", "no " * 40 + "kernels", "fix it " * 20)}
    run = {"source": "measured", "micro_batch_size": 4, "gradient_accumulation_steps": 2, "memory_gb": 3.21}
    run |= {"usable_memory_gb": 8.0, "tokens_per_second": 123456, "seconds_to_first_step": 12.0}
    run |= {"activation_checkpointing": True, "loss_chunks": 8, "optim": "adamw_torch_fused"}
    run |= {"steps": 1000, "seconds": 3.14 * 3600, "max_minutes": None}
    report(findings, ["accelerate", "launch", "--sample_prompt", "word " * 9, *["--tf32"] * 5], run, False)
    text = capsys.readouterr().out
    report(findings, ["accelerate", "launch", "--sample_prompt", "word " * 9, *["--tf32"] * 5], run, True)
    found = json.loads(capsys.readouterr().out)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for line in found["checks"]:
        assert " ".join(f"{line['status']} {line['name']} {line['found']} {line['remedy']}".split()) in words
    assert found["run"] == run and not found["can_run"]
    command = text.partition("accelerate")[2].partition("\n\n")[0]
    command = command.replace("\\\n", "")  # as a shell reads it
    assert shlex.split(f"accelerate{command}") == shlex.split(found["command"])
    for shown in (
        "adamw_torch_fused, activation checkpointing, loss in 8 chunks",
        "4 rows x 2 per step",
        "3.2 of 8.0 GB (measured)",
        "123,456 tokens/s (measured)",
        "3.1 hours",
    ):
        assert shown in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "gpt2_125m"], "there is no recipe 'gpt2_125m'; did you mean gpt2_124m?"),
        (["--max_stepz", "3"], "unknown option --max_stepz; did you mean --max_steps?"),
        (["--global_batch_size", "0"], "global_batch_size must be at least 1, got 0"),
    ],
)
def test_mistakes_on_the_command_line(arguments, expected):
    assert expected in run_script(SCRIPT, *arguments)


def test_a_missing_dependency():
    """Without torch, Transformers and PyYAML, the script says so and exits with 1."""
    code = f"""
import importlib.metadata, runpy, sys
gone, version = ("torch", "transformers", "pyyaml"), importlib.metadata.version
def only_others(name):
    if name in gone:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = only_others
sys.modules.update(torch=None, transformers=None, yaml=None)
runpy.run_path({str(ROOT / SCRIPT)!r}, run_name="__main__")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    found = " ".join(result.stdout.split())
    assert "error Packages torch is not installed; transformers is not installed; pyyaml is not installed" in found
    assert "pip install -e ." in found


def test_a_dependency_that_is_too_old(monkeypatch):
    installed = check.version
    monkeypatch.setattr(check, "version", lambda name: "4.57.0" if name == "transformers" else installed(name))
    finding = check_packages()
    assert finding.status == "error" and finding.found.startswith("transformers 4.57.0 is not ")


def test_a_dependency_that_is_broken(monkeypatch):
    """It is installed, but its import fails."""
    monkeypatch.setitem(sys.modules, "recipe.train", None)
    assert check.check_imports().status == "error"


def test_a_tracker_that_is_not_installed(config, monkeypatch):
    monkeypatch.setattr(check, "_requirements", lambda: [("trackio", "trackio", "trackio is not installed")])
    config = mock.Mock(report_to=["trackio"])
    finding = check.check_optional_packages(config)
    assert finding.status == "error" and finding.remedy == "run pip install -e .[trackio]"


def test_a_check_that_raises_is_a_warning_and_a_user_error_an_error():
    def raises(error):
        raise error

    assert attempt(raises, ZeroDivisionError("oh")) == Finding("warning", "not checked: ZeroDivisionError: oh")
    assert attempt(raises, UserError("too small; use more")) == Finding("error", "too small", "use more")


@pytest.mark.parametrize(
    ("build", "status", "said"),
    [
        (("2.13.0+cpu", None, None, False), "ok", "no driver"),
        (("2.13.0+cpu", None, "580.65.06", False), "error", "cannot use the NVIDIA GPU"),
        (("2.13.0+cu130", "13.0", "580.65.06", True), "ok", "CUDA 13.0"),
        (("2.13.0+cu130", "13.0", "570.86", False), "error", "580.65"),
        (("2.13.0+cu126", "12.6", "535.104.05", True), "ok", "535.104.05"),
        (("2.13.0+cu126", "12.6", "525.60.13", False), "error", "nvidia-smi"),
        (("2.13.0+cu130", "13.0", None, False), "ok", "no driver"),
        (("2.13.0", None, None, True), "ok", "no CUDA"),  # Apple silicon
    ],
)
def test_the_torch_build_against_the_driver(build, status, said, monkeypatch):
    """NVIDIA's table: CUDA 12 runs with driver 525.60.13 and newer, CUDA 13 with 580.65.06."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = check_torch_build(*build)
    assert finding.status == status and said in f"{finding.found} {finding.remedy}"


def test_a_hidden_gpu_is_a_warning(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_torch_build("2.13.0+cu130", "13.0", "580.65", False).status == "warning"


@pytest.mark.parametrize(
    ("capability", "architectures", "status"),
    [
        ((7, 0), ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"], "error"),  # a V100
        ((7, 5), ["sm_75", "sm_80"], "ok"),
        ((8, 9), ["sm_80", "sm_86", "sm_90"], "ok"),  # a later minor version runs kernels for 8.6
        ((8, 0), ["sm_86"], "error"),  # but not the other way round
        ((9, 0), ["sm_80", "compute_80"], "warning"),  # PTX
        ((9, 0), ["sm_90a"], "ok"),
        ((10, 0), ["sm_90a", "compute_90a"], "error"),  # `a` runs only on its own version
        ((12, 0), ["sm_100", "compute_100"], "warning"),
    ],
)
def test_kernels_of_the_build(capability, architectures, status):
    """CUDA's rules of binary and PTX compatibility."""
    assert check_gpu_kernels("GPU", capability, architectures).status == status


def test_no_compiler(config, monkeypatch, tmp_path):
    """A warning with the package to install, or an error if inductor is requested."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finding = attempt(check_compiler, config, CPU, LONG)
    assert finding.status == "warning" and "C++ compiler" in finding.found and "g++" in finding.remedy
    requested = dataclasses.replace(config, dynamo_backend="inductor")
    assert attempt(check_compiler, requested, CPU, LONG).status == "error"


def test_no_python_headers(config, monkeypatch, tmp_path):
    """Triton compiles against Python.h."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_: {"include": str(tmp_path)})
    finding = check_compiler(config, torch.device("cuda"), LONG)
    assert finding.status == "warning" and "Python.h" in finding.found and "python3-dev" in finding.remedy


@pytest.mark.parametrize(("flops", "status"), [(LONG, "error"), (1.0, "warning")])
def test_a_broken_compiler(config, monkeypatch, flops, status):
    """It is an error for a run that compiles. The program that compiles the graph fails here at once."""
    monkeypatch.setattr(check_device, "why_no_inductor", lambda device: None)
    monkeypatch.setattr("recipe.hardware.choices.why_no_inductor", lambda device: None)
    monkeypatch.setattr(check_device, "COMPILED_PROGRAM", "raise RuntimeError('cc1plus: not found')")
    finding = check_compiler(dataclasses.replace(config, max_minutes=None), CPU, flops)
    assert finding.status == status and "cc1plus: not found" in finding.found


def test_a_compilation_that_hangs(config, monkeypatch):
    monkeypatch.setattr(check_device, "COMPILED_PROGRAM", "import time; time.sleep(60)")
    monkeypatch.setattr(check_device, "COMPILE_SECONDS", 0.2)
    assert "did not compile in" in check_compiler(config, CPU, 1.0).found


def test_the_attention_kernel(config, model_config):
    """The kernel that torch is told to use is the one that is found; plain matmuls are a warning."""
    config = mock.Mock(wraps=config, attn_implementation="sdpa", sdpa_with_mask=False, mixed_precision="no")
    config.block_size = BLOCK_SIZE
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        finding = check_attention(config, model_config, CPU)
    assert finding == Finding("ok", f"flash (CPU), {BLOCK_SIZE} tokens, head size 16")
    with sdpa_kernel(SDPBackend.MATH):
        assert check_attention(config, model_config, CPU).status == "warning"


def test_cores_of_a_container(monkeypatch, tmp_path):
    """More threads than the container's share of time is a warning that names the number to set."""
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(check_machine, "own_cgroups", lambda: [tmp_path / "none", tmp_path])
    monkeypatch.setattr(check_machine, "count_cpus", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    finding = check_cpu(1)
    assert finding.status == "warning" and "1.5 cores" in finding.found and "OMP_NUM_THREADS=1" in finding.remedy
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert check_cpu(2).status == "ok"


def test_a_small_disk(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=5e9))
    assert check_disk(tmp_path / "not" / "yet", 6e9, "checkpoints").status == "error"
    assert check_disk(tmp_path, 4e9, "checkpoints").status == "ok"


def test_the_size_of_the_checkpoints():
    """5 are kept and a sixth is written before the oldest is deleted; the final model has 4 bytes per parameter."""
    config = load_config(["--config", "gpt2_124m", "--dataset_dir", "DIR"])[0]
    assert checkpoint_bytes(config, 1000) == (6 * 12 + 4) * 1000
    config = load_config(["--config", "gpt2_124m", "--dataset_dir", "DIR", "--max_steps", "1500"])[0]
    assert checkpoint_bytes(config, 1000) == (2 * 12 + 4) * 1000


def test_a_slow_disk(config, monkeypatch):
    """100 rows per second are enough for fewer tokens than that, and too few for more."""
    monkeypatch.setattr(check_machine, "measure_row_rate", lambda path, row_bytes: 100.0)
    assert check_read_rate(config, None, 99.0 * config.block_size).status == "ok"
    finding = check_read_rate(config, None, 101.0 * config.block_size)
    assert finding.status == "warning" and "--data_placement ram" in finding.remedy


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"distributed_type": "FSDP"}, "FSDP is not supported"),
        ({"distributed_type": "DEEPSPEED"}, "DeepSpeed is not supported"),
        ({"distributed_type": "MEGATRON_LM"}, "Megatron-LM is not supported"),
        ({"distributed_type": "XLA"}, "TPUs are not supported"),
        ({"mixed_precision": "fp8"}, "fp8 is not supported"),
        ({"typo": 1}, "typo"),
        ({"distributed_type": "MULTI_GPU", "num_processes": 8}, "this machine has 2 GPUs"),
    ],
)
def test_refused_launchers(changes, said, tmp_path, monkeypatch):
    """Each is an error with a remedy."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    values = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": False, "machine_rank": 0}
    values |= {"num_machines": 1, "num_processes": 1, "mixed_precision": "no"} | changes
    (tmp_path / "mine.json").write_text(json.dumps(values))
    finding = attempt(lambda: check_launch(find_launch(str(tmp_path / "mine.json"))))
    assert finding.status == "error" and said in finding.found and finding.remedy


def test_what_a_config_of_the_recipe_resolves_to():
    launch = find_launch(str(ROOT / "accelerate_configs" / "single_gpu.yaml"))
    finding = check_launch(launch)
    assert finding.status == "ok" and finding.found.endswith("1 process, precision bf16, dynamo inductor")
    assert launch.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.parametrize(
    ("token", "push", "answer", "status", "said"),
    [
        (None, False, None, "ok", "no token"),
        (None, True, None, "error", "no token"),
        ("hf_x", False, SimpleNamespace(status_code=200, json=lambda: {"name": "ada"}), "ok", "logged in as ada"),
        ("hf_x", False, SimpleNamespace(status_code=401), "warning", "401"),
        ("hf_x", True, SimpleNamespace(status_code=401), "error", "401"),
        ("hf_x", True, OSError("no route"), "warning", "cannot be reached"),
    ],
)
def test_the_login_of_the_hub(token, push, answer, status, said, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    get = mock.Mock(side_effect=answer) if isinstance(answer, OSError) else mock.Mock(return_value=answer)
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: SimpleNamespace(get=get))
    finding = check_hub(mock.Mock(push_to_hub=push))
    assert finding.status == status and said in finding.found
    assert not get.called or get.call_args.kwargs["timeout"] <= 5


def test_the_estimate_by_hand(config, model_config, monkeypatch):
    """Tokens per second are the share of a matrix product's rate over FLOPs per token, and time follows from them."""
    monkeypatch.setattr(expect, "measure_matmul", lambda device, dtype: 1e12)
    monkeypatch.setattr(expect, "count_flops_per_token", lambda *_: 1e6)
    found = estimate_run(config, model_config, CPU, False, 1, 1)
    assert found.tokens_per_second == expect.MATMUL_SHARES[False] * 1e6
    step_seconds = config.global_batch_size * config.block_size / found.tokens_per_second
    assert found.length(config, 100) == (100, pytest.approx(100 * step_seconds))
    limit = int(config.max_minutes * 60 / step_seconds)
    assert found.length(config, 10**9) == (limit, pytest.approx(config.max_minutes * 60, abs=step_seconds))


def test_a_model_that_does_not_fit(config, model_config, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**6)
    with pytest.raises(UserError, match=r"the model needs .* of 0.0 GB \(estimated\)"):
        estimate_run(config, model_config, CPU, False, 1, 1)


def test_measuring_trains_the_same_model(config, monkeypatch, tmp_path):
    """The measured run has the options of the real one, except that it saves, evaluates and uploads nothing."""
    measured = {"peak_memory_bytes": 5, "tokens_per_second": 7, "seconds_to_first_step": 1.5}

    def measure(options, setting, num_steps, work, deadline):
        found = load_config(["--config", str(setting.options["config"])])[0]
        assert (found.config_overrides, found.dataset_dir) == (config.config_overrides, config.dataset_dir)
        assert (found.save_steps, found.eval_steps, found.eval_on_start, found.push_to_hub) == (0, 0, False, False)
        assert (setting.micro_batch, setting.global_batch) == (2, 4)
        return measured

    monkeypatch.setattr(expect, "measure", measure)
    plan = MemoryPlan(2, False, 1, "adamw_torch_fused", {})
    found = measure_run(config, Expectation("estimated", plan, 1, 9, None), 3, True, tmp_path)
    assert found == Expectation("measured", plan, 5, 9, 21, 1.5)
    measured["failed"] = "out of memory"
    with pytest.raises(UserError, match="out of memory"):
        measure_run(config, found, 1, True, tmp_path)


@pytest.mark.usefixtures("quick")
def test_every_check_may_fail(config, monkeypatch):
    """The checker reports all checks even if each of them raises."""
    for module in (check_device, check_machine):
        for name in [name for name in vars(module) if name.startswith("check_")]:
            monkeypatch.setattr(module, name, mock.Mock(side_effect=RuntimeError("broken")))
    monkeypatch.setattr("recipe.benchmark.preflight.estimate_run", mock.Mock(side_effect=RuntimeError("broken")))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ"))
        preflight = Preflight(config, True)
        preflight.run(False)
    broken = [name for name, finding in preflight.findings.items() if "RuntimeError: broken" in finding.found]
    assert set(broken) >= {"PyTorch", "GPU", "Compiler", "Cores", "Output disk", "Training", "Read rate"}


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--report_to", "nothing"],
        ["--gpu_memory_limit_gb", "4"],
        ["--ddp_comm_hook", "bf16"],
        ["--per_device_train_batch_size", "3"],
        ["--lr_scheduler_kwargs", "nothing=1"],
        ["--bf16_residual"],
    ],
)
def test_the_checker_and_the_run_agree(train, dataset_dir, tmp_path, monkeypatch, options):
    """The checker finds an error where the run raises one, and nowhere else."""
    monkeypatch.setattr(check_device, "check_compiler", lambda *_: Finding("ok", "not tried here"))
    for name in ("check_hub", "find_launch"):
        monkeypatch.setattr(f"recipe.benchmark.preflight.{name}", getattr(FakeChecks, name))
    monkeypatch.setattr(check_machine, "check_read_rate", lambda *_: Finding("ok", "not tried here"))
    preflight = Preflight(load_config([*default_arguments(dataset_dir, tmp_path / "run", TINY), *options])[0], True)
    preflight.run(measured=False)
    with pytest.raises(UserError) if options else contextlib.nullcontext():
        train(*options)
    assert preflight.can_run() is not bool(options), preflight.findings


class FakeChecks:
    """Checks that need a network or Accelerate's own configuration file."""

    @staticmethod
    def check_hub(config):
        return Finding("ok", "not asked")

    @staticmethod
    def find_launch(config_file):
        return Launch(None, 1, 1, dict.fromkeys(("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"), "no"))
