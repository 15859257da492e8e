"""The micro-batches of an optimizer step: how large, how many, and their data."""

import json
import traceback

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
    free_memory,
    is_out_of_memory,
    micro_batch_candidates,
    recall_micro_batch,
    remember_micro_batch,
    smaller_micro_batch,
)
from recipe.hardware.processes import complete_synchronization, gather, largest_of_processes, on_main_process


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
        self.plan, self.is_too_large = plan, False
        self.candidates = micro_batch_candidates(config, accelerator.num_processes, accelerator.device)
        self.answer_key = self._describe(choices, plan)
        remembered = on_main_process(lambda: recall_micro_batch(self.answer_key))
        if remembered not in self.candidates:
            planned = [size for size in self.candidates if size <= plan.micro_batch_size]
            remembered = find_micro_batch(accelerator, module, planned, config)
        self._set_size(remembered)
        self._remember(remembered)

    def _describe(self, choices: dict[str, Choice], plan: MemoryPlan) -> str:
        """Return all that decides which size fits; a change of any of it leads to new trials."""
        device, shape = self.accelerator.device, self.accelerator.unwrap_model(self.module).model.config
        environment = describe_environment(device)
        options = {
            **{name: environment[name] for name in ("device", "gpt2_recipe", "torch", "transformers")},
            "memory": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
            "shape": shape.to_json_string(use_diff=False),
            "rows": [self.config.block_size, self.config.global_batch_size, self.accelerator.num_processes],
            **{name: choice.value for name, choice in choices.items() if name != "memory"},
            "plan": [plan.micro_batch_size, plan.activation_checkpointing, plan.loss_chunks, plan.optim],
        }
        return json.dumps(options)

    def _remember(self, size: int | None) -> None:
        """Store the size for later runs, if trials find it, or forget it."""
        is_found = len(self.candidates) > 1 and self.accelerator.device.type != "cpu"
        if is_found and self.accelerator.is_main_process:
            remember_micro_batch(self.answer_key, size)

    def _set_size(self, micro_batch_size: int) -> None:
        self.micro_batch_size = micro_batch_size
        self.num_micro_batches = self.config.global_batch_size // (micro_batch_size * self.accelerator.num_processes)
        self.accelerator.gradient_accumulation_steps, self.accelerator.step = self.num_micro_batches, 0

    def start(self, state: RunState) -> None:
        """Open the data at the run's position, and record the choices with which the run continues."""
        state.memory_choices = {**self.plan.choices, "micro_batch_size": self.micro_batch_size}
        self.batches = build_batches(
            self.config, self.dataset, self.accelerator, self.micro_batch_size, state.step, state.position, gather
        )

    def out_of_memory(self, error: RuntimeError) -> None:
        """Record that this process ran out of memory and let the others finish the step. Raises any other error."""
        if not is_out_of_memory(error):
            raise error
        self.is_too_large = True
        traceback.clear_frames(error.__traceback__)  # they hold what did fit
        free_memory()
        complete_synchronization(self.module)

    def must_shrink(self) -> bool:
        """Return whether any process ran out of memory in this step. All processes get the same answer."""
        self.is_too_large = bool(largest_of_processes(self.is_too_large))
        return self.is_too_large

    def shrink(self, state: RunState) -> str:
        """Prepare the same step with smaller micro-batches, on all processes. Returns a message.

        Raises `UserError` if the micro-batch cannot be smaller.
        """
        num_processes = self.accelerator.num_processes
        self._set_size(smaller_micro_batch(self.config, self.candidates, self.micro_batch_size, num_processes))
        self._remember(None)  # another program may have used the memory: the next run tries again
        self.is_too_large = False
        torch.compiler.reset()  # discard the graphs of the shape that did not fit
        free_memory()
        self.module.zero_grad()  # the prepared optimizer ignores zero_grad in the middle of an accumulation
        self.close()
        self.start(state)
        return f"out of memory in step {state.step + 1}: continuing with micro-batches of {self.micro_batch_size}"

    def close(self) -> None:
        """Stop the processes that build batches."""
        self.batches.close()
