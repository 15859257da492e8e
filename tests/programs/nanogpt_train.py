"""Stands in for nanoGPT's train.py: checks the options and the data that it gets, and prints what nanoGPT prints."""

import pickle
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

options = dict(argument[2:].split("=") for argument in sys.argv[1:])
assert pickle.loads(Path("data/ladder/meta.pkl").read_bytes()) == {"vocab_size": 512}
assert len(np.fromfile("data/ladder/train.bin", np.uint16)) > 1000
assert options["n_layer"] == "2"
device, ptdtype = options["device"], getattr(torch, options["dtype"])
device_type = device
# fmt: off
ctx = nullcontext() if device_type == 'cpu' else torch.amp.autocast(device_type=device_type, dtype=ptdtype)
# fmt: on
with ctx:
    assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == ptdtype
print("num decayed parameter tensors: 2, with 1,200 parameters")
print("num non-decayed parameter tensors: 1, with 34 parameters")
for step in range(int(options["max_iters"]) + 1):  # the first ones compile
    print(f"iter {step}: loss 6.0, time {1000 if step < 4 else 64:.2f}ms, mfu -100.00%")
