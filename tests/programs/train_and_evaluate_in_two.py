"""Wait for the main process, train several times, and evaluate the first model, all in the same two processes.

    accelerate launch train_and_evaluate_in_two.py RUN,RUN EVALUATION ARGUMENTS

A run is named by its backend, with a + if it saves memory. Importing torch takes longer than a tiny run. All runs use
one process group, because a second one in the same store may hang (torch 2.13). Gradients are reduced in several
buckets, as those of a large model are: DistributedDataParallel splits compiled graphs between them.
"""

import functools
import runpy
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from torch.nn.parallel import DistributedDataParallel

import recipe.train
from recipe.hardware.processes import STEP_WAIT, host_group, on_main_process, start_processes


def limit_collectives(wait: timedelta) -> None:
    for group in (dist.group.WORLD, host_group()):
        dist.distributed_c10d._set_pg_timeout(wait, group)


start_processes()
limit_collectives(timedelta(seconds=1))
time.sleep(2 * (dist.get_rank() == 0))  # the other process waits for its begin, and then for its result
sys.stdout.write(f"waited: {on_main_process(lambda: time.sleep(2) or 'prepared')}\n")  # at once: both share a pipe
limit_collectives(STEP_WAIT)

small_buckets = functools.partialmethod(DistributedDataParallel.__init__, bucket_cap_mb=0.02)
DistributedDataParallel.__init__ = small_buckets
torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 4096
PartialState.destroy_process_group = lambda self, group=None: None
runs, evaluation, *arguments = sys.argv[1:]
for name in runs.split(","):
    backend, _, saves_memory = name.partition("+")
    options = ["--activation_checkpointing", "--loss_chunks", "2"] if saves_memory else []
    sys.argv[1:] = [*arguments, "--dynamo_backend", backend, *options, "--output_dir", name]
    recipe.train.main()
program, *sys.argv[1:] = evaluation.split()
runpy.run_path(program, run_name="__main__")
