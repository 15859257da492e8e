"""Start a rung of the ladder as its process does, `python start_rung.py run_ladder.py OPTION ...`, with huge pages.

Prints the variable of recipe/__init__.py for them before the rung, and how many KB of a tensor of 64 MB are on such.
"""

import os
import re
import runpy
import sys
from pathlib import Path

program = runpy.run_path(sys.argv[1], run_name="__mp_main__")
import torch  # noqa: E402 (after the program has set up its environment)

print(os.environ.get("THP_MEM_ALLOC_ENABLE"))
program["train"]({"fp32", "huge_pages"}, program["load_config"](sys.argv[2:])[0])
tensor = torch.ones(2**24)
print(re.search(r"AnonHugePages: *(\d+)", Path("/proc/self/smaps_rollup").read_text())[1])
