"""accelerate_configs/ and other answers to `accelerate config`, loaded as the launcher loads them.

cpu.yaml, multi_cpu.yaml and multi_node.yaml are launched in other tests.
"""

import os
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from accelerate import Accelerator
from accelerate.commands import launch as launch_module
from accelerate.commands.launch import launch_command, launch_command_parser
from helpers import ROOT, reset_accelerate
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, GPT2LMHeadModel

from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.hardware import processes
from recipe.hardware.processes import start_processes
from recipe.hardware.sharding import USE_FSDP, Sharding, shard, take_sharding
from recipe.hardware.trial import _fits
from recipe.launcher import asks_for_cpu
from recipe.model.loss import LanguageModelingLoss
from recipe.publish.hub import publishes_training_state

FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
ONE_MACHINE = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "machine_rank": 0, "mixed_precision": "no"}
GPUS = ONE_MACHINE | {"distributed_type": "MULTI_GPU", "num_processes": 2, "main_process_port": 0}


def environment_of(config, tmp_path, monkeypatch):
    """Return the environment in which `accelerate launch` would start train.py for a config: a dict or a file."""
    if isinstance(config, dict):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        config = tmp_path / "config.yaml"
    started = []
    unset = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in (*unset, "ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    simple = mock.Mock(side_effect=lambda cmd, env: started.append(env) or SimpleNamespace(wait=int, returncode=0))
    monkeypatch.setattr(launch_module.subprocess, "Popen", simple)

    def run(_args):  # torchrun, which adds the ranks
        started.append(dict(launch_module.os.environ) | {"LOCAL_RANK": "0", "WORLD_SIZE": "2"})

    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    launch_command(launch_command_parser().parse_args(["--config_file", str(config), "train.py"]))
    (environment,) = started
    return environment


@pytest.fixture
def start(monkeypatch):
    """Start a run's only process in an environment."""
    monkeypatch.setattr(processes, "die_with_the_launcher", lambda: None)

    def start_in(environment):
        reset_accelerate()
        with mock.patch.dict(os.environ, environment, clear=True):
            start_processes()

    yield start_in
    reset_accelerate()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_configs_for_a_cpu_ask_for_it_and_those_for_one_process_start_one(path, tmp_path, monkeypatch, start):
    """No other does. multi_cpu asks for it by hiding the GPUs."""
    environment = environment_of(path, tmp_path, monkeypatch)
    assert asks_for_cpu(environment) == path.stem.endswith("cpu")
    is_multi = path.stem.startswith(("multi", "fsdp"))
    assert ("LOCAL_RANK" in environment) == is_multi
    if not is_multi:
        start(environment)


FSDP = {"distributed_type": "FSDP"}
TENSOR_PARALLEL = {"parallelism_config": {"parallelism_config_tp_size": 2}}


@pytest.mark.parametrize(
    ("answers", "names"),
    [
        (FSDP | {"fsdp_config": {"fsdp_offload_params": True}}, "FSDP offload accelerate_configs/fsdp.yaml"),
        (FSDP | {"fsdp_config": {"fsdp_version": 2}} | TENSOR_PARALLEL, "PARALLELISM_CONFIG accelerate_configs/"),
        ({"distributed_type": "MEGATRON_LM", "megatron_lm_config": {}}, "MEGATRON_LM accelerate_configs/"),
    ],
)
def test_answers_that_the_recipe_cannot_follow(answers, names, tmp_path, monkeypatch, start):
    """Each is refused in one sentence that names what to use, instead of being ignored."""
    environment = environment_of(GPUS | answers, tmp_path, monkeypatch)
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        environment.pop(name, None)  # the answer is the same for one process
    with pytest.raises(UserError) as refused:
        start(environment)
    assert [name for name in names.split() if name not in str(refused.value)] == []
    assert "\n" not in str(refused.value)


def test_tpus_are_refused(monkeypatch, start):
    monkeypatch.setattr(processes, "is_torch_xla_available", lambda: True)
    with pytest.raises(UserError, match="TPU"):
        start({})


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"fsdp_version": 2}, Sharding(4)),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, Sharding(4, reshard_after_forward=False)),
        ({"fsdp_version": 1}, Sharding(4)),
        ({"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}, Sharding(4, 1, False)),
        ({"fsdp_version": 1, "fsdp_sharding_strategy": "HYBRID_SHARD"}, Sharding(2, 2)),
        ({"fsdp_version": 1, "fsdp_reshard_after_forward": "HYBRID_SHARD_ZERO2"}, Sharding(2, 2, False)),
        ({"fsdp_version": 1, "fsdp_reshard_after_forward": "NO_SHARD"}, None),
        ({"fsdp_version": 2, "fsdp_activation_checkpointing": True}, Sharding(4, activation_checkpointing=True)),
    ],
)
def test_answers_about_fsdp(answers, expected, tmp_path, monkeypatch):
    """Of FSDP 1 and 2, on two machines with two processes each. Accelerate and Transformers no longer see them.

    One process has nothing to shard.
    """
    environment = environment_of(GPUS | FSDP | {"fsdp_config": answers}, tmp_path, monkeypatch)
    environment |= {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert environment[USE_FSDP] == "true"
    assert take_sharding(environment) == expected
    assert USE_FSDP not in environment and take_sharding(environment) is None
    assert take_sharding(environment | {USE_FSDP: "true", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}) is None


@pytest.fixture
def sharded(monkeypatch):
    """An accelerator, a module as two machines with two processes each shard it, and what counts reductions."""
    counts = []
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 8, "bos_token_id": 0}
    module = LanguageModelingLoss(GPT2LMHeadModel(GPT2Config(**shape, eos_token_id=0)), 64)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        shard(module, Sharding(2, num_replicas=2), "cpu")
        reset_accelerate()
        monkeypatch.setattr(Accelerator, "use_distributed", True)
        monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: counts.append(1))
        yield Accelerator(cpu=True), module, counts
    finally:
        dist.destroy_process_group()
        reset_accelerate()


def test_machines_exchange_gradients_once_per_step(sharded):
    """One reduction for each of two blocks and the rest."""
    accelerator, module, counts = sharded
    rows = torch.zeros(2, 9, dtype=torch.int64)
    accelerator.gradient_accumulation_steps = 4
    for _ in range(4):
        with accelerator.accumulate(module):
            accelerator.backward(module(rows[:, :-1], rows[:, 1:])["loss"])
    assert len(counts) == 3


def test_a_trial_leaves_nothing_for_the_first_update(sharded):
    """Neither gradients nor what FSDP keeps until machines exchange them (torch 2.13)."""
    accelerator, module, _ = sharded
    assert _fits(accelerator, module, size=2, share=4, block_size=8, can_agree=True)
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in module.modules() if hasattr(layer, "unshard")]
    assert len(groups) == 3 and all(group._partial_reduce_output is None for group in groups)
    assert all(p.grad is None for p in module.parameters())


def test_the_job_of_the_readme_resumes_from_the_hub():
    """The options of its command for Hugging Face Jobs: the job's disk is lost, so its state is on the Hub."""
    text = (ROOT / "accelerate_configs" / "README.md").read_text().replace("\\\n", " ")
    (options,) = re.findall(r"hf jobs uv run .* python -m recipe.train (.*)", text)
    config = load_config(options.split()).config
    assert publishes_training_state(config) and config.resume_from_checkpoint == "auto"
