"""Join a control group, and print how many CPUs the recipe counts there: `python count_cpus_of_group.py FOLDER`."""

import os
import sys
from pathlib import Path

from recipe.environment import count_cpus

Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
print(count_cpus())
