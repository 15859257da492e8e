"""A GPT-2 pre-training recipe: Transformers model, Accelerate loop, packed dataset."""

import os

__version__ = "0.1.0"

# Huge pages for CPU tensors of 2 MB and more. Torch's allocator reads this once, at its first tensor (2.11 to 2.15).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# OpenMP's threads wait for each other in every operator. By default they spin, for so long that a busy neighbor on one
# of the cores stops the training; after 1,000 turns they sleep. libgomp reads this once, when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
