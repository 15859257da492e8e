"""A GPT-2 pre-training recipe: Transformers model, Accelerate loop, packed dataset."""

import os

__version__ = "0.1.0"

# Huge pages for CPU tensors of 2 MB and more. Torch's allocator reads this once, at its first tensor (2.11 to 2.15).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# OpenMP's threads wait for each other in every operator. By default they spin while they wait, so one busy neighbor
# on a core stalls the training. With this limit they sleep after 1,000 spins. libgomp reads it when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
