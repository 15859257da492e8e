"""Stands in for Transformers' run_clm.py: checks the options and the text that it gets, and prints a log.

A line comes every 0.2 seconds, but the first one after another second.
"""

import json
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
tokenizer = Tokenizer.from_file(options["--tokenizer_name"] + "/tokenizer.json")
texts = [json.loads(line)["text"] for line in Path(options["--train_file"]).read_text().splitlines()]
lengths = [len(tokenizer.encode(text).ids) for text in texts]
steps, block_size = int(options["--max_steps"]), int(options["--block_size"])
assert min(lengths) >= block_size
assert sum(lengths) >= steps * 4 * 2 * block_size
assert "n_layer=2" in options["--config_overrides"]
assert options["--gradient_accumulation_steps"] == "2"
print("[INFO] Number of trainable parameters = 1,234", file=sys.stderr)
time.sleep(1)
for _ in range(0, steps, int(options["--logging_steps"])):
    time.sleep(0.2)
    print({"loss": "6.0", "epoch": "0"})
