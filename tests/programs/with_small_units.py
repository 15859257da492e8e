"""Run a program that cuts its text into small units: `python with_small_units.py UNIT_BYTES PROGRAM OPTIONS`."""

import runpy
import sys

from recipe.data import cut

cut.SMALL_SOURCE = cut.SMALLEST_UNIT = int(sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
