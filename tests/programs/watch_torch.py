"""Run a program, and print an environment variable whenever something looks for torch and the variable is set.

python tests/programs/watch_torch.py first|always VARIABLE PROGRAM [ARGUMENT ...]

first: end at the first look. always: run on. Libraries read such variables once, when torch is loaded.
"""

import importlib.machinery
import os
import runpy
import sys

WHEN, VARIABLE, *PROGRAM = sys.argv[1:]


class Watch(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, *rest):
        if name == "torch" and (WHEN == "first" or VARIABLE in os.environ):
            print(f"{VARIABLE}={os.environ.get(VARIABLE)}", flush=True)
            if WHEN == "first":
                os._exit(0)


sys.meta_path.insert(0, Watch)
sys.argv = PROGRAM
runpy.run_path(PROGRAM[0], run_name="__main__")
