"""Print the peak memory at the start, after 0.5 GB that is freed at once, and after the same again."""

import torch

from recipe.hardware.devices import peak_memory_bytes

for size in (1, 2**27, 2**27):
    torch.ones(size)
    print(peak_memory_bytes(torch.device("cpu")))
