"""Check that a run works on this machine before it starts: the launcher, the device, the disks, the data."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from recipe.benchmark.expect import Expectation, count_devices, estimate_run, measure_run
from recipe.benchmark.ladder import GPT2_VOCAB_SIZE
from recipe.config import TrainConfig
from recipe.data.files import expand_paths
from recipe.data.packed import PackedDataset, open_packed_dataset
from recipe.environment import count_cpus, find_nvidia_driver
from recipe.hardware import check_device as on_device
from recipe.hardware import check_machine as on_machine
from recipe.hardware.accelerator import check_options
from recipe.hardware.check import (
    Finding,
    Launch,
    attempt,
    check_hub,
    check_launch,
    check_optional_packages,
    find_launch,
)
from recipe.hardware.choices import choose_dynamo_backend, choose_mixed_precision
from recipe.hardware.launcher import wants_cpu
from recipe.model.build import build_model_config
from recipe.model.size import count_parameters, count_training_flops, padded_vocab_size
from recipe.run.output_dir import check_writable
from recipe.run.plan import check_before_preparing, resolve_max_steps

# What the launcher passes on and the choices of `auto` read.
LAUNCHER_CHOICES = (
    "ACCELERATE_USE_CPU",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_DYNAMO_BACKEND",
    "ACCELERATE_DYNAMO_MODE",
    "CUDA_VISIBLE_DEVICES",
)


@dataclass
class Preflight:
    """The checks of one run, in order, and what they found out about it. has_data: the options name a data source."""

    config: TrainConfig
    has_data: bool
    config_file: str | None = None
    findings: dict[str, Finding] = field(default_factory=dict)
    launch: Launch = Launch(None, 1, 1, {})
    dataset: PackedDataset | None = None
    model_config: PreTrainedConfig | None = None  # with the padded vocabulary
    expected: Expectation | None = None

    def run(self, measured: bool) -> None:
        """Run all checks. measured: train a few steps instead of estimating."""
        findings = self.findings
        findings["Optional"] = attempt(check_optional_packages, self.config)
        findings["Accelerate"] = attempt(self.check_launch)
        findings["Data"] = attempt(self.check_data)
        findings["Model"] = attempt(self.check_model)
        config, device, model = self.config, self.device(), self.model_config
        flops = count_training_flops(config, model, count_parameters(model)) if model else 0
        with ThreadPoolExecutor() as pool:  # these two wait for another process and for the network
            compiler = pool.submit(attempt, on_device.check_compiler, config, device, flops)
            hub = pool.submit(attempt, check_hub, config)
            driver = None if wants_cpu(os.environ) else find_nvidia_driver()
            arguments = torch.__version__, torch.version.cuda, driver, torch.accelerator.is_available()
            findings["PyTorch"] = attempt(on_device.check_torch_build, *arguments)
            findings["GPU"] = attempt(on_device.check_device, device)
            findings["Precision"] = attempt(on_device.check_precision, config, device)
            if findings["Precision"].status != "error":
                findings["Options"] = attempt(self.check_options, device)
            if device.type == "cuda":
                findings["TF32"] = attempt(on_device.check_tf32, config, device)
                findings["cuDNN"] = attempt(on_device.check_cudnn)
            if model is not None:
                findings["Attention"] = attempt(on_device.check_attention, config, model, device)
            findings["Compiler"] = compiler.result()
            findings["Hub"] = hub.result()
        num_local_processes = max(1, self.launch.num_processes // self.launch.num_machines)
        findings["Cores"] = attempt(on_machine.check_cpu, num_local_processes)
        findings["Memory"] = attempt(on_machine.check_memory)
        self.check_disks()
        if self.can_run() and model is not None:
            findings["Training"] = attempt(self.check_training, device, flops, measured)
        rate = self.expected and self.expected.tokens_per_second
        if findings["Data"].status != "error":
            findings["Read rate"] = attempt(on_machine.check_read_rate, config, self.dataset, rate)

    def can_run(self) -> bool:
        return all(finding.status != "error" for finding in self.findings.values())

    def num_steps(self) -> int | None:
        """Return the steps of the run, or None if they depend on text that is not prepared yet."""
        return self.config.max_steps if self.config.num_train_epochs is None else None

    def device(self) -> torch.device:
        """Return the device that the run trains on."""
        if wants_cpu(os.environ):
            return torch.device("cpu")
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    def check_launch(self) -> Finding:
        """Resolve the Accelerate config. From here on, this process has the launcher's settings."""
        self.launch = find_launch(self.config_file)
        environment = self.launch.environment
        os.environ.update({name: environment[name] for name in LAUNCHER_CHOICES if name in environment})
        return check_launch(self.launch)

    def check_data(self) -> Finding:
        """Open the dataset as the run does, or say which text the run prepares."""
        config = self.config
        if not self.has_data:
            remedy = "prepare a dataset with scripts/prepare_data.py and pass --dataset_dir DIR"
            return Finding("warning", "this recipe needs a dataset, and none is given", remedy)
        if config.dataset_dir is None:
            text = config.dataset_name or " ".join(config.train_file)
            expand_paths(config.train_file or [])
            return Finding("ok", f"{text}, prepared when the run starts")
        self.dataset = open_packed_dataset(Path(config.dataset_dir), config.block_size)
        num_rows = len(self.dataset.splits["train"])
        self.config = resolve_max_steps(config, num_rows)
        return Finding("ok", f"{num_rows:,} rows of {config.block_size:,} tokens in {config.dataset_dir}")

    def check_model(self) -> Finding:
        """Find the shape of the model, from the options or from the model that the run starts from."""
        config = self.config
        vocab_size = self.dataset.vocab_size if self.dataset else config.tokenizer_vocab_size or GPT2_VOCAB_SIZE
        found = build_model_config(config, vocab_size, 0, config.model_name_or_path)
        found.vocab_size = padded_vocab_size(found.vocab_size, config.pad_vocab_to_multiple_of)
        self.model_config = found
        shape = f"{found.num_hidden_layers} layers, {found.num_attention_heads} heads, width {found.hidden_size}"
        return Finding("ok", f"{count_parameters(found) / 1e6:,.1f} M parameters: {shape}")

    def check_options(self, device: torch.device) -> Finding:
        """Check what the run checks before it prepares its data."""
        config = self.config
        check_options(config, device)
        precision = choose_mixed_precision(config, device)
        check_before_preparing(config, self.launch.num_processes, device, precision, config.model_name_or_path)
        return Finding("ok", "the run's options work on this device")

    def check_output(self) -> Finding:
        """Check that the output folder can be written, and has the space for checkpoints and the final model."""
        folder = Path(self.config.output_dir or "runs")
        check_writable(folder)
        needed = on_machine.checkpoint_bytes(self.config, count_parameters(self.model_config))
        return on_machine.check_disk(folder, needed, "checkpoints")

    def check_disks(self) -> None:
        """Check the space for what the run writes: the dataset, checkpoints and the final model."""
        config, check = self.config, on_machine.check_disk
        if not self.has_data and not config.is_open_ended:
            needed = on_machine.TOKEN_BYTES * config.max_steps * config.global_batch_size * config.block_size
            arguments = Path(config.cache_dir), needed, "dataset", "warning"
            self.findings["Data disk"] = attempt(check, *arguments)
        if self.model_config is not None:
            self.findings["Output disk"] = attempt(self.check_output)

    def check_training(self, device: torch.device, total_flops: float, measured: bool) -> Finding:
        """Find out whether the model fits and how fast it trains. Raises `UserError` if it cannot train."""
        if device.type == "cpu":
            torch.set_num_threads(count_cpus())
        compiled = choose_dynamo_backend(self.config, device, total_flops).value == "inductor"
        processes = self.launch.num_processes, self.launch.num_machines
        self.expected = estimate_run(self.config, self.model_config, device, compiled, *processes)
        if measured:
            with tempfile.TemporaryDirectory() as folder:
                arguments = count_devices(device, *processes), self.has_data, Path(folder)
                self.expected = measure_run(self.config, self.expected, *arguments)
        used, usable = self.expected.memory_bytes / 1e9, self.expected.usable_bytes / 1e9
        return Finding("ok", f"{used:.1f} of {usable:.1f} GB on {device.type} ({self.expected.source})")
