"""Start a rung of the ladder as its process does, `python start_rung.py run_ladder.py DATASET_DIR`, with huge pages.

Prints the variable of recipe/__init__.py for them that a peer gets, and how many KB of a tensor of 64 MB are on such.
"""

import re
import runpy
import sys
from pathlib import Path

program = runpy.run_path(sys.argv[1], run_name="__mp_main__")
import torch  # noqa: E402 (after the program has set up its environment)

print(program["run_program"](["-c", "import os; print(os.environ.get('THP_MEM_ALLOC_ENABLE'))"])[0][1])
shape = {"n_layer": 1, "n_head": 1, "n_embd": 8}
setting = program["Setting"]("cpu", "fp32", Path(sys.argv[2]), 500, shape, 32, 1, 1, 8, None, 1)
program["train"]({"fp32", "huge_pages"}, setting)
tensor = torch.ones(2**24)
print(re.search(r"AnonHugePages: *(\d+)", Path("/proc/self/smaps_rollup").read_text())[1])
