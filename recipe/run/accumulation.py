"""The micro-batches of an optimizer step: how large, how many, and their data."""

import json

import torch
from accelerate import Accelerator
from torch import nn

from recipe.checkpoint.load import RunState
from recipe.config import TrainConfig
from recipe.data.packed import PackedDataset
from recipe.data.streaming import build_batches
from recipe.environment import describe_environment
from recipe.hardware.choices import Choice
from recipe.hardware.memory import MemoryPlan
from recipe.hardware.micro_batch import (
    find_micro_batch,
    micro_batch_candidates,
    recall_micro_batch,
    remember_micro_batch,
    smaller_micro_batch,
)
from recipe.hardware.processes import on_main_process


class Accumulation:
    """Splits each step into micro-batches that fit into memory, and into smaller ones if they no longer do.

    num_micro_batches: per step and process. batches: endless (input_ids, targets), int64 [micro_batch_size,
    block_size] on the device.
    """

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        module: nn.Module,
        dataset: PackedDataset,
        choices: dict[str, Choice],
        plan: MemoryPlan,
    ) -> None:
        """module: prepared; trial steps on it find the micro-batch size if the option is auto."""
        self.config, self.accelerator, self.module, self.dataset = config, accelerator, module, dataset
        self.candidates = micro_batch_candidates(config, accelerator.num_processes, accelerator.device)
        self.answer_key = self._describe(choices, plan)
        remembered = on_main_process(lambda: recall_micro_batch(self.answer_key))
        if remembered not in self.candidates:
            planned = [size for size in self.candidates if size <= plan.micro_batch_size]
            remembered = find_micro_batch(accelerator, module, planned, config)
        self._set_size(remembered)
        self._remember()

    def _describe(self, choices: dict[str, Choice], plan: MemoryPlan) -> str:
        """Return all that decides which size fits; a change of any of it leads to new trials."""
        device, shape = self.accelerator.device, self.accelerator.unwrap_model(self.module).model.config
        environment = describe_environment(device)
        options = {
            **{name: environment[name] for name in ("device", "gpt2_recipe", "torch", "transformers")},
            "memory": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
            "limit": self.config.gpu_memory_limit_gb,
            "shape": [shape.n_layer, shape.n_head, shape.n_embd, shape.n_inner, shape.vocab_size],
            "rows": [self.config.block_size, self.config.global_batch_size, self.accelerator.num_processes],
            **{name: choice.value for name, choice in choices.items() if name != "memory"},
            "plan": [plan.micro_batch_size, plan.activation_checkpointing, plan.loss_chunks, plan.optim],
        }
        return json.dumps(options)

    def _remember(self) -> None:
        """Store the size for later runs, if trials can find it."""
        is_found = len(self.candidates) > 1 and self.accelerator.device.type != "cpu"
        if is_found and self.accelerator.is_main_process:
            remember_micro_batch(self.answer_key, self.micro_batch_size)

    def _set_size(self, micro_batch_size: int) -> None:
        self.micro_batch_size = micro_batch_size
        self.num_micro_batches = self.config.global_batch_size // (micro_batch_size * self.accelerator.num_processes)
        self.accelerator.gradient_accumulation_steps, self.accelerator.step = self.num_micro_batches, 0

    def start(self, state: RunState) -> None:
        """Open the data at the run's position."""
        self.batches = build_batches(
            self.config, self.dataset, self.accelerator, self.micro_batch_size, state.step, state.position
        )

    def shrink(self, error: RuntimeError, state: RunState) -> str:
        """After an out-of-memory error, prepare the same step with smaller micro-batches. Returns a message.

        Raises any other error, and `UserError` if the micro-batch cannot be smaller.
        """
        self._set_size(
            smaller_micro_batch(
                error, self.config, self.candidates, self.micro_batch_size, self.accelerator.num_processes
            )
        )
        self._remember()
        self.module.zero_grad()  # the prepared optimizer ignores zero_grad in the middle of an accumulation
        self.close()
        self.start(state)
        return f"out of memory in step {state.step + 1}: continuing with micro-batches of {self.micro_batch_size}"

    def close(self) -> None:
        """Stop the processes that build batches."""
        self.batches.close()
