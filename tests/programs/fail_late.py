"""Every process meets the same mistake, but the process of the rank given meets it two seconds after the others."""

import os
import sys
import time

from recipe.errors import UserError, run_main


def main() -> None:
    time.sleep(2 * (os.environ["RANK"] == sys.argv[1]))
    raise UserError("the mistake")


run_main(main)
