"""Run a program and print which slow packages it has imported: `python slow_imports.py PROGRAM OPTIONS`."""

import runpy
import sys

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("imported:", sorted({"torch", "transformers", "datasets"} & set(sys.modules)))
