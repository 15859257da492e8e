"""The launcher's configs, loaded as the launcher loads them, and what its other answers lead to.

tests/test_programs.py launches cpu.yaml, and tests/test_nodes.py multi_cpu.yaml and multi_node.yaml.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import yaml
from accelerate.commands import launch as launch_module
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser
from conftest import ROOT

from recipe.errors import UserError
from recipe.hardware import launcher
from recipe.hardware.launcher import check_launcher, wants_cpu

FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def test_each_kind_of_hardware_has_a_config():
    assert {p.stem for p in FILES} >= {
        "cpu",
        "multi_cpu",
        "single_gpu",
        "single_gpu_fp16",
        "multi_gpu",
        "multi_node",
        "mps",
    }


@pytest.mark.parametrize(
    ("name", "distributed_type", "precision", "dynamo", "use_cpu"),
    [
        ("cpu", "NO", "no", {}, True),
        ("single_gpu", "NO", "bf16", {"dynamo_backend": "INDUCTOR"}, False),
        ("single_gpu_fp16", "NO", "fp16", {"dynamo_backend": "INDUCTOR"}, False),
        ("multi_gpu", "MULTI_GPU", "bf16", {"dynamo_backend": "INDUCTOR"}, False),
        ("multi_node", "MULTI_GPU", "bf16", {"dynamo_backend": "INDUCTOR"}, False),
        ("multi_cpu", "MULTI_GPU", "no", {}, True),
        ("mps", "NO", "no", {}, False),
    ],
)
def test_values_of_the_configs(name, distributed_type, precision, dynamo, use_cpu):
    """An unknown key is fatal to the launcher, and to this test."""
    config = load_config_from_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"))
    assert (config.distributed_type, config.mixed_precision, config.use_cpu) == (distributed_type, precision, use_cpu)
    assert config.dynamo_config == dynamo


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_configs_are_short_and_start_with_a_comment(path):
    text = path.read_text()
    assert text.startswith("# ") and len(text.splitlines()) <= 20


ONE_MACHINE = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "machine_rank": 0, "mixed_precision": "no"}
GPUS = ONE_MACHINE | {"distributed_type": "MULTI_GPU", "num_processes": 2, "main_process_port": 0}


def environment_of(config, tmp_path, monkeypatch, *options):
    """Return the environment in which `accelerate launch` would start train.py for a config: a dict or a file."""
    if isinstance(config, dict):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        config = tmp_path / "config.yaml"
    started = []
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    simple = mock.Mock(side_effect=lambda cmd, env: started.append(env) or SimpleNamespace(wait=int, returncode=0))
    monkeypatch.setattr(launch_module.subprocess, "Popen", simple)

    def run(_args):  # torchrun, which adds the ranks
        started.append(dict(launch_module.os.environ) | {"LOCAL_RANK": "0", "WORLD_SIZE": "2"})

    monkeypatch.setattr("torch.distributed.run.run", run)
    launch_command(launch_command_parser().parse_args(["--config_file", str(config), *options, "train.py"]))
    (environment,) = started
    return environment


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_our_configs_are_accepted(path, tmp_path, monkeypatch):
    """Only those for the CPU ask for it, multi_cpu by hiding the GPUs."""
    environment = environment_of(path, tmp_path, monkeypatch)
    check_launcher(environment)
    assert wants_cpu(environment) == path.stem.endswith("cpu")
    assert ("LOCAL_RANK" in environment) == path.stem.startswith("multi")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (GPUS | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, "FSDP is not .*multi_gpu.yaml"),
        (GPUS | {"distributed_type": "MEGATRON_LM", "megatron_lm_config": {}}, "Megatron-LM is not .*multi_gpu.yaml"),
        (
            GPUS
            | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
            | {"parallelism_config": {"parallelism_config_tp_size": 2}},
            "FSDP is not .*multi_gpu.yaml",
        ),
        (ONE_MACHINE | {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True}, "multi_cpu.yaml"),
        (ONE_MACHINE | {"distributed_type": "NO", "dynamo_config": {"dynamo_use_dynamic": True}}, "one shape"),
        (
            ONE_MACHINE | {"distributed_type": "NO", "dynamo_config": {"dynamo_use_regional_compilation": True}},
            "one graph",
        ),
    ],
)
def test_answers_that_the_recipe_cannot_follow(answers, message, tmp_path, monkeypatch):
    """Each is refused in one sentence that names what to use, instead of being ignored."""
    with pytest.raises(UserError, match=message):
        check_launcher(environment_of(answers, tmp_path, monkeypatch))


@pytest.mark.parametrize(
    "answers",
    [
        ONE_MACHINE | {"distributed_type": "NO", "debug": True, "enable_cpu_affinity": True, "downcast_bf16": "no"},
        ONE_MACHINE | {"distributed_type": "MULTI_CPU", "num_processes": 1, "use_cpu": True},
        ONE_MACHINE | {"distributed_type": "NO", "dynamo_config": {"dynamo_backend": "INDUCTOR"}},
        ONE_MACHINE | {"distributed_type": "NO", "dynamo_config": {"dynamo_mode": "max-autotune-no-cudagraphs"}},
        GPUS | {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_fullgraph": True}, "debug": True},
    ],
)
def test_answers_that_work(answers, tmp_path, monkeypatch):
    check_launcher(environment_of(answers, tmp_path, monkeypatch))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed is not .*multi_gpu.yaml"),  # launched by its own program
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config is not .*multi_gpu.yaml"),
        ({"ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL"}, "SageMaker"),
    ],
)
def test_launchers_that_cannot_run_here(environment, message):
    """Their packages are not installed; the variables are those of accelerate 1.15."""
    with pytest.raises(UserError, match=message):
        check_launcher(environment)


def test_tpus_are_refused(monkeypatch):
    monkeypatch.setattr(launcher, "is_torch_xla_available", lambda: True)
    with pytest.raises(UserError, match="TPUs are not supported"):
        check_launcher({})


def test_numa_affinity_requires_its_library(monkeypatch):
    """Accelerate's own error would be a traceback."""
    monkeypatch.setattr(launcher.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launcher, "is_pynvml_available", lambda: False)
    with pytest.raises(UserError, match="nvidia-ml-py"):
        check_launcher({"ACCELERATE_CPU_AFFINITY": "1"})


def test_processes_started_by_mpirun_are_not_refused():
    """MULTI_CPU with mpirun does start several processes."""
    check_launcher({"ACCELERATE_DYNAMO_BACKEND": "no", "MASTER_ADDR": "a", "MASTER_PORT": "1", "PMI_SIZE": "2"})
